"""How many deviations of headroom the target needs: by theory first, then by what was measured.

Owns: ``deviations`` (the quantile of a skewed sum) and ``Calibration`` (the factor on it that makes forecasts hold as
often as they claim to).

Guarantees: deterministic. In the long run the measured total exceeds its forecast at most about as often as the target
says, whatever the true distribution is: the factor rises by a fixed step at each miss and sinks by target/(1 - target)
of that step at each hit, so that it stands still only where misses are as frequent as the target. It never falls below
what theory asks for: a host measures its sandboxes in rotation, which hides short peaks from the forecasts' check.
"""

from __future__ import annotations

from statistics import NormalDist

_STEP = 0.05
_LEAST, _MOST = 1.0, 4.0
_SKEW_LIMIT = 2.0


def normal_quantile(target: float) -> float:
    """Deviations above the mean that a normal variable exceeds with probability ``target``."""
    if not 0.0 < target < 0.5:
        raise ValueError(f"the overload probability must lie between 0 and 0.5, not {target}")
    return NormalDist().inv_cdf(1.0 - target)


def deviations(quantile: float, skewness: float) -> float:
    """The same for a variable with that skewness and a gamma's kurtosis (Cornish and Fisher's expansion).

    Memory only has a long right tail: a negative skewness buys nothing.
    """
    skew = max(0.0, min(_SKEW_LIMIT, skewness))
    first = (quantile**2 - 1.0) * skew / 6.0
    second = (quantile**3 - 7.0 * quantile) * skew**2 / 144.0
    return quantile + max(0.0, first + second)


class Calibration:
    """The factor on the deviations, from hits and misses of forecasts."""

    def __init__(self, target: float) -> None:
        self._target = target
        self.factor = 1.0
        self.forecasts = 0
        self.missed = 0

    def take_up(self, factor: float) -> None:
        """Go on from the factor of an earlier process. What is out of range is taken for its nearest bound."""
        self.factor = max(_LEAST, min(_MOST, factor))

    def measured(self, deviation: float, allowed: float) -> None:
        """A total came out ``deviation`` deviations above its mean; ``allowed`` was what the theory asked for."""
        self.forecasts += 1
        missed = deviation > allowed * self.factor
        self.missed += missed
        change = _STEP if missed else -_STEP * self._target / (1.0 - self._target)
        self.factor = max(_LEAST, min(_MOST, self.factor + change))
