"""What was seen so far of every live trajectory and its group.

Owns: ``Track``, ``Family`` (a group as the predictor sees it) and their update from events. Must not know: how
anything is predicted.

Guarantees: O(1) an event; a trajectory is forgotten when it fails or its group is closed, a complete group when enough
younger ones are complete: memory is bounded by what is live. Events about unknown trajectories, and a second opening,
change nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from venusrl.scheduling import events as ev
from venusrl.scheduling.predictor.history import log_of
from venusrl.types import FailureKind, StopReason

_COMPLETE_KEPT = 4096
_STEP = 1.25
"""A running sibling is news to its group when it has this many times the turns it had when it last was."""

Phase = Literal["turns", "tool", "verifying", "finished"]


@dataclass(slots=True)
class Tally:
    """Logarithms of one kind of quantity, a value a turn. ``recent``: their moving average over about four turns."""

    n: int = 0
    logs: float = 0.0
    recent: float = 0.0
    last: float = 0.0

    def add(self, value: float) -> None:
        self.last = log_of(value)
        self.n += 1
        self.logs += self.last
        self.recent += (self.last - self.recent) / min(self.n, 4)


class Checkpoint(NamedTuple):
    """A forecast kept until its trajectory ends: what the trajectory was like and had had (turns, tokens, context,
    seconds in tools), and what was said of those four (three quantiles each): by the heuristic, by the model before
    its calibration, and to whoever asked."""

    features: array[float]
    had: tuple[float, float, float, float]
    heuristic: tuple[float, ...]
    model: tuple[float, ...] | None
    given: tuple[float, ...]


@dataclass(slots=True)
class Family:
    """A group. ``size``: places not given up. ``news``: grows when what is known of its members' lengths does."""

    name: str
    task: str
    size: int
    members: dict[str, Track] = field(default_factory=dict)
    finished: int = 0
    news: int = 0
    cache: Any = None
    """Whatever a predictor keeps here."""


@dataclass(slots=True)
class Track:
    """One trajectory. ``turns``: finished ones. ``partial``: tokens of the turn in progress. ``ended``: its last turn
    is over. ``first``: number of the first turn that was seen (not 0 when the predictor came late)."""

    name: str
    family: Family
    opened: int
    phase: Phase = "turns"
    turns: int = 0
    first: int | None = None
    partial: int = 0
    resumed: int = 0
    prompt: int = 0
    """Tokens of its context: of the present prompt, or after its last finished turn."""
    first_prompt: int = 0
    tokens: int = 0
    tool_s: float = 0.0
    since: float = 0.0
    """When the tool call or the verification began."""
    generated: Tally = field(default_factory=Tally)
    observed: Tally = field(default_factory=Tally)
    tools: Tally = field(default_factory=Tally)
    failing: int = 0
    """Tool calls with an exit code other than 0; ``streak``: those since the last that succeeded."""
    streak: int = 0
    ended: bool = False
    lost: bool = False
    news_at: int = 1
    checkpoints: list[Checkpoint] = field(default_factory=list)
    next_checkpoint: int = 0
    correction: tuple[float, ...] | None = None
    """What a model said at its last checkpoint."""
    kept: tuple[tuple[Any, ...], Any] | None = None
    """Its last forecast, and of when that is."""
    given: tuple[Any, ...] | None = None
    """The last that was made of it, and what it was made of."""

    @property
    def whole(self) -> bool:
        """Whether all of it was seen."""
        return self.first == 0

    def had(self) -> tuple[float, float, float, float]:
        """Turns, tokens, context, seconds in tools up to its last finished turn (or later, while nothing was added)."""
        return float(self.turns), float(self.tokens), float(self.prompt), self.tool_s


class Seen(msgspec.Struct, frozen=True):
    """What an event meant for a trajectory: it is ``opened``, ``started`` (asks for its first turn), ``went_on`` (for a
    later one), finished a ``turn``, ``ended`` (no turn follows), had a ``verdict`` or was ``lost``."""

    what: Literal["opened", "started", "went_on", "turn", "tool", "ended", "verdict", "lost"]
    track: Track
    value: float = 0.0
    """Of a turn: tokens generated; of one that went on: tokens observed; else seconds."""


class Tracks:
    """See the module."""

    def __init__(self) -> None:
        self.live: dict[str, Track] = {}
        """Those whose group is not forgotten; finished ones included."""
        self.families: dict[str, Family] = {}
        self.running = 0
        """Trajectories whose last turn is not over."""
        self.opened = 0
        self._complete: deque[str] = deque()
        self._handlers: dict[type, Callable[[Any, float], Seen | None]] = {
            ev.GroupOpened: self._group_opened,
            ev.TrajectoryOpened: self._opened,
            ev.TurnRequested: self._requested,
            ev.TokensGenerated: self._generated,
            ev.TurnFinished: self._turn_finished,
            ev.ToolStarted: self._tool_started,
            ev.ToolFinished: self._tool_finished,
            ev.VerificationStarted: self._verification_started,
            ev.VerificationFinished: self._verification_finished,
            ev.TrajectoryFinished: self._finished,
            ev.TrajectoryFailed: self._failed,
            ev.GroupClosed: self._closed,
        }

    def note(self, event: ev.Event, now: float) -> Seen | None:
        """Take note; say what it meant if it is something to learn from."""
        handler = self._handlers.get(type(event))
        return None if handler is None else handler(event, now)

    # --- groups and trajectories -------------------------------------------------------------------------
    def _group_opened(self, event: ev.GroupOpened, now: float) -> None:
        self.families.setdefault(event.group, Family(event.group, event.task, event.size))

    def _opened(self, event: ev.TrajectoryOpened, now: float) -> Seen | None:
        family = self.families.get(event.group)
        if family is None or event.trajectory in self.live:
            return None
        track = Track(event.trajectory, family, self.opened)
        self.opened += 1
        self.running += 1
        self.live[event.trajectory] = family.members[event.trajectory] = track
        family.news += 1
        return Seen("opened", track)

    def _end(self, track: Track) -> Seen | None:
        """Its last turn is over."""
        if track.ended:
            return None
        track.ended = True
        self.running -= 1
        track.family.news += 1
        return Seen("ended", track) if track.turns else None

    def _verification_started(self, event: ev.VerificationStarted, now: float) -> Seen | None:
        track = self.live.get(event.trajectory)
        if track is None:
            return None
        track.phase, track.since = "verifying", now
        return self._end(track)

    def _verification_finished(self, event: ev.VerificationFinished, now: float) -> Seen | None:
        track = self.live.get(event.trajectory)
        if track is None or track.phase != "verifying":
            return None
        return Seen("verdict", track, now - track.since)

    def _finished(self, event: ev.TrajectoryFinished, now: float) -> Seen | None:
        track = self.live.get(event.trajectory)
        if track is None or track.phase == "finished":
            return None
        seen = self._end(track)
        track.phase = "finished"
        track.family.finished += 1
        self._perhaps_complete(track.family)
        return seen

    def _failed(self, event: ev.TrajectoryFailed, now: float) -> Seen | None:
        track = self.live.pop(event.trajectory, None)
        if track is None:
            return None
        family = track.family
        del family.members[track.name]
        family.finished -= track.phase == "finished"
        if not event.replaced:
            family.size -= 1
        seen = self._lose(track)
        if event.kind is FailureKind.CANCELLED and not family.members:
            self.families.pop(family.name, None)
        else:
            self._perhaps_complete(family)
        return seen

    def _lose(self, track: Track) -> Seen | None:
        track.family.news += 1
        if track.ended:
            return None
        track.ended = track.lost = True
        self.running -= 1
        return Seen("lost", track)

    def _closed(self, event: ev.GroupClosed, now: float) -> None:
        self._forget(event.group)

    def _perhaps_complete(self, family: Family) -> None:
        if 0 < family.finished >= family.size:
            self._complete.append(family.name)
            if len(self._complete) > _COMPLETE_KEPT:
                self._forget(self._complete.popleft())

    def _forget(self, group: str) -> None:
        family = self.families.pop(group, None)
        for track in family.members.values() if family is not None else ():
            self.live.pop(track.name, None)
            self._lose(track)

    # --- turns and tools -----------------------------------------------------------------------------------
    def _requested(self, event: ev.TurnRequested, now: float) -> Seen | None:
        track = self.live.get(event.trajectory)
        if track is None or track.ended:
            return None
        track.phase = "turns"
        track.resumed = track.partial = event.resumed
        seen: Seen | None = None
        if track.first is None:
            track.first = track.turns = event.turn
            track.first_prompt = event.prompt_tokens
            seen = Seen("started", track)
        elif event.resumed == 0 and event.turn > 0 and track.observed.n < event.turn - track.first:
            observed = max(0, event.prompt_tokens - track.prompt)
            track.observed.add(observed)
            seen = Seen("went_on", track, observed)
        if event.resumed == 0:
            track.prompt = event.prompt_tokens
        return seen

    def _generated(self, event: ev.TokensGenerated, now: float) -> None:
        track = self.live.get(event.trajectory)
        if track is not None and not track.ended:
            track.partial += event.count

    def _turn_finished(self, event: ev.TurnFinished, now: float) -> Seen | None:
        track = self.live.get(event.trajectory)
        if track is None or track.ended:
            return None
        if event.stop is StopReason.ABORT:
            track.partial = track.resumed + event.generated
            return None
        tokens = track.resumed + event.generated
        track.turns = event.turn + 1
        track.tokens += tokens
        track.prompt += tokens
        track.generated.add(tokens)
        track.partial = track.resumed = 0
        if track.turns >= track.news_at:
            track.news_at = max(track.turns + 1, int(track.turns * _STEP))
            track.family.news += 1
        return Seen("turn", track, tokens)

    def _tool_started(self, event: ev.ToolStarted, now: float) -> None:
        track = self.live.get(event.trajectory)
        if track is not None and not track.ended:
            track.phase, track.since = "tool", now

    def _tool_finished(self, event: ev.ToolFinished, now: float) -> Seen | None:
        track = self.live.get(event.trajectory)
        if track is None or track.ended or track.phase != "tool":
            return None
        seconds = now - track.since
        track.phase = "turns"
        track.tool_s += seconds
        track.tools.add(seconds)
        failed = event.exit_code not in (0, None)
        track.failing += failed
        track.streak = track.streak + 1 if failed else 0
        return Seen("tool", track, seconds)
