"""Arithmetic on ``Spread``: what the quantiles of one quantity say about those of another.

Owns: the largest of several, scaling. Must not know: what a spread is of.

Lengths and times of agents are skewed over orders of magnitude, so all of it happens on log(1 + x), where three
quantiles describe them well as a normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from venusrl.scheduling.predictor import Spread

Z90 = 1.2815515655446004
"""The standard normal's 0.9 quantile."""
_SQRT2 = math.sqrt(2.0)
_SQRT2PI = math.sqrt(2.0 * math.pi)


def largest(spreads: Sequence[Spread]) -> Spread:
    """The maximum of independent quantities (Clark's moments, one after the other)."""
    moments = sorted((math.log1p(s.p50), (math.log1p(s.p90) - math.log1p(s.p10)) / (2 * Z90)) for s in spreads)
    mean, deviation = moments[-1]
    for other in reversed(moments[:-1]):
        mean, deviation = _larger(mean, deviation, *other)
    means = [s.mean for s in spreads]
    lowest, highest = max(means), math.fsum(means)
    middle = math.expm1(mean)
    expected = math.expm1(min(mean + deviation * deviation / 2, 700.0))
    return Spread(
        p10=max(0.0, math.expm1(mean - Z90 * deviation)),
        p50=middle,
        p90=math.expm1(mean + Z90 * deviation),
        mean=min(max(expected, lowest), highest),
    )


def _larger(m1: float, s1: float, m2: float, s2: float) -> tuple[float, float]:
    """Mean and deviation of the larger of two normal variables."""
    variance = s1 * s1 + s2 * s2
    if variance < 1e-18:
        return max(m1, m2), 0.0
    spread = math.sqrt(variance)
    a = (m1 - m2) / spread
    below = 0.5 * (1.0 + math.erf(a / _SQRT2))
    density = math.exp(-0.5 * a * a) / _SQRT2PI
    mean = m1 * below + m2 * (1.0 - below) + spread * density
    second = (m1 * m1 + s1 * s1) * below + (m2 * m2 + s2 * s2) * (1.0 - below) + (m1 + m2) * spread * density
    return mean, math.sqrt(max(0.0, second - mean * mean))
