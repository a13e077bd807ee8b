"""Which reasons for holding a turn were already said.

Owns: that memory. Guarantees: ``Hold`` is emitted once per change of a turn's reason, as the interface asks.
"""

from __future__ import annotations

from collections.abc import Iterator

from venusrl.scheduling.actions import Hold
from venusrl.scheduling.policies import PendingTurn


class Holds:
    """See the module."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def __contains__(self, trajectory: str) -> bool:
        return trajectory in self._said

    def forget(self, trajectory: str) -> None:
        """Its turn is a new one, went out, or is not wanted any more."""
        self._said.pop(trajectory, None)

    def say(self, turn: PendingTurn, reason: str) -> Iterator[Hold]:
        if self._said.get(turn.trajectory) != reason:
            self._said[turn.trajectory] = reason
            yield Hold(reason, turn.trajectory, turn.turn)
