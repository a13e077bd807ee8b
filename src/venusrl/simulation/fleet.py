"""The engine workers of a simulated run: who serves, with which weights, and what becomes of their requests.

Owns: the engines, the way new weights reach them, deaths and restarts, transfers of KV. Must not know: what a
trajectory does between its turns (``Turns`` is told what becomes of each request).

Guarantees: every request that is submitted comes back by ``finished`` or ``aborted``, once, unless it is withdrawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Protocol

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.simulation.cache import RELEASED, RETAINED, Path
from venusrl.simulation.core import Core, Timer
from venusrl.simulation.engine import Engine
from venusrl.simulation.requests import Request
from venusrl.simulation.sandboxes import PolicyFault
from venusrl.simulation.scenario import EngineSpec, FailureSpec, FleetSpec


class Turns(Protocol):
    """Whoever submits requests."""

    def turn(self, trajectory: str) -> int:
        """Number of the turn that its request is for."""
        ...

    def finished(self, request: Request) -> None: ...

    def aborted(self, request: Request) -> None:
        """Not by the submitter's wish; the turn is to be asked for again without ``request.generated`` tokens."""
        ...


class Server:
    """One engine worker, its weights and its fate. ``next``: when something happens in it by itself; ``life``: number
    of its deaths."""

    __slots__ = ("engine", "life", "link_free_at", "loading", "migrated", "next", "up", "version")

    def __init__(self, spec: EngineSpec) -> None:
        self.engine = Engine(spec)
        self.version = 0
        self.up = True
        self.loading = False
        self.life = 0
        self.next: Timer | None = None
        self.link_free_at = 0.0
        self.migrated: list[int] = []
        """Tokens of each transfer that arrived."""


class Move:
    """KV of an idle trajectory under way to another worker."""

    __slots__ = ("life", "path", "target", "trajectory")

    def __init__(self, trajectory: str, path: Path, target: Server) -> None:
        self.trajectory = trajectory
        self.path = path
        self.target = target
        self.life = target.life


class Fleet:
    """See the module."""

    def __init__(self, core: Core, spec: FleetSpec, failures: FailureSpec, seed: int, turns: Turns) -> None:
        self.servers = {engine.name: Server(engine) for engine in spec.engines}
        self._core = core
        self._spec = spec
        self._flushes = spec.stale_kv == "flush" or spec.weight_update == "abort"
        self._failures = failures
        self._seed = seed
        self._turns = turns
        self.published = 0
        self._dirty: dict[Server, None] = {}
        self._draining: dict[Server, None] = {}
        self._loaded_now: list[Server] = []
        self._homes: dict[str, Server] = {}
        """Where each trajectory's last turn ran: what is cached of it is there."""
        self._last: dict[str, Request] = {}
        """The request of each trajectory's last turn."""
        self._moves: dict[str, Move] = {}
        core.after_timer.append(self._settle)
        core.carry_out[act.Migrate] = self._migrate
        core.carry_out[act.RetainKV] = lambda a: self._hint(a.trajectory, a.worker, RETAINED)
        core.carry_out[act.ReleaseKV] = lambda a: self._hint(a.trajectory, a.worker, RELEASED)

    def start(self) -> None:
        for server in self.servers.values():
            self._report_up(server)
            self._schedule_death(server)
        if self._spec.measure_every_s is not None:
            self._core.later(self._spec.measure_every_s, self._measure, self._spec.measure_every_s)
        tokens_every_s = self._core.scheduler.policy.tokens_every_s
        if tokens_every_s is not None:
            self._core.later(tokens_every_s, self._tell_tokens, tokens_every_s)

    # --- requests -------------------------------------------------------------------------------------------
    def submit(self, request: Request, worker: str, urgency: int) -> int:
        """The version with which the worker generates."""
        server = self.servers[worker]
        if not server.up:
            raise PolicyFault(f"{request.trajectory} is sent to {worker}, which is down")
        self._give_up_move(request.trajectory)
        self._homes[request.trajectory] = server
        self._last[request.trajectory] = request
        server.engine.submit(request, urgency, self._core.now)
        self._touch(server)
        return server.version

    def withdraw(self, trajectory: str) -> Request | None:
        """Abort its request by the submitter's wish. None if none is running."""
        server = self._homes.get(trajectory)
        if server is None:
            return None
        request = server.engine.abort(trajectory, self._core.now)
        if request is not None:
            self._touch(server)
        return request

    def forget(self, trajectory: str) -> None:
        """The trajectory is over and has no request; what is cached of it stays until evicted."""
        self._give_up_move(trajectory)
        server = self._homes.pop(trajectory, None)
        self._last.pop(trajectory, None)
        if server is not None:
            server.engine.cache.forget(trajectory)

    def _hint(self, trajectory: str, worker: str, rank: int) -> None:
        server = self.servers[worker]
        if server.up:
            server.engine.cache.rank(trajectory, rank)

    # --- the engines' own time ---------------------------------------------------------------------------------
    def _touch(self, server: Server) -> None:
        self._dirty[server] = None

    def _settle(self) -> None:
        """Once for all changes of this instant."""
        if not self._dirty:
            return
        core = self._core
        for server in self._dirty:
            engine = server.engine
            engine.settle(core.now)
            if server.next is not None:
                server.next.cancel()
            due = engine.next_at()
            server.next = None if due is None else core.at(due, self._fire, server)
        self._dirty.clear()
        self._load_drained()

    def _fire(self, server: Server) -> None:
        self._core.worked()
        ended = server.engine.fire(self._core.now)
        self._touch(server)
        server.engine.settle(self._core.now)
        for request in ended:
            self._turns.finished(request)

    def _measure(self, every_s: float) -> None:
        self._core.popped += 1
        for server in self.servers.values():
            if server.up:
                engine = server.engine
                engine.advance(self._core.now)
                used = round(engine.kv_running + engine.cache.idle)
                self._core.report(ev.WorkerMeasured(engine.name, engine.running, engine.queued, used))
        self._core.later(every_s, self._measure, every_s)

    def _tell_tokens(self, every_s: float) -> None:
        self._core.popped += 1
        news = [told for server in self.servers.values() for told in server.engine.news(self._core.now)]
        if news:
            turn = self._turns.turn
            self._core.report(*(ev.TokensGenerated(name, turn(name), count) for name, count in news))
        self._core.later(every_s, self._tell_tokens, every_s)

    # --- new weights ------------------------------------------------------------------------------------------
    def publish(self, version: int) -> None:
        """The scheduler knows of the version; now bring it to the workers."""
        self.published = version
        up = [server for server in self.servers.values() if server.up]
        mode = self._spec.weight_update
        if mode in ("drain", "turn_boundary"):
            for server in up:
                self._draining[server] = None
                self._core.report(ev.WorkerDraining(server.engine.name))
            self._load_drained()
            return
        for server in up:
            if not server.loading:
                server.engine.pause(self._core.now)
        if mode == "abort":
            self._abort_all(up)
        for server in up:
            if not server.loading:
                self._load(server)

    def _abort_all(self, servers: Iterable[Server]) -> None:
        aborted = [request for server in servers for request in server.engine.abort_all(self._core.now)]
        for request in aborted:
            self._turns.aborted(request)

    def _load_drained(self) -> None:
        """Weights of workers that have come to rest (``drain``: once all of them have)."""
        waiting = [s for s in self._draining if s.up and not s.loading]
        if not waiting:
            return
        if self._spec.weight_update == "drain" and any(s.engine.requests for s in self.servers.values()):
            return
        for server in waiting:
            if not server.engine.requests:
                server.engine.pause(self._core.now)
                self._load(server)

    def _load(self, server: Server) -> None:
        server.loading = True
        self._touch(server)
        self._core.later(self._spec.load_s, self._loaded, server, server.life, self.published)

    def _loaded(self, server: Server, life: int, version: int) -> None:
        if life != server.life or not server.up:
            return
        self._core.worked()
        server.version = version
        server.loading = False
        if self._flushes:
            server.engine.cache.flush()
        if version < self.published:
            self._load(server)
            return
        self._draining.pop(server, None)
        server.engine.resume(self._core.now)
        self._touch(server)
        # Timers of one instant fire in the order of their creation: the workers that loaded together come first.
        if not self._loaded_now:
            self._core.later(0.0, self._acknowledge)
        self._loaded_now.append(server)

    def _acknowledge(self) -> None:
        """The workers that took weights at this instant say so together."""
        self._core.popped += 1
        loaded, self._loaded_now = [s for s in self._loaded_now if s.up], []
        self._core.report(*(ev.WorkerAcknowledged(s.engine.name, s.version, self._flushes) for s in loaded))

    # --- deaths -----------------------------------------------------------------------------------------------
    def _schedule_death(self, server: Server) -> None:
        mean = self._failures.worker_mtbf_s
        if mean is not None:
            draw = random.Random(f"{self._seed}/death/{server.engine.name}/{server.life}")
            self._core.later(draw.expovariate(1 / mean), self._die, server)

    def _die(self, server: Server) -> None:
        self._core.popped += 1
        engine, now = server.engine, self._core.now
        server.up = server.loading = False
        self._draining.pop(server, None)
        server.life += 1
        lost = engine.abort_all(now)
        engine.resume(now)
        self._touch(server)
        self._core.report(ev.WorkerDown(engine.name))
        for request in lost:
            self._turns.aborted(request)
        self._core.later(self._failures.worker_restart_s, self._restart, server)

    def _restart(self, server: Server) -> None:
        self._core.popped += 1
        server.up = True
        server.version = self.published
        self._report_up(server)
        self._schedule_death(server)

    def _report_up(self, server: Server) -> None:
        e = server.engine
        self._core.report(ev.WorkerUp(e.name, e.capacity, e.spec.slots, server.version, e.costs))

    # --- transfers ----------------------------------------------------------------------------------------------
    def _migrate(self, action: act.Migrate) -> None:
        source, target = self._homes.get(action.trajectory), self.servers[action.worker]
        if source is None or action.trajectory in source.engine.requests:
            raise PolicyFault(f"{action.trajectory} is to be moved and does not idle on any worker")
        if source.engine.costs.transfer_token_s is None:
            raise PolicyFault(f"{action.trajectory} is to be moved in a fleet that prices no transfer of KV")
        self._give_up_move(action.trajectory)
        own = source.engine.cache.own(action.trajectory)
        if source is target or not (own and source.up and target.up):
            self._core.report(ev.KVTransferred(action.trajectory, action.worker, 0))
            return
        path = self._last[action.trajectory].path
        tokens = own + target.engine.cache.lacking(path)
        move = self._moves[action.trajectory] = Move(action.trajectory, path, target)
        begin = max(self._core.now, source.link_free_at)
        source.link_free_at = begin + source.engine.costs.transfer_s(tokens)
        self._core.at(source.link_free_at, self._moved, move, source, source.life)

    def _moved(self, move: Move, source: Server, life: int) -> None:
        if self._moves.get(move.trajectory) is not move:
            return
        self._core.worked()
        del self._moves[move.trajectory]
        own = source.engine.cache.own(move.trajectory)
        alive = source.life == life and move.target.life == move.life and move.target.up
        target = move.target.engine
        taken = bool(alive and own) and target.receive(move.trajectory, move.path, own, self._core.now)
        if taken:
            source.engine.cache.drop(move.trajectory)
            self._homes[move.trajectory] = move.target
            move.target.migrated.append(own)
            self._touch(move.target)
        self._core.report(ev.KVTransferred(move.trajectory, target.name, own if taken else 0))

    def _give_up_move(self, trajectory: str) -> None:
        """Its next turn did not wait for the transfer, or it is over."""
        move = self._moves.pop(trajectory, None)
        if move is not None:
            self._core.report(ev.KVTransferred(trajectory, move.target.engine.name, 0))
