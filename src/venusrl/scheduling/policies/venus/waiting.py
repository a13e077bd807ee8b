"""The turns that wait and in which order they go.

Owns: pending turns, the queue of those that hold no KV, and the residents that wait at each worker. Must not know: how
keys come about, what fits.

Guarantees: every waiting trajectory is in exactly one place; the queue is sorted by key; insertion and removal are
binary searches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from venusrl.scheduling.policies import PendingTurn

Key = tuple[float, ...]
Entry = tuple[Key, str]


class Waiting:
    """See the module. ``key`` gives a turn's rank: lower goes first."""

    def __init__(self, key: Callable[[PendingTurn], Key]) -> None:
        self._key = key
        self.turns: dict[str, PendingTurn] = {}
        self._homes: dict[str, str] = {}
        self._residents: dict[str, dict[str, None]] = {}
        self._queue: list[Entry] = []
        self._keys: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self.turns)

    def add(self, turn: PendingTurn, home: str | None) -> None:
        """It waits: as a resident of ``home``, or in the queue."""
        self.remove(turn.trajectory)
        self.turns[turn.trajectory] = turn
        key = self._keys[turn.trajectory] = self._key(turn)
        if home is None:
            insort(self._queue, (key, turn.trajectory))
        else:
            self._homes[turn.trajectory] = home
            self._residents.setdefault(home, {})[turn.trajectory] = None

    def remove(self, trajectory: str) -> PendingTurn | None:
        turn = self.turns.pop(trajectory, None)
        if turn is None:
            return None
        key = self._keys.pop(trajectory)
        home = self._homes.pop(trajectory, None)
        if home is not None:
            del self._residents[home][trajectory]
        else:
            del self._queue[bisect_left(self._queue, (key, trajectory))]
        return turn

    def unseat(self, trajectory: str) -> PendingTurn | None:
        """A waiting resident lost its KV: it joins the queue. None if it was none."""
        home = self._homes.pop(trajectory, None)
        if home is None:
            return None
        del self._residents[home][trajectory]
        insort(self._queue, (self._keys[trajectory], trajectory))
        return self.turns[trajectory]

    def seat(self, trajectory: str, home: str) -> None:
        """Its KV is on that worker now."""
        turn = self.remove(trajectory)
        if turn is not None:
            self.add(turn, home)

    def home(self, trajectory: str) -> str | None:
        return self._homes.get(trajectory)

    def key(self, trajectory: str) -> Key:
        return self._keys[trajectory]

    def reorder(self) -> None:
        """Keys have changed."""
        self._keys = {trajectory: self._key(turn) for trajectory, turn in self.turns.items()}
        self._queue = sorted((key, t) for t, key in self._keys.items() if t not in self._homes)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def first(self, count: int) -> Iterator[PendingTurn]:
        """The head of the queue as it is now, each looked up when its turn comes."""
        return (self.turns[t] for _, t in self._queue[:count])

    def at(self, place: int) -> PendingTurn:
        """The turn at that place of the queue, from 0."""
        return self.turns[self._queue[place][1]]

    def last(self) -> Iterator[PendingTurn]:
        """The queue from its end."""
        return (self.turns[t] for _, t in reversed(self._queue))

    def residents(self, worker: str) -> list[str]:
        """Those waiting at the worker where their KV is, best first."""
        return sorted(self._residents.get(worker, ()), key=lambda t: (self._keys[t], t))
