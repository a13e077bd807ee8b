"""Small-sample statistics of paired runs.

Owns: Student's t and confidence intervals of ratios. Must not know: what is compared.

Policies meet the same trajectories under the same seed, so the ratio of two policies is taken seed by seed, and
its mean and interval on logarithms: a geometric mean, whose interval never depends on which one is on top.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class Ratio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Geometric mean with its 95% interval; ``low`` and ``high`` are None for a single pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95) -> Ratio:
    """How many times the one is the other, from pairs (all positive, at least one)."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    mean, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return Ratio(math.exp(mean), None, None, n)
    half = t_quantile((1 + confidence) / 2, n - 1) * statistics.stdev(logs) / math.sqrt(n)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def t_quantile(p: float, degrees: int) -> float:
    """The ``p`` quantile (p >= 0.5) of Student's t."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < p:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        if t_probability(middle, degrees) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_probability(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, in closed form for a whole number of degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, term = math.cos(theta), 1.0
    if degrees % 2:
        total, power = 0.0, cosine
        for k in range(1, degrees // 2 + 1):
            total += term * power
            power *= cosine * cosine
            term *= 2 * k / (2 * k + 1)
        share = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        total, power = 0.0, 1.0
        for k in range(1, degrees // 2 + 1):
            total += term * power
            power *= cosine * cosine
            term *= (2 * k - 1) / (2 * k)
        share = math.sin(theta) * total
    return 0.5 + share / 2
