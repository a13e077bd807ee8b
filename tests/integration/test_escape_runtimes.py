"""What the abuse tests of namespaces show, for the runtimes with a kernel of their own: gVisor and virtual machines.

Inside, root may do to that kernel what it likes (mount, set its sysctls); asked is what reaches the machine or a
neighbour: nothing, and the neighbour works on. Disks that are filled: ``test_limits_told``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration import microvms, persistent
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.agent.api import AgentError, ProcessSpec
from venusrl.sandboxes.protocol import Limits, SandboxError
from venusrl.sandboxes.runtimes.base import Instance, Runtime, Shortages, Spec
from venusrl.sandboxes.runtimes.gvisor.runtime import GvisorRuntime

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="both runtimes are started by root: run as root")
LIMITS = Limits(memory_mib=microvms.MEMORY_MIB, disk_mib=64, pids=64)
WORKS_S = PATIENCE_S
MARK = "VENUSRL_TEST_TREASURE"


class Place:
    """A runtime with a sandbox that attacks and one that must not notice."""

    def __init__(self, runtime: Runtime, bad: Instance, neighbour: Instance) -> None:
        self.runtime = runtime
        self.bad = bad
        self.neighbour = neighbour


@pytest.fixture(params=["gvisor", "microvm"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    image = microvms.image(microvms.tiny_root(tmp_path / "root"))
    runtime = await (_gvisor(tmp_path) if request.param == "gvisor" else _microvm(tmp_path))
    made = [await runtime.create(Spec(name, image, LIMITS)) for name in ("bad", "neighbour")]
    try:
        await persistent.output(made[1], "echo untouched > ~/mine; sleep 7777 > /dev/null 2>&1 & true")
        yield Place(runtime, *made)
        assert await works(made[1]) == "untouched\n1"
        assert not await short_of_memory(made[1])
    finally:
        for instance in made:
            await instance.kill()
        await runtime.close()


async def _gvisor(folder: Path) -> Runtime:
    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed: apt-get install runsc")
    runtime = GvisorRuntime(folder / "g")
    await runtime.start()
    return runtime


async def _microvm(folder: Path) -> Runtime:
    kernel = await asyncio.to_thread(microvms.guest_kernel)
    return await microvms.runtime(microvms.new_state(folder / "m", kernel))


async def works(instance: Instance) -> str:
    return await persistent.output(instance, "cat ~/mine; ps | grep -c '[s]leep 7777'")


async def short_of_memory(instance: Instance) -> bool:
    found: Shortages = await instance.shortages()
    return found.memory_kills > 0


def machine() -> tuple[str, ...]:
    """What an attack would change here."""
    names = ("core_pattern", "hostname", "modprobe", "randomize_va_space")
    settings = [path for name in names if (path := Path(f"/proc/sys/kernel/{name}")).exists()]
    mounts = Path("/proc/self/mountinfo").read_text().count("/tmp/stolen")
    return (*(path.read_text() for path in settings), str(mounts))


async def test_root_inside_changes_nothing_outside(place: Place, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(MARK)
    before = machine()
    outside = await asyncio.create_subprocess_exec("sleep", "8888", env={"TREASURE": MARK})
    attacks = (
        "echo '|/bin/sh' > /proc/sys/kernel/core_pattern",
        "echo /tmp/x > /proc/sys/kernel/modprobe",
        "hostname stolen",
        "mkdir -p /tmp/stolen && mount -t proc proc /tmp/stolen",
        "mount -t tmpfs tmpfs /tmp",
    )
    for attack in attacks:
        await persistent.shell(place.bad, attack, "root")
    said = await _looked(place.bad, tmp_path)
    assert MARK not in said
    assert machine() == before
    assert outside.returncode is None
    await persistent.shell(place.bad, f"kill -9 {outside.pid}; kill -9 -1", "root")
    assert outside.returncode is None, "a signal to a number of the machine's reached it"
    outside.kill()
    await outside.wait()


async def _looked(bad: Instance, folder: Path) -> str:
    """All that can be read of the machine's files and processes from inside."""
    looks = (
        f"cat {folder}/secret",
        f"cat /proc/1/root{folder}/secret",
        "cat /proc/*/environ",
        "cat /proc/1/cwd/../../../../etc/shadow",
        f"ln -s {folder}/secret /home/user/link; cat /home/user/link",
        "ps",
        "ls /dev /sys",
    )
    said = [(await persistent.shell(bad, look, "root"))[1] for look in looks]
    assert "8888" not in said[5]
    assert "7777" not in said[5], "a neighbour's process shows"
    for path in ("/home/user/link", f"/home/user/../..{folder}/secret", "/proc/1/root/../../../../../../etc/shadow"):
        with pytest.raises(AgentError):
            _ = [piece async for piece in bad.agent.read(path, "root")]
    assert "vsock" not in said[6]
    return "\n".join(said)


async def test_the_machine_s_network_does_not_answer(place: Place) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.write(MARK.encode()), "0.0.0.0")
    port = server.sockets[0].getsockname()[1]
    listed = await asyncio.to_thread(subprocess.run, ["hostname", "-I"], capture_output=True, text=True, check=True)
    own = [one for one in listed.stdout.split() if "." in one]
    async with server:
        for address in ("127.0.0.1", "169.254.169.254", "10.0.2.2", *own):
            code, said = await persistent.shell(
                place.bad, f"echo | busybox timeout 3 busybox nc -w 2 {address} {port}", "root"
            )
            assert code != 0, address
            assert MARK not in said


async def test_a_flood_that_nobody_reads_stays_inside(place: Place) -> None:
    flooding = [await place.bad.agent.start(ProcessSpec(("/bin/cat", "/dev/zero"), "user")) for _ in range(3)]
    assert await works(place.neighbour) == "untouched\n1"
    for process in flooding:
        await process.signal(9)
    assert await persistent.output(place.bad, "echo well") == "well"


async def test_a_fork_bomb_ends_with_its_sandbox_and_says_so(place: Place) -> None:
    ended = asyncio.create_task(place.bad.died())
    await place.bad.agent.start(ProcessSpec(("/bin/sh", "-c", "b() { b | b & }; b; sleep 1000"), "user"))
    for _ in range(3):
        assert await works(place.neighbour) == "untouched\n1"
    if place.runtime.name == "gvisor":  # a virtual machine bears it: its kernel says no
        cause = await asyncio.wait_for(ended, WORKS_S)
        assert cause == f"out of processes: its limit is {LIMITS.pids}; start fewer at once"
    await place.bad.kill()
    ended.cancel()


async def test_a_memory_bomb_ends_in_its_sandbox_and_is_told(place: Place) -> None:
    """By the count of processes ended, or, where all of the sandbox goes, by the cause of its death."""
    bad = place.bad
    ended = asyncio.create_task(bad.died())
    bombs = [await bad.agent.start(ProcessSpec(("/bin/tail", "/dev/zero"), "root")) for _ in range(2)]
    async with asyncio.timeout(WORKS_S):
        while not ended.done() and not await _counted(bad):  # noqa: ASYNC110 - nobody tells of a count
            await asyncio.sleep(0.1)
    assert await works(place.neighbour) == "untouched\n1"
    if ended.done():
        assert ended.result().startswith("out of memory: its limit is 128 MiB")
    ended.cancel()
    del bombs


async def _counted(bad: Instance) -> bool:
    try:
        return await short_of_memory(bad)
    except SandboxError:
        return False  # it ends just now
