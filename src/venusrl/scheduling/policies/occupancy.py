"""What one worker's KV holds, as a policy that counts for itself sees it.

Owns: tokens per trajectory, a group's common prefix counted once. Must not know: what is running and why.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class _Share(NamedTuple):
    group: str
    shared: int
    private: int


class Occupancy:
    """``used`` is exact for what was put and not dropped."""

    def __init__(self) -> None:
        self.used = 0
        self._shares: dict[str, _Share] = {}
        self._groups: Counter[str] = Counter()

    def __contains__(self, trajectory: str) -> bool:
        return trajectory in self._shares

    def put(self, trajectory: str, group: str, tokens: int, shared: int) -> None:
        """The trajectory holds ``tokens``, ``shared`` of which are its group's; replaces what it held before."""
        self.drop(trajectory)
        share = self._shares[trajectory] = _Share(group, shared, max(0, tokens - shared))
        self.used += share.private + (0 if self._groups[group] else shared)
        self._groups[group] += 1

    def drop(self, trajectory: str) -> None:
        share = self._shares.pop(trajectory, None)
        if share is None:
            return
        self._groups[share.group] -= 1
        self.used -= share.private
        if not self._groups[share.group]:
            del self._groups[share.group]
            self.used -= share.shared

    def with_(self, trajectory: str, group: str, tokens: int, shared: int) -> int:
        """What would be used if the trajectory held that instead of what it holds."""
        before = self._shares.get(trajectory)
        others = self._groups[group] - (before is not None)
        own = 0 if before is None else before.private + (0 if others else before.shared)
        return self.used - own + max(0, tokens - shared) + (0 if others else shared)
