"""How alike the members of a group are, and how alike the turns of a trajectory.

Owns: ``GroupVariance`` (the share of variance that lies between groups) and ``Pace`` (what a turn of a trajectory
takes, next to everybody's). Must not know: events.

Both are about logarithms: lengths, tokens and times are spread over orders of magnitude.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from venusrl.scheduling.predictor.history import Durations
from venusrl.scheduling.predictor.tracks import Tally

_GROUPS = 128
_PRIOR_GROUPS = 12.0
_PRIOR_SHARE = 0.25
"""Published SWE runs with 16 attempts a task show 0.25 to 0.3; believed as firmly as that many groups would show it."""
_MOST = 0.95
_SETTLED = 4.0
"""A running member's pace counts as n / (n + this) of a finished one's after n turns."""
_PRIOR_LIKENESS = 0.05
"""Variance of trajectories' paces in that of single turns, until it is measured."""
_MEMORY = 256.0


class GroupVariance:
    """One-way analysis of variance over the newest complete groups."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, float, float]] = deque(maxlen=_GROUPS)
        self.share = _PRIOR_SHARE

    def add(self, deviations: Sequence[float]) -> None:
        """A complete group's deviations from everybody's mean at that time."""
        n = len(deviations)
        mean = math.fsum(deviations) / n
        self._groups.append((n, mean, math.fsum((d - mean) ** 2 for d in deviations)))
        self.share = self._estimate()

    def _estimate(self) -> float:
        groups = len(self._groups)
        total = sum(n for n, _, _ in self._groups)
        inner = total - groups
        if groups < 3 or inner < 1:
            return _PRIOR_SHARE
        grand = math.fsum(n * mean for n, mean, _ in self._groups) / total
        between = math.fsum(n * (mean - grand) ** 2 for n, mean, _ in self._groups) / (groups - 1)
        within = math.fsum(square for _, _, square in self._groups) / inner
        size = (total - sum(n * n for n, _, _ in self._groups) / total) / (groups - 1)
        whole = between + (size - 1) * within
        measured = (between - within) / whole if whole > 0 else _PRIOR_SHARE
        measured = min(_MOST, max(0.0, measured))
        return (groups * measured + _PRIOR_GROUPS * _PRIOR_SHARE) / (groups + _PRIOR_GROUPS)

    def expected(self, weight: float, total: float) -> float:
        """A group's deviation, best predicted from ``weight`` members whose deviations sum to ``total``."""
        return self.share * total / (1.0 - self.share + self.share * weight)

    def unexplained(self, weight: float) -> float:
        """The share of a further member's variance that is left when ``weight`` members are known."""
        inner = 1.0 - self.share
        return inner + self.share * inner / (inner + self.share * weight)

    def state(self) -> dict[str, Any]:
        return {"groups": list(self._groups)}

    def load(self, state: dict[str, Any]) -> None:
        self._groups = deque(((int(n), float(m), float(s)) for n, m, s in state["groups"]), maxlen=_GROUPS)
        self.share = self._estimate()


class Pace:
    """One kind of quantity that every turn has: everybody's distribution, and how much trajectories differ in it."""

    def __init__(self, *, half_life: float, prior: float) -> None:
        self.all = Durations(half_life=half_life, prior=prior)
        self.variance = GroupVariance()
        self._between = _PRIOR_LIKENESS
        """Variance of trajectories' mean logs, in units of the variance of a single turn's."""

    def ended(self, tally: Tally) -> None:
        """A trajectory of which all turns are known."""
        if tally.n:
            deviation = tally.logs / tally.n - self.all.log_mean
            excess = deviation * deviation / self.all.log_variance - 1.0 / tally.n
            self._between += (min(excess, 4.0) - self._between) / _MEMORY

    def complete(self, tallies: Sequence[Tally]) -> None:
        """A group of which all turns are known."""
        if all(tally.n for tally in tallies):
            self.variance.add([tally.logs / tally.n - self.all.log_mean for tally in tallies])

    def told(self, tally: Tally) -> tuple[float, float]:
        """What a member says of its group: how much it counts, and its deviation times that."""
        if not tally.n:
            return 0.0, 0.0
        weight = tally.n / (tally.n + _SETTLED)
        return weight, weight * (tally.logs / tally.n - self.all.log_mean)

    def ratio(self, own: Tally, of_group: float) -> float:
        """A turn of the trajectory as a multiple of everybody's, given its group's expected deviation."""
        between = max(self._between, 1e-3) * (1.0 - self.variance.share)
        firmness = 1.0 / between
        deviation = (firmness * of_group + own.logs - own.n * self.all.log_mean) / (firmness + own.n)
        return math.exp(deviation)

    def state(self) -> dict[str, Any]:
        return {"all": self.all.state(), "variance": self.variance.state(), "between": self._between}

    def load(self, state: dict[str, Any]) -> None:
        self.all.load(state["all"])
        self.variance.load(state["variance"])
        self._between = float(state["between"])
