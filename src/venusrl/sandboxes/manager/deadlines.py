"""Which sandbox's time is up.

Owns: a set of deadlines, one an id. Pure: time is an argument.

Must not know: what happens at a deadline.

Guarantees: an id has one deadline, the last one set; ``due`` hands out each once, earliest first.
"""

from __future__ import annotations

import heapq


class Deadlines:
    """Ids and times, in any order."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._times)

    def set(self, name: str, when: float) -> bool:
        """Set or replace; whether it is now the earliest of all."""
        self._times[name] = when
        heapq.heappush(self._heap, (when, name))
        self._compact()
        return self.next == when

    def remove(self, name: str) -> None:
        self._times.pop(name, None)
        self._compact()

    @property
    def next(self) -> float | None:
        """The earliest deadline; None when there is none."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[str]:
        """Take those whose time has come."""
        taken = []
        while (when := self.next) is not None and when <= now:
            _, name = heapq.heappop(self._heap)
            del self._times[name]
            taken.append(name)
        return taken

    def _drop_stale(self) -> None:
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _compact(self) -> None:
        # Every extension leaves an old entry behind: rebuild before they outnumber the living.
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._times):
            self._heap = [(when, name) for name, when in self._times.items()]
            heapq.heapify(self._heap)
