"""Random numbers that depend on what is drawn, never on when.

Owns: streams keyed by hashing, distributions given by published quantiles, and the one-factor correlation inside a
group. Must not know: what is drawn.

Guarantees: equal keys give equal numbers on every platform and in every order of calls, so that all policies meet
the same trajectories.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from statistics import NormalDist


def stream(*key: object) -> random.Random:
    """The random numbers of ``key`` (its parts are told apart by ``repr``)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest))


def correlated(rho: float, shared: float, own: float) -> float:
    """A standard normal made of two: any two that share one of them have correlation ``rho``."""
    return math.sqrt(rho) * shared + math.sqrt(1.0 - rho) * own


class Quantiles:
    """A positive variable known by some of its quantiles.

    Between them the logarithm is linear in the normal score: through two points this is the lognormal. Beyond the
    outermost points the outermost slopes go on, cut to ``low``..``high``.
    """

    def __init__(self, points: Sequence[tuple[float, float]], low: float, high: float) -> None:
        """``points``: (probability, value), both rising; at least two."""
        scores = [NormalDist().inv_cdf(p) for p, _ in points]
        logs = [math.log(value) for _, value in points]
        self._low, self._high = low, high
        slopes = [(logs[i + 1] - logs[i]) / (scores[i + 1] - scores[i]) for i in range(len(points) - 1)]
        self._pieces = list(zip([*scores[1:-1], math.inf], scores, logs, slopes, strict=False))

    def at(self, z: float) -> float:
        """The value at normal score ``z``."""
        score, log, slope = next(piece[1:] for piece in self._pieces if z <= piece[0])
        return min(max(math.exp(log + slope * (z - score)), self._low), self._high)


def quantile(sorted_values: Sequence[float], p: float) -> float:
    """The ``p`` quantile of sorted values, linear between neighbours."""
    place = p * (len(sorted_values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(sorted_values) - 1)
    return sorted_values[below] + (place - below) * (sorted_values[above] - sorted_values[below])
