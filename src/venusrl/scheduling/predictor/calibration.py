"""From quantiles that were said to quantiles that hold.

Owns: a factor for every quantile of a quantity, by split-conformal quantile regression on forecasts whose outcome
became known after they were made. Must not know: who forecast.

For the q-quantile the factor is the q-quantile of outcome/forecast over past trajectories (of which none was used to
fit what it is applied to, being younger than the fit). Among exchangeable trajectories the next outcome then lies
below the corrected forecast with probability q, up to 1/(n+1). Outcomes that are not known yet (the trajectory runs, or
was cancelled) are lower bounds: the quantile is the Kaplan-Meier estimate, not that of the ended ones, which are short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from venusrl.scheduling.predictor import Spread

LEVELS = (0.1, 0.5, 0.9)
_FEWEST = 40
_FURTHEST = math.log(8.0)


class Outcome(NamedTuple):
    """What a forecast quantile was against what came. ``known`` is false for a lower bound."""

    log_ratio: float
    known: bool
    weight: float = 1.0


def factors(outcomes: Iterable[Sequence[Outcome]]) -> tuple[float, ...]:
    """For each level's outcomes (given in the order of ``LEVELS``) what to add to the forecast's logarithm."""
    return tuple(_shift(found, level) for found, level in zip(outcomes, LEVELS, strict=True))


def _shift(outcomes: Sequence[Outcome], level: float) -> float:
    known = sum(outcome.known for outcome in outcomes)
    if known < _FEWEST:
        return 0.0
    # Rank ceil(q (n + 1)) from above for upper levels, from below for lower ones.
    corrected = level * (1 + 1 / known) if level > 0.5 else level - (1 - level) / known if level < 0.5 else level
    found = survival_quantile(outcomes, min(1.0, max(0.0, corrected)))
    return max(-_FURTHEST, min(_FURTHEST, found))


def survival_quantile(outcomes: Sequence[Outcome], level: float) -> float:
    """The ``level`` quantile under right censoring; the largest known value where the estimate does not get there."""
    left = math.fsum(outcome.weight for outcome in outcomes)
    survival, last = 1.0, 0.0
    # Of equal values the known come first: a bound says that the outcome is larger.
    for ratio, known, weight in sorted(outcomes, key=lambda o: (o.log_ratio, not o.known)):
        if known:
            last = ratio
            survival *= max(0.0, 1.0 - weight / left) if left > 0 else 0.0
            if survival <= 1.0 - level + 1e-12:
                return ratio
        left -= weight
    return last


def outcome(actual: float, forecast: float, unit: float, lag: float = 0.0, *, known: bool) -> Outcome:
    """What came against a forecast quantile. ``unit``: below it the quantity is as good as nothing. ``lag``: an error
    (of logarithms) that the forecaster has since made good."""
    return Outcome(math.log((actual + unit) / (forecast + unit)) - lag, known)


def corrected(spread: Spread, shifts: Sequence[float], unit: float) -> Spread:
    """The quantiles corrected, and in order. The mean stays: calibration is of quantiles."""
    low, middle, high = (max(0.0, (q + unit) * math.exp(s) - unit) for q, s in zip(spread, shifts, strict=False))
    return Spread(min(low, middle), middle, max(middle, high), spread.mean)
