"""How long idle KV is worth its room.

Owns: the history of gaps (from a turn's end to the next request) and the price of holding KV through one. Must not
know: which trajectory is more urgent, what is resident where.

A gap is worth holding for another h seconds when what that saves on average exceeds what it costs. Holding c tokens
of a worker of C tokens takes about the share c/C of that worker (``room.recompute_s`` says how much exactly); computing
them again takes all of it for ``prefill(c)`` seconds. With R the rest of the gap, given that it has lasted e already,

    max over h of  P(R <= h) * prefill(c) / (c/C * E[min(R, h)])

is what holding saves over what it costs, the index; at 1 it breaks even. (prefill(c)/(c/C) is the time in which a
worker computes all its KV anew, about 19 s for a 32B model on two H100.) This is optimal stopping with a known
distribution: the best h is looked for, so that a dip of the hazard is bridged when returns follow soon after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EDGES: tuple[float, ...] = (0.0, *(0.1 * 1.25**k for k in range(52)))
"""Borders of the histogram of gaps: a quarter finer each, up to more than two hours."""
_MEMORY = 4096.0
"""Gaps remembered: older ones fade."""
_PRIOR = 8.0


class Gaps:
    """A fading histogram of gaps. Before it has seen any it believes in a log-uniform gap up to 100 s."""

    def __init__(self) -> None:
        self._weights = [_PRIOR / 32 if edge < 100.0 else 1e-3 for edge in EDGES]
        self._grain = 1.0
        self._total = sum(self._weights)
        self.changes = 0
        """Grows when the distribution has changed enough to ask again."""
        self._seen = 0

    def add(self, seconds: float) -> None:
        """A gap ended after ``seconds``."""
        self._weights[_bin(seconds)] += self._grain
        self._total += self._grain
        self._grain *= 1 + 1 / _MEMORY
        self._seen += 1
        if self._grain > 1e6:
            self._weights = [w / self._grain for w in self._weights]
            self._total, self._grain = sum(self._weights), 1.0
        if self._seen & (self._seen - 1) == 0 or self._seen % 1024 == 0:
            self.changes += 1

    def indices(self) -> list[float]:
        """For a gap that has lasted to each edge: max over h of P(R <= h) / E[min(R, h)], in 1/s."""
        tail = self._total
        out = []
        for start in range(len(EDGES)):
            out.append(self._best(start, tail))
            tail -= self._weights[start]
        return out

    def rests(self) -> list[float]:
        """For a gap that has lasted to each edge: how long it lasts from there on average."""
        out = [0.0] * len(EDGES)
        later, behind = 0.0, 0.0
        for start in range(len(EDGES) - 2, -1, -1):
            width, weight = EDGES[start + 1] - EDGES[start], self._weights[start]
            later += width * (behind + weight / 2)
            behind += weight
            out[start] = later / behind if behind else 0.0
        return out

    def _best(self, start: int, tail: float) -> float:
        """The ratio's maximum over the stopping times after edge ``start``; ``tail``: weight of gaps that long."""
        if tail <= 0:
            return 0.0
        best, returned, waited = 0.0, 0.0, 0.0
        for index in range(start, len(EDGES) - 1):
            width = EDGES[index + 1] - EDGES[index]
            weight = self._weights[index]
            waited += width * (tail - returned - weight / 2)
            returned += weight
            if waited > 0:
                best = max(best, returned / waited)
        return best


class HoldTimes:
    """From gaps to the time that idle KV is held: the same for all trajectories of a worker but for the price."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self._at = -1
        self._index: Sequence[float] = ()
        self._rests: Sequence[float] = ()

    def hold_s(self, recompute_s: float) -> float:
        """How long after a turn its KV stays worth holding. ``recompute_s``: prefill(c) / (c/C)."""
        self._look()
        for index, edge in enumerate(EDGES):
            if self._index[index] * recompute_s < 1:
                return edge
        return EDGES[-1]

    def value(self, elapsed: float, recompute_s: float) -> float:
        """The index of a gap that has lasted ``elapsed``: victims are the lowest."""
        self._look()
        return self._index[_bin(elapsed)] * recompute_s

    def rest(self, elapsed: float) -> float:
        """By how much a gap that has lasted ``elapsed`` is expected to exceed an average one."""
        self._look()
        return max(0.0, self._rests[_bin(elapsed)] - self._rests[0])

    def _look(self) -> None:
        if self._at != self._gaps.changes or not self._index:
            self._at, self._index, self._rests = self._gaps.changes, self._gaps.indices(), self._gaps.rests()


def _bin(seconds: float) -> int:
    if seconds < EDGES[1]:
        return 0
    return min(len(EDGES) - 1, 1 + int(math.log(seconds / EDGES[1]) / math.log(1.25)))
