"""The sandboxes that tests of other parts run on keep the protocol's promises."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from venusrl.sandboxes.protocol import (
    CommandResult,
    Limits,
    SandboxDenied,
    SandboxError,
    Sandboxes,
    SandboxGone,
    TemplateNotFound,
)
from venusrl.testing.sandboxes import FakeCall, FakeSandboxes

LIMITS = Limits()


async def test_it_is_a_sandboxes() -> None:
    sandboxes: Sandboxes = FakeSandboxes()
    sandbox = await sandboxes.create("host", LIMITS, {})
    result = await sandboxes.run(sandbox, "anything")
    assert (result.exit_code, result.output) == (0, "")
    await sandboxes.kill(sandbox)
    await sandboxes.kill(sandbox)
    with pytest.raises(SandboxGone):
        await sandboxes.run(sandbox, "true")


async def test_a_script_answers_and_may_change_files() -> None:
    def script(call: FakeCall) -> str | int | CommandResult:
        if call.command == "make":
            call.files["/work/out"] = b"made"
            return "made"
        return 3 if call.command == "fail" else CommandResult(137, "", 0, 1.0, timed_out=True)

    fake = FakeSandboxes(script)
    sandbox = await fake.create("host", LIMITS, {})
    assert (await fake.run(sandbox, "make")).output == "made"
    assert await fake.read(sandbox, "out") == b"made"
    assert (await fake.run(sandbox, "fail")).exit_code == 3
    assert (await fake.run(sandbox, "hang")).timed_out


async def test_a_table_answers() -> None:
    fake = FakeSandboxes({"ls": "a b", "false": 1})
    sandbox = await fake.create("host", LIMITS, {})
    assert (await fake.run(sandbox, "ls")).output == "a b"
    assert (await fake.run(sandbox, "false")).exit_code == 1
    assert (await fake.run(sandbox, "other")).exit_code == 0
    assert [call.command for call in fake.commands] == ["ls", "false", "other"]


async def test_files(tmp_path: Path) -> None:
    fake = FakeSandboxes()
    sandbox = await fake.create(str(tmp_path), LIMITS, {})
    await fake.write(sandbox, {"a/b": b"1", "/tmp/c": b"22"})
    assert await fake.read(sandbox, "/work/a/b") == b"1"
    assert fake.files(sandbox) == {"/work/a/b": b"1", "/tmp/c": b"22"}
    with pytest.raises(FileNotFoundError):
        await fake.read(sandbox, "none")
    with pytest.raises(SandboxError):
        await fake.read(sandbox, "/tmp/c", max_bytes=1)


async def test_refusals() -> None:
    fake = FakeSandboxes(max_sandboxes=1)
    with pytest.raises(TemplateNotFound):
        await fake.create("/no/such", LIMITS, {})
    sandbox = await fake.create("host", LIMITS, {})
    with pytest.raises(SandboxDenied):
        await fake.create("host", LIMITS, {})
    fake.fail_next(SandboxError("boom"))
    with pytest.raises(SandboxError, match="boom"):
        await fake.run(sandbox, "true")
    fake.lose(sandbox)
    with pytest.raises(SandboxGone):
        await fake.write(sandbox, {})


async def test_a_cancelled_command_is_not_running_any_more() -> None:
    started = asyncio.Event()

    async def script(_call: FakeCall) -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    fake = FakeSandboxes(script)
    sandbox = await fake.create("host", LIMITS, {})
    task = asyncio.create_task(fake.run(sandbox, "hang"))
    await started.wait()
    assert fake.running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.running == 0
    assert fake.alive == [sandbox]
