"""A run's five methods over a real service with real namespaces."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.waiting import until

from venusrl.sandboxes.e2b import E2BSandboxes
from venusrl.sandboxes.manager import keys
from venusrl.sandboxes.manager.asks import Settings
from venusrl.sandboxes.manager.serve import ServeConfig, Server
from venusrl.sandboxes.protocol import (
    BadPath,
    Limits,
    Mount,
    RuntimeUnavailable,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    TemplateNotFound,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of the service need root: run as root")
PLAIN = "this-machine"
"""The template that needs no making: the fixture's name for ``host``."""
NAMES = {PLAIN: "host"}
LIMITS = Limits(output_bytes=2000, command_timeout_s=20.0)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("env")


@pytest.fixture
async def server(state: Path) -> AsyncIterator[Server]:
    made = Server(ServeConfig(state, listen="127.0.0.1:0", settings=Settings()))
    try:
        await made.start()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.stop(kill=True)


@pytest.fixture
async def sandboxes(server: Server) -> AsyncIterator[E2BSandboxes]:
    async with E2BSandboxes(server.url, server.api_key, sandbox_url=server.sandbox_url, templates=NAMES) as made:
        yield made


async def small_template(server: Server, folder: Path) -> str:
    """A writable root with a shell and tar in it, made in a moment where there is busybox."""
    busybox = shutil.which("busybox")
    if busybox is None:
        return "base"
    tools = folder / "bin"
    tools.mkdir(parents=True)
    shutil.copy(busybox, tools / "busybox")
    for name in ("sh", "cat", "ls", "mkdir", "rm", "chmod", "tar", "grep", "kill", "pwd", "echo", "sleep"):
        (tools / name).symlink_to("busybox")
    assert server.local.templates is not None
    await server.local.templates.from_directory("", "small", folder)
    return "small"


async def test_the_five_methods(sandboxes: E2BSandboxes, server: Server, tmp_path: Path) -> None:
    sandbox = await sandboxes.create(await small_template(server, tmp_path / "root"), LIMITS, {"task": "1"})
    assert server.service.manager.book.records[sandbox].metadata == {"task": "1"}
    result = await sandboxes.run(sandbox, "pwd; echo $WORD; echo wrong >&2; exit 3", env={"WORD": "hello"})
    assert result.exit_code == 3
    assert sorted(result.output.split()) == ["/work", "hello", "wrong"]
    await sandboxes.write(sandbox, {"a/b.txt": b"\x00\xff", "/tmp/c": b"c"})
    assert await sandboxes.read(sandbox, "/work/a/b.txt") == b"\x00\xff"
    assert (await sandboxes.run(sandbox, "cat c", cwd="/tmp")).output == "c"
    with pytest.raises(FileNotFoundError):
        await sandboxes.read(sandbox, "nothing")
    with pytest.raises(SandboxError, match="more than the 1 bytes"):
        await sandboxes.read(sandbox, "a/b.txt", max_bytes=1)
    with pytest.raises(BadPath):
        await sandboxes.write(sandbox, {"../../etc/x": b""})

    hidden = tmp_path / "hidden"
    (hidden / "deep").mkdir(parents=True)
    (hidden / "deep" / "test.sh").write_text("#!/bin/sh\necho verified\n")
    (hidden / "deep" / "test.sh").chmod(0o755)
    await sandboxes.run(sandbox, "mkdir /tests; echo forged > /tests/x")
    result = await sandboxes.run(sandbox, "ls /tests; /tests/deep/test.sh", mounts=(Mount(str(hidden), "/tests"),))
    assert result.output.split() == ["deep", "verified"]
    assert (await sandboxes.run(sandbox, "ls /tests")).exit_code != 0

    await sandboxes.kill(sandbox)
    await sandboxes.kill(sandbox)
    assert sandbox not in server.service.manager.book.records
    with pytest.raises(SandboxGone):
        await sandboxes.run(sandbox, "true")


async def begun(sandboxes: E2BSandboxes, sandbox: str) -> None:
    async def holds() -> bool:
        return (await sandboxes.run(sandbox, "cat /tmp/begun")).exit_code == 0

    await until(holds, "the command's start")


async def test_nothing_of_a_command_outlives_it(sandboxes: E2BSandboxes) -> None:
    sandbox = await sandboxes.create(PLAIN, LIMITS, {})
    left = "setsid sleep 1001 & (setsid setsid sleep 1002 &) ; "
    alive = "grep -lz '^100[12]$' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
    assert (await sandboxes.run(sandbox, left + "true")).exit_code == 0
    assert (await sandboxes.run(sandbox, alive)).output.strip() == "0"
    result = await sandboxes.run(sandbox, left + "sleep 1001", timeout_s=1.0)
    assert result.timed_out
    assert (await sandboxes.run(sandbox, alive)).output.strip() == "0"
    task = asyncio.create_task(sandboxes.run(sandbox, left + "echo begun > /tmp/begun; sleep 1001"))
    await begun(sandboxes, sandbox)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sandboxes.run(sandbox, alive)).output.strip() == "0"
    flood = await sandboxes.run(sandbox, "yes | head -c 100000")
    assert len(flood.output) < 2200
    assert flood.truncated_bytes == 98000


async def test_T39_a_command_that_fails_keeps_what_it_said_and_why(sandboxes: E2BSandboxes) -> None:
    sandbox = await sandboxes.create(PLAIN, LIMITS, {})
    late = await sandboxes.run(sandbox, "echo before; echo beside >&2; sleep 1003", timeout_s=5.0)
    assert (late.timed_out, sorted(late.output.split())) == (True, ["before", "beside"])
    wrong = await sandboxes.run(sandbox, "echo no; exit 3")
    assert (wrong.exit_code, wrong.timed_out, wrong.output) == (3, False, "no\n")
    struck = await sandboxes.run(sandbox, "echo last; kill -9 $$")
    assert (struck.exit_code, struck.timed_out, struck.output.split()[0]) == (137, False, "last")
    running = asyncio.create_task(sandboxes.run(sandbox, "echo begun > /tmp/begun; sleep 1003"))
    await begun(sandboxes, sandbox)
    await sandboxes.kill(sandbox)
    with pytest.raises(SandboxGone):
        await running


async def test_a_limit_that_ended_a_command_is_known(sandboxes: E2BSandboxes) -> None:
    sandbox = await sandboxes.create(PLAIN, LIMITS, {})
    greedy = await sandboxes.run(sandbox, "head -c 3000000000 /dev/zero | tail | wc -c; exit 5")
    assert (greedy.exit_code, greedy.out_of_memory, greedy.out_of_disk) == (5, True, False)
    full = await sandboxes.run(sandbox, "head -c 3000000000 /dev/zero > /tmp/big")
    assert (full.exit_code != 0, full.out_of_memory, full.out_of_disk) == (True, False, True)
    innocent = await sandboxes.run(sandbox, "rm /tmp/big; exit 5")
    assert (innocent.exit_code, innocent.out_of_memory, innocent.out_of_disk) == (5, False, False)


async def test_refusals_have_their_types(server: Server, sandboxes: E2BSandboxes) -> None:
    with pytest.raises(TemplateNotFound):
        await sandboxes.create("nowhere", LIMITS, {})
    async with E2BSandboxes(server.url, "e2b_" + "0" * 40, sandbox_url=server.url, templates=NAMES) as stranger:
        with pytest.raises(RuntimeUnavailable):
            await stranger.create(PLAIN, LIMITS, {})
    clock = server.service.clock
    _, text = keys.create(server.service.store, clock, "one", max_sandboxes=1)
    async with E2BSandboxes(server.url, text, sandbox_url=server.url, templates=NAMES) as small:
        await small.create(PLAIN, LIMITS, {})
        with pytest.raises(SandboxDenied) as refusal:
            await small.create(PLAIN, LIMITS, {})
        assert refusal.value.retry_after_s >= 1
    assert not server.service.manager.book.records
    async with E2BSandboxes("http://127.0.0.1:9", "e2b_00") as nobody:
        with pytest.raises(SandboxError):
            await nobody.create(PLAIN, LIMITS, {})


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.1])
async def test_T36_a_cancelled_create_leaves_nothing(server: Server, sandboxes: E2BSandboxes, after_s: float) -> None:
    """Whenever it is cancelled: before, while or after the service makes it."""
    tasks = [asyncio.create_task(sandboxes.create(PLAIN, LIMITS, {})) for _ in range(4)]
    await asyncio.sleep(after_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    kept = {task.result() for task in tasks if not task.cancelled()}
    assert set(server.service.manager.book.records) == kept
    status = await server.local.host.status()
    assert {one.id for one in status.held} == kept
