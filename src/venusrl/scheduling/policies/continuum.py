"""Continuum: KV is kept over a tool call for a time to live, and programs are served in the order they arrived.

Owns: its time to live, its order and its gate. Must not know: groups, batches, remaining lengths.

A program (trajectory) belongs to one worker, the one with fewest programs per slot when it arrived. When a turn ends,
its KV is kept for tau = argmax P(tau) * (T * eta + reload) - tau: P the tool times seen so far (of all tools together:
events do not name them), T the mean wait of turns whose KV was not kept, eta as in ``Memory``, reload the prefill of
its context on that worker. A worker's turns go in the order (preempted, kept, arrival of the program), each as soon as
its context fits beside what runs and what is kept; none overtakes. If nothing runs and the first one does not fit, the
KV of the program that arrived last is given up. A context larger than the worker runs alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, ReleaseKV, RetainKV
from venusrl.scheduling.events import Event
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View
from venusrl.scheduling.policies.holds import Holds
from venusrl.scheduling.policies.occupancy import Occupancy
from venusrl.scheduling.policies.tool_times import Memory, ToolTimes
from venusrl.types import StopReason

WATERMARK = 0.01
"""Share of the KV that stays free when a turn is let in, as vLLM does it."""
_MEMORY = 0.99
"""How much of the mean wait survives one more."""


@dataclass(slots=True)
class Program:
    """One trajectory. ``arrival``: its place in the order; ``tokens``: its context after the last turn."""

    name: str
    group: str
    shared: int
    arrival: int
    tokens: int = 0
    turns: int = 0
    worker: str | None = None
    turn: PendingTurn | None = None
    tool_since: float | None = None
    kept_until: float | None = None
    was_kept: bool = True
    """Whether the KV of its last turn was still kept when the present one was asked for."""


@dataclass(slots=True)
class _Server:
    """One worker: what runs and what is kept (together in ``kv``), and the heap of waiting turns."""

    kv: Occupancy = field(default_factory=Occupancy)
    running: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    queue: list[tuple[bool, bool, int, str]] = field(default_factory=list)
    programs: set[str] = field(default_factory=set)


class Continuum(Policy):
    """See the module. ``cold_start``: tool times below which P is unknown. ``reload_tokens_per_s``: prefill speed of
    workers whose costs nobody knows."""

    name = "continuum"

    def __init__(self, *, cold_start: int = 100, reload_tokens_per_s: float = 10_000.0) -> None:
        if cold_start < 1 or reload_tokens_per_s <= 0:
            raise ValueError("cold_start and reload_tokens_per_s must be positive")
        self._reload_s = 1 / reload_tokens_per_s
        self._times = ToolTimes(cold_start)
        self._memory = Memory()
        self._mean_wait = 0.0
        self._programs: dict[str, Program] = {}
        self._servers: dict[str, _Server] = {}
        self._fresh: dict[str, PendingTurn] = {}
        self._idle: list[Program] = []
        """Programs whose turn has just ended."""
        self._expiries: list[tuple[float, str]] = []
        self._dirty: set[str] = set()
        """Workers on which something may go now."""
        self._holds = Holds()
        self._arrivals = 0
        self._changes = -1

    # --- taking note -------------------------------------------------------------------------------------
    def observe(self, event: Event, view: View) -> None:
        match event:
            case ev.TurnFinished():
                self._turn_finished(event)
            case ev.ToolStarted(trajectory=name) if name in self._programs:
                self._programs[name].tool_since = view.now
            case ev.ToolFinished(trajectory=name) if name in self._programs:
                program = self._programs[name]
                if program.tool_since is not None:
                    self._times.add(view.now - program.tool_since)
                    program.tool_since = None
            case ev.VerificationStarted(trajectory=name):
                self._end(name)

    def add(self, turn: PendingTurn) -> None:
        self._fresh[turn.trajectory] = turn
        self._holds.forget(turn.trajectory)

    def remove(self, trajectory: str) -> None:
        self._fresh.pop(trajectory, None)
        self._holds.forget(trajectory)
        self._end(trajectory)

    def _turn_finished(self, event: ev.TurnFinished) -> None:
        program = self._programs.get(event.trajectory)
        if program is None or program.worker is None:
            return
        program.tokens += event.generated
        program.turns += 1
        self._stop(program)
        if event.stop is not StopReason.ABORT:
            # Nobody knows yet whether a tool call follows; if not, it ends at this very moment.
            self._idle.append(program)

    def _stop(self, program: Program) -> None:
        """Its turn does not run (any more)."""
        if program.worker is not None and program.name in self._servers[program.worker].running:
            self._servers[program.worker].running.remove(program.name)
            self._servers[program.worker].kv.drop(program.name)
            self._dirty.add(program.worker)

    def _end(self, trajectory: str) -> None:
        program = self._programs.pop(trajectory, None)
        if program is None:
            return
        self._leave(program)
        if program.turns:
            self._memory.add(program.turns)

    def _leave(self, program: Program) -> None:
        if program.worker is None:
            return
        server = self._servers[program.worker]
        server.kv.drop(program.name)
        for names in (server.running, server.kept, server.programs):
            names.discard(program.name)
        self._dirty.add(program.worker)
        program.worker, program.kept_until = None, None

    # --- deciding ----------------------------------------------------------------------------------------
    def decide(self, view: View) -> Iterator[Decision]:
        if view.changes != self._changes:
            self._changes = view.changes
            self._sync(view)
        # Requests come before expiries of the same moment.
        fresh, self._fresh = self._fresh, {}
        for turn in fresh.values():
            self._request(turn, view)
        yield from self._expire(view)
        idle, self._idle = self._idle, []
        for program in idle:
            yield from self._keep(program, view)
        dirty, self._dirty = self._dirty, set()
        for name in sorted(dirty):
            if name in self._servers:
                yield from self._serve(view.workers[name], self._servers[name], view)
        for name in fresh:
            program = self._programs[name]
            if program.turn is not None and name not in self._holds:
                yield from self._holds.say(program.turn, "no_worker" if program.worker is None else "capacity")

    def wake_at(self, view: View) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def _sync(self, view: View) -> None:
        """Workers came or went, or took new weights: everybody may have somewhere to go."""
        for name in [name for name in self._servers if name not in view.workers]:
            for program in [self._programs[p] for p in self._servers[name].programs]:
                self._leave(program)
            del self._servers[name]
        for name in view.workers:
            self._servers.setdefault(name, _Server())
        self._dirty.update(self._servers)
        for program in self._programs.values():
            if program.turn is not None and program.worker is None:
                self._enqueue(program, view)

    def _request(self, turn: PendingTurn, view: View) -> None:
        program = self._programs.get(turn.trajectory)
        if program is None:
            self._arrivals += 1
            program = Program(turn.trajectory, turn.group, turn.shared_prefix, self._arrivals)
            self._programs[program.name] = program
        self._stop(program)
        program.turn, program.tokens = turn, turn.prompt_tokens + turn.resumed
        program.was_kept = program.kept_until is not None or not program.turns
        program.kept_until = None  # Until it is served its KV stays.
        self._enqueue(program, view)

    def _enqueue(self, program: Program, view: View) -> None:
        if program.worker is None:
            if not view.workers:
                return
            name = min(view.workers, key=lambda w: (len(self._servers[w].programs) / view.workers[w].slots, w))
            program.worker = name
            self._servers[name].programs.add(program.name)
        server = self._servers[program.worker]
        resumed = program.turn is not None and program.turn.resumed > 0
        # A set lives on after a request: kept KV is in ``kept`` until it is served or given up.
        heapq.heappush(server.queue, (not resumed, program.name not in server.kept, program.arrival, program.name))
        self._dirty.add(program.worker)

    def _serve(self, worker: Worker, server: _Server, view: View) -> Iterator[Decision]:
        passed = []
        room = int(worker.kv_capacity * (1 - WATERMARK))
        while server.queue and len(server.running) < worker.slots:
            entry = server.queue[0]
            program = self._programs.get(entry[3])
            turn = program.turn if program is not None and program.worker == worker.name else None
            if program is None or turn is None:
                heapq.heappop(server.queue)
                continue
            reason = view.held(turn) or view.refusal(turn, worker)
            if reason is not None:
                passed.append(heapq.heappop(server.queue))
                yield from self._holds.say(turn, reason)
                continue
            while server.kv.with_(program.name, program.group, program.tokens, program.shared) > room:
                if server.running or not (others := server.kept - {program.name}):
                    break
                last = max(others, key=lambda name: self._programs[name].arrival)
                yield from self._give_up(self._programs[last], "deadlock")
            fits = server.kv.with_(program.name, program.group, program.tokens, program.shared) <= room
            if not fits and server.running:
                break
            heapq.heappop(server.queue)
            yield self._start(program, turn, worker, server, view)
        for entry in passed:
            heapq.heappush(server.queue, entry)

    def _start(self, program: Program, turn: PendingTurn, worker: Worker, server: _Server, view: View) -> Dispatch:
        server.kept.discard(program.name)
        server.running.add(program.name)
        server.kv.put(program.name, program.group, program.tokens, program.shared)
        if not program.was_kept:
            self._mean_wait = _MEMORY * self._mean_wait + (1 - _MEMORY) * (view.now - turn.requested_at)
        program.turn = None
        self._holds.forget(program.name)
        return Dispatch(self.name, program.name, turn.turn, worker.name, view.urgency(turn))

    # --- keeping KV --------------------------------------------------------------------------------------
    def _keep(self, program: Program, view: View) -> Iterator[Decision]:
        if program.worker is None or program.turn is not None or program.name not in self._programs:
            return
        costs = view.workers[program.worker].costs
        reload = program.tokens * self._reload_s if costs is None else costs.prefill_s(program.tokens)
        ttl = self._times.ttl(self._mean_wait * self._memory.eta + reload)
        if ttl <= 0:
            return
        server = self._servers[program.worker]
        server.kept.add(program.name)
        server.kv.put(program.name, program.group, program.tokens, program.shared)
        program.kept_until = view.now + ttl
        heapq.heappush(self._expiries, (program.kept_until, program.name))
        yield RetainKV("ttl", program.name, program.worker)

    def _expire(self, view: View) -> Iterator[Decision]:
        while self._expiries:
            at, name = self._expiries[0]
            program = self._programs.get(name)
            current = program is not None and program.kept_until == at
            if current and at > view.now:
                return
            heapq.heappop(self._expiries)
            if current and program is not None:
                yield from self._give_up(program, "ttl_over")

    def _give_up(self, program: Program, reason: str) -> Iterator[Decision]:
        """Its KV may go. If its turn waits already, that goes on as one whose KV was not kept."""
        if program.worker is None:
            return
        server = self._servers[program.worker]
        server.kept.discard(program.name)
        server.kv.drop(program.name)
        program.kept_until = None
        program.was_kept = False
        self._dirty.add(program.worker)
        yield ReleaseKV(reason, program.name, program.worker)
