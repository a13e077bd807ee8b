"""The gVisor runtime, with real runsc: commands, files, pausing, copies, adoption, nothing left."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.persistent import run
from tests.waiting import PATIENCE_S, until

from venusrl.sandboxes.agent.api import Exit, ProcessSpec
from venusrl.sandboxes.protocol import Limits, SandboxError, SandboxGone, SandboxPaused, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Instance, Network, Spec
from venusrl.sandboxes.runtimes.gvisor.runtime import GvisorRuntime
from venusrl.sandboxes.runtimes.namespace.instance import start_time
from venusrl.sandboxes.templates.api import Image, Start

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="gVisor sandboxes mount file systems: run as root"),
    pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed: apt-get install runsc"),
    pytest.mark.skipif(shutil.which("busybox") is None, reason="no root to start from: apt-get install busybox-static"),
]
LIMITS = Limits(memory_mib=128, pids=64, disk_mib=16)
TOOLS = ("sh", "cat", "echo", "id", "rm", "ls", "sleep", "dd", "test", "mount", "hostname", "tail")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Two layers: busybox, and a file and a deletion on top."""
    low, top = tmp_path_factory.mktemp("low"), tmp_path_factory.mktemp("top")
    for folder in ("bin", "etc", "root", "tmp", "home/user", "proc", "dev", "sys"):
        (low / folder).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), low / "bin/busybox")
    for tool in TOOLS:
        (low / "bin" / tool).symlink_to("busybox")
    (low / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (low / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    (low / "etc/gone").write_text("low")
    os.chown(low / "home/user", 1000, 1000)
    (low / "tmp").chmod(0o1777)
    (top / "etc").mkdir()
    (top / "etc/top").write_text("top")
    os.mknod(top / "etc/gone", 0o020000, 0)
    for root in (low, top):
        root.chmod(0o755)
    return Image(id="img-test", name="test", layers=(str(low), str(top)), env={"FROM": "template"})


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[GvisorRuntime]:
    made = GvisorRuntime(tmp_path / "g")
    await made.start()
    yield made
    await made.close()
    await made.sweep(set())
    await made.close()
    assert made._node is not None
    left = [directory for directory in made._node.directories.values() if directory.exists()]
    assert left == [], "a service that leaves no sandbox leaves no control group"
    assert list((tmp_path / "g/sandboxes").iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()  # noqa: ASYNC240


def spec(image: Image, name: str = "one") -> Spec:
    return Spec(id=name, image=image, limits=LIMITS, env={"OWN": "spec"})


async def create(runtime: GvisorRuntime, image: Image, name: str = "one") -> Instance:
    return await runtime.create(spec(image, name))


async def test_commands_users_layers_and_limits(runtime: GvisorRuntime, image: Image) -> None:
    box = await create(runtime, image)
    assert await run(box.agent, "id -u; echo $FROM $OWN; cat /etc/top; test -e /etc/gone || echo gone") == (
        0,
        "1000\ntemplate spec\ntopgone\n",
    )
    assert await run(box.agent, "id -u; echo x >/etc/new; rm /etc/top", "root") == (0, "0\n")
    assert (await run(box.agent, "echo x >/etc/other"))[0] != 0
    assert (await run(box.agent, "dd if=/dev/zero of=/tmp/big bs=1M count=32", "root"))[0] != 0
    assert (await box.footprint()).total > 0
    assert Path(image.layers[1], "etc/top").read_text() == "top"  # noqa: ASYNC240
    with pytest.raises(SandboxError, match="already"):
        await create(runtime, image)
    await box.kill()
    await box.kill()
    with pytest.raises(SandboxGone):
        _ = box.agent


async def test_the_host_is_out_of_reach(runtime: GvisorRuntime, image: Image, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("treasure")
    box = await create(runtime, image)
    commands = [
        f"cat {tmp_path}/secret",
        "cat /.venusrl/socket/../../../../../../etc/shadow",
        "echo x >/proc/sys/kernel/core_pattern",
        "mount -t proc proc /tmp",
        "echo x >/.venusrl/bin/agent",
    ]
    for command in commands:
        code, output = await run(box.agent, command, "root")
        assert code != 0, command
        assert "treasure" not in output
    assert await run(box.agent, "cat /proc/1/environ", "root") == (0, "HOME=/root\0")  # runsc adds it


async def test_pausing_an_idle_sandbox_keeps_only_its_files(runtime: GvisorRuntime, image: Image) -> None:
    box = await create(runtime, image)
    await run(box.agent, "echo kept >/home/user/f; echo kept >/tmp/g")
    await box.pause()
    with pytest.raises(SandboxPaused):
        _ = box.agent
    assert (await box.footprint()).total == 0
    await box.resume()
    assert await run(box.agent, "cat /home/user/f /tmp/g; test -e /etc/gone || echo gone") == (0, "kept\nkept\ngone\n")


async def test_pausing_a_busy_sandbox_stops_it_where_it_is(runtime: GvisorRuntime, image: Image) -> None:
    box = await create(runtime, image)
    process = await box.agent.start(
        ProcessSpec(("/bin/sh", "-c", "until test -e /tmp/go; do sleep 0.1; done; echo done"), "user")
    )
    with pytest.raises(SandboxError, match="running processes"):
        await box.snapshot(Path("/nonexistent/never"), memory=True)
    await box.pause()
    await box.resume()
    await run(box.agent, "echo >/tmp/go")
    output = b"".join([event.data async for event in process.events() if not isinstance(event, Exit)])
    assert output == b"done\n"


async def test_copies_go_their_own_ways(runtime: GvisorRuntime, image: Image, tmp_path: Path) -> None:
    box = await create(runtime, image)
    await run(box.agent, "echo shared >/home/user/f")
    kept = await box.snapshot(tmp_path / "kept", memory=False)
    twins = [await runtime.restore(spec(image, name), kept) for name in ("two", "three")]
    await run(twins[0].agent, "echo own >/home/user/f")
    assert [(await run(each.agent, "cat /home/user/f"))[1] for each in (box, *twins)] == [
        "shared\n",
        "own\n",
        "shared\n",
    ]
    ids = {(await run(each.agent, "cat /etc/machine-id"))[1] for each in (box, *twins)}
    assert len(ids) == 3


async def test_a_new_service_takes_sandboxes_up(runtime: GvisorRuntime, image: Image, tmp_path: Path) -> None:
    running, paused, ended, unknown = [await create(runtime, image, n) for n in ("r", "p", "e", "u")]
    await run(running.agent, "echo 1 >/tmp/f")
    await paused.pause()
    records = [box.record() for box in (running, paused, ended)]
    await runtime.close()
    later = GvisorRuntime(tmp_path / "g")
    await later.start()
    try:
        pid = int((tmp_path / "g/sandboxes/e/pid").read_text())
        os.kill(pid, 9)
        await until(lambda: start_time(pid) is None, "its end")
        found = [await later.adopt(record) for record in records]
        assert found[2] is None
        assert found[0] is not None
        assert found[1] is not None
        assert await run(found[0].agent, "cat /tmp/f") == (0, "1\n")
        await found[1].resume()
        assert await run(found[1].agent, "echo here") == (0, "here\n")
        assert await later.sweep({"r", "p"}) == ["u"]
        for box in found[:2]:
            await box.kill()  # type: ignore[union-attr]
    finally:
        await later.close()
    assert unknown.spec.id == "u"


async def test_a_death_is_told_with_its_cause(runtime: GvisorRuntime, image: Image, tmp_path: Path) -> None:
    box = await create(runtime, image)
    os.kill(int((tmp_path / "g/sandboxes/one/pid").read_text()), 9)
    assert "ended" in await asyncio.wait_for(box.died(), PATIENCE_S)
    with pytest.raises(SandboxGone):
        _ = box.agent


async def test_what_it_cannot_do_it_says(runtime: GvisorRuntime, image: Image) -> None:
    with pytest.raises(TemplateNotFound, match="root of its own"):
        await create(runtime, Image(id="host", name="host"))
    with pytest.raises(SandboxError, match="no network"):
        await runtime.create(Spec(id="n", image=image, limits=LIMITS, network=Network(internet=True)))
    assert await runtime.sweep(set()) == []


async def test_a_start_command_runs_first_and_a_failure_leaves_nothing(
    runtime: GvisorRuntime, image: Image, tmp_path: Path
) -> None:
    started = Image(
        id="i", name="t", layers=image.layers, start=Start("echo on >/tmp/ready; sleep 100", "test -s /tmp/ready")
    )
    box = await create(runtime, started)
    assert await run(box.agent, "cat /tmp/ready") == (0, "on\n")
    broken = Image(id="i", name="t", layers=image.layers, user="nobody-such", start=Start("true"))
    with pytest.raises(SandboxError):
        await create(runtime, broken, "two")
    assert not (tmp_path / "g/sandboxes/two").exists()
    given_up = asyncio.create_task(create(runtime, image, "three"))
    await until((tmp_path / "g/sandboxes/three").exists, "its beginning")
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert not (tmp_path / "g/sandboxes/three").exists()
