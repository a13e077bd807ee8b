"""The engine workers as the scheduler knows them.

Owns: which workers serve, with which version, which turns they were given and which trajectories live on them.
Must not know: why a turn goes where it goes.

Guarantees: a trajectory occupies at most one slot and lives on at most one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from venusrl.scheduling.costs import EngineCosts


@dataclass(slots=True)
class Worker:
    """One engine worker that is up. ``sessions``: trajectories whose last turn went there (they find their KV
    there). ``chosen``: when a session was last placed on it, as a sequence number."""

    name: str
    kv_capacity: int
    slots: int
    version: int
    draining: bool = False
    running: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    chosen: int = 0
    costs: EngineCosts | None = None


class Fleet:
    """See the module. ``changes`` counts what may let a held turn go other than a freed slot, ``freed`` the slots."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.changes = 0
        self.freed = 0
        self._home: dict[str, Worker] = {}
        self._placements = 0

    def up(self, name: str, kv_capacity: int, slots: int, version: int, costs: EngineCosts | None = None) -> None:
        """A worker serves (again): whatever it held before is gone."""
        self.down(name)
        self.workers[name] = Worker(name, kv_capacity, max(1, slots), version, costs=costs)
        self.changes += 1

    def down(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is not None:
            for trajectory in worker.sessions:
                del self._home[trajectory]
            self.changes += 1

    def acknowledge(self, name: str, version: int) -> bool:
        """False if there is no such worker (it died meanwhile)."""
        worker = self.workers.get(name)
        if worker is None:
            return False
        worker.version, worker.draining = version, False
        self.changes += 1
        return True

    def calibrate(self, name: str, costs: EngineCosts) -> bool:
        """What its work takes became known, or known better. False if there is no such worker."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.costs = costs
        return worker is not None

    def drain(self, name: str) -> bool:
        worker = self.workers.get(name)
        if worker is None:
            return False
        worker.draining = True
        return True

    def touch(self) -> None:
        """Something outside the fleet may let held turns go."""
        self.changes += 1

    def home(self, trajectory: str) -> Worker | None:
        """The worker that ran its last turn, while it is up."""
        return self._home.get(trajectory)

    def place(self, trajectory: str, name: str) -> bool:
        """The trajectory's turn goes to the worker. False if there is no such worker."""
        worker = self.workers.get(name)
        if worker is None:
            return False
        before = self._home.get(trajectory)
        if before is not worker:
            self.leave(trajectory)
            self._home[trajectory] = worker
            worker.sessions.add(trajectory)
            self._placements += 1
            worker.chosen = self._placements
        worker.running.add(trajectory)
        return True

    def move(self, trajectory: str, name: str) -> bool:
        """The idle trajectory lives on another worker now. False if there is no such worker."""
        if not self.place(trajectory, name):
            return False
        self.workers[name].running.discard(trajectory)
        return True

    def free(self, trajectory: str) -> None:
        """Its turn is over; it stays at home there."""
        worker = self._home.get(trajectory)
        if worker is not None and trajectory in worker.running:
            worker.running.remove(trajectory)
            self.freed += 1

    def leave(self, trajectory: str) -> None:
        """The trajectory is over."""
        self.free(trajectory)
        worker = self._home.pop(trajectory, None)
        if worker is not None:
            worker.sessions.remove(trajectory)
