"""What a tool call's time is worth in KV: Continuum's time to live.

Owns: the empirical distribution of tool times, how strongly a program's past tells its future, and the best time to
keep KV over a call. Must not know: workers, turns.

With V seconds saved by a hit, keeping KV for t costs t and pays P(t) * V, P being the share of calls that return within
t. The best t is a vertex of the upper concave hull of P: the last one whose slope is at least 1 / V.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import pairwise
from typing import NamedTuple

_REFRESH = 20
"""New samples after which the hull is computed anew."""


class ToolTimes:
    """The last ``window`` tool times. Until ``cold`` of them are known, the distribution counts as unknown."""

    def __init__(self, cold: int = 100, window: int = 2000) -> None:
        self._cold = cold
        self._window = window
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._unseen = 0
        self._times: list[float] = []
        self._seconds_per_share: list[float] = []

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._unseen += 1

    def ttl(self, value_s: float) -> float:
        """argmax over t of P(t) * value_s - t, the smallest if several are best.

        While P is unknown: ``value_s`` itself, which never costs more than twice what knowing the time would.
        """
        if value_s <= 0:
            return 0.0
        if len(self._recent) < self._cold:
            return value_s
        if self._unseen >= _REFRESH or not self._times:
            self._hull()
        vertex = bisect_left(self._seconds_per_share, value_s)
        return self._times[vertex - 1] if vertex else 0.0

    def _hull(self) -> None:
        """Vertices after (0, 0), with the seconds that each one costs for a share of 1 more: they rise."""
        self._unseen = 0
        hull: list[tuple[float, float]] = [(0.0, 0.0)]
        count = len(self._sorted)
        for rank, time in enumerate(self._sorted, 1):
            point = (time, rank / count)
            if point[0] == hull[-1][0]:
                hull.pop()
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        # Calls that take no time are a share that is there at once.
        pairs = list(pairwise(hull))
        self._times = [after[0] for _, after in pairs]
        self._seconds_per_share = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


class _Sums(NamedTuple):
    """Over all pairs (k turns done, N - k left) of programs that ended."""

    n: float = 0.0
    k: float = 0.0
    left: float = 0.0
    k2: float = 0.0
    left2: float = 0.0
    product: float = 0.0


class Memory:
    """eta = -Corr(k, N - k): 1 where turns done tell how many are left, 0 where they tell nothing."""

    def __init__(self) -> None:
        self._sums = _Sums()

    def add(self, turns: int) -> None:
        """A program of that many turns ended."""
        n = turns
        squares = n * (n + 1) * (2 * n + 1) / 6
        k = n * (n + 1) / 2
        self._sums = _Sums(
            self._sums.n + n,
            self._sums.k + k,
            self._sums.left + n * (n - 1) / 2,
            self._sums.k2 + squares,
            self._sums.left2 + squares - n * n,
            self._sums.product + n * k - squares,
        )

    @property
    def eta(self) -> float:
        s = self._sums
        spread = (s.n * s.k2 - s.k**2) * (s.n * s.left2 - s.left**2)
        return -(s.n * s.product - s.k * s.left) / spread**0.5 if spread > 0 else 0.0
