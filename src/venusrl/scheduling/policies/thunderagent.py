"""ThunderAgent: a gate that keeps the programs (trajectories) on each worker within its KV capacity.

Owns: its capacity model and its rules of pausing and resuming. Must not know: groups, batches, remaining lengths; the
engine's KV, which it never touches: to pause a program is to hold its next turn and hope.

A program is *reasoning* from a request to its end, *acting* until the next. Every ``interval_s`` paused programs are
resumed, then each worker over capacity pauses its smallest acting program, or marks its smallest reasoning one to be
paused when its turn ends, until it is within. Resumed are first those in the middle (reasoning), then new ones, then
acting ones, smallest first, whoever still fits beside those before; the largest is placed first, on the worker with
most room, wherever it was before. What waited ``timeout_s`` runs anyway, where it was before.

``faithful`` keeps what its source does and should not: marked programs are not counted as relief, so that one round
marks every reasoning program; a group's common prefix counts once a member; the order of resuming uses sizes of
the moment of pausing; a program larger than a worker waits for its timeout though the worker is empty; a small program
always goes before a large one, however long that waits. With ``faithful=False`` marks are relief, the prefix counts
once, sizes are current, a program too large for any worker takes an empty one, waiting shrinks a program's
size in the order (by half after ``AGEING_S``), and a program goes back to its own worker where that has room.

In its favour: prompts are counted exactly, and programs on a worker that died wait for another one (its source lets
them fail).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch
from venusrl.scheduling.events import Event
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View
from venusrl.scheduling.policies.holds import Holds
from venusrl.scheduling.policies.programs import BUFFER_TOKENS, Backend, Program

AGEING_S = 45.0


class ThunderAgent(Policy):
    """See the module. ``release``: programs are forgotten at their end. ``decay``: for resuming, an acting program
    weighs half as much every ``half_life_s``. ``order``: of resuming, within a class; its own is ``smallest``."""

    name = "thunderagent"

    def __init__(
        self,
        *,
        release: bool = True,
        decay: bool = False,
        faithful: bool = True,
        order: Literal["smallest", "fifo", "largest"] = "smallest",
        interval_s: float = 5.0,
        half_life_s: float = 1.0,
        acting_weight: float = 1.0,
        timeout_s: float = 1800.0,
    ) -> None:
        if order not in ("smallest", "fifo", "largest"):
            raise ValueError(f"there is no order {order!r}; there are smallest, fifo, largest")
        if min(interval_s, half_life_s, timeout_s) <= 0 or acting_weight < 0:
            raise ValueError("interval_s, half_life_s and timeout_s must be positive, acting_weight not negative")
        self._release = release
        self._half_life_s = half_life_s if decay else None
        self._faithful = faithful
        self._order = order
        self._interval_s = interval_s
        self._acting_weight = acting_weight
        self._timeout_s = timeout_s
        self.programs: dict[str, Program] = {}
        self.backends: dict[str, Backend] = {}
        self._paused: dict[str, Program] = {}
        self._fresh: dict[str, PendingTurn] = {}
        """Requests that were not looked at yet."""
        self._ready: dict[str, Program] = {}
        """Programs with a place and a turn to send."""
        self._blocked: dict[str, Program] = {}
        """Programs with a place and a turn that its worker does not take now."""
        self._timeouts: list[tuple[float, str, int]] = []
        """Heap of (time, program, step)."""
        self._holds = Holds()
        self._over: dict[str, Backend] = {}
        """Workers beyond their capacity."""
        self._next_round = 0.0
        # Its source adds up every 20 streamed chunks; what matters is what it knows at a round, within its buffers.
        self.tokens_every_s = max(interval_s, 5.0)
        self._round_needed = False
        self._changes = -1

    # --- taking note -------------------------------------------------------------------------------------
    def observe(self, event: Event, view: View) -> None:
        if isinstance(event, ev.TurnFinished):
            self._turn_finished(event, view.now)
        elif isinstance(event, ev.TokensGenerated):
            program = self.programs.get(event.trajectory)
            if program is not None:
                with self._changing(program):
                    program.tokens += event.count
        elif isinstance(event, ev.VerificationStarted) and self._release:
            self._forget(event.trajectory)

    def add(self, turn: PendingTurn) -> None:
        self._fresh[turn.trajectory] = turn
        self._holds.forget(turn.trajectory)

    def remove(self, trajectory: str) -> None:
        self._fresh.pop(trajectory, None)
        self._holds.forget(trajectory)
        self._ready.pop(trajectory, None)
        self._blocked.pop(trajectory, None)
        if self._release:
            self._forget(trajectory)
        elif trajectory in self.programs:
            self.programs[trajectory].turn = None

    def _forget(self, trajectory: str) -> None:
        program = self.programs.pop(trajectory, None)
        if program is not None:
            self._unplace(program)
            self._paused.pop(trajectory, None)

    def _turn_finished(self, event: ev.TurnFinished, now: float) -> None:
        program = self.programs.get(event.trajectory)
        if program is None or not program.reasoning:
            return
        with self._changing(program):
            program.tokens = program.prompt + event.generated
            program.reasoning, program.acting_since = False, now
        if program.marked and program.backend is not None:
            self._pause(program, now)

    @contextmanager
    def _changing(self, program: Program) -> Iterator[None]:
        """Its worker's sums follow."""
        backend = self.backends[program.backend] if program.backend is not None else None
        if backend is not None:
            backend.drop(program)
        yield
        if backend is not None:
            backend.put(program)
            self._watch(backend)

    def _watch(self, backend: Backend) -> None:
        if backend.room < 0:
            self._over[backend.name] = backend
        else:
            self._over.pop(backend.name, None)

    def _place(self, program: Program, backend: Backend) -> None:
        self._paused.pop(program.name, None)
        program.backend = program.origin = backend.name
        backend.put(program)
        self._watch(backend)
        if program.turn is not None:
            self._ready[program.name] = program

    def _unplace(self, program: Program) -> None:
        if program.backend is not None:
            backend = self.backends[program.backend]
            backend.drop(program)
            self._watch(backend)
            program.backend, program.marked = None, False

    def _pause(self, program: Program, now: float) -> None:
        self._unplace(program)
        self._ready.pop(program.name, None)
        self._blocked.pop(program.name, None)
        self._paused[program.name] = program
        program.paused_tokens, program.paused_at = program.tokens, now

    # --- deciding ----------------------------------------------------------------------------------------
    def decide(self, view: View) -> Iterator[Decision]:
        if view.changes != self._changes:
            self._changes = view.changes
            self._sync(view)
            self._ready.update(self._blocked)
            self._blocked.clear()
        if view.now >= self._next_round:
            if self._round_needed:
                self._resume(view)
                for backend in list(self._over.values()):
                    self._pause_until_safe(backend, view.now)
            self._next_round = self._grid(view.now)
        fresh, self._fresh = self._fresh, {}
        for turn in fresh.values():
            self._request(turn)
        self._force(view.now)
        ready, self._ready = self._ready, {}
        for program in ready.values():
            yield from self._send(program, view)
        for name in fresh:
            if name in self._paused and name not in self._holds:
                yield from self._holds.say(fresh[name], "capacity")
        self._round_needed = bool(self._paused or self._over)

    def wake_at(self, view: View) -> float | None:
        times = [self._timeouts[0][0]] if self._timeouts and self.backends else []
        if self._round_needed:
            times.append(self._next_round)
        return min(times, default=None)

    def _grid(self, now: float) -> float:
        """The next round's time: rounds are ``interval_s`` apart whether or not there is something to do."""
        following = (math.floor(now / self._interval_s) + 1) * self._interval_s
        return following if following > now else following + self._interval_s

    def _sync(self, view: View) -> None:
        """Workers came or went."""
        for name in [name for name in self.backends if name not in view.workers]:
            for program in list(self.backends[name].programs.values()):
                self._pause(program, view.now)
            del self.backends[name]
            self._over.pop(name, None)
        for name, worker in view.workers.items():
            if name not in self.backends:
                self.backends[name] = Backend(name, worker.kv_capacity, not self._faithful, self._acting_weight)

    def _request(self, turn: PendingTurn) -> None:
        program = self.programs.get(turn.trajectory)
        if program is None:
            program = self.programs[turn.trajectory] = Program(turn.trajectory, turn.group, turn.shared_prefix)
        with self._changing(program):
            program.turn, program.step = turn, program.step + 1
            program.reasoning = True
            program.tokens = program.prompt = turn.prompt_tokens + turn.resumed
        if program.backend is not None:
            self._ready[program.name] = program
            return
        if program.step == 1 and not self._paused:
            roomy = [b for b in self.backends.values() if b.room >= program.tokens + BUFFER_TOKENS]
            if roomy:
                self._place(program, min(roomy, key=lambda b: (b.active, b.name)))
                return
        if program.name not in self._paused:
            self._pause(program, turn.requested_at)
        heapq.heappush(self._timeouts, (turn.requested_at + self._timeout_s, program.name, program.step))

    def _force(self, now: float) -> None:
        """What waited too long runs, whatever that does to the worker."""
        while self._timeouts:
            at, name, step = self._timeouts[0]
            program = self._paused.get(name)
            waits = program is not None and program.turn is not None and program.step == step
            if waits and (at > now or not self.backends):
                return
            heapq.heappop(self._timeouts)
            if waits and program is not None:
                fewest = min(self.backends.values(), key=lambda b: (len(b.programs), b.name))
                self._place(program, self.backends.get(program.origin or "", fewest))

    def _send(self, program: Program, view: View) -> Iterator[Decision]:
        turn = program.turn
        if turn is None or program.backend is None:
            return
        reason = view.held(turn)
        if reason is not None:
            # It may not begin: it gives its room to those that may.
            self._pause(program, view.now)
            heapq.heappush(self._timeouts, (view.now + self._timeout_s, program.name, program.step))
            yield from self._holds.say(turn, reason)
            return
        reason = view.refusal(turn, view.workers[program.backend])
        if reason is not None:
            self._blocked[program.name] = program
            yield from self._holds.say(turn, reason)
            return
        program.turn = None
        self._holds.forget(program.name)
        yield Dispatch(self.name, program.name, turn.turn, program.backend, view.urgency(turn))

    # --- a round -----------------------------------------------------------------------------------------
    def _pause_until_safe(self, backend: Backend, now: float) -> None:
        acting = sorted((p for p in backend.programs.values() if not p.reasoning), key=_by_size)
        for program in acting:
            if self._is_safe(backend):
                return
            self._pause(program, now)
        for program in sorted((p for p in backend.programs.values() if not p.marked), key=_by_size):
            if self._is_safe(backend):
                return
            with self._changing(program):
                program.marked = True

    def _is_safe(self, backend: Backend) -> bool:
        return backend.room + (0 if self._faithful else backend.marked) >= 0

    def _resume(self, view: View) -> None:
        rooms = {b.name: self._free(b, view.now) for b in self.backends.values()}
        free = {name: room for name, room in rooms.items() if room > BUFFER_TOKENS}
        total = sum(free.values())
        chosen: list[Program] = []
        for program in self._in_order(view):
            need = program.tokens + BUFFER_TOKENS
            # One that does not fit is passed over, as in the source: smaller ones behind it may.
            if need <= total:
                total -= need
                chosen.append(program)
        for program in sorted(chosen, key=lambda p: (-p.tokens, p.name)):
            name = self._fitting(program, free)
            if name is not None:
                free[name] -= program.tokens + BUFFER_TOKENS
                self._place(program, self.backends[name])
        if not self._faithful:
            self._resume_too_large(view)

    def _in_order(self, view: View) -> list[Program]:
        """Paused programs, who comes first."""
        startable: Iterable[Program] = self._paused.values()
        if not view.window.may_start():
            startable = [p for p in startable if p.turn is None or view.held(p.turn) is None]
        # Ties in the order of pausing: sorting is stable.
        return sorted(startable, key=lambda p: (_class(p), self._precedence(p, view.now)))

    def _precedence(self, program: Program, now: float) -> float:
        if self._order == "fifo":
            return 0.0
        tokens: float = program.paused_tokens if self._faithful else program.tokens
        if self._order == "largest":
            return -tokens
        return tokens if self._faithful else tokens / (1 + (now - program.paused_at) / AGEING_S)

    def _free(self, backend: Backend, now: float) -> float:
        if self._half_life_s is None:
            return backend.room
        return backend.decayed_room(now, self._half_life_s)

    def _fitting(self, program: Program, free: dict[str, float]) -> str | None:
        need = program.tokens + BUFFER_TOKENS
        if not self._faithful and program.origin in free and free[program.origin] >= need:
            return program.origin
        name = max(free, key=lambda worker: (free[worker], worker), default=None)
        return name if name is not None and free[name] >= need else None

    def _resume_too_large(self, view: View) -> None:
        """A program larger than any worker takes one that is empty."""
        largest = max((b.capacity for b in self.backends.values()), default=0)
        empty = [b for b in self.backends.values() if not b.programs]
        waiting = [p for p in self._in_order(view) if p.turn is not None and p.tokens + BUFFER_TOKENS > largest]
        for program, backend in zip(waiting, empty, strict=False):
            self._place(program, backend)


def _by_size(program: Program) -> tuple[int, str]:
    return program.tokens, program.name


def _class(program: Program) -> int:
    """In the middle, new, acting; what had no more than one request is new whatever it does."""
    if program.step == 1:
        return 1
    return 0 if program.reasoning else 2
