"""A turn's request while it is at an engine: sent once, awaited, aborted until it let go.

Owns: request ids, the time limit of a request, aborts and their handles.

Must not know: trajectories, the scheduler, what becomes of the tokens.

Guarantees: ``outcome`` returns a generation or raises EngineError, within the time limit and a little more than
the grace time; after ``let_go`` the request has ended or the engine did not answer in time; no task is left
without a handle.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from venusrl.clock import Clock
from venusrl.rollout.engines.protocol import EngineClient, EngineError, EngineLost, GenerateRequest, Generation
from venusrl.rollout.recorder import Ask
from venusrl.rollout.settings import GatewaySettings
from venusrl.rollout.waiting import done_within

_ABORT_AGAIN_S = 1.0
"""An abort that overtakes its request finds nothing at the engine: it is sent again until the request ended."""


class Worker(msgspec.Struct):
    """An engine worker and the version it acknowledged; None: not yet."""

    name: str
    engine: EngineClient
    version: int | None


class Running(msgspec.Struct, frozen=True):
    """A request at an engine."""

    request_id: str
    worker: Worker
    task: asyncio.Task[Generation]

    @property
    def partial_tokens(self) -> int:
        """Tokens it ended with, as far as they are known."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return 0
        return len(self.task.result().token_ids)


class Requests:
    """Sends requests and lets go of them (see the module's guarantees)."""

    def __init__(self, settings: GatewaySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._count = 0
        self._nonce = uuid.uuid4().hex[:8]
        self._background: set[asyncio.Task[Any]] = set()

    def send(self, trajectory: str, turn: int, worker: Worker, ask: Ask, urgency: int) -> Running:
        """Send ``ask`` to ``worker`` now; the trajectory and its turn begin the request's id."""
        self._count += 1
        request = GenerateRequest(
            request_id=f"{trajectory}-{turn}-{self._count}-{self._nonce}",
            token_ids=ask.token_ids,
            max_tokens=ask.max_tokens,
            sampling=self._settings.sampling,
            urgency=urgency,
            cache_salt=f"v{worker.version}" if self._settings.salt_by_version else "",
            session=trajectory,
        )
        task = asyncio.create_task(worker.engine.generate(request), name=f"generate:{request.request_id}")
        return Running(request.request_id, worker, task)

    async def outcome(self, running: Running) -> Generation:
        """What the engine answered; past the time limit what it gave up. Raises EngineError."""
        limit = self._settings.turn_timeout_s
        if not await done_within(running.task, self._clock, limit):
            await self.let_go(running)
            if not running.task.done() or running.task.cancelled():
                raise EngineLost(f"engine worker {running.worker.name} held a turn longer than {limit:g} s")
        if running.task.cancelled():
            raise EngineLost(f"engine worker {running.worker.name} is gone")
        return running.task.result()

    async def let_go(self, running: Running) -> None:
        """Abort until the request ended with its partial tokens; past the grace time drop it without them."""
        await self._abort(running, self._settings.abort_grace_s)

    def start_letting_go(self, running: Running) -> None:
        """``let_go`` in the background."""
        self.keep(asyncio.create_task(self._abort(running, self._settings.abort_grace_s)))

    def preempt(self, running: Running) -> None:
        """Abort in the background; the request keeps its time limit, so its partial tokens are not lost."""
        self.keep(asyncio.create_task(self._abort(running, self._settings.turn_timeout_s)))

    async def ended(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Wait for tasks to end, whatever their outcome, for the grace time at most."""
        if tasks:
            all_of_them = asyncio.gather(*tasks, return_exceptions=True)
            await done_within(all_of_them, self._clock, self._settings.abort_grace_s)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await self.ended(list(self._background))

    async def _abort(self, running: Running, grace_s: float) -> None:
        abort: asyncio.Task[None] | None = None
        begun = self._clock.monotonic()
        while not running.task.done() and (left := begun + grace_s - self._clock.monotonic()) > 0:
            if abort is None or abort.done():
                abort = asyncio.create_task(_abort_once(running), name=f"abort:{running.request_id}")
                self.keep(abort)
            await done_within(running.task, self._clock, min(_ABORT_AGAIN_S, left))
        if not running.task.done():
            running.task.cancel()
            await done_within(running.task, self._clock, _ABORT_AGAIN_S)
            self.keep(running.task)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task's handle until it ends; its outcome is looked at so that none is reported as lost."""
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()


async def _abort_once(running: Running) -> None:
    try:
        await running.worker.engine.abort([running.request_id])
    except EngineError:
        # An engine that cannot abort is lost or broken: its generate call says so, or its time limit does.
        return
