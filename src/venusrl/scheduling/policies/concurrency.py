"""A limit on how many trajectories live at once, around any policy.

Owns: which trajectories are admitted. Must not know: how the policy inside orders what was admitted.

This is the knob that the baselines' own systems have (slime's ``sglang_server_concurrency``, the number of clients
of ThunderAgent and Continuum) and that a fair comparison tunes. A trajectory takes a place from its first turn until
its model has nothing more to say (verification needs no engine). Places go to the oldest task first, as
slime's semaphore gives them; a group that may not start holds none.

Guarantees: whatever was admitted reaches the policy inside at once and stays with it, so that this limit alone
never holds back a trajectory that has begun.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from venusrl.scheduling.actions import CreateSandbox, Dispatch, Hold
from venusrl.scheduling.events import Event, VerificationStarted
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View


class Concurrency(Policy):
    """See the module. ``limit``: trajectories."""

    def __init__(self, inner: Policy, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a concurrency limit is at least 1, not {limit}")
        self.name = inner.name
        self.tokens_every_s = inner.tokens_every_s
        self.inner = inner
        self._limit = limit
        self._places: set[str] = set()
        self._unstarted: dict[str, PendingTurn] = {}
        """Those with a place whose first turn is not dispatched."""
        self._waiting: dict[str, PendingTurn] = {}
        self._order: list[tuple[int, int, str]] = []
        self._arrivals = 0
        self._new: dict[str, None] = {}

    def observe(self, event: Event, view: View) -> None:
        self.inner.observe(event, view)
        if isinstance(event, VerificationStarted):
            self._places.discard(event.trajectory)

    def add(self, turn: PendingTurn) -> None:
        if turn.trajectory in self._places:
            self.inner.add(turn)
            return
        self._new[turn.trajectory] = None
        self._waiting[turn.trajectory] = turn

    def remove(self, trajectory: str) -> None:
        self._places.discard(trajectory)
        self._unstarted.pop(trajectory, None)
        self._waiting.pop(trajectory, None)
        self._new.pop(trajectory, None)
        self.inner.remove(trajectory)

    def decide(self, view: View) -> Iterator[Decision]:
        if self._unstarted and not view.window.may_start():
            self._take_back(view)
        for trajectory in self._new:
            group = view.group(trajectory)
            self._arrivals += 1
            heapq.heappush(self._order, (group.ordinal if group is not None else 0, self._arrivals, trajectory))
        if self._waiting:
            self._admit(view)
        for trajectory in self._new:
            if trajectory in self._waiting:
                yield Hold("concurrency", trajectory, self._waiting[trajectory].turn)
        self._new.clear()
        for decision in self.inner.decide(view):
            if isinstance(decision, Dispatch):
                self._unstarted.pop(decision.trajectory, None)
            yield decision

    def group_limit(self, view: View) -> int:
        return self.inner.group_limit(view)

    def sandbox(self, trajectory: str, view: View) -> CreateSandbox | None:
        return self.inner.sandbox(trajectory, view)

    def wake_at(self, view: View) -> float | None:
        return self.inner.wake_at(view)

    def _admit(self, view: View) -> None:
        may_start = view.window.may_start()
        skipped = []
        while self._order and len(self._places) < self._limit:
            entry = heapq.heappop(self._order)
            turn = self._waiting.get(entry[2])
            if turn is None:
                continue
            if not may_start and view.held(turn) is not None:
                skipped.append(entry)
                continue
            self._places.add(turn.trajectory)
            self._unstarted[turn.trajectory] = turn
            self.inner.add(self._waiting.pop(turn.trajectory))
        for entry in skipped:
            heapq.heappush(self._order, entry)

    def _take_back(self, view: View) -> None:
        """The quota has closed: those it holds make room for members of groups that have begun."""
        for trajectory, turn in list(self._unstarted.items()):
            if view.held(turn) is not None:
                self.inner.remove(trajectory)
                self._places.discard(trajectory)
                del self._unstarted[trajectory]
                self._waiting[trajectory] = turn
                self._new[trajectory] = None
