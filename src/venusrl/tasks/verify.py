"""Puts a task into a sandbox before the agent, and judges it after.

Owns: the order of the two, and the reward's way out. The verifier's files reach the sandbox only when the agent is
over and its processes are gone; they are mounted read-only; the reward file's directory is emptied first, and its
word counts only if the verifier itself ended well. Guarantees: a verifier that crashes or says nothing is an
infrastructure failure, never a reward of 0; one that the code under test drives out of time or memory is the
policy's doing and scores 0.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import CommandResult, Mount, Sandboxes
from venusrl.tasks.harbor import environment_files
from venusrl.types import Failure, FailureKind, Task

_REWARD = "/logs/verifier/reward.txt"
_COMMAND = "rm -rf /logs/verifier && mkdir -p /logs/verifier && exec sh /tests/test.sh"


class Verdict(msgspec.Struct, frozen=True):
    """``reward`` in [0, 1]; ``failure`` is set when there is no verdict (the reward is then meaningless)."""

    reward: float
    output: str
    failure: Failure | None = None


async def prepare(sandboxes: Sandboxes, sandbox: str, task: Task) -> None:
    """Upload environment/ into /work. Raises SandboxError."""
    files = environment_files(task)
    if files:
        await sandboxes.write(sandbox, files)


async def verify(sandboxes: Sandboxes, sandbox: str, task: Task) -> Verdict:
    """Run the task's verifier after the agent. Raises SandboxError when the sandbox fails."""
    tests = Mount(source=str(Path(task.directory) / "tests"), target="/tests")
    result = await sandboxes.run(sandbox, _COMMAND, timeout_s=task.verifier_timeout_s, mounts=(tests,))
    if result.timed_out or result.out_of_memory:
        return Verdict(0.0, result.output)
    try:
        text = (await sandboxes.read(sandbox, _REWARD, max_bytes=64)).decode("utf-8", "replace")
    except FileNotFoundError:
        return _no_verdict("verifier_no_reward", f"tests/test.sh wrote no {_REWARD}", result)
    return judge(text, result)


def judge(text: str, result: CommandResult) -> Verdict:
    """The verdict of a reward file's ``text``; a good word from a verifier that did not end well is void."""
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not 0.0 <= reward <= 1.0:
        return _no_verdict(
            "verifier_bad_reward", f"the reward must be a number from 0 to 1, not {text.strip()!r}", result
        )
    if result.exit_code != 0 and reward > 0:
        return _no_verdict("verifier_crashed", f"tests/test.sh ended with exit code {result.exit_code}", result)
    return Verdict(reward, result.output)


def _no_verdict(reason: str, message: str, result: CommandResult) -> Verdict:
    return Verdict(
        0.0,
        result.output,
        Failure(FailureKind.INFRASTRUCTURE, reason, f"{message}; its output: {result.output[-500:]}"),
    )
