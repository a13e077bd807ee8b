"""The life of a persistent sandbox: made, used, frozen, kept as files, copied, taken up by a later process, ended."""

# ruff: noqa: ASYNC240 - a test may look at a local file

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from tests.integration.persistent import WAIT_S, left_of, output, running, shell, spec, starting

from venusrl.sandboxes.agent.api import Exit, Output, ProcessSpec
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused, TemplateNotFound, Unsupported
from venusrl.sandboxes.runtimes.base import Snapshot
from venusrl.sandboxes.runtimes.namespace import groups
from venusrl.sandboxes.runtimes.namespace.instance import NamespaceInstance, Record
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.sandboxes.templates.api import Image


@pytest.fixture(params=get_args(Disk))
async def runtime(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[NamespaceRuntime]:
    async with running(tmp_path / "ns", request.param) as made:
        yield made


def pid_of(record: bytes) -> int:
    init = msgspec.json.decode(record, type=Record).init
    assert init is not None
    return init.pid


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_processes_and_files_persist_across_commands(runtime: NamespaceRuntime) -> None:
    sandbox = await runtime.create(spec("one"))
    await output(sandbox, "sleep 1000 & echo hello > note; mkdir -p deep/er")
    assert await output(sandbox, "pgrep -c sleep; cat note; pwd; id -un; hostname") == "1\nhello\n/home/user\nuser\none"
    assert await output(sandbox, "id -un; touch /root/x /etc/y && echo made", "root") == "root\nmade"
    assert (await shell(sandbox, "touch /root/z"))[0] != 0
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        _ = sandbox.agent
    await sandbox.kill()


async def test_kill_leaves_nothing(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("one"))
    pid = pid_of(sandbox.record())
    directories = [path for path in groups_of(tmp_path / "ns") if path.name == "one"]
    assert directories
    assert left_of(tmp_path / "ns")
    await output(sandbox, "(setsid sleep 1000 &) ; (sleep 1000 & trap '' TERM; sleep 1000) & true")
    await sandbox.kill()
    assert not alive(pid)
    assert not [path for path in directories if path.exists()]
    assert left_of(tmp_path / "ns") == []


def groups_of(state: Path) -> list[Path]:
    """Every control group of a runtime's sandboxes."""
    name = NamespaceRuntime(state)._group_name()
    node = groups.open_node(name)
    assert node is not None
    return [entry for directory in node.directories.values() for entry in directory.iterdir() if entry.is_dir()]


async def test_another_process_takes_it_up(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("one"))
    waiting = "echo a; while ! test -e /tmp/go; do sleep 0.05; done; echo b; exit 7"
    process = await sandbox.agent.start(ProcessSpec(("/bin/sh", "-c", waiting), "user"))
    record, pid = sandbox.record(), pid_of(sandbox.record())
    assert runtime._link is not None
    os.kill(runtime._link.pid, signal.SIGKILL)  # the forge is no part of a sandbox
    await runtime.close()
    assert alive(pid)

    async with running(tmp_path / "ns") as later:
        taken = await later.adopt(record)
        assert taken is not None
        again = await taken.agent.attach(process.pid)
        await output(taken, "touch /tmp/go")
        told, code = b"", None
        async for event in again.events():
            if isinstance(event, Output):
                told += event.data
            elif isinstance(event, Exit):
                code = event.code
        assert (code, told[-2:]) == (7, b"b\n")
        await taken.kill()
        assert not alive(pid)
        assert await later.adopt(record) is None
    assert left_of(tmp_path / "ns") == []


async def test_what_nobody_knows_is_swept(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    kept, lost = await runtime.create(spec("kept")), await runtime.create(spec("lost"))
    records = kept.record(), lost.record()
    await runtime.close()
    async with running(tmp_path / "ns") as later:
        assert await later.adopt(records[0]) is not None
        assert await later.sweep({"kept"}) == ["sandbox lost"]
        assert not alive(pid_of(records[1]))
        assert alive(pid_of(records[0]))
        assert await later.adopt(records[1]) is None


async def test_freezing_keeps_processes(runtime: NamespaceRuntime) -> None:
    sandbox = await runtime.create(spec("one"))
    beating = "(while :; do date +%s%N > /tmp/beat; sleep 0.02; done) >/dev/null 2>&1 &"
    await output(sandbox, f"{beating} until test -e /tmp/beat; do sleep 0.05; done")
    await sandbox.pause()
    beat = Path(f"/proc/{pid_of(sandbox.record())}/root/tmp/beat")
    before = beat.read_text()
    await asyncio.sleep(0.3)
    assert beat.read_text() == before
    with pytest.raises(SandboxPaused):
        _ = sandbox.agent
    await sandbox.resume()
    assert await output(sandbox, "pgrep -c -f 'while :'") != "0"
    await sandbox.pause()
    await sandbox.kill()  # a frozen one can be ended too
    assert not beat.exists()


async def test_an_idle_one_is_kept_as_files_only(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("one"))
    make = "echo hello > note; ln -s note link; ln note twin; chmod 751 note; truncate -s 8M hole"
    await output(sandbox, make)
    await output(sandbox, "echo mine > /etc/new; rm /etc/mime.types; chown 7:8 /etc/new", "root")
    pid = pid_of(sandbox.record())
    await sandbox.pause()
    assert not alive(pid)
    assert (await sandbox.footprint()).total == 0
    record = sandbox.record()
    await runtime.close()
    async with running(tmp_path / "ns") as later:
        again = await later.adopt(record)
        assert again is not None
        assert await later.sweep({"one"}) == []
        await again.resume()
        look = "cat note link; stat -c '%a %h %U' note; stat -c '%s %b' hole; stat -c '%u %g' /etc/new"
        assert await output(again, look) == "hello\nhello\n751 2 user\n8388608 0\n7 8"
        assert (await shell(again, "ls /etc/mime.types"))[0] != 0
        assert list((tmp_path / "ns/paused").iterdir()) == []
        await again.pause(memory=False)
        await again.kill()
    assert left_of(tmp_path / "ns") == []


async def test_a_snapshot_waits_for_what_the_agent_itself_does(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    """A file that was just written is no running process, though a child of the agent's wrote it."""
    parent = await runtime.create(spec("parent"))
    release = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"first "
        await release.wait()
        yield b"last"

    writing = asyncio.create_task(parent.agent.write("/home/user/slow", "user", slow()))
    assert isinstance(parent, NamespaceInstance)
    group = parent._maker.group("parent")
    assert group is not None
    async with asyncio.timeout(WAIT_S):
        while len(group.pids()) < 2:  # noqa: ASYNC110 - nobody tells when it has begun
            await asyncio.sleep(0.01)
    snapshotting = asyncio.create_task(parent.snapshot(tmp_path / "taken"))
    await asyncio.wait({snapshotting}, timeout=0.1)
    release.set()
    child = await runtime.restore(spec("child"), await snapshotting)
    await writing
    assert await output(child, "cat ~/slow") == "first last"
    await child.agent.start(ProcessSpec(("sleep", "1000"), "user"))
    with pytest.raises(Unsupported, match="end them"):
        await child.snapshot(tmp_path / "refused")


async def test_a_snapshot_makes_as_many_as_wanted(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    parent = await runtime.create(spec("parent"))
    await output(parent, "echo hello > note; sleep 1000 & true")
    with pytest.raises(SandboxError, match="files only"):
        await parent.snapshot(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    snapshot = await parent.snapshot(tmp_path / "taken", memory=False)
    assert snapshot.bytes > 0
    assert not snapshot.memory
    children = [await runtime.restore(spec(f"child{n}"), snapshot) for n in range(2)]
    for child in children:
        assert await output(child, "cat note; echo own > note") == "hello"
    assert await output(parent, "cat note; pgrep -c sleep") == "hello\n1"
    identities = {await output(each, "cat /etc/machine-id; hostname") for each in (parent, *children)}
    assert len(identities) == 3
    (tmp_path / "taken/files").write_bytes(b"not an archive")
    with pytest.raises(SandboxError):
        await runtime.restore(spec("broken"), Snapshot(str(tmp_path / "taken"), False, 1, "namespace"))
    assert not [path for path in groups_of(tmp_path / "ns") if path.name == "broken"]


async def test_a_template_of_layers(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for name in ("bin", "usr", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (lower).mkdir(exist_ok=True)
            (lower / name).symlink_to(os.readlink(f"/{name}"))
    program = "usr/bin/busybox"
    if not Path("/", program).exists():
        pytest.skip("no static busybox: apt install busybox-static")
    (lower / "usr/bin").mkdir(parents=True)
    (lower / program).write_bytes(Path("/", program).read_bytes())
    (lower / program).chmod(0o755)
    for tool in ("sh", "cat", "id", "rm", "ls"):
        (lower / "usr/bin" / tool).symlink_to("busybox")
    (lower / "greeting").write_text("lower")
    (lower / "secret").write_text("covered")
    upper.mkdir()
    (upper / "greeting").write_text("upper")
    os.mknod(upper / "secret", 0o600 | 0o020000, 0)
    image = Image(id="layered", name="layered", layers=(str(lower), str(upper)))
    sandbox = await runtime.create(spec("one", image))
    assert await output(sandbox, "cat /greeting; id -un") == "upperuser"
    assert (await shell(sandbox, "cat /secret"))[0] != 0
    await output(sandbox, "rm /greeting; rm -r /usr/bin/ls; echo x > /new", "root")
    await sandbox.pause(memory=False)
    await sandbox.resume()
    assert (await shell(sandbox, "cat /greeting"))[0] != 0
    assert await output(sandbox, "cat /new") == "x"
    assert (upper / "greeting").read_text() == "upper"
    with pytest.raises(TemplateNotFound):
        await runtime.create(spec("two", Image(id="x", name="x", layers=(str(tmp_path / "none"),))))


async def test_a_start_command_runs_before_the_first_command(runtime: NamespaceRuntime) -> None:
    image = starting("sleep 0.1; echo up > /tmp/up; exec sleep 1000", "test -e /tmp/up")
    sandbox = await runtime.create(spec("one", image))
    assert await output(sandbox, "cat /tmp/up; pgrep -c sleep") == "up\n1"


async def test_a_cancelled_creation_leaves_nothing(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    for turn in range(6):
        task = asyncio.create_task(runtime.create(spec(f"s{turn}")))
        for _ in range(turn * 3):
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task.result().kill()
    while runtime._tasks:
        await asyncio.wait(runtime._tasks, timeout=WAIT_S)
    assert left_of(tmp_path / "ns") == []
    assert groups_of(tmp_path / "ns") == []


@pytest.mark.parametrize("kept", [False, True])
async def test_a_maker_that_dies_fails_its_sandbox_alone(runtime: NamespaceRuntime, tmp_path: Path, kept: bool) -> None:
    before = await runtime.create(spec("before"))
    snapshot = await before.snapshot(tmp_path / "snapshot")
    assert runtime._link is not None
    await runtime._link.close()
    maker, runtime._maker_program = runtime._maker_program, str(shutil.which("false"))
    with pytest.raises(SandboxError, match="ended as it began"):
        async with asyncio.timeout(WAIT_S):
            await (runtime.restore(spec("dead"), snapshot) if kept else runtime.create(spec("dead")))
    await runtime._link.close()
    runtime._maker_program = maker
    assert await output(await runtime.create(spec("dead")), "echo alive") == "alive"
    assert await output(before, "echo alive") == "alive"


async def test_the_end_of_pid_1_is_told(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("one"))
    waiting = asyncio.create_task(sandbox.died())
    os.kill(pid_of(sandbox.record()), signal.SIGKILL)
    assert "PID 1" in await asyncio.wait_for(waiting, WAIT_S)
    with pytest.raises(SandboxGone):
        await sandbox.footprint()
    await sandbox.kill()
    assert left_of(tmp_path / "ns") == []


async def test_the_footprint_is_its_own(runtime: NamespaceRuntime) -> None:
    sandbox = await runtime.create(spec("one"))
    before = await sandbox.footprint()
    assert before.total < 4 << 20
    code = "import time; held = bytearray(40 << 20); open('/tmp/held', 'w'); time.sleep(1000)"
    await output(sandbox, f'(python3 -c "{code}" &) >/dev/null; while ! test -e /tmp/held; do sleep 0.05; done')
    await output(sandbox, "head -c 10000000 /dev/zero > /tmp/file")
    after = await sandbox.footprint()
    assert 40 << 20 <= after.private < 60 << 20
    files = 10_000_000 if runtime.disk == "memory" else 0
    assert files <= after.files < files + (2 << 20)


async def test_ids_are_checked(runtime: NamespaceRuntime) -> None:
    assert isinstance(await runtime.create(spec("one")), NamespaceInstance)
    for name in ("one", "../up", "", "a/b", "x" * 64):
        with pytest.raises(SandboxError):
            await runtime.create(spec(name))


async def test_a_templates_pages_are_its_own(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "usr/lib").mkdir(parents=True)
    (layer / "usr/lib/big.so").write_bytes(os.urandom(3 << 20))
    image = Image(id="sha256:pages", name="pages", layers=(str(layer),))
    assert await runtime.shared([image.id]) == {image.id: 0}
    await runtime.prepare(image)
    assert await runtime.shared([image.id]) == {image.id: 3 << 20}
    other = msgspec.structs.replace(image, id="sha256:more", layers=(str(layer), str(tmp_path / "more")))
    (tmp_path / "more").mkdir()
    (tmp_path / "more/big").write_bytes(os.urandom(1 << 20))
    await runtime.prepare(other)
    for order, counts in (((image, other), (3, 1)), ((other, image), (4, 0))):
        ids = [each.id for each in order]
        found = await runtime.shared(ids)
        assert [found[each] >> 20 for each in ids] == [*counts], "what they have in common counts for the first"
    await runtime.forget(other.id)
    assert [path for path in groups_of(tmp_path / "ns") if path.name.startswith("template.")]
    assert await runtime.sweep(set()) == []
    await runtime.forget(image.id)
    assert groups_of(tmp_path / "ns") == []
    with pytest.raises(SandboxError, match="lacks its layer"):
        await runtime.prepare(Image(id="gone", name="gone", layers=(str(tmp_path / "gone"),)))


async def test_a_hundred_lives_leave_nothing(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    numbers = iter(range(100))

    async def live() -> None:
        for number in numbers:
            sandbox = await runtime.create(spec(f"life-{number}"))
            await output(sandbox, "echo x > /tmp/x; (sleep 1000 &) >/dev/null 2>&1; true")
            await sandbox.kill()

    await asyncio.gather(*(live() for _ in range(8)))
    assert left_of(tmp_path / "ns") == []
    assert groups_of(tmp_path / "ns") == []
    assert runtime._link is not None
    children = Path(f"/proc/{runtime._link.pid}/task/{runtime._link.pid}/children")
    for _ in range(int(WAIT_S / 0.05)):
        if not children.read_text().split():
            break
        await asyncio.sleep(0.05)
    assert children.read_text().split() == []
    assert runtime._pool is not None
    assert runtime._pool.take() == runtime._pool.first()
