"""The state of one simulated trajectory and of its group.

Owns: ``Episode`` and ``GroupRun``, mutable. Must not know: what moves them on (``episodes``).
"""

from __future__ import annotations

from typing import Literal

from venusrl.simulation.cache import Path
from venusrl.simulation.core import Timer
from venusrl.simulation.scenario import Script


class GroupRun:
    """One opened group. ``members``: by index, the latest trajectory; ``task``: its place in the task order."""

    __slots__ = ("lost", "members", "name", "opened_at", "reissues", "task")

    def __init__(self, name: str, task: int, reissues: int, now: float) -> None:
        self.name = name
        self.task = task
        self.reissues = reissues
        self.members: dict[int, Episode] = {}
        self.lost = 0
        self.opened_at = now


class Episode:
    """One trajectory. The ``_s``: where its time went."""

    __slots__ = (
        "branches",
        "cached",
        "decode_s",
        "fails_at",
        "finished_at",
        "generated",
        "group",
        "held_s",
        "held_since",
        "hold",
        "hold_since",
        "index",
        "left_s",
        "longest_hold_s",
        "name",
        "opened_at",
        "prefill_s",
        "prefilled",
        "prompt",
        "queued_s",
        "resumed",
        "sandbox_s",
        "script",
        "start",
        "started_at",
        "state",
        "tool_s",
        "turn",
        "verify_s",
        "work",
    )

    def __init__(self, name: str, group: GroupRun, index: int, script: Script, now: float) -> None:
        self.name = name
        self.group = group
        self.index = index
        self.script = script
        self.branches: Path = script.branches if script.branches is not None else _of_group(script, group.name)
        """What its context may share with others, stretch after stretch."""
        self.state: Literal["sandbox", "held", "engine", "tool", "verify", "finished", "over"] = "sandbox"
        self.fails_at: int | None = None
        """The turn after which its sandbox dies."""
        self.turn = 0
        self.prompt = script.prompt
        """Tokens of the present turn's prompt."""
        self.resumed = 0
        """Tokens of the present turn that aborted requests generated."""
        self.start: int | None = None
        """Weight version of its first dispatch."""
        self.started_at = 0.0
        self.work: Timer | None = None
        """The end of the tool call or verification in progress."""
        self.left_s: float | None = None
        """What is left of one that waits for the sandbox."""
        self.opened_at = now
        self.finished_at = 0.0
        self.hold = ""
        """Why the scheduler holds its turn, since ``hold_since``; the turn was requested at ``held_since``."""
        self.held_since = self.hold_since = now
        self.generated = self.prefilled = self.cached = 0
        self.held_s = self.longest_hold_s = self.queued_s = self.prefill_s = self.decode_s = 0.0
        self.tool_s = self.sandbox_s = self.verify_s = 0.0


def _of_group(script: Script, group: str) -> Path:
    return ((group, script.shared_prefix),) if script.shared_prefix else ()
