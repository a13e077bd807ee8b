"""A coordinator that a trainer can be tried against: the trainer API over a list of batches, nothing behind it.

Owns: the three routes of the trainer API with made-up batches, what was reported, and faults on demand.

Guarantees: every answer has the shape of the real one; what was reported is kept in order, repeats included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from venusrl.types import Batch

MSGPACK = "application/msgpack"


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    batch_id: str
    version: int
    model_path: str
    checkpointed: bool
    metrics: dict[str, float]


class FakeTrainerApi:
    """Serves ``make(version)`` for every version below ``last``, then says that the run is over.

    ``on_report`` is called before a report is recorded and may raise ``web.HTTPException`` or block the answer;
    ``hold`` names a version whose batch is not ready yet.
    """

    def __init__(self, make: Callable[[int], Batch], *, last: int, key: str = "key") -> None:
        self._make = make
        self._last = last
        self._key = key
        self._over: str | None = None
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.version = 0
        self.hold: int | None = None
        self.asked: list[int] = []
        self.reports: list[Report] = []
        self.on_report: Callable[[Report], None] | None = None
        self.changed = asyncio.Event()
        """Set at every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve; again on the same port after ``stop``."""
        app = web.Application(middlewares=[self._authorized])
        app.router.add_get("/v1/trainer/batch", self._batch)
        app.router.add_post("/v1/trainer/trained", self._trained)
        app.router.add_get("/v1/trainer/state", self._state)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def end(self, reason: str | None) -> None:
        """From now on every poll is told that the run is over (None: not any more)."""
        self._over = reason

    async def until(self, condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
        """Wait until requests have made ``condition`` true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.Response(status=401, text="a bearer key is needed")
        try:
            return await handler(request)  # type: ignore[misc,no-any-return]
        finally:
            self.changed.set()

    async def _batch(self, request: web.Request) -> web.Response:
        version = int(request.query["version"])
        self.asked.append(version)
        if self._over is not None or version >= self._last:
            return web.Response(status=410, text=self._over or "all steps are trained")
        if version == self.hold or version > self.version:
            self.changed.set()
            await asyncio.sleep(min(0.2, float(request.query["wait_s"])))
            return web.Response(status=204, headers={"X-Waiting-For": "a group to complete"})
        return web.Response(body=msgspec.msgpack.encode(self._make(version)), content_type=MSGPACK)

    async def _trained(self, request: web.Request) -> web.Response:
        report = msgspec.msgpack.decode(await request.read(), type=Report)
        if self.on_report is not None:
            self.on_report(report)
        self.reports.append(report)
        self.version = max(self.version, report.version)
        return web.Response(status=204)

    async def _state(self, request: web.Request) -> web.Response:
        state = {"version": self.version, "max_steps": self._last}
        return web.Response(body=msgspec.msgpack.encode(state), content_type=MSGPACK)
