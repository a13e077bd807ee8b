"""``drift``: the distribution of lengths shifts in the middle of a run.

Owns: where one workload ends and the next begins in the order of tasks. Policies get longer (or shorter) answers as
they train; the abrupt shift is the hardest case for a predictor that learnt from what was.
"""

from __future__ import annotations

import msgspec

from venusrl.simulation.scenario import Script
from venusrl.simulation.workloads.openswe import OpenSwe


class Drift(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drift"):
    """Tasks before ``at`` come from ``before``, the others from ``after``."""

    at: int
    before: OpenSwe = OpenSwe(length=0.5)
    after: OpenSwe = OpenSwe()

    @property
    def name(self) -> str:
        return "drift"

    @property
    def tasks(self) -> int | None:
        return self.after.tasks

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        workload = self.before if ordinal < self.at else self.after
        return workload.script(seed, ordinal, index, attempt)
