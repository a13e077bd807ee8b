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

from collections.abc import Iterable, Iterator

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import CreateSandbox, Dispatch, Hold, Migrate, ReleaseKV
from venusrl.scheduling.events import Event
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View
from venusrl.scheduling.policies.venus import placement, reasons
from venusrl.scheduling.policies.venus.admission import Admission
from venusrl.scheduling.policies.venus.config import VenusConfig
from venusrl.scheduling.policies.venus.frontier import BACKGROUND_LEVEL, DEADLINE_LEVEL, FRONTIER_LEVEL, Frontier
from venusrl.scheduling.policies.venus.lengths import Lengths
from venusrl.scheduling.policies.venus.relief import Relief
from venusrl.scheduling.policies.venus.room import Room
from venusrl.scheduling.policies.venus.sandboxes import Sandboxes
from venusrl.scheduling.policies.venus.waiting import Key, Waiting
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.siblings import Siblings
from venusrl.types import StopReason

_PASSING = frozenset({"weights", "draining", "staleness_quota", reasons.NO_WORKER, reasons.SANDBOX_PAUSED})
"""Reasons that are replaced by the next one; others stay until the turn goes."""
_OF_TOOLS = frozenset({ev.ToolStarted, ev.ToolFinished, ev.TokensGenerated})
"""Events, most of all, that say something of lengths alone."""
_SOON_S = 1.0
_LEAST = 512
"""Tokens of room below which the queue is not looked at."""


class Venus(Policy):
    """See the module. ``predictor``: fresh, it is told every event. ``pausable``: the nodes can pause a sandbox."""

    name = "venus"

    def __init__(
        self, config: VenusConfig | None = None, predictor: Predictor | None = None, *, pausable: bool = True
    ) -> None:
        self.settings = VenusConfig() if config is None else config
        self.lengths = Lengths(Siblings() if predictor is None else predictor)
        self.frontier = Frontier(by_batch=self.settings.frontier)
        self.room = Room(by_value=self.settings.retention)
        self.sandboxes = Sandboxes(self.frontier, pausing=self.settings.sandboxes and pausable)
        self.waiting = Waiting(self._key)
        parts = (self.settings, self.room, self.frontier, self.lengths)
        self.admission = Admission(*parts, self.waiting, self._level)
        self.relief = Relief(*parts, self.admission)
        self._fresh: dict[str, None] = {}
        self._dirty: dict[str, None] = {}
        self._reasons: dict[str, str] = {}
        self._moving: dict[str, str] = {}
        self._least: dict[str, int] = {}
        """By worker: the smallest need of those at the head of the queue who found no room there."""
        self._seen = (-1, -1)
        self._due = True
        """Whether something happened that may change the order of groups."""
        self._refreshed_at = float("-inf")
        self._now = 0.0

    # --- what happened -----------------------------------------------------------------------------------
    def observe(self, event: Event, view: View) -> None:
        self._now = view.now
        self.lengths.observe(event, view)
        if type(event) in _OF_TOOLS:
            return
        self.sandboxes.observe(event)
        match event:
            case ev.TurnRequested(trajectory=name):
                self.room.end_gap(name, view.now)
            case ev.TurnFinished(trajectory=name):
                aborted = event.stop is StopReason.ABORT
                self._give_up(() if aborted else self.room.missed(name, event.cached_tokens))
                self._turn_finished(name, event.generated, view, aborted=aborted)
                self._give_up(() if event.leaves_kv else (name,))
            case ev.TurnDispatched(trajectory=name, worker=worker):
                self._turn_dispatched(name, worker)
            case ev.VerificationStarted(trajectory=name):
                self._look_at(self.room.forget(name))
            case ev.SandboxPaused(trajectory=name):
                self._look_at(self.room.drop(name))
                self.waiting.unseat(name)
            case ev.SandboxReady(trajectory=name) if name in self.waiting.turns:
                self._least.clear()
                self._look_at_all(view)
            case ev.KVTransferred(trajectory=name, worker=worker, tokens=tokens):
                self._transferred(name, worker, tokens)
            case ev.WorkerUp(worker=worker, kv_capacity=capacity):
                self._worker_down(worker)
                self.room.up(worker, capacity)
                self._least.pop(worker, None)
                self._look_at(worker)
            case ev.WorkerDown(worker=worker):
                self._worker_down(worker)
            case ev.WorkerAcknowledged(worker=worker, flushed=flushed):
                self._give_up(self.room.flushed(worker) if flushed else ())
                self._least.pop(worker, None)
                self._look_at(worker)
            case ev.TrajectoryFinished() | ev.TrajectoryFailed() | ev.GroupOpened() | ev.GroupClosed():
                self._due = True
            case _:
                pass

    def _turn_finished(self, name: str, generated: int, view: View, *, aborted: bool) -> None:
        holding = self.room.ledger.held(name)
        worker = None if holding is None else view.workers.get(holding.worker)
        tokens = 0 if holding is None else holding.tokens + generated
        self.relief.stopped(name)
        if aborted:
            self.room.ledger.stop(name, tokens)
        else:
            self.room.begin_gap(name, tokens, view.now, worker)
        if holding is not None:
            self._look_at(holding.worker)

    def _give_up(self, trajectories: Iterable[str]) -> None:
        """Their KV is gone, as the engine says: those that wait for room at home wait for any room."""
        for name in trajectories:
            self._look_at(self.room.drop(name))
            turn = self.waiting.unseat(name)
            if turn is not None:
                self._joins(turn)

    def _turn_dispatched(self, name: str, worker: str) -> None:
        """Somebody else may have sent it elsewhere."""
        holding = self.room.ledger.held(name)
        if holding is not None and holding.worker != worker and worker in self.room.ledger.books:
            self._look_at(holding.worker)
            self.room.ledger.start(name, holding.group, worker, holding.tokens, holding.prefix, holding.reserve)

    def _transferred(self, name: str, worker: str, tokens: int) -> None:
        self._moving.pop(name, None)
        holding = self.room.ledger.held(name)
        if holding is not None:
            self._look_at(holding.worker)
        if tokens and worker in self.room.ledger.books:
            self.room.move(name, worker)
            self.waiting.seat(name, worker)
            self._look_at(worker)

    def _worker_down(self, worker: str) -> None:
        for name in self.waiting.residents(worker):
            self.waiting.unseat(name)
        self._least.clear()
        self.room.down(worker)
        self.admission.claims.pop(worker, None)

    def _look_at(self, worker: str | None) -> None:
        if worker is not None:
            self._dirty[worker] = None

    @property
    def _refresh_at(self) -> float:
        return self._refreshed_at + (min(_SOON_S, self.settings.refresh_s) if self._due else self.settings.refresh_s)

    def _rest_of_gap(self, trajectory: str) -> float:
        return self.room.rest(trajectory, self._now)

    def _look_at_all(self, view: View) -> None:
        if len(self.waiting):
            self._dirty.update(dict.fromkeys(view.workers))

    def add(self, turn: PendingTurn) -> None:
        holding = self.room.ledger.held(turn.trajectory)
        if holding is not None and holding.running:
            # Its connection was lost, and nobody said that the turn ended.
            self.room.ledger.stop(turn.trajectory, turn.prompt_tokens + turn.resumed)
        self.waiting.add(turn, None if holding is None else holding.worker)
        self._fresh[turn.trajectory] = None
        self._reasons.pop(turn.trajectory, None)

    def remove(self, trajectory: str) -> None:
        self.waiting.remove(trajectory)
        self._look_at(self.room.forget(trajectory))
        for part in (self.lengths, self.sandboxes, self.admission, self.relief):
            part.forget(trajectory)
        self._fresh.pop(trajectory, None)
        self._reasons.pop(trajectory, None)
        self._moving.pop(trajectory, None)
        self._dirty.update(dict.fromkeys(self.relief.release(trajectory)))

    # --- order ---------------------------------------------------------------------------------------------
    def _level(self, turn: PendingTurn) -> int:
        level = self.frontier.level(turn.group)
        if level == BACKGROUND_LEVEL and self._now - turn.requested_at >= self.settings.ageing_s:
            return FRONTIER_LEVEL
        return level

    def _key(self, turn: PendingTurn) -> Key:
        """Least slack first: when the trajectory's batch is due, less all that it takes."""
        total = self.lengths.total(turn.trajectory) if self.settings.longest_first else 0.0
        aged = self._level(turn) != self.frontier.level(turn.group)
        due = 0.0 if aged else self.frontier.due(turn.group)
        return (due - total, turn.requested_at)

    def _refresh(self, view: View) -> None:
        """At once with a new batch or version, within a second of other events, now and then for forecasts' sake."""
        window = view.window
        seen = (window.next_version, window.published)
        if seen == self._seen and view.now < self._refresh_at:
            return
        self._seen, self._refreshed_at, self._due = seen, view.now, False
        needs = {name: self.lengths.group(group, self._rest_of_gap) for name, group in window.open.items()}
        self.frontier.refresh(view, lambda group: needs[group.name])
        self.waiting.reorder()
        self.sandboxes.reordered()
        self._least.clear()
        self._look_at_all(view)

    # --- deciding --------------------------------------------------------------------------------------------
    def decide(self, view: View) -> Iterator[Decision]:
        self._now = view.now
        self._refresh(view)
        for worker_name in sorted(self.room.expire(view.now)):
            self._look_at(worker_name)
        fresh, self._fresh = self._fresh, {}
        for trajectory in fresh:
            turn = self.waiting.turns.get(trajectory)
            if turn is not None:
                yield from self._arrive(turn, view)
        if self.sandboxes.due:
            yield from self.sandboxes.decide(view, self.waiting.last())
        self._claim(view)
        if self.settings.preemption and self.admission.claims:
            yield from self.relief.preempt(view, self.waiting.turns)
        while self._dirty:
            name = next(iter(self._dirty))
            del self._dirty[name]
            worker = view.workers.get(name)
            if worker is not None:
                yield from self._trim(worker)
                if len(self.waiting):
                    yield from self._serve(worker, view)

    def sandbox(self, trajectory: str, view: View) -> CreateSandbox | None:
        return self.sandboxes.opened(trajectory, view)

    def wake_at(self, view: View) -> float | None:
        if not len(self.waiting):
            return None
        expiry, look = self.room.next_expiry(), self._refresh_at
        return look if expiry is None else min(expiry, look)

    def _arrive(self, turn: PendingTurn, view: View) -> Iterator[Decision]:
        """A turn is new: it goes on at home, or enters where it is cheapest if it is among the first."""
        home = self.waiting.home(turn.trajectory)
        if home is not None:
            yield from self._go_on(turn, view.workers[home], view)
            return
        reason = self._barred(turn, view) or (reasons.KV if view.workers else reasons.NO_WORKER)
        if reason == reasons.KV and self._among_first(turn):
            willing: list[tuple[float, Worker, list[str]]] = []
            for worker in view.workers.values():
                need = self.admission.need(turn, worker.name)
                if self.admission.hopeless(need, worker.name):
                    continue
                answer = self.admission.enter(turn, need, worker, view)
                if isinstance(answer, str):
                    reason = answer
                else:
                    willing.append((self._price(turn, worker), worker, answer))
            if willing:
                _, worker, victims = min(willing, key=lambda w: (w[0], *placement.tie(w[1])))
                yield from self._send(turn, worker, victims, self._entry(turn))
                return
        self._joins(turn)
        yield from self._hold(turn, reason)

    def _barred(self, turn: PendingTurn, view: View) -> str | None:
        """Why it may go nowhere now."""
        return reasons.SANDBOX_PAUSED if self.sandboxes.away(turn.trajectory) else view.held(turn)

    def _among_first(self, turn: PendingTurn) -> bool:
        if self.waiting.queued <= self.settings.scan:
            return True
        last = self.waiting.at(self.settings.scan - 1)
        return self.waiting.key(turn.trajectory) <= self.waiting.key(last.trajectory)

    def _serve(self, worker: Worker, view: View) -> Iterator[Decision]:
        """Room may have appeared: residents first, then the queue."""
        if worker.draining:
            yield from self._desert(worker, view)
            return
        for trajectory in self.waiting.residents(worker.name):
            if self.waiting.home(trajectory) == worker.name:
                yield from self._go_on(self.waiting.turns[trajectory], worker, view)
        if not self.waiting.queued:
            return
        before = self._least.get(worker.name, 0)
        full = worker.name not in self.admission.claims and self.admission.hopeless(before, worker.name)
        if full and not self._pressing():
            return
        least, tried, refused = 1 << 60, 0, {reasons.PACING: False, reasons.INTERFERENCE: False}
        for turn in self.waiting.first(4 * self.settings.scan):
            if len(worker.running) >= worker.slots:
                tried = 0  # who was not looked at may need less
                break
            if tried >= self.settings.scan:
                break
            if full and self._level(turn) == BACKGROUND_LEVEL:
                break
            if refused[reasons.PACING] and not self.admission.started(turn.trajectory):
                continue
            if refused[reasons.INTERFERENCE] and self._level(turn) == BACKGROUND_LEVEL:
                break
            barred = self._barred(turn, view)
            if barred is not None:
                if self._reasons.get(turn.trajectory) in _PASSING:
                    yield from self._hold(turn, barred)
                continue
            need = self.admission.need(turn, worker.name)
            answer = self.admission.enter(turn, need, worker, view)
            if not isinstance(answer, str):
                yield from self._send(turn, worker, answer, self._entry(turn))
                continue
            tried += 1
            refused[answer] = True
            least = min(least, need)
            if self._reasons.get(turn.trajectory) in _PASSING:
                yield from self._hold(turn, answer)
        if full:
            least = min(least, before)
        self._least[worker.name] = least if tried else 0

    def _joins(self, turn: PendingTurn) -> None:
        """The queue has one more, whose need may be less than that of those looked at before."""
        if self._among_first(turn):
            need = turn.prompt_tokens + turn.resumed - turn.shared_prefix
            for worker, least in self._least.items():
                self._least[worker] = min(least, need)

    def _pressing(self) -> bool:
        """Whether the first of the queue may displace others: without room for the least that was found lacking,
        only such turns are looked at."""
        turn = self.waiting.at(0)
        waited = self._now - turn.requested_at >= self.settings.displace_after_s
        return waited and self._level(turn) != BACKGROUND_LEVEL

    def _has_room(self, worker: Worker) -> bool:
        return self.room.ledger.books[worker.name].free + self.room.spare(worker.name) >= _LEAST

    def _trim(self, worker: Worker) -> Iterator[Decision]:
        """Turns that generated more than was kept for them may leave less than nothing: the least valuable goes."""
        book = self.room.ledger.books[worker.name]
        while book.used > book.capacity and book.idle and len(book.idle) + len(book.running) > 1:
            least = min(book.idle, key=lambda name: (self.room.value(name, self._now, worker), name))
            yield from self._evict(least, reasons.DISPLACED)

    # --- residents ---------------------------------------------------------------------------------------------
    def _go_on(self, turn: PendingTurn, home: Worker, view: View) -> Iterator[Decision]:
        """A resident's next turn."""
        name = turn.trajectory
        reason = reasons.TRANSFER if name in self._moving else view.refusal(turn, home)
        if reason is None and len(home.running) >= home.slots:
            reason = reasons.SLOTS
        if reason is not None:
            yield from self._hold(turn, reason)
        elif self._yields(turn, home):
            yield from self._evict(name, reasons.DISPLACED)
            yield from self._hold(turn, reasons.KV)
        else:
            victims = self.admission.go_on(turn, home, self._now)
            target = self._elsewhere(turn, home, view, stuck=victims is None)
            if target is not None:
                yield from self._move(turn, home, target)
            elif victims is None:
                yield from self._hold(turn, reasons.KV)
            else:
                yield from self._send(turn, home, victims, reasons.RESIDENT)

    def _desert(self, home: Worker, view: View) -> Iterator[Decision]:
        """Residents of a worker that waits for new weights do not wait with it for long, if others take turns."""
        for name in self.waiting.residents(home.name):
            turn = self.waiting.turns[name]
            waited = self._now - turn.requested_at >= self.settings.displace_after_s
            if waited and any(view.refusal(turn, w) is None for w in view.workers.values()):
                yield from self._evict(name, reasons.MOVED)

    def _yields(self, turn: PendingTurn, home: Worker) -> bool:
        """Whether it makes room for somebody more urgent, at this boundary of turns."""
        owner = self.waiting.turns.get(self.admission.claims.get(home.name, ""))
        if owner is not None and self.waiting.key(owner.trajectory) < self.waiting.key(turn.trajectory):
            return True
        if self.settings.sticky or not self.waiting.queued or self._has_room(home):
            return False
        return self.waiting.key(self.waiting.at(0).trajectory) < self.waiting.key(turn.trajectory)

    def _elsewhere(self, turn: PendingTurn, home: Worker, view: View, *, stuck: bool) -> Worker | None:
        """Where to move to. Only while nobody waits for the room there; and where sessions are so many fewer that a
        look is worth it, unless it is ``stuck`` at home."""
        if not self.settings.migration or self.waiting.queued:
            return None
        fewest = min(len(w.sessions) for w in view.workers.values())
        if not stuck and len(home.sessions) <= fewest + 1:
            return None
        return self.relief.better(turn, home, view)

    def _move(self, turn: PendingTurn, home: Worker, target: Worker) -> Iterator[Decision]:
        name, costs = turn.trajectory, home.costs
        self.relief.moved(name)
        tokens = turn.prompt_tokens + turn.resumed
        if costs is not None and costs.transfer_s(tokens) < costs.prefill_s(tokens):
            self._moving[name] = target.name
            yield from self._hold(turn, reasons.TRANSFER)
            yield Migrate(reasons.MIGRATED, name, target.name)
        else:
            yield from self._evict(name, reasons.MOVED)
            yield from self._send(turn, target, [], reasons.MOVED)

    # --- patience ---------------------------------------------------------------------------------------------
    def _claim(self, view: View) -> None:
        """The first of the frontier in the queue, if it waited too long, keeps a worker's room for itself. Not when it
        may go nowhere itself (its sandbox was paused): then it would keep out those who must end before it."""
        for owner in dict.fromkeys(self.admission.claims.values()):
            claimant = self.waiting.turns.get(owner)
            if claimant is not None and self._barred(claimant, view) is not None:
                self._dirty.update(dict.fromkeys(self.relief.release(owner)))
        for turn in self.waiting.first(self.settings.scan):
            if self._level(turn) != BACKGROUND_LEVEL and self._barred(turn, view) is None:
                if view.now - turn.requested_at >= self.settings.claim_after_s:
                    self._look_at(self.relief.claim(turn, view))
                return

    # --- carrying out -----------------------------------------------------------------------------------------
    def _send(self, turn: PendingTurn, worker: Worker, victims: list[str], reason: str) -> Iterator[Decision]:
        for victim in victims:
            yield from self._evict(victim, reasons.GAP if self.room.is_spare(victim) else reasons.DISPLACED)
        name = turn.trajectory
        self.waiting.remove(name)
        tokens = turn.prompt_tokens + turn.resumed
        reserve = self.admission.reserve(turn)
        holding = self.room.ledger.held(name)
        if holding is not None and holding.worker == worker.name:
            computed = max(0, tokens - holding.tokens)
        else:
            computed = self.admission.need(turn, worker.name) - reserve
        self.room.expect(name, worker.name)
        self.room.ledger.start(name, turn.group, worker.name, tokens, turn.shared_prefix, reserve)
        self.admission.sent(turn, worker, computed, self._now)
        self.relief.sent(turn, self._now)
        self._reasons.pop(name, None)
        self._dirty.update(dict.fromkeys(self.relief.release(name)))
        yield Dispatch(reason, name, turn.turn, worker.name, BACKGROUND_LEVEL - self._level(turn))

    def _evict(self, trajectory: str, reason: str) -> Iterator[Decision]:
        worker = self.room.drop(trajectory)
        turn = self.waiting.unseat(trajectory)
        if turn is not None:
            self._joins(turn)
        if worker is not None:
            self._look_at(worker)
            yield ReleaseKV(reason, trajectory, worker)

    def _hold(self, turn: PendingTurn, reason: str) -> Iterator[Decision]:
        if self._reasons.get(turn.trajectory) != reason:
            self._reasons[turn.trajectory] = reason
            yield Hold(reason, turn.trajectory, turn.turn)

    def _entry(self, turn: PendingTurn) -> str:
        level = self.frontier.level(turn.group)
        if level == BACKGROUND_LEVEL:
            return reasons.AGED if self._level(turn) == FRONTIER_LEVEL else reasons.BACKGROUND
        return reasons.DEADLINE if level == DEADLINE_LEVEL else reasons.FRONTIER

    def _price(self, turn: PendingTurn, worker: Worker) -> float:
        return placement.price(turn, worker, self.room.ledger.books[worker.name], self.lengths.turn_tokens)
