"""What a scheduler is told once: the numbers of a run that decide order.

Owns: ``SchedulerConfig`` and its consistency. Must not know: the recipe (its reader fills this in).

Guarantees: a config that exists is consistent; the window is computed from exact fractions, so that
(1 + 0.15) * 100 is 115 groups and not 114.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Literal

import msgspec

Consumption = Literal["oldest", "completion", "in_order", "windowed"]
"""Which complete groups make a batch. None is looser than the quota, which always comes first.

``oldest``: by start version, then as they completed. ``completion``: as they completed. ``in_order``: the B oldest
tasks and no other, so that the first unfinished one holds up the batch (``Window.best_batch`` by ordinal).
``windowed``: as they completed, but no task that is ``consumption_window`` or more places behind the oldest unfinished.
"""


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
    consumption: Consumption = "oldest"
    consumption_window: int | None = None
    """For ``windowed``: how many open groups, in the order of their tasks, a batch may be taken from."""
    cohorts: bool = False
    """Groups open B at a time, the next ones when all of those are complete, and new weights wait for that too
    (``Window.publication_waits``): one step off, as slime's ``train_async`` does it."""

    def __post_init__(self) -> None:
        faults = {
            "batch_groups must be at least 1": self.batch_groups < 1,
            "async_factor must not be negative": self.async_factor < 0,
            "max_staleness must be at least ceil(async_factor)": self.max_staleness < math.ceil(self.async_factor),
            "min_valid must lie in 1..group_size": not 1 <= self.min_valid <= self.group_size,
            'deadline "drop" is not allowed on-policy (async_factor 0)': self.on_policy and self.deadline == "drop",
            "cohorts are one step off at most: async_factor may not exceed 1": self.cohorts and self.async_factor > 1,
            'deadline "drop" goes with consumption "oldest" or "completion" and without cohorts': (
                self.deadline == "drop" and (self.consumption in ("in_order", "windowed") or self.cohorts)
            ),
            "max_steps must not be negative": self.max_steps is not None and self.max_steps < 0,
            'consumption_window goes with consumption "windowed" and is at least batch_groups': (
                (self.consumption == "windowed") != (self.consumption_window is not None)
                or (self.consumption_window or self.batch_groups) < self.batch_groups
            ),
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
        numerator, denominator = self.async_factor.as_integer_ratio()
        return (denominator + numerator) * self.batch_groups // denominator
