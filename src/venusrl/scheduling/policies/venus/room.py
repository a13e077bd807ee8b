"""Room on the workers: what lies idle there, until when it is worth it, and who goes when others need the place.

Owns: the ledger as the policy keeps it, the clock of every gap, and the choice among idle KV. Must not know: who is
more urgent than whom (it is told which trajectories may yield).

Nothing is thrown away before somebody needs the room: past its time KV is only *spare*; its owner may still find it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.ledger import Ledger
from venusrl.scheduling.policies.venus.retention import Gaps, HoldTimes

_RECOMPUTE_S = 20.0
"""Believed where a worker's costs are not known: the time in which it computes all its KV anew."""
_BATCH, _DECODING = 8, 0.6
"""A worker whose KV is full: sequences that decode, their share of the KV. The rest idles in gaps."""
_LEAST_WORTH = 0.05
_PAGE = 64
"""Tokens by which engines may find less than is there: they cache whole pages."""


class Room:
    """See the module."""

    def __init__(self, *, by_value: bool = True) -> None:
        self.ledger = Ledger()
        self.gaps = Gaps()
        self._holds = HoldTimes(self.gaps)
        self._by_value = by_value
        self._timers: list[tuple[float, int, str]] = []
        self._since: dict[str, tuple[float, int]] = {}
        """Since when trajectories are in a gap, with the number of that gap."""
        self._idled: dict[str, int] = {}
        """The number of their last gap, in it or since."""
        self._expected: dict[str, tuple[int, int]] = {}
        """What running turns should have found of their group's prefix and of their own."""
        self._spare: dict[str, dict[str, None]] = {}
        self._spare_tokens: dict[str, int] = {}
        self._count = 0

    # --- gaps -------------------------------------------------------------------------------------------
    def begin_gap(self, trajectory: str, tokens: int, now: float, worker: Worker | None) -> None:
        """Its turn ended with ``tokens`` of context; a tool call follows."""
        self._count += 1
        self._since[trajectory] = (now, self._count)
        self._idled[trajectory] = self._count
        holding = self.ledger.stop(trajectory, tokens)
        if holding is None or worker is None:
            return
        lasts = self._holds.hold_s(recompute_s(worker, tokens)) if self._by_value else 0.0
        heapq.heappush(self._timers, (now + lasts, self._count, trajectory))

    def end_gap(self, trajectory: str, now: float) -> None:
        """It asks for its next turn."""
        since = self._since.pop(trajectory, None)
        if since is not None:
            self.gaps.add(now - since[0])
        self._keep(trajectory)

    def in_gap(self, trajectory: str) -> bool:
        return trajectory in self._since

    def rest(self, trajectory: str, now: float) -> float:
        """Seconds by which its gap is expected to last longer than an average one; 0 outside a gap."""
        since = self._since.get(trajectory)
        return 0.0 if since is None else self._holds.rest(now - since[0])

    def expire(self, now: float) -> set[str]:
        """Note whose time is up. Returns the workers where room became spare."""
        workers: set[str] = set()
        while self._timers and self._timers[0][0] <= now:
            _, number, trajectory = heapq.heappop(self._timers)
            since, holding = self._since.get(trajectory), self.ledger.held(trajectory)
            if since is not None and since[1] == number and holding is not None and not holding.running:
                self._spare_tokens[holding.worker] = self._spare_tokens.get(holding.worker, 0) + holding.own
                self._spare.setdefault(holding.worker, {})[trajectory] = None
                workers.add(holding.worker)
        return workers

    def next_expiry(self) -> float | None:
        """When more room becomes spare."""
        while self._timers:
            at, number, trajectory = self._timers[0]
            since = self._since.get(trajectory)
            if since is not None and since[1] == number and self.ledger.held(trajectory) is not None:
                return at
            heapq.heappop(self._timers)
        return None

    def value(self, trajectory: str, now: float, worker: Worker) -> float:
        """What holding its KV on saves over what it costs; infinite outside a gap."""
        since, holding = self._since.get(trajectory), self.ledger.held(trajectory)
        if since is None or holding is None:
            return float("inf")
        if not self._by_value:
            return -(now - since[0])
        return self._holds.value(now - since[0], recompute_s(worker, holding.tokens))

    # --- what the engine says ---------------------------------------------------------------------------
    def expect(self, trajectory: str, worker: str) -> None:
        """Its turn goes to the worker (before the ledger is told): what is held there, it should find."""
        holding = self.ledger.held(trajectory)
        if holding is not None and holding.worker == worker:
            self._expected[trajectory] = (holding.prefix, holding.own)
        else:
            self._expected.pop(trajectory, None)

    def missed(self, trajectory: str, cached: int) -> list[str]:
        """Its turn found ``cached`` tokens. Had most of its own KV gone, so has what idled on that worker for longer
        (an engine evicts least recently used first, and a flush takes all): whose that is."""
        prefix, own = self._expected.pop(trajectory, (0, 0))
        holding, number = self.ledger.held(trajectory), self._idled.get(trajectory)
        if holding is None or number is None or cached + _PAGE >= prefix + own / 2:
            return []
        idle = self.ledger.books[holding.worker].idle
        return [name for name in idle if self._idled.get(name, number + 1) < number]

    def flushed(self, worker: str) -> list[str]:
        """All that idles there is void: whose that was."""
        return list(self.ledger.books[worker].idle) if worker in self.ledger.books else []

    # --- room -------------------------------------------------------------------------------------------
    def spare(self, worker: str) -> int:
        """Tokens there that nobody needs soon (at least)."""
        return self._spare_tokens.get(worker, 0)

    def is_spare(self, trajectory: str) -> bool:
        holding = self.ledger.held(trajectory)
        return holding is not None and trajectory in self._spare.get(holding.worker, ())

    def find(
        self, worker: str, need: int, limit: float, yielding: Iterable[str] = (), owner: str = ""
    ) -> list[str] | None:
        """Whose KV must go so that ``need`` more tokens fit under ``limit``: spare first, then ``yielding`` in
        their order; never that of ``owner``. None if that is not enough."""
        book = self.ledger.books[worker]
        lacking = book.used + need - int(limit * book.capacity)
        victims: list[str] = []
        if lacking <= 0:
            return victims
        if book.running and lacking > (book.idle_own if yielding else self.spare(worker)):
            return None
        seen: set[str] = set()
        for source in (self._spare.get(worker, ()), yielding):
            for trajectory in source:
                if trajectory not in seen and trajectory != owner:
                    seen.add(trajectory)
                    victims.append(trajectory)
                    lacking -= self._freed(trajectory)
                    if lacking <= 0:
                        return victims
        # What is larger than the worker may have it alone.
        alone = not book.running and len(victims) == len(book.idle) - (owner in book.idle)
        return victims if alone else None

    def drop(self, trajectory: str) -> str | None:
        """Its KV is given up; returns where it was."""
        self._keep(trajectory)
        return self.ledger.drop(trajectory)

    def forget(self, trajectory: str) -> str | None:
        """It is over."""
        for table in (self._since, self._idled, self._expected):
            table.pop(trajectory, None)
        return self.drop(trajectory)

    def _keep(self, trajectory: str) -> None:
        holding = self.ledger.held(trajectory)
        if holding is not None and trajectory in self._spare.get(holding.worker, ()):
            del self._spare[holding.worker][trajectory]
            self._spare_tokens[holding.worker] -= holding.own

    def _freed(self, trajectory: str) -> int:
        """A lower bound of what dropping it frees: the shared prefix may stay."""
        holding = self.ledger.held(trajectory)
        return 0 if holding is None else holding.own

    def move(self, trajectory: str, worker: str) -> None:
        """Its KV was copied to another worker."""
        self._keep(trajectory)
        self.ledger.move(trajectory, worker)

    def up(self, worker: str, capacity: int) -> None:
        self.ledger.up(worker, capacity)
        self._spare.pop(worker, None)
        self._spare_tokens.pop(worker, None)

    def down(self, worker: str) -> None:
        self.ledger.down(worker)
        self._spare.pop(worker, None)
        self._spare_tokens.pop(worker, None)


def recompute_s(worker: Worker, tokens: int) -> float:
    """The time in which holding its KV costs as much as computing it again, in seconds.

    Where sequences that decode have a share f of a full worker's KV, c tokens more for them raise tokens a second by
    c/(f C) * base/step of themselves: a step takes its base once, and reads the KV of every sequence. That is what c
    idle tokens cost, and prefill(c) over it is returned.
    """
    costs = worker.costs
    if costs is None or tokens <= 0:
        return _RECOMPUTE_S
    step_s = costs.step_s(_BATCH, _DECODING * worker.kv_capacity)
    # Steps that take no time gain nothing by KV.
    gain = costs.step_base_s / (_DECODING * step_s) if step_s > 0 else 0.0
    return costs.prefill_s(tokens) * worker.kv_capacity / tokens / max(gain, _LEAST_WORTH)
