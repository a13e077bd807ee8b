"""What is done for those who waited too long, and for those who are badly placed.

Owns: claims (a worker whose room is kept for one turn), preemption of long background turns there, and moves from a
crowded worker to one where a trajectory finishes sooner. Must not know: the order of the queue, how entry is decided.

A claim makes waiting finite: nobody else enters the worker, and who stands behind the claimant leaves it at the end of
its turn (long background turns before, by preemption), so that its room only grows until the claimant fits. Moves are
bounded, and happen while nobody waits: what waits fills the emptier worker anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from venusrl.scheduling.actions import Preempt
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import PendingTurn, View
from venusrl.scheduling.policies.venus import placement, reasons
from venusrl.scheduling.policies.venus.admission import Admission
from venusrl.scheduling.policies.venus.config import VenusConfig
from venusrl.scheduling.policies.venus.frontier import BACKGROUND_LEVEL, Frontier
from venusrl.scheduling.policies.venus.lengths import Lengths
from venusrl.scheduling.policies.venus.room import Room

_CLAIMS = 8
"""One worker in so many, and one more, may be claimed at a time."""
_MOST_MOVES = 3
"""Of one trajectory."""
_MOST_TURNS = 50.0


class Relief:
    """See the module."""

    def __init__(
        self, settings: VenusConfig, room: Room, frontier: Frontier, lengths: Lengths, admission: Admission
    ) -> None:
        self._settings = settings
        self._room = room
        self._frontier = frontier
        self._lengths = lengths
        self._claims = admission.claims
        self._sent_at: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._preempted: dict[str, int] = {}
        self._moves: dict[str, int] = {}
        self._looked: dict[str, tuple[int, float]] = {}
        """By claimed worker: the order of groups when its turns were looked at, and when the first of those that had
        not run for long was sent. Until the order changes or that one has run for long, nothing is new."""

    def sent(self, turn: PendingTurn, now: float) -> None:
        """Its turn runs."""
        self._sent_at[turn.trajectory] = now
        self._turns[turn.trajectory] = turn.turn

    def stopped(self, trajectory: str) -> None:
        """Its turn does not run any more."""
        self._sent_at.pop(trajectory, None)

    def forget(self, trajectory: str) -> None:
        for table in (self._sent_at, self._turns, self._preempted, self._moves):
            table.pop(trajectory, None)

    # --- claims ---------------------------------------------------------------------------------------------
    def claim(self, turn: PendingTurn, view: View) -> str | None:
        """Keep a worker for it, if one more may be: the one with most room once background has left."""
        if len(self._claims) > len(view.workers) // _CLAIMS or turn.trajectory in self._claims.values():
            return None
        willing = [w for w in view.workers.values() if w.name not in self._claims and view.refusal(turn, w) is None]
        if not willing:
            return None
        worker = max(willing, key=lambda w: (self._gain(w), w.name)).name
        self._claims[worker] = turn.trajectory
        return worker

    def release(self, trajectory: str) -> list[str]:
        """It is served, or gone. Returns the workers that were kept for it."""
        workers = [worker for worker, owner in self._claims.items() if owner == trajectory]
        for worker in workers:
            del self._claims[worker]
        return workers

    def preempt(self, view: View, waiting: dict[str, PendingTurn]) -> Iterator[Preempt]:
        """Abort background turns on claimed workers that run too long for those who wait for them."""
        for name, owner in self._claims.items():
            turn, book = waiting.get(owner), self._room.ledger.books.get(name)
            patience = self._settings.preempt_after_s
            if turn is None or book is None or view.now - turn.requested_at < patience:
                continue
            order, oldest = self._looked.get(name, (-1, 0.0))
            if order == self._frontier.changes and view.now - oldest < patience:
                continue
            sent = (self._sent_at.get(trajectory, view.now) for trajectory in book.running)
            oldest = min((at for at in sent if view.now - at < patience), default=view.now)
            self._looked[name] = (self._frontier.changes, oldest)
            for trajectory in self._long_background(book.running, view, patience):
                self._preempted[trajectory] = self._preempted.get(trajectory, 0) + 1
                self._sent_at[trajectory] = view.now
                yield Preempt(reasons.PREEMPTED, trajectory, self._turns[trajectory])

    def _long_background(self, running: Iterable[str], view: View, patience: float) -> list[str]:
        found = []
        for trajectory in running:
            if view.now - self._sent_at.get(trajectory, view.now) < patience:
                continue
            group = view.group(trajectory)
            if group is None or self._frontier.level(group.name) != BACKGROUND_LEVEL:
                continue
            if self._preempted.get(trajectory, 0) < self._settings.max_preemptions:
                found.append(trajectory)
        return found

    def _gain(self, worker: Worker) -> int:
        """Room there if all background yielded."""
        book = self._room.ledger.books[worker.name]
        listed = (*book.running.values(), *book.idle.values())
        critical = [h for h in listed if self._frontier.level(h.group) != BACKGROUND_LEVEL]
        return book.capacity - sum(h.own + h.reserve for h in critical)

    # --- moves ------------------------------------------------------------------------------------------------
    def better(self, turn: PendingTurn, home: Worker, view: View) -> Worker | None:
        """Where a resident finishes so much sooner that leaving its KV (or copying it) pays."""
        costs, holding = home.costs, self._room.ledger.held(turn.trajectory)
        if costs is None or holding is None or self._moves.get(turn.trajectory, 0) >= _MOST_MOVES:
            return None
        here = self._rate(turn, home, holding.tokens)
        tokens = turn.prompt_tokens + turn.resumed
        cost = min(costs.prefill_s(tokens), costs.transfer_s(tokens))
        turns = min(_MOST_TURNS, self._lengths.turns(turn.trajectory))
        worth = here - self._settings.migration_margin * cost / max(1.0, turns)
        best: Worker | None = None
        for worker in view.workers.values():
            if worker is not home and worker.name not in self._claims and self._fits(turn, worker):
                there = self._rate(turn, worker, 0)
                if there < worth and view.refusal(turn, worker) is None:
                    best, worth = worker, there
        return best

    def moved(self, trajectory: str) -> None:
        self._moves[trajectory] = self._moves.get(trajectory, 0) + 1

    def _rate(self, turn: PendingTurn, worker: Worker, held: int) -> float:
        """Seconds that an average turn of it decodes there."""
        book = self._room.ledger.books[worker.name]
        return placement.turn_s(turn, worker, book, self._lengths.turn_tokens, held)

    def _fits(self, turn: PendingTurn, worker: Worker) -> bool:
        book = self._room.ledger.books[worker.name]
        return len(worker.running) < worker.slots and book.fits(
            turn.prompt_tokens + turn.resumed, self._settings.watermark
        )
