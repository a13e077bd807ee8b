"""Who may enter a worker, and whose KV goes for it.

Owns: the started set (trajectories whose first turn went out), and the rules of entry: room now, room as the working
set grows (pacing), the frontier's speed (interference), workers claimed by somebody else. Must not know: the order of
those who ask, versions.

A trajectory enters a worker when its context and a turn's generation fit under the watermark. One that starts anew
must also fit as what lives there grows: every resident counts with the context it will have half-way through what it
has left, for as some end others start. Where trajectories of the frontier decode, prefill for background may take no
more than a share of the time: it holds up every sequence of its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import PendingTurn, View
from venusrl.scheduling.policies.venus import reasons
from venusrl.scheduling.policies.venus.config import VenusConfig
from venusrl.scheduling.policies.venus.frontier import BACKGROUND_LEVEL, Frontier
from venusrl.scheduling.policies.venus.lengths import Lengths
from venusrl.scheduling.policies.venus.room import Room
from venusrl.scheduling.policies.venus.waiting import Waiting

_RESERVE = 1.5
"""Room kept for a turn's generation, in average turns."""


class Site(NamedTuple):
    """What a worker's book says to those who would enter, kept until it changes. ``critical``: whether trajectories of
    the frontier decode there; ``growth``: of all residents."""

    changes: tuple[int, int]
    critical: bool
    growth: float


class Admission:
    """See the module. ``level``: of a turn's group, or better by age."""

    def __init__(
        self,
        settings: VenusConfig,
        room: Room,
        frontier: Frontier,
        lengths: Lengths,
        waiting: Waiting,
        level: Callable[[PendingTurn], int],
    ) -> None:
        self.claims: dict[str, str] = {}
        """Workers whose room is kept for one trajectory."""
        self._settings = settings
        self._room = room
        self._frontier = frontier
        self._lengths = lengths
        self._waiting = waiting
        self._level = level
        self._last: dict[str, str] = {}
        """Where each started trajectory ran last."""
        self._sites: dict[str, Site] = {}
        self._quiet_until: dict[str, float] = {}
        """Until when each worker's share of prefill for background is used up."""

    def started(self, trajectory: str) -> bool:
        return trajectory in self._last

    def sent(self, turn: PendingTurn, worker: Worker, computed: int, now: float) -> None:
        """It goes to the worker, which computes so many tokens of its context."""
        self._last[turn.trajectory] = worker.name
        if worker.costs is not None and self._level(turn) == BACKGROUND_LEVEL:
            prefill_s = worker.costs.prefill_s(computed, turn.prompt_tokens + turn.resumed - computed)
            begin = max(now, self._quiet_until.get(worker.name, now))
            self._quiet_until[worker.name] = begin + prefill_s / self._settings.interference_share

    def forget(self, trajectory: str) -> None:
        self._last.pop(trajectory, None)

    def reserve(self, turn: PendingTurn) -> int:
        """Tokens kept for what the turn will generate."""
        return min(turn.max_tokens, int(_RESERVE * self._lengths.turn_tokens) + 1)

    def enter(self, turn: PendingTurn, need: int, worker: Worker, view: View) -> list[str] | str:
        """Whose KV must go for it to enter the worker, where it needs so much room, or why it may not."""
        refusal = view.refusal(turn, worker)
        if refusal is not None:
            return refusal
        if len(worker.running) >= worker.slots:
            return reasons.SLOTS
        if (self.claims or not self._settings.late_binding) and self._is_kept(turn, worker, view):
            return reasons.KV
        background = self._level(turn) == BACKGROUND_LEVEL
        if background and self._settings.interference and self._disturbs(worker, view.now):
            return reasons.INTERFERENCE
        if self._settings.pacing and not self.started(turn.trajectory) and self._outgrows(turn, need, worker):
            return reasons.PACING
        waited = view.now - turn.requested_at
        urgent = not background and waited >= self._settings.displace_after_s
        yielding: Iterable[str] = ()
        if self.claims.get(worker.name) == turn.trajectory:
            yielding = self._worse(turn, worker, view.now)
        elif urgent:
            yielding = self.background(worker, view.now)
        victims = self._room.find(worker.name, need, self._settings.watermark, yielding)
        return reasons.KV if victims is None else victims

    def need(self, turn: PendingTurn, worker: str) -> int:
        """Tokens that it adds to a worker which holds nothing of its own."""
        book = self._room.ledger.books[worker]
        return book.need(turn.group, turn.prompt_tokens + turn.resumed, turn.shared_prefix) + self.reserve(turn)

    def hopeless(self, need: int, worker: str) -> bool:
        """Whether there is no room for that many tokens, whoever asks (but for those who displace others)."""
        book = self._room.ledger.books[worker]
        limit = int(self._settings.watermark * book.capacity)
        return bool(book.running) and book.used - self._room.spare(worker) + need > limit

    def go_on(self, turn: PendingTurn, worker: Worker, now: float) -> list[str] | None:
        """Whose KV must go for a resident's next turn; None if nothing there yields to it."""
        holding = self._room.ledger.held(turn.trajectory)
        assert holding is not None, "a resident holds KV"
        growth = turn.prompt_tokens + turn.resumed - holding.tokens + self.reserve(turn)
        return self._room.find(worker.name, growth, 1.0, self._worse(turn, worker, now), turn.trajectory)

    def background(self, worker: Worker, now: float) -> Iterator[str]:
        """Residents behind the frontier that are not decoding: those that wait, then the least valuable."""
        for name in reversed(self._waiting.residents(worker.name)):
            if self._level(self._waiting.turns[name]) == BACKGROUND_LEVEL:
                yield name
        idle = [
            h.trajectory
            for h in self._room.ledger.books[worker.name].idle.values()
            if self._room.in_gap(h.trajectory) and self._frontier.level(h.group) == BACKGROUND_LEVEL
        ]
        yield from sorted(idle, key=lambda name: self._room.value(name, now, worker))

    def _is_kept(self, turn: PendingTurn, worker: Worker, view: View) -> bool:
        if self.claims.get(worker.name, turn.trajectory) != turn.trajectory:
            return True
        last = self._last.get(turn.trajectory)
        bound = last is not None and not self._settings.late_binding
        return bound and last != worker.name and last in view.workers

    def _worse(self, turn: PendingTurn, worker: Worker, now: float) -> Iterator[str]:
        """Who yields to a resident that cannot go on: residents that wait behind it, then idle ones of later groups."""
        key = self._waiting.key(turn.trajectory)
        for name in reversed(self._waiting.residents(worker.name)):
            if self._waiting.key(name) > key:
                yield name
        mine = (self._level(turn), self._frontier.place(turn.group))
        idle = [
            h
            for h in self._room.ledger.books[worker.name].idle.values()
            if self._room.in_gap(h.trajectory) and (self._frontier.level(h.group), self._frontier.place(h.group)) > mine
        ]
        idle.sort(key=lambda h: (-self._frontier.place(h.group), self._room.value(h.trajectory, now, worker)))
        yield from (h.trajectory for h in idle)

    def _disturbs(self, worker: Worker, now: float) -> bool:
        """Whether prefill for background took its share of the time of the frontier's trajectories there already."""
        return now < self._quiet_until.get(worker.name, now) and self._site(worker).critical

    def _outgrows(self, turn: PendingTurn, need: int, worker: Worker) -> bool:
        """Whether the worker's residents and it come to need more than there is, each half-way through its rest."""
        book = self._room.ledger.books[worker.name]
        if not (book.running or book.idle):
            return False
        growth = self._site(worker).growth + self._lengths.growth(turn.trajectory)
        used = book.used - self._room.spare(worker.name)
        return used + need + growth / 2 > self._settings.overcommit * book.capacity

    def _site(self, worker: Worker) -> Site:
        book = self._room.ledger.books[worker.name]
        changes = (book.changes, self._frontier.changes)
        site = self._sites.get(worker.name)
        if site is None or site.changes != changes:
            critical = any(self._frontier.level(h.group) != BACKGROUND_LEVEL for h in book.running.values())
            growth = sum(map(self._lengths.growth, book.running)) + sum(map(self._lengths.growth, book.idle))
            site = self._sites[worker.name] = Site(changes, critical, growth)
        return site
