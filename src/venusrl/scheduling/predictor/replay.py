"""Trajectories that happened, told once more as events.

Owns: ``Recorded`` and the order of its events in time. Must not know: files, predictors.

Groups are opened in the given order, ``window`` of them at once; each trajectory takes the time it took, as if it never
waited. So a predictor sees what it would see in a run: short ones end first, long ones are unfinished for long.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from venusrl.scheduling import events as ev
from venusrl.types import FailureKind, StopReason


class RecordedTurn(NamedTuple):
    """One turn: the model's call, and the tool call after it (none after the last)."""

    generated: int
    model_s: float
    tool_s: float = 0.0
    observation: int = 0
    exit_code: int | None = None


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trajectory. ``cut``: it did not end by itself (cancelled, failed): its length is a lower bound."""

    name: str
    prompt: int
    turns: tuple[RecordedTurn, ...]
    verify_s: float = 0.0
    cut: bool = False


class RecordedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    task: str
    members: tuple[Recorded, ...]


def replay(groups: Sequence[RecordedGroup], window: int) -> Iterator[tuple[float, ev.Event]]:
    """All events in the order of time; every group is complete at the end."""
    return iter(_Replay(groups, window))


class _Replay:
    def __init__(self, groups: Sequence[RecordedGroup], window: int) -> None:
        if window < 1:
            raise ValueError("at least one group is open at a time")
        self._groups = groups
        self._window = min(window, len(groups))
        self._next = 0
        self._left: dict[str, int] = {}
        self._queue: list[tuple[float, int, Iterator[tuple[float, list[ev.Event]]], str]] = []
        self._pushed = 0

    def __iter__(self) -> Iterator[tuple[float, ev.Event]]:
        for _ in range(self._window):
            yield from self._open(0.0)
        while self._queue:
            now, _, steps, group = heapq.heappop(self._queue)
            step = next(steps, None)
            if step is not None:
                wait, events = step
                for event in events:
                    yield now, event
                self._push(now + wait, steps, group)
                continue
            self._left[group] -= 1
            if not self._left[group]:
                yield from self._open(now)

    def _open(self, now: float) -> Iterator[tuple[float, ev.Event]]:
        if self._next >= len(self._groups):
            return
        ordinal, group = self._next, self._groups[self._next]
        self._next += 1
        self._left[group.name] = len(group.members)
        yield now, ev.GroupOpened(group.name, ordinal, group.task, len(group.members))
        for index, member in enumerate(group.members):
            yield now, ev.TrajectoryOpened(member.name, group.name, index, 0)
            self._push(now, _steps(member), group.name)

    def _push(self, at: float, steps: Any, group: str) -> None:
        heapq.heappush(self._queue, (at, self._pushed, steps, group))
        self._pushed += 1


def _steps(member: Recorded) -> Iterator[tuple[float, list[ev.Event]]]:
    """What happens at once, and how long nothing happens then."""
    name, prompt, last = member.name, member.prompt, len(member.turns) - 1
    before: list[ev.Event] = []
    for number, turn in enumerate(member.turns):
        yield turn.model_s, [*before, ev.TurnRequested(name, number, prompt, 0, 1 << 20)]
        finished = ev.TurnFinished(name, number, turn.generated, 0, StopReason.STOP)
        if number < last:
            yield turn.tool_s, [finished, ev.ToolStarted(name, number)]
            before = [ev.ToolFinished(name, number, turn.observation, turn.exit_code)]
            prompt += turn.generated + turn.observation
        else:
            before = [finished]
    if member.cut:
        yield 0.0, [*before, ev.TrajectoryFailed(name, FailureKind.CANCELLED, "cut", replaced=False)]
        return
    yield member.verify_s, [*before, ev.VerificationStarted(name)]
    yield 0.0, [ev.VerificationFinished(name, 0.0), ev.TrajectoryFinished(name)]
