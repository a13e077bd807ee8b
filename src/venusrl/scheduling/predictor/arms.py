"""Predictors that bound what prediction is worth: nothing, misleading, everything.

Owns: ``Constant``, ``Shuffled``, ``Oracle``. Must not know: policies. The first two know tool latencies as ``Siblings``
does, so that they differ from it in lengths only; the oracle knows the call at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from venusrl.scheduling import events as ev
from venusrl.scheduling.predictor import DONE, NOTHING, Forecast, Gap, Predictor, Quality, Spread, slowest
from venusrl.scheduling.predictor.siblings import Limits, Siblings
from venusrl.scheduling.predictor.tracks import Track


class Constant(Siblings):
    """Every running trajectory has as much left as any other: what a fresh one has on average lately."""

    name = "constant"
    expected = Predictor.expected

    def of(self, track: Track) -> Forecast:
        if track.ended:
            return self.verdict(track)._replace(source="constant")
        turns = self.lengths.remaining(0)
        mean = turns.mean
        return Forecast(
            turns=turns,
            tokens=Spread.exactly(mean * self.generated.all.mean),
            context=Spread.exactly(mean * (self.generated.all.mean + self.observed.all.mean)),
            tool_s=Spread.exactly(mean * self.tools.all.mean),
            verify_s=self.verdicts.remaining(0.0),
            source="constant",
        )

    def quality(self) -> Quality:
        return Quality(active="constant", trajectories=0)


class Remaining(NamedTuple):
    """What truly remains, as in ``Forecast``."""

    turns: int
    tokens: int
    context: int
    tool_s: float
    verify_s: float


class Truth(Protocol):
    """Whoever knows how trajectories will go (the simulator)."""

    def remaining(self, trajectory: str, turns: int) -> Remaining:
        """What is left of it when ``turns`` turns are finished, with no tool call after these begun."""
        ...

    def tool_s(self, trajectory: str, turn: int) -> float:
        """How long the tool call after turn number ``turn`` takes in all."""
        ...


class KnownGap:
    """See ``Gap``: the call ends at a known time."""

    __slots__ = ("_left",)

    def __init__(self, left: float) -> None:
        self._left = left

    @property
    def remaining(self) -> Spread:
        return Spread.exactly(self._left)

    def within(self, seconds: float) -> float:
        return float(seconds >= self._left)


class Oracle(Siblings):
    """The truth. ``Remaining.tool_s`` counts whole calls: the one in progress too, until its turn is over."""

    name = "oracle"
    expected = Predictor.expected

    def __init__(self, truth: Truth, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._truth = truth

    def of(self, track: Track) -> Forecast:
        if track.phase == "finished":
            return DONE
        left = self._truth.remaining(track.name, track.turns)
        verdict = Spread.exactly(left.verify_s)
        if track.ended:
            return Forecast(NOTHING, NOTHING, NOTHING, NOTHING, verdict, "oracle")
        return Forecast(
            turns=Spread.exactly(left.turns),
            tokens=Spread.exactly(max(0, left.tokens - track.partial)),
            context=Spread.exactly(max(0, left.context - track.partial)),
            tool_s=Spread.exactly(left.tool_s),
            verify_s=verdict,
            source="oracle",
        )

    def gap(self, trajectory: str, now: float) -> Gap:
        track = self.tracks.live[trajectory]
        if track.phase != "tool":
            return KnownGap(self._truth.tool_s(trajectory, track.turns))
        whole = self._truth.tool_s(trajectory, track.turns - 1)
        return KnownGap(max(0.0, whole - (now - track.since)))

    def quality(self) -> Quality:
        return Quality(active="oracle", trajectories=0)


class Shuffled(Predictor):
    """Another predictor's answers, each given for the wrong trajectory: the right distribution, no information.

    A running trajectory keeps its stand-in, one drawn from all that run when it is first asked about, for as long as
    that runs; then it gets a new one.
    """

    name = "shuffled"

    def __init__(self, inner: Siblings, *, salt: str = "") -> None:
        self._inner = inner
        self._salt = salt
        self._running: list[str] = []
        self._place: dict[str, int] = {}
        self._stand_in: dict[str, str] = {}
        self._drawn: dict[str, int] = {}

    def observe(self, event: ev.Event, now: float) -> None:
        tracks = self._inner.tracks
        before = tracks.running
        self._inner.observe(event, now)
        if isinstance(event, ev.TrajectoryOpened) and tracks.running > before:
            self._place[event.trajectory] = len(self._running)
            self._running.append(event.trajectory)
        elif tracks.running < before:
            self._drop(event)

    def _drop(self, event: ev.Event) -> None:
        name = getattr(event, "trajectory", None)
        live = self._inner.tracks.live
        for gone in [name] if name in self._place else [n for n in self._running if n not in live or live[n].ended]:
            place, last = self._place.pop(gone), self._running.pop()
            if last != gone:
                self._running[place], self._place[last] = last, place
            self._drawn.pop(gone, None)
            self._stand_in.pop(gone, None)

    def forecast(self, trajectory: str) -> Forecast:
        track = self._inner.tracks.live[trajectory]
        if track.ended:
            return self._inner.forecast(trajectory)
        return self._inner.forecast(self._other(trajectory))._replace(source="shuffled")

    def _other(self, trajectory: str) -> str:
        kept = self._stand_in.get(trajectory)
        if kept is not None and kept in self._place:
            return kept
        draw = self._drawn[trajectory] = self._drawn.get(trajectory, 0) + 1
        digest = hashlib.blake2b(f"{self._salt}/{trajectory}/{draw}".encode(), digest_size=8).digest()
        chosen = self._running[int.from_bytes(digest, "big") % len(self._running)]
        self._stand_in[trajectory] = chosen
        return chosen

    def forecast_many(self, trajectories: Sequence[str]) -> list[Forecast]:
        return [self.forecast(name) for name in trajectories]

    def gap(self, trajectory: str, now: float) -> Gap:
        return self._inner.gap(trajectory, now)

    def group(self, group: str) -> Forecast:
        members = self._inner.tracks.families[group].members.values()
        return slowest(self.forecast(track.name) for track in members if track.phase != "finished")

    def refit(self) -> bool:
        return self._inner.refit()

    def quality(self) -> Quality:
        return Quality(active="shuffled", trajectories=0)
