"""The ``venus`` policy: finish first what lets the trainer take its next step, with KV that pays.

Owns: who waits, in which order they enter the workers, and the composition of the parts: ``frontier`` (order of
groups), ``lengths`` (what is left of trajectories), ``room`` and ``retention`` (what idle KV is worth), ``placement``
(which worker). Must not know: the window's rule and which versions may serve a turn (the view says so).

A turn either finds its KV at home (a *resident*) and goes on as soon as its growth fits there, or it waits in one
queue for all workers, in the order of the frontier. Whoever enters must fit. Room comes from what ends, from gaps that
last longer than their KV is worth, and, for a frontier turn that waited long enough, from background residents at the
end of their turns. Reasons are listed in ``reasons``.

Guarantees: a turn waits for ever only if no worker may ever take it: a frontier turn that waited long keeps the room of
one worker for itself until it fits (a turn larger than a worker fits when that is empty), every other becomes one by
age. The ledger exceeds a worker's capacity only by one trajectory that is alone there, or by what running turns
generate beyond expectation.
"""

from __future__ import annotations

from collections.abc import Iterator

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, Hold, ReleaseKV
from venusrl.scheduling.events import Event
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View
from venusrl.scheduling.policies.venus import placement, reasons
from venusrl.scheduling.policies.venus.config import VenusConfig
from venusrl.scheduling.policies.venus.frontier import BACKGROUND_LEVEL, DEADLINE_LEVEL, FRONTIER_LEVEL, Frontier
from venusrl.scheduling.policies.venus.lengths import Lengths
from venusrl.scheduling.policies.venus.room import Room
from venusrl.scheduling.policies.venus.waiting import Key, Waiting
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.siblings import Siblings
from venusrl.types import StopReason

_RESERVE = 1.5
"""Room kept for a turn's generation, in average turns."""
_PASSING = frozenset({"weights", "draining", "staleness_quota", reasons.NO_WORKER})
"""Reasons that are replaced by the next one; others stay until the turn goes."""


class Venus(Policy):
    """See the module. ``predictor``: fresh, it is told every event."""

    name = "venus"

    def __init__(self, config: VenusConfig | None = None, predictor: Predictor | None = None) -> None:
        self.settings = VenusConfig() if config is None else config
        self.lengths = Lengths(Siblings() if predictor is None else predictor)
        self.frontier = Frontier(by_batch=self.settings.frontier)
        self.room = Room(by_value=self.settings.retention)
        self.waiting = Waiting(self._key)
        self._started: set[str] = set()
        self._last_worker: dict[str, str] = {}
        self._fresh: dict[str, None] = {}
        self._dirty: dict[str, None] = {}
        self._reasons: dict[str, str] = {}
        self._claims: dict[str, str] = {}
        self._preempted: dict[str, int] = {}
        self._sent_at: dict[str, float] = {}
        self._seen = (-1, -1, -1, -1)
        self._changes = -1
        self._refreshed_at = float("-inf")
        self._now = 0.0

    # --- what happened -----------------------------------------------------------------------------------
    def observe(self, event: Event, view: View) -> None:
        self._now = view.now
        self.lengths.observe(event, view)
        match event:
            case ev.TurnRequested(trajectory=name):
                self.room.end_gap(name, view.now)
            case ev.TurnFinished(trajectory=name, generated=generated, stop=stop):
                self._turn_finished(name, generated, view, aborted=stop is StopReason.ABORT)
            case ev.TurnDispatched(trajectory=name, worker=worker):
                self._turn_dispatched(name, worker)
            case ev.VerificationStarted(trajectory=name):
                self._dirty_if(self.room.forget(name))
            case ev.SandboxPaused(trajectory=name):
                self._dirty_if(self.room.drop(name))
            case ev.KVTransferred(trajectory=name, worker=worker, tokens=tokens) if tokens:
                self.room.ledger.move(name, worker)
            case ev.WorkerUp(worker=worker, kv_capacity=capacity):
                self._worker_down(worker)
                self.room.up(worker, capacity)
            case ev.WorkerDown(worker=worker):
                self._worker_down(worker)
            case ev.TrajectoryFinished() | ev.TrajectoryFailed():
                self._seen = (-1, -1, -1, -1)
            case _:
                pass

    def _turn_finished(self, name: str, generated: int, view: View, *, aborted: bool) -> None:
        holding = self.room.ledger.held(name)
        worker = None if holding is None else view.workers.get(holding.worker)
        tokens = 0 if holding is None else holding.tokens + generated
        if aborted:
            self.room.ledger.stop(name, tokens)
        else:
            self.room.begin_gap(name, tokens, view.now, worker)
        self._sent_at.pop(name, None)
        if holding is not None:
            self._dirty[holding.worker] = None

    def _turn_dispatched(self, name: str, worker: str) -> None:
        """Somebody else may have sent it elsewhere."""
        holding = self.room.ledger.held(name)
        if holding is not None and holding.worker != worker and worker in self.room.ledger.books:
            self._dirty_if(holding.worker)
            self.room.ledger.start(name, holding.group, worker, holding.tokens, holding.prefix, holding.reserve)

    def _worker_down(self, worker: str) -> None:
        for name in self.waiting.residents(worker):
            self.waiting.unseat(name)
        self.room.down(worker)
        self._claims.pop(worker, None)

    def _dirty_if(self, worker: str | None) -> None:
        if worker is not None:
            self._dirty[worker] = None

    def add(self, turn: PendingTurn) -> None:
        holding = self.room.ledger.held(turn.trajectory)
        if holding is not None and holding.running:
            # It was aborted with its worker, or with its connection.
            self.room.ledger.stop(turn.trajectory, turn.prompt_tokens + turn.resumed)
        self.waiting.add(turn, None if holding is None else holding.worker)
        self._fresh[turn.trajectory] = None
        self._reasons.pop(turn.trajectory, None)

    def remove(self, trajectory: str) -> None:
        self.waiting.remove(trajectory)
        self._dirty_if(self.room.forget(trajectory))
        self.lengths.forget(trajectory)
        self._started.discard(trajectory)
        for table in (self._last_worker, self._fresh, self._reasons, self._preempted, self._sent_at):
            table.pop(trajectory, None)
        self._unclaim(trajectory)

    # --- order ---------------------------------------------------------------------------------------------
    def _level(self, turn: PendingTurn) -> int:
        level = self.frontier.level(turn.group)
        if level == BACKGROUND_LEVEL and self._now - turn.requested_at >= self.settings.ageing_s:
            return FRONTIER_LEVEL
        return level

    def _key(self, turn: PendingTurn) -> Key:
        level = self._level(turn)
        started = turn.trajectory in self._started
        total = self.lengths.total(turn.trajectory) if self.settings.longest_first else 0.0
        if level != BACKGROUND_LEVEL:
            return (level, 0, 0, -total, turn.requested_at)
        return (level, self.frontier.place(turn.group), 0 if started else 1, -total, turn.requested_at)

    def _refresh(self, view: View) -> None:
        window = view.window
        seen = (window.next_version, window.published, len(window.open), len(window.complete))
        if seen == self._seen and view.now < self._refreshed_at + self.settings.refresh_s:
            return
        self._seen, self._refreshed_at = seen, view.now
        needs = {name: self.lengths.group(group) for name, group in window.open.items()}
        self.frontier.refresh(view, lambda group: needs[group.name])
        self.waiting.reorder()
        self._touch(view)

    def _touch(self, view: View) -> None:
        if len(self.waiting):
            self._dirty.update(dict.fromkeys(view.workers))

    # --- deciding --------------------------------------------------------------------------------------------
    def decide(self, view: View) -> Iterator[Decision]:
        self._now = view.now
        self._refresh(view)
        if view.changes != self._changes:
            self._changes = view.changes
            self._touch(view)
        self._dirty.update(dict.fromkeys(sorted(self.room.expire(view.now))))
        fresh, self._fresh = self._fresh, {}
        for trajectory in fresh:
            turn = self.waiting.turns.get(trajectory)
            if turn is not None:
                yield from self._arrive(turn, view)
        self._claim(view)
        while self._dirty:
            name = next(iter(self._dirty))
            del self._dirty[name]
            worker = view.workers.get(name)
            if worker is not None:
                yield from self._trim(worker)
                if len(self.waiting):
                    yield from self._serve(worker, view)

    def wake_at(self, view: View) -> float | None:
        if not len(self.waiting):
            return None
        expiry, look = self.room.next_expiry(), self._refreshed_at + self.settings.refresh_s
        return look if expiry is None else min(expiry, look)

    def _arrive(self, turn: PendingTurn, view: View) -> Iterator[Decision]:
        """A turn is new: it goes on at home, or enters where it is cheapest if it is among the first."""
        home = self.waiting.home(turn.trajectory)
        if home is not None:
            yield from self._go_on(turn, view.workers[home], view)
            return
        reason = view.held(turn) or (reasons.KV if view.workers else reasons.NO_WORKER)
        if reason == reasons.KV and self._among_first(turn):
            willing: list[tuple[float, Worker, list[str]]] = []
            for worker in view.workers.values():
                answer = self._admit(turn, worker, view)
                if isinstance(answer, str):
                    reason = answer
                else:
                    willing.append((self._price(turn, worker), worker, answer))
            if willing:
                _, worker, victims = min(willing, key=lambda w: (w[0], *placement.tie(w[1])))
                yield from self._send(turn, worker, victims, self._entry(turn))
                return
        yield from self._hold(turn, reason)

    def _among_first(self, turn: PendingTurn) -> bool:
        if self.waiting.queued <= self.settings.scan:
            return True
        last = self.waiting.first(self.settings.scan)[-1]
        return self.waiting.key(turn.trajectory) <= self.waiting.key(last.trajectory)

    def _serve(self, worker: Worker, view: View) -> Iterator[Decision]:
        """Room may have appeared: residents first, then the queue."""
        if worker.draining:
            return
        for trajectory in self.waiting.residents(worker.name):
            if self.waiting.home(trajectory) == worker.name:
                yield from self._go_on(self.waiting.turns[trajectory], worker, view)
        tried = 0
        for turn in self.waiting.first(4 * self.settings.scan):
            if tried >= self.settings.scan or len(worker.running) >= worker.slots:
                break
            if view.held(turn) is not None:
                continue
            answer = self._admit(turn, worker, view)
            if isinstance(answer, str):
                tried += 1
                if self._reasons.get(turn.trajectory) in _PASSING:
                    yield from self._hold(turn, answer)
                continue
            yield from self._send(turn, worker, answer, self._entry(turn))

    def _trim(self, worker: Worker) -> Iterator[Decision]:
        """Turns that generated more than was kept for them may leave less than nothing: the least valuable goes."""
        book = self.room.ledger.books[worker.name]
        while book.used > book.capacity and book.idle:
            least = min(book.idle, key=lambda name: (self.room.value(name, self._now, worker), name))
            yield from self._evict(least, reasons.DISPLACED)

    def _go_on(self, turn: PendingTurn, worker: Worker, view: View) -> Iterator[Decision]:
        """A resident's next turn."""
        reason = view.refusal(turn, worker)
        if reason is None and len(worker.running) >= worker.slots:
            reason = reasons.SLOTS
        if reason is not None:
            yield from self._hold(turn, reason)
            return
        if self._claims.get(worker.name, turn.trajectory) != turn.trajectory and self._level(turn) == BACKGROUND_LEVEL:
            yield from self._evict(turn.trajectory, reasons.DISPLACED)
            yield from self._hold(turn, reasons.KV)
            return
        holding = self.room.ledger.held(turn.trajectory)
        assert holding is not None, "a resident holds KV"
        growth = turn.prompt_tokens + turn.resumed - holding.tokens + self._reserve(turn)
        victims = self.room.find(worker.name, growth, 1.0, self._worse(turn, worker), turn.trajectory)
        if victims is None:
            yield from self._hold(turn, reasons.KV)
        else:
            yield from self._send(turn, worker, victims, reasons.RESIDENT)

    def _admit(self, turn: PendingTurn, worker: Worker, view: View) -> list[str] | str:
        """Whose KV must go for it to enter the worker, or why it may not."""
        refusal = view.refusal(turn, worker)
        if refusal is not None:
            return refusal
        if len(worker.running) >= worker.slots:
            return reasons.SLOTS
        if self._claims.get(worker.name, turn.trajectory) != turn.trajectory:
            return reasons.KV
        started = turn.trajectory in self._started
        if started and not self.settings.late_binding:
            last = self._last_worker.get(turn.trajectory)
            if last != worker.name and last in view.workers:
                return reasons.KV
        level = self._level(turn)
        book = self.room.ledger.books[worker.name]
        need = book.need(turn.group, turn.prompt_tokens + turn.resumed, turn.shared_prefix) + self._reserve(turn)
        limit = self.settings.watermark
        if level == BACKGROUND_LEVEL and not started and self.settings.pacing:
            limit *= 0.95
        yielding: Iterator[str] = iter(())
        if level < BACKGROUND_LEVEL and view.now - turn.requested_at >= self.settings.displace_after_s:
            yielding = self._background(worker)
        victims = self.room.find(worker.name, need, limit, yielding)
        return reasons.KV if victims is None else victims

    def _worse(self, turn: PendingTurn, worker: Worker) -> Iterator[str]:
        """Who yields to a resident that cannot go on: residents that wait behind it, then idle background."""
        key = self.waiting.key(turn.trajectory)
        for name in reversed(self.waiting.residents(worker.name)):
            if self.waiting.key(name) > key:
                yield name
        level = self._level(turn)
        place = self.frontier.place(turn.group)
        idle = [
            h
            for h in self.room.ledger.books[worker.name].idle.values()
            if self.room.in_gap(h.trajectory)
            and (self.frontier.level(h.group), self.frontier.place(h.group)) > (level, place)
        ]
        idle.sort(key=lambda h: (-self.frontier.place(h.group), self.room.value(h.trajectory, self._now, worker)))
        yield from (h.trajectory for h in idle)

    def _background(self, worker: Worker) -> Iterator[str]:
        """Residents behind the frontier that are not decoding: those that wait, then the least valuable."""
        for name in reversed(self.waiting.residents(worker.name)):
            if self._level(self.waiting.turns[name]) == BACKGROUND_LEVEL:
                yield name
        idle = [
            h.trajectory
            for h in self.room.ledger.books[worker.name].idle.values()
            if self.room.in_gap(h.trajectory) and self.frontier.level(h.group) == BACKGROUND_LEVEL
        ]
        yield from sorted(idle, key=lambda name: self.room.value(name, self._now, worker))

    # --- claims ---------------------------------------------------------------------------------------------
    def _claim(self, view: View) -> None:
        """The first of the queue, if it waited too long, keeps the room of a worker for itself."""
        if not self.waiting.queued or len(self._claims) > len(view.workers) // 8:
            return
        turn = self.waiting.first(1)[0]
        waited = view.now - turn.requested_at >= self.settings.claim_after_s
        if not waited or self._level(turn) == BACKGROUND_LEVEL or turn.trajectory in self._claims.values():
            return
        if view.held(turn) is not None:
            return
        willing = [w for w in view.workers.values() if w.name not in self._claims and view.refusal(turn, w) is None]
        if willing:
            worker = max(willing, key=lambda w: (self._gain(w), w.name))
            self._claims[worker.name] = turn.trajectory
            self._dirty[worker.name] = None

    def _gain(self, worker: Worker) -> int:
        """Room there if all background yielded."""
        book = self.room.ledger.books[worker.name]
        critical = [
            h
            for table in (book.running, book.idle)
            for h in table.values()
            if self.frontier.level(h.group) != BACKGROUND_LEVEL
        ]
        return book.capacity - sum(h.own + h.reserve for h in critical)

    def _unclaim(self, trajectory: str) -> None:
        for worker in [w for w, owner in self._claims.items() if owner == trajectory]:
            del self._claims[worker]
            self._dirty[worker] = None

    # --- carrying out -----------------------------------------------------------------------------------------
    def _send(self, turn: PendingTurn, worker: Worker, victims: list[str], reason: str) -> Iterator[Decision]:
        for victim in victims:
            yield from self._evict(victim, reasons.GAP if self.room.in_gap(victim) else reasons.DISPLACED)
        name = turn.trajectory
        self.waiting.remove(name)
        tokens = turn.prompt_tokens + turn.resumed
        self.room.ledger.start(name, turn.group, worker.name, tokens, turn.shared_prefix, self._reserve(turn))
        self._started.add(name)
        self._last_worker[name] = worker.name
        self._reasons.pop(name, None)
        self._sent_at[name] = self._now
        self._unclaim(name)
        yield Dispatch(reason, name, turn.turn, worker.name, BACKGROUND_LEVEL - self._level(turn))

    def _evict(self, trajectory: str, reason: str) -> Iterator[Decision]:
        worker = self.room.drop(trajectory)
        self.waiting.unseat(trajectory)
        if worker is not None:
            yield ReleaseKV(reason, trajectory, worker)

    def _hold(self, turn: PendingTurn, reason: str) -> Iterator[Decision]:
        if self._reasons.get(turn.trajectory) != reason:
            self._reasons[turn.trajectory] = reason
            yield Hold(reason, turn.trajectory, turn.turn)

    def _reserve(self, turn: PendingTurn) -> int:
        return min(turn.max_tokens, int(_RESERVE * self.lengths.turn_tokens) + 1)

    def _entry(self, turn: PendingTurn) -> str:
        level = self.frontier.level(turn.group)
        if level == BACKGROUND_LEVEL:
            return reasons.AGED if self._level(turn) == FRONTIER_LEVEL else reasons.BACKGROUND
        return reasons.DEADLINE if level == DEADLINE_LEVEL else reasons.FRONTIER

    def _price(self, turn: PendingTurn, worker: Worker) -> float:
        book = self.room.ledger.books[worker.name]
        return placement.price(turn, turn.group, worker, book, self.lengths.turn_tokens)
