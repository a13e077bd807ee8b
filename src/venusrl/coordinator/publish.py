"""Bringing new weights to the engine workers while they serve.

Owns: for every worker the loop that takes it from the version it has to the newest one, in one of three ways
(``drain``: no turn runs anywhere while weights change; ``turn_boundary``: none runs on that worker;
``in_flight``: paused in the middle, kept, resumed), and the clock on it.

Must not know: processes, trajectories, how an engine loads weights.

Guarantees: a version is announced (``VersionPublished``, so that stale work is cancelled) before any worker is
paused; every publish ends acknowledged, superseded by a newer one, or with the worker declared broken and the
engine's own words, within the time limit and never later; a paused worker is resumed whatever happens; one
slow or broken worker delays no other (after a drain, by ``_TOGETHER_S`` at most: those that are ready together are
announced together, so that one decision spreads what waited over all of them).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from venusrl.rollout.engines.protocol import EngineClient, EngineError, EngineLost
from venusrl.scheduling.events import (
    Event,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnDispatched,
    TurnFinished,
    TurnRequested,
    VersionPublished,
    WorkerAcknowledged,
    WorkerDown,
    WorkerDraining,
)

_RETRY_PAUSE_S = 0.2
_RESUME_TIMEOUT_S = 5.0
_TOGETHER_S = 1.0
"""How long a worker that is ready waits, after a drain, for the others to be announced with it."""


class PublishFailed(EngineError):
    """A worker did not take a version in time; the message carries the engine's own last words."""

    reason = "weight_sync_failed"


class Weights(msgspec.Struct, frozen=True):
    """A version and the directory it is in."""

    version: int
    path: Path


class PublishRecord(msgspec.Struct, frozen=True):
    """How one worker came to one version (seconds). ``preempted``: turns cut off to keep the time limit."""

    worker: str
    version: int
    drain_s: float
    load_s: float
    attempts: int
    preempted: int


class RunningTurns:
    """Which turn runs on which worker, from the events alone."""

    def __init__(self) -> None:
        self._turns: dict[str, tuple[str, int]] = {}
        self._changed = asyncio.Event()

    def observe(self, event: Event) -> None:
        if isinstance(event, TurnDispatched):
            self._turns[event.trajectory] = (event.worker, event.turn)
        elif isinstance(event, TurnFinished | TurnRequested | TrajectoryFailed | TrajectoryFinished):
            self._turns.pop(event.trajectory, None)
        elif isinstance(event, WorkerDown):
            self._turns = {t: at for t, at in self._turns.items() if at[0] != event.worker}
        else:
            return
        self._changed.set()

    def on(self, worker: str | None) -> list[tuple[str, int]]:
        """(trajectory, turn) running on ``worker``, or anywhere."""
        return [(t, turn) for t, (at, turn) in self._turns.items() if worker is None or at == worker]

    async def idle(self, worker: str | None) -> None:
        """Wait until nothing runs on ``worker``, or anywhere. The caller sets the time limit."""
        while self.on(worker):
            self._changed.clear()
            await self._changed.wait()


class _Worker:
    def __init__(self, name: str, client: EngineClient, version: int) -> None:
        self.name = name
        self.client = client
        self.version = version
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class WeightPublisher:
    """Keeps every registered worker at the newest version (see the module's guarantees)."""

    def __init__(
        self,
        *,
        mode: str,
        timeout_s: float,
        running: RunningTurns,
        notify: Callable[..., None],
        preempt: Callable[[str, int], None],
        settle: Callable[[], Awaitable[None]],
        on_broken: Callable[[str, PublishFailed], None],
        on_record: Callable[[PublishRecord], None] = lambda record: None,
    ) -> None:
        """``notify(*events)`` reports what happens at one instant; ``preempt(trajectory, turn)`` aborts a turn;
        ``settle`` returns once cancelled work let go of its engine."""
        self._mode = mode
        self._timeout_s = timeout_s
        self._running = running
        self._notify = notify
        self._preempt = preempt
        self._settle = settle
        self._on_broken = on_broken
        self._on_record = on_record
        self._workers: dict[str, _Worker] = {}
        self._changed = asyncio.Event()
        self._ready: dict[str, WorkerAcknowledged] = {}
        """Workers that serve the newest version, of which nobody was told yet."""
        self._telling: asyncio.TimerHandle | None = None
        self.current: Weights | None = None

    def add(self, name: str, client: EngineClient, version: int) -> None:
        """Take care of a worker that serves ``version`` now."""
        worker = _Worker(name, client, version)
        self._workers[name] = worker
        worker.task = asyncio.create_task(self._keep(worker), name=f"publish:{name}")
        if self.current is not None and self.current.version != version:
            worker.wake.set()
        self._changed.set()

    async def remove(self, name: str) -> None:
        """Forget a worker that is gone."""
        worker = self._workers.pop(name, None)
        self._ready.pop(name, None)
        self._changed.set()
        if worker is not None and worker.task is not None:
            worker.task.cancel()
            await asyncio.wait([worker.task])

    async def publish(self, weights: Weights) -> None:
        """Make ``weights`` the newest; returns once announced and stale work has let go (workers follow)."""
        self.current = weights
        self._notify(VersionPublished(weights.version))
        if self._mode != "in_flight":
            for worker in self._workers.values():
                self._notify(WorkerDraining(worker.name))
        await self._settle()
        for worker in self._workers.values():
            worker.wake.set()

    async def wait_acknowledged(self, version: int, timeout_s: float) -> bool:
        """Wait until some worker is there and all that are there serve ``version`` or newer."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._workers or not self._all_serve(version):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def versions(self) -> Mapping[str, int]:
        return {name: worker.version for name, worker in self._workers.items()}

    async def close(self) -> None:
        for name in list(self._workers):
            await self.remove(name)
        self._tell()

    async def _keep(self, worker: _Worker) -> None:
        while True:
            await worker.wake.wait()
            worker.wake.clear()
            while self.current is not None and worker.version != self.current.version:
                try:
                    await self._bring(worker, self.current)
                except PublishFailed as error:
                    self._on_broken(worker.name, error)
                    return

    async def _bring(self, worker: _Worker, weights: Weights) -> None:
        """One publish to one worker: acknowledged, or superseded (returns), or PublishFailed."""
        begun = time.monotonic()
        deadline = begun + self._timeout_s
        preempted = 0 if self._mode == "in_flight" else await self._drain(worker, begun + self._timeout_s / 2)
        drained, attempts, words = time.monotonic(), 0, "the running turns did not end"
        while time.monotonic() < deadline:
            attempts += 1
            try:
                async with asyncio.timeout_at(_loop_time(deadline)):
                    await self._load(worker.client, weights)
            except EngineLost as error:
                raise PublishFailed(
                    f"engine worker {worker.name} was lost at version {weights.version}: {error}"
                ) from error
            except EngineError as error:
                words = str(error)
                await asyncio.sleep(min(_RETRY_PAUSE_S, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                words = f"no answer ({words})" if attempts > 1 else "no answer"
            else:
                self._acknowledge(worker, weights, drained - begun, time.monotonic() - drained, attempts, preempted)
                return
            if self.current is not None and self.current.version != weights.version:
                return
        raise PublishFailed(
            f"engine worker {worker.name} did not load version {weights.version} within {self._timeout_s:g} s: {words}"
        )

    def _acknowledge(
        self, worker: _Worker, weights: Weights, drain_s: float, load_s: float, attempts: int, preempted: int
    ) -> None:
        worker.version = weights.version
        self._on_record(PublishRecord(worker.name, weights.version, drain_s, load_s, attempts, preempted))
        # Clients namespace the prefix cache by version: what idles there is found by nobody any more.
        self._ready[worker.name] = WorkerAcknowledged(worker.name, weights.version, flushed=True)
        if self._mode != "drain" or self._all_serve(weights.version):
            self._tell()
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(_TOGETHER_S, self._tell)
        self._changed.set()

    def _all_serve(self, version: int) -> bool:
        return all(worker.version >= version for worker in self._workers.values())

    def _tell(self) -> None:
        """Where nothing runs while weights change, the first to be ready would else get every turn that waits."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        ready, self._ready = list(self._ready.values()), {}
        if ready:
            self._notify(*ready)

    async def _load(self, client: EngineClient, weights: Weights) -> None:
        await client.pause()
        try:
            await client.load_weights(str(weights.path), weights.version)
            if self._mode != "in_flight":
                # Nothing runs: free what the old version left. (In flight, the per-version salt isolates it.)
                await client.reset_prefix_cache()
        except BaseException:  # whatever it is, cancellation too: raised again below
            await _resume_after_failure(client)
            raise
        await client.resume()

    async def _drain(self, worker: _Worker, deadline: float) -> int:
        """Wait until no turn runs where none may; past ``deadline`` cut off those that still do."""
        where = None if self._mode == "drain" else worker.name
        if await self._idle(where, deadline):
            return 0
        stragglers = self._running.on(where)
        for trajectory, turn in stragglers:
            self._preempt(trajectory, turn)
        await self._idle(where, deadline + self._timeout_s / 4)
        return len(stragglers)

    async def _idle(self, where: str | None, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                await self._running.idle(where)
        except TimeoutError:
            return False
        return True


async def _resume_after_failure(client: EngineClient) -> None:
    try:
        async with asyncio.timeout(_RESUME_TIMEOUT_S):
            await client.resume()
    except (EngineError, TimeoutError):
        return  # The failure that brought us here is the one to tell; a dead engine needs no resume.


def _loop_time(deadline: float) -> float:
    """A ``time.monotonic`` instant on the running loop's clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()
