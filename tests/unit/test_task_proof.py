"""A task is proved by running it: fails untouched, passes when solved, and no sandbox stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from venusrl.sandboxes.protocol import Limits, SandboxGone
from venusrl.tasks.proof import prove
from venusrl.testing.sandboxes import FakeCall, FakeSandboxes
from venusrl.types import Task


def task_in(folder: Path, *, solution: bool = True) -> Task:
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "a.py").write_text("wrong\n")
    (folder / "tests").mkdir()
    (folder / "solution").mkdir()
    if solution:
        (folder / "solution" / "solve.sh").write_text("echo right > a.py\n")
    return Task(id="t", instruction="Mend it.", directory=str(folder))


def scripted(untouched: str, solved: str) -> FakeSandboxes:
    """Sandboxes whose verifier answers by whether the solution ran in them."""

    def script(call: FakeCall) -> None:
        if "solve.sh" in call.command:
            assert call.files["/work/a.py"] == b"wrong\n"
            assert [mount.target for mount in call.mounts] == ["/solution"]
            call.files["/work/a.py"] = b"right\n"
        elif "test.sh" in call.command:
            right = call.files["/work/a.py"] == b"right\n"
            call.files["/logs/verifier/reward.txt"] = (solved if right else untouched).encode()

    return FakeSandboxes(script)


@pytest.mark.parametrize(
    ("untouched", "solved", "says"),
    [
        ("0", "1", []),
        ("1", "1", ["pass before anything was done"]),
        ("0", "0.5", ["reference solution scores 0.5"]),
        ("1", "0", ["pass before anything was done", "reference solution scores 0"]),
        ("?", "1", ["gives no verdict"]),
        ("0", "?", ["no verdict after the solution"]),
    ],
)
async def test_a_task_fails_untouched_and_passes_when_solved(
    tmp_path: Path, untouched: str, solved: str, says: list[str]
) -> None:
    sandboxes = scripted(untouched, solved)
    faults = await prove(sandboxes, task_in(tmp_path), Limits())
    assert len(faults) == len(says)
    assert all(expected in fault for expected, fault in zip(says, faults, strict=True))
    assert sandboxes.alive == []


async def test_without_a_solution_it_is_only_proved_to_fail(tmp_path: Path) -> None:
    sandboxes = scripted("0", "0")
    assert await prove(sandboxes, task_in(tmp_path, solution=False), Limits()) == []
    assert sandboxes.created == 1


async def test_a_broken_sandbox_is_not_the_tasks_fault(tmp_path: Path) -> None:
    def script(call: FakeCall) -> None:
        raise SandboxGone("gone")

    sandboxes = FakeSandboxes(script)
    with pytest.raises(SandboxGone):
        await prove(sandboxes, task_in(tmp_path), Limits())
    assert sandboxes.alive == []
