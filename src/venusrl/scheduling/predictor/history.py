"""How long things last, learned from what ended and from what did not.

Owns: ``LifeTable`` (lengths in whole turns) and ``Durations`` (seconds or tokens), both with exponential forgetting.
Must not know: trajectories, groups, events.

A life table counts, for every turn, how many came to it and how many of these ended with it. A trajectory that still
runs, or was cancelled, has counted for the turns it is known to have survived, and for no end: it biases nothing, and
long ones shape the table long before they end. Chances of ending are per turn *now* (demography's period table), so
that a shift of lengths shows within the turns that follow it.

Both answer for a part of the population too, that lasts longer or shorter than everybody.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import mul
from typing import Any

from venusrl.scheduling.predictor import Spread

_RESCALE_AT = 1e9
_POOLED = 1.1
"""Turns within this factor of each other share their hazard, so that few ends do not make a jagged table."""
_PRIOR_ENDED = 8.0
"""Trajectories of ``prior_turns`` that are as if seen before everything else."""
_ENOUGH = 1.0
"""Weight of the overall hazard among the observed."""
_NEGLIGIBLE = 1e-4
_LONGEST = 20_000
_LEVELS = (0.97, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.04, 0.01)
"""Survival at which a conditional distribution is read off; the mean is the sum with these weights:"""
_WEIGHTS = (0.065, 0.085, 0.125, 0.15, 0.15, 0.15, 0.125, 0.08, 0.045, 0.025)
_P10_P50_P90 = (1, 4, 7)


class LifeTable:
    """How many turns trajectories have. ``cap``: they are cut there; what would have been is extrapolated.

    ``half_life``: ended trajectories after which an observation counts half. ``prior_turns``: mean length until
    something is known.
    """

    def __init__(self, *, half_life: float, cap: int | None = None, prior_turns: float = 30.0) -> None:
        self.cap = cap
        self.version = 0
        """Grows whenever answers change."""
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._prior = (_PRIOR_ENDED, _PRIOR_ENDED * max(1.0, prior_turns))
        self._came: list[float] = []
        self._ended: list[float] = []
        self._fresh = 0
        self._build()

    # --- observations ------------------------------------------------------------------------------------
    def survived(self, turn: int) -> None:
        """A trajectory went on after turn number ``turn`` (from 0)."""
        self._reach(turn)
        self._came[turn] += self._weight

    def ended(self, turn: int) -> None:
        """A trajectory's last turn was number ``turn``."""
        self.survived(turn)
        if self.cap is None or turn + 1 < self.cap:
            self._ended[turn] += self._weight
        self._weight *= self._growth
        self._fresh += 1
        if self._fresh >= 16 or self.version < 16:
            self._build()

    def _reach(self, turn: int) -> None:
        while len(self._came) <= turn:
            self._came.append(0.0)
            self._ended.append(0.0)

    # --- the table ---------------------------------------------------------------------------------------
    def _build(self) -> None:
        """Survival S(k) = P(T > k) with its sums, until next to nobody is left. O(longest length)."""
        if self._weight > _RESCALE_AT:
            self._came = [n / self._weight for n in self._came]
            self._ended = [n / self._weight for n in self._ended]
            self._prior = (self._prior[0] / self._weight, self._prior[1] / self._weight)
            self._weight = 1.0
        self.version += 1
        self._fresh = 0
        survival = [1.0]
        for hazard in self._hazards():
            survival.append(survival[-1] * (1.0 - hazard))
            if survival[-1] < _NEGLIGIBLE or len(survival) > _LONGEST:
                break
        self._survival = survival
        self._descending = [-s for s in survival]
        self._logs = self._log_sums(survival)
        self.log_mean = self._logs[0] / max(survival[0], _NEGLIGIBLE)

    def _hazards(self) -> Any:
        """P(turn k is the last | it is played) for k = 0, 1, ...; without end."""
        came, ended = [0.0], [0.0]
        for n, d in zip(self._came, self._ended, strict=True):
            came.append(came[-1] + n)
            ended.append(ended[-1] + d)
        seen = len(self._came)
        unit = self._weight
        overall = (ended[-1] + self._prior[0]) / (came[-1] + self._prior[1])
        k = 0
        while True:
            low, high = math.ceil(k / _POOLED), min(seen, math.floor(k * _POOLED) + 1)
            if low < seen:
                n, d = came[high] - came[low], ended[high] - ended[low]
                yield min(1.0, (d + _ENOUGH * overall * unit) / (n + _ENOUGH * unit))
            else:
                yield overall
            k += 1

    @staticmethod
    def _log_sums(survival: list[float]) -> list[float]:
        """For every k the sum over j > k of P(T = j) * log(j)."""
        sums = [survival[-1] * math.log(len(survival) + 1.0)]
        for j in range(len(survival) - 1, 0, -1):
            sums.append(sums[-1] + (survival[j - 1] - survival[j]) * math.log(j))
        sums.reverse()
        return sums

    # --- answers -----------------------------------------------------------------------------------------
    def survival(self, turns: float) -> float:
        """P(T > turns)."""
        k = int(turns)
        last = len(self._survival) - 1
        if k >= last:
            return self._survival[last] * math.exp(-(turns - last) * self._tail_hazard())
        return self._survival[k] + (turns - k) * (self._survival[k + 1] - self._survival[k])

    def log_beyond(self, turns: int) -> float:
        """E[log T | T > turns]."""
        if turns + 1 >= len(self._survival):
            return math.log(turns + 1.0 / self._tail_hazard())
        return self._logs[turns] / self._survival[turns]

    def remaining(self, turns: int, shift: float = 0.0, power: float = 1.0) -> Spread:
        """T - turns given T > turns; at least 1, at most what the cap leaves.

        ``shift`` and ``power`` say of whom: log T is everybody's, moved by ``shift`` and its deviations from the mean
        multiplied by ``power``.
        """
        most = math.inf if self.cap is None else max(1.0, float(self.cap - turns))
        scale = math.exp(shift + (1.0 - power) * self.log_mean)
        here = self.survival((turns / scale) ** (1.0 / power))
        values: list[float] = []
        survival, descending = self._survival, self._descending
        last, k = len(survival), 0
        for level in _LEVELS:
            # t with S(t) = probability; levels decrease, so the search goes on where it was.
            probability = level * here
            k = bisect_left(descending, -probability, k)
            if 0 < k < last:
                above = survival[k - 1]
                t = k - 1 + (above - probability) / (above - survival[k])
            elif k:
                t = last - 1 + math.log(survival[-1] / max(probability, 1e-300)) / self._tail_hazard()
            else:
                t = 0.0
            # Between two whole turns the table is interpolated; what ends there has the larger number of turns.
            rest = math.ceil(scale * t**power - turns - 1e-9)
            values.append(rest if rest > 1 else 1.0)
        if values[-1] >= most:
            values = [min(most, value) for value in values]
        low, middle, high = _P10_P50_P90
        return Spread(values[low], values[middle], values[high], math.fsum(map(mul, _WEIGHTS, values)))

    def _tail_hazard(self) -> float:
        last, before = self._survival[-1], self._survival[-2]
        return min(1.0, max(1.0 / _LONGEST, 1.0 - last / before))

    # --- keeping -----------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        return {"came": self._came, "ended": self._ended, "weight": self._weight, "prior": self._prior}

    def load(self, state: dict[str, Any]) -> None:
        self._came, self._ended = list(state["came"]), list(state["ended"])
        self._weight = float(state["weight"])
        self._prior = (float(state["prior"][0]), float(state["prior"][1]))
        self._build()


_FINEST = 0.01
_PER_OCTAVE = 3
_BINS = 31 * _PER_OCTAVE
"""From 0.01 to 2e7 in steps of 26%."""


class Durations:
    """How long one kind of thing lasts: a histogram with logarithmic bins.

    ``half_life``: observations after which one counts half. ``prior``: what is believed until then, as if seen once.
    """

    def __init__(self, *, half_life: float, prior: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._bins = [0.0] * _BINS
        self._sum = self._logs = self._squares = self._total = 0.0
        self.added = 0
        self._tabled = -1
        self._count(prior)

    def add(self, value: float) -> None:
        """One that ended after ``value``."""
        self._weight *= self._growth
        self.added += 1
        if self._weight > _RESCALE_AT:
            self._rescale()
        self._count(value)

    def _rescale(self) -> None:
        by, self._weight = 1.0 / self._weight, 1.0
        self._bins = [n * by for n in self._bins]
        self._sum, self._logs, self._squares, self._total = (
            x * by for x in (self._sum, self._logs, self._squares, self._total)
        )

    def _count(self, value: float) -> None:
        w, log = self._weight, log_of(value)
        self._bins[_bin(value)] += w
        self._total += w
        self._sum += w * value
        self._logs += w * log
        self._squares += w * log * log
        self._average()

    def _average(self) -> None:
        # Asked for more often than values come.
        self.mean = self._sum / self._total
        self.log_mean = self._logs / self._total

    @property
    def log_variance(self) -> float:
        return max(1e-6, self._squares / self._total - self.log_mean**2)

    def _table(self) -> None:
        """Survival and its sums, when somebody asks and enough is new: 32 values, or an eighth of few."""
        if self._tabled >= 0 and self.added - self._tabled < min(32, 1 + self.added // 8):
            return
        self._tabled = self.added
        left, area = self._total, 0.0
        self._survival, self._area = [], []
        for b, n in enumerate(self._bins):
            self._survival.append(max(0.0, left / self._total))
            self._area.append(area)
            area += (left - n / 2) / self._total * (_EDGES[b + 1] - _EDGES[b])
            left -= n
        self._whole = area
        self._descending = [-s for s in self._survival]

    def survival(self, value: float, scale: float = 1.0) -> float:
        """P(X > value)."""
        self._table()
        return self._survived(value / scale)

    def _survived(self, value: float) -> float:
        b = _bin(value)
        low, high = _EDGES[b], _EDGES[b + 1]
        after = self._survival[b + 1] if b + 1 < _BINS else 0.0
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self._survival[b] + share * (after - self._survival[b])

    def remaining(self, elapsed: float, scale: float = 1.0) -> Spread:
        """X - elapsed given X > elapsed. Beyond everything seen: as long again as it has lasted."""
        here = self.survival(elapsed, scale)
        if here <= 1e-9:
            return Spread(0.1 * elapsed, elapsed, 9.0 * elapsed, 2.0 * elapsed)
        low, middle, high = (max(0.0, scale * self._inverse((1.0 - q) * here) - elapsed) for q in (0.1, 0.5, 0.9))
        mean = scale * (self._whole - self._integral(elapsed / scale)) / here
        return Spread(low, middle, high, max(0.0, mean))

    def _integral(self, value: float) -> float:
        b = _bin(value)
        return self._area[b] + (value - _EDGES[b]) * (self._survival[b] + self._survived(value)) / 2

    def _inverse(self, probability: float) -> float:
        b = bisect_left(self._descending, -probability) - 1
        if b < 0:
            return 0.0
        above = self._survival[b]
        below = self._survival[b + 1] if b + 1 < _BINS else 0.0
        share = (above - probability) / (above - below) if above > below else 1.0
        return _EDGES[b] + share * (_EDGES[b + 1] - _EDGES[b])

    def state(self) -> dict[str, Any]:
        sums = [self._sum, self._logs, self._squares, self._total]
        return {"bins": self._bins, "sums": sums, "weight": self._weight}

    def load(self, state: dict[str, Any]) -> None:
        if len(state["bins"]) != _BINS:
            raise ValueError(f"a histogram of {len(state['bins'])} bins, not of {_BINS}")
        self._bins = list(state["bins"])
        self._sum, self._logs, self._squares, self._total = state["sums"]
        self._weight = float(state["weight"])
        self._average()
        self._tabled = -1


def log_of(value: float) -> float:
    """The scale on which durations are averaged; 0 is as good as a hundredth."""
    return math.log(value + _FINEST)


def _bin(value: float) -> int:
    if value <= _FINEST:
        return 0
    return min(_BINS - 1, 1 + int(math.log2(value / _FINEST) * _PER_OCTAVE))


_EDGES: list[float] = [0.0, *(_FINEST * 2.0 ** (b / _PER_OCTAVE) for b in range(_BINS))]
