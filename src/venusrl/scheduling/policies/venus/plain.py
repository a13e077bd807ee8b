"""A predictor of one number: what is left of the mean of what has finished.

Owns: ``Plain``, for runs without a predictor worth its cost. Must not know: groups, policies. Its forecasts are points.
"""

from __future__ import annotations

from venusrl.scheduling import events as ev
from venusrl.scheduling.events import Event
from venusrl.scheduling.predictor import NOTHING, Forecast, Gap, Predictor, Quality, Spread

_TURNS, _TOKENS, _CONTEXT, _TOOL_S = 30.0, 256.0, 1024.0, 3.0


class _Rest:
    """A gap of exponential length."""

    def __init__(self, mean: float) -> None:
        self.remaining = Spread(mean * 0.105, mean * 0.693, mean * 2.303, mean)
        self._mean = mean

    def within(self, seconds: float) -> float:
        return float(seconds / (seconds + self._mean))


class Plain(Predictor):
    """See the module."""

    name = "plain"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._members: dict[str, set[str]] = {}
        self._group: dict[str, str] = {}
        self._mean, self._count = _TURNS, 1.0

    def observe(self, event: Event, now: float) -> None:
        match event:
            case ev.TrajectoryOpened(trajectory=name, group=group):
                self._turns[name] = 0
                self._group[name] = group
                self._members.setdefault(group, set()).add(name)
            case ev.TurnFinished(trajectory=name) if name in self._turns:
                self._turns[name] += 1
            case ev.TrajectoryFinished(trajectory=name) if name in self._turns:
                self._count += 1
                self._mean += (self._turns.pop(name) - self._mean) / min(self._count, 500.0)
            case ev.TrajectoryFailed(trajectory=name):
                self._turns.pop(name, None)
            case _:
                pass

    def forecast(self, trajectory: str) -> Forecast:
        left = max(self._mean - self._turns[trajectory], 0.2 * self._mean)
        turns, tokens, context, tool_s = (Spread.exactly(left * x) for x in (1.0, _TOKENS, _CONTEXT, _TOOL_S))
        return Forecast(turns, tokens, context, tool_s, NOTHING, "constant")

    def gap(self, trajectory: str, now: float) -> Gap:
        return _Rest(_TOOL_S)

    def group(self, group: str) -> Forecast:
        return max((self.forecast(n) for n in self._members[group] if n in self._turns), key=lambda f: f.turns.mean)

    def quality(self) -> Quality:
        return Quality("constant", int(self._count) - 1)
