"""The order in which a run takes its tasks. Pure.

Owns: the map from ordinal (0, 1, 2...) to task id. Must not know: what was taken already.

Guarantees: it depends on nothing but the set of ids, the seed and the ordinal: not on the order in which the
ids were listed, on the Python version or on state. Every epoch holds each task once, in an order of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache


class TaskOrder:
    """``epochs`` passes over the tasks; 0 = without end."""

    def __init__(self, task_ids: Iterable[str], seed: int, epochs: int) -> None:
        self.task_ids = sorted(set(task_ids))
        if not self.task_ids:
            raise ValueError("an order needs at least one task")
        self.seed = seed
        self.epochs = epochs
        self._epoch = lru_cache(maxsize=4)(self._shuffled)

    def task_at(self, ordinal: int) -> str | None:
        """The task of ``ordinal``, None past the last epoch."""
        epoch, position = divmod(ordinal, len(self.task_ids))
        if self.epochs and epoch >= self.epochs:
            return None
        return self._epoch(epoch)[position]

    def _shuffled(self, epoch: int) -> list[str]:
        # Sorting by a keyed hash is a uniform shuffle that no release of Python can change.
        return sorted(self.task_ids, key=lambda task: hashlib.sha256(f"{self.seed}/{epoch}/{task}".encode()).digest())
