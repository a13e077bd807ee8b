"""What an engine's work takes, learned from the turns that it answered.

``turns`` turns overlapping requests into samples (what was computed while one of them ran, and how long that took),
``fit`` finds the coefficients. Both are pure and know no engine: they see request sizes and times only.
"""

from venusrl.scheduling.calibration.fit import CostFit, Estimate, Sample, differ
from venusrl.scheduling.calibration.turns import TurnLog

__all__ = ["CostFit", "Estimate", "Sample", "TurnLog", "differ"]
