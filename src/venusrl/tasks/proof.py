"""Proves that a task can teach: its tests fail before the reference solution and pass after it.

Owns: the two attempts, each in a fresh sandbox, that ``venusrl tasks check --run`` makes. Must not know: which
sandboxes. Guarantees: no sandbox is left behind; a fault of the task is a sentence, a fault of the sandbox is raised.
"""

from __future__ import annotations

from pathlib import Path

from venusrl.sandboxes.protocol import Limits, Mount, Sandboxes
from venusrl.tasks.verify import Verdict, prepare, verify
from venusrl.types import Task

_SOLUTION = "solution/solve.sh"
_PASSED = 1.0


async def prove(sandboxes: Sandboxes, task: Task, limits: Limits) -> list[str]:
    """What is wrong with ``task`` when it is really run; empty when it fails untouched and passes when solved.

    A task without a reference solution is only proved to fail untouched. Raises SandboxError.
    """
    untouched = await _attempt(sandboxes, task, limits, solve=False)
    if untouched.failure is not None:
        return [f"{task.id}: its verifier gives no verdict: {untouched.failure.message}"]
    faults = []
    if untouched.reward >= _PASSED:
        faults.append(f"{task.id}: its tests pass before anything was done; there is nothing to learn")
    if not (Path(task.directory) / _SOLUTION).is_file():
        return faults
    solved = await _attempt(sandboxes, task, limits, solve=True)
    if solved.failure is not None:
        faults.append(f"{task.id}: its verifier gives no verdict after the solution: {solved.failure.message}")
    elif solved.reward < _PASSED:
        faults.append(f"{task.id}: its reference solution scores {solved.reward:g}: {solved.output[-500:].strip()}")
    return faults


async def _attempt(sandboxes: Sandboxes, task: Task, limits: Limits, *, solve: bool) -> Verdict:
    sandbox = await sandboxes.create(task.template, limits, {"task": task.id})
    try:
        await prepare(sandboxes, sandbox, task)
        if solve:
            solution = Mount(source=str(Path(task.directory) / "solution"), target="/solution")
            timeout_s = task.agent_timeout_s
            await sandboxes.run(sandbox, "sh /solution/solve.sh", timeout_s=timeout_s, mounts=(solution,))
        return await verify(sandboxes, sandbox, task)
    finally:
        await sandboxes.kill(sandbox)
