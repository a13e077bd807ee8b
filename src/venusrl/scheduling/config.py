"""What a scheduler is told once: the numbers of a run that decide order.

Owns: ``SchedulerConfig`` and its consistency. Must not know: the recipe (its reader fills this in).

Guarantees: a config that exists is consistent; the window is computed from exact fractions, so that
(1 + 0.15) * 100 is 115 groups and not 114.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Literal

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """B, G, alpha, S and what to do at a deadline. ``max_steps``: weight versions to train; None = no end."""

    batch_groups: int
    group_size: int
    async_factor: Decimal
    max_staleness: int
    max_steps: int | None = None
    deadline: Literal["wait", "drop"] = "wait"
    drop_grace_s: float = 60.0
    max_reissues: int = 3
    """How often the task of a dropped group is tried again before the run goes on without it."""
    max_dead_groups: int = 8
    """Consecutive groups that failed whole before the run is stopped."""
    zero_variance_refills: int = 0
    """Zero-variance groups replaced per batch; beyond that they train."""
    min_valid: int = 2
    """Trajectories below which a group cannot train (a baseline needs two)."""
    short_last_batch: bool = False
    """Whether the groups left when the tasks run out train as a batch of fewer than B."""

    def __post_init__(self) -> None:
        faults = {
            "batch_groups must be at least 1": self.batch_groups < 1,
            "async_factor must not be negative": self.async_factor < 0,
            "max_staleness must be at least ceil(async_factor)": self.max_staleness < math.ceil(self.async_factor),
            "min_valid must lie in 1..group_size": not 1 <= self.min_valid <= self.group_size,
            'deadline "drop" is not allowed on-policy (async_factor 0)': self.on_policy and self.deadline == "drop",
            "max_steps must not be negative": self.max_steps is not None and self.max_steps < 0,
        }
        for fault, present in faults.items():
            if present:
                raise ValueError(fault)

    @property
    def on_policy(self) -> bool:
        """Every token of a batch comes from exactly the version it trains."""
        return self.async_factor == 0

    @property
    def window(self) -> int:
        """Groups that may be outstanding: floor((1 + alpha) * B), exactly."""
        return math.floor((1 + Fraction(self.async_factor)) * self.batch_groups)
