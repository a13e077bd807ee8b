"""The engine workers of a run: started, brought to the newest weights, watched, started again.

Owns: ``EnginePool``, the life of every worker from its start to its end, and the count of restarts that a run
allows. How an engine is started is a ``EngineStarter``'s affair (``engines.py``).

Must not know: trajectories, how weights travel (``publish.py``).

Guarantees: a worker is announced (``WorkerUp``) only once it serves the newest weights, so that nobody waits
for a version that no engine was ever told (T08); what its work takes is told once it is learned; one that dies, hangs
or does not take weights in time is announced (``WorkerDown``), stopped for good, and started again; when the allowance
is spent the run fails with the original cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from venusrl.coordinator.errors import CoordinatorError, RunFailed
from venusrl.coordinator.publish import WeightPublisher, Weights
from venusrl.rollout.engines.protocol import EngineClient, EngineError, EngineLoad
from venusrl.scheduling.calibration import differ
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.events import Event, WorkerCalibrated, WorkerDown, WorkerMeasured, WorkerUp

_log = logging.getLogger(__name__)

_MEASURE_EVERY_S = 1.0
_SILENT_LIMIT = 3
"""Unanswered measurements in a row after which a worker counts as hung."""


class RunningEngine(Protocol):
    """One incarnation of an engine worker."""

    @property
    def client(self) -> EngineClient: ...

    async def wait_exit(self) -> str:
        """Return, once the engine is gone, why."""
        ...

    async def stop(self) -> None:
        """End it for good (bounded) and close its client. Idempotent."""
        ...


class EngineStarter(Protocol):
    """Starts engine workers."""

    async def start(self, name: str, weights: Weights) -> RunningEngine:
        """Start one that serves ``weights``; ready when this returns. Raises EngineError, ProcessError."""
        ...


class WorkerState(msgspec.Struct):
    """What the live view shows of a worker. Mutable; owned by the pool."""

    name: str
    state: str = "starting"
    restarts: int = 0
    load: EngineLoad | None = None
    costs: EngineCosts | None = None
    """What its work takes as the scheduler was told; kept over a restart, which changes nothing of it."""


class Allowance:
    """Restarts that a run may spend, shared by whoever is told to share them."""

    def __init__(self, what: str, restarts: int) -> None:
        self._what = what
        self._restarts = restarts
        self.spent = 0

    def spend(self, name: str, cause: str) -> None:
        """Take one restart. Raises RunFailed with the cause when none is left."""
        if self.spent >= self._restarts:
            raise RunFailed(
                f"{name} failed and {self._what} = {self._restarts} restarts are used up; the last cause: {cause}",
                reason="engine_lost",
            )
        self.spent += 1


class EnginePool:
    """Keeps the named workers serving (see the module's guarantees)."""

    def __init__(
        self,
        names: Sequence[str],
        starter: EngineStarter,
        publisher: WeightPublisher,
        *,
        allowance: Allowance,
        notify: Callable[[Event], None],
        attach: Callable[[str, EngineClient, int], None],
        detach: Callable[[str], None],
        on_event: Callable[[str, dict[str, object]], None],
        measure_every_s: float = _MEASURE_EVERY_S,
    ) -> None:
        """``attach`` and ``detach`` tell the gateway; ``on_event(kind, fields)`` writes the run's record."""
        self.workers = {name: WorkerState(name) for name in names}
        self._starter = starter
        self._publisher = publisher
        self._allowance = allowance
        self._notify = notify
        self._attach = attach
        self._detach = detach
        self._on_event = on_event
        self._measure_every_s = measure_every_s
        self._broken: dict[str, asyncio.Future[str]] = {}
        self._clients: dict[str, EngineClient] = {}

    @property
    def serving(self) -> dict[str, EngineClient]:
        """The workers that serve now."""
        return dict(self._clients)

    @property
    def versions(self) -> Mapping[str, int]:
        """What each serving worker generates with."""
        return self._publisher.versions

    def broken(self, name: str, error: EngineError) -> None:
        """Somebody found the worker unusable: it is replaced."""
        found = self._broken.get(name)
        if found is not None and not found.done():
            found.set_result(str(error))

    async def keep(self, name: str) -> None:
        """Keep one worker alive until cancelled. Raises RunFailed when its restarts are used up."""
        worker = self.workers[name]
        while True:
            cause = await self._live(worker)
            worker.state, worker.load = "restarting", None
            _log.warning("engine worker %s is gone: %s", name, cause)
            self._on_event("worker_down", {"worker": name, "cause": cause})
            self._allowance.spend(f"engine worker {name}", cause)
            worker.restarts += 1

    async def _live(self, worker: WorkerState) -> str:
        """One incarnation from start to end; returns why it ended."""
        weights = self._publisher.current
        if weights is None:
            raise RunFailed("engine workers were started before there were weights", reason="internal")
        try:
            engine = await self._starter.start(worker.name, weights)
        except (EngineError, CoordinatorError) as error:
            return str(error)
        self._broken[worker.name] = asyncio.get_running_loop().create_future()
        try:
            return await self._serve(worker, engine, weights)
        finally:
            await self._down(worker, engine)

    async def _serve(self, worker: WorkerState, engine: RunningEngine, weights: Weights) -> str:
        name = worker.name
        try:
            load = await engine.client.load()
        except EngineError as error:
            return str(error)
        worker.state, worker.load = "serving", load
        self._clients[name] = engine.client
        self._attach(name, engine.client, weights.version)
        self._notify(WorkerUp(name, load.kv_capacity, load.slots, weights.version, worker.costs))
        self._publisher.add(name, engine.client, weights.version)
        up = {"worker": name, "version": weights.version, "restarts": worker.restarts}
        self._on_event("worker_up", {**up, "kv_order": "scheduler" if engine.client.kv_control else "engine"})
        ends = {
            asyncio.create_task(engine.wait_exit(), name=f"exit:{name}"),
            asyncio.create_task(self._measure(worker, engine.client), name=f"measure:{name}"),
            asyncio.ensure_future(self._broken[name]),
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(sorted(end.result() for end in done))
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _measure(self, worker: WorkerState, client: EngineClient) -> str:
        """Follow the worker's load; returns when it stopped answering."""
        silent, words = 0, ""
        while silent < _SILENT_LIMIT:
            await asyncio.sleep(self._measure_every_s)
            try:
                load = await client.load()
            except EngineError as error:
                silent, words = silent + 1, str(error)
                continue
            silent, worker.load = 0, load
            self._notify(WorkerMeasured(worker.name, load.running, load.waiting, load.kv_used))
            self._calibrate(worker, load)
        return f"it does not answer: {words}"

    def _calibrate(self, worker: WorkerState, load: EngineLoad) -> None:
        """Hand on what the worker's work takes when it is known, or known to be notably otherwise."""
        learned = load.learned
        if learned is None or not differ(worker.costs, learned.costs, max(1, load.slots // 2), load.kv_capacity // 2):
            return
        worker.costs = learned.costs
        self._notify(WorkerCalibrated(worker.name, learned.costs))
        self._on_event("worker_calibrated", {"worker": worker.name, **msgspec.to_builtins(learned)})

    async def _down(self, worker: WorkerState, engine: RunningEngine) -> None:
        worker.state = "down"
        if self._clients.pop(worker.name, None) is not None:
            self._notify(WorkerDown(worker.name))
            await self._publisher.remove(worker.name)
            self._detach(worker.name)
        await engine.stop()
