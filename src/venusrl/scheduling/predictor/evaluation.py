"""How good a predictor is on trajectories that happened.

Owns: ``evaluate`` and its figures. Must not know: files, which predictor it is.

Prequential: every forecast is made with what was known at that moment of the replay, and scored against what came. The
first trajectories only teach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from venusrl.scheduling.events import TrajectoryFinished, TurnRequested
from venusrl.scheduling.predictor import Forecast, Predictor, Spread
from venusrl.scheduling.predictor.ranks import kendall, spearman
from venusrl.scheduling.predictor.replay import Recorded, RecordedGroup, replay

_SPACING = 1.4
_STAGES = ((0, 0), (1, 3), (4, 15), (16, 63), (64, 1 << 30))
_FEWEST = 20


class Figures(msgspec.Struct, frozen=True):
    """Of forecasts made when turns ``first``..``last`` were asked for. ``bias``: sum of means over sum of outcomes.
    ``coverage``: share of outcomes within p10..p90 (aim: 0.8). ``None``: too few, or all alike."""

    first: int
    last: int
    forecasts: int
    spearman: float | None
    kendall: float | None
    coverage: float | None
    bias: float | None
    tokens_spearman: float | None
    tokens_coverage: float | None
    tokens_bias: float | None


class Evaluation(msgspec.Struct, frozen=True):
    """``overall`` pools all stages: there a forecast is right in part because elapsed turns count against a cap."""

    predictor: str
    trajectories: int
    scored: int
    overall: Figures
    stages: tuple[Figures, ...]


class _Scored(NamedTuple):
    turn: int
    forecast: Forecast
    turns: int
    tokens: int


def evaluate(
    predictor: Predictor,
    groups: Sequence[RecordedGroup],
    window: int,
    *,
    warm_up: float = 0.25,
    on_ended: Callable[[int], None] | None = None,
) -> Evaluation:
    """Replay all groups; score the forecasts after the first ``warm_up`` of the trajectories has ended."""
    members = {member.name: member for group in groups for member in group.members}
    asks = _asked_turns(max((len(m.turns) for m in members.values()), default=0))
    scored: list[_Scored] = []
    names: set[str] = set()
    ended = 0
    for now, event in replay(groups, window):
        predictor.observe(event, now)
        if isinstance(event, TrajectoryFinished):
            ended += 1
            if on_ended is not None:
                on_ended(ended)
        elif isinstance(event, TurnRequested) and event.turn in asks and ended >= warm_up * len(members):
            member = members[event.trajectory]
            if not member.cut:
                names.add(member.name)
                scored.append(_score(member, event.turn, predictor.forecast(member.name)))
    stages = (_figures(scored, first, last) for first, last in _STAGES)
    return Evaluation(
        predictor.name, len(members), len(names), _figures(scored, 0, 1 << 30), tuple(s for s in stages if s.forecasts)
    )


def _asked_turns(longest: int) -> set[int]:
    asks, turn = {0}, 1
    while turn <= longest:
        asks.add(turn)
        turn = max(turn + 1, int(turn * _SPACING))
    return asks


def _score(member: Recorded, turn: int, forecast: Forecast) -> _Scored:
    left = member.turns[turn:]
    return _Scored(turn, forecast, len(left), sum(t.generated for t in left))


def _figures(scored: Sequence[_Scored], first: int, last: int) -> Figures:
    some = [s for s in scored if first <= s.turn <= last]
    turns = [float(s.turns) for s in some]
    tokens = [float(s.tokens) for s in some]
    said, said_tokens = [s.forecast.turns for s in some], [s.forecast.tokens for s in some]
    enough = len(some) >= _FEWEST
    return Figures(
        first=first,
        last=max((s.turn for s in some), default=first),
        forecasts=len(some),
        spearman=spearman([s.p50 for s in said], turns) if enough else None,
        kendall=kendall([s.p50 for s in said], turns) if enough else None,
        coverage=_coverage(said, turns) if enough else None,
        bias=_bias(said, turns) if enough else None,
        tokens_spearman=spearman([s.p50 for s in said_tokens], tokens) if enough else None,
        tokens_coverage=_coverage(said_tokens, tokens) if enough else None,
        tokens_bias=_bias(said_tokens, tokens) if enough else None,
    )


def _coverage(said: Sequence[Spread], actual: Sequence[float]) -> float:
    return sum(s.p10 <= y <= s.p90 for s, y in zip(said, actual, strict=True)) / len(actual)


def _bias(said: Sequence[Spread], actual: Sequence[float]) -> float:
    return math.fsum(s.mean for s in said) / max(1.0, math.fsum(actual))
