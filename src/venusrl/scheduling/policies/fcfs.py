"""First come, first served, with session affinity: the plain baseline.

Owns: the order of waiting turns and the choice of a worker. Must not know: groups, batches, remaining lengths.

Turns go out in the order they were requested. A trajectory stays on the worker that ran its last turn; it moves
when that worker is down or takes no turn for it (draining, older weights) while another would. A trajectory without
a home goes to the worker with the fewest sessions per slot, ties to the one chosen longest ago: an idle fleet fills
evenly. By default nothing is gated: the engine's own queue takes what exceeds its slots, as slime does it. With
``gate=True`` turns wait here until their worker has a free slot, so that new trajectories start on newer weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View


class Fcfs(Policy):
    """See the module."""

    name = "fcfs"

    def __init__(self, *, gate: bool = False) -> None:
        self._gate = gate
        self._waiting: dict[str, PendingTurn] = {}
        self._fresh: dict[str, None] = {}
        self._reasons: dict[str, str] = {}
        self._seen = (-1, -1)

    def add(self, turn: PendingTurn) -> None:
        self._waiting[turn.trajectory] = turn
        self._fresh[turn.trajectory] = None
        self._reasons.pop(turn.trajectory, None)

    def remove(self, trajectory: str) -> None:
        self._waiting.pop(trajectory, None)
        self._fresh.pop(trajectory, None)
        self._reasons.pop(trajectory, None)

    def decide(self, view: View) -> Iterator[Decision]:
        seen = (view.changes, view.freed if self._gate else 0)
        # What was held stays held until something changed: then look at the new turns only.
        todo = self._waiting if seen != self._seen else self._fresh
        self._seen = seen
        sent: dict[str, None] = {}
        for trajectory in todo:
            if self._gate and not self._some_slot(view):
                # Turns held for another reason keep it: to look at each one at every freed slot would cost too much.
                rest = [t for t in self._fresh if t not in sent and t not in self._reasons]
                for held in rest:
                    yield from self._hold(self._waiting[held], "slots")
                break
            turn = self._waiting[trajectory]
            worker, reason = self._choose(turn, view)
            if worker is None:
                yield from self._hold(turn, reason)
            else:
                sent[trajectory] = None
                yield Dispatch("fcfs", trajectory, turn.turn, worker.name, view.urgency(turn))
        for trajectory in sent:
            self.remove(trajectory)
        self._fresh.clear()

    def _choose(self, turn: PendingTurn, view: View) -> tuple[Worker | None, str]:
        if not view.workers:
            return None, "no_worker"
        home = view.home(turn.trajectory)
        if home is not None and not self._has_slot(home):
            return None, "slots"
        reason = view.held(turn)
        if reason is not None:
            return None, reason
        if home is not None and view.refusal(turn, home) is None:
            return home, ""
        refusals = {name: view.refusal(turn, worker) for name, worker in view.workers.items()}
        willing = [w for name, w in view.workers.items() if refusals[name] is None]
        if not willing:
            return None, next(reason for reason in refusals.values() if reason is not None)
        free = [w for w in willing if self._has_slot(w)]
        if not free:
            return None, "slots"
        return min(free, key=lambda w: (len(w.sessions) / w.slots, w.chosen, w.name)), ""

    def _has_slot(self, worker: Worker) -> bool:
        return not self._gate or len(worker.running) < worker.slots

    def _some_slot(self, view: View) -> bool:
        """Whether a slot is free anywhere (no worker at all is another reason to wait)."""
        return not view.workers or any(len(w.running) < w.slots for w in view.workers.values())

    def _hold(self, turn: PendingTurn, reason: str) -> Iterator[Hold]:
        if self._reasons.get(turn.trajectory) != reason:
            self._reasons[turn.trajectory] = reason
            yield Hold(reason, turn.trajectory, turn.turn)
