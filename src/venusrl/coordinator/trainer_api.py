"""The door through which a trainer takes batches and gives back weights (``docs/architecture.md``, Trainer API).

Owns: three HTTP routes on the loopback interface, their bearer key, and the waiting of long polls.

Must not know: how a batch is chosen, what a trainer is: ours and anybody else's look the same from here.

Guarantees:
- A batch is in the store before it is served, and the same question gets the same batch, whoever asks again.
- ``trained`` is recorded before it is answered; repeating it changes nothing and is answered alike.
- No poll outlives its own ``wait_s``, the end of the run or ``close``; an empty answer names what is waited for.
- What fails on our side (a full disk, a fault in ``on_trained``) is told to the trainer and raised from
  ``wait_failed``, so that the run ends with the original cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from venusrl.coordinator.errors import RunFailed, StoreConflict, StoreError, StoreFull
from venusrl.coordinator.store import RunStore, TrainedReport

MSGPACK = "application/msgpack"
LONGEST_POLL_S = 120.0
_BODY_BYTES = 1 << 20
_CLOSE_S = 2.0
_INSUFFICIENT_STORAGE = 507

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TrainerApi:
    """``start`` it, tell it of every formed batch, ``finish`` it when the run is over, ``close`` it.

    ``on_trained(report, news)`` runs on the event loop once the report is in the store; ``news`` is false when
    it was there already. ``waiting_for()`` says in a few words why there is no batch yet.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        key: str,
        max_steps: int,
        on_trained: Callable[[TrainedReport, bool], None],
        waiting_for: Callable[[], str],
    ) -> None:
        if not key:
            raise ValueError("the trainer API needs a key")
        self._store = store
        self._authorization = f"Bearer {key}".encode()
        self._max_steps = max_steps
        self._on_trained = on_trained
        self._waiting_for = waiting_for
        self.greeted = False
        """Whether a trainer has asked for anything; whoever sees it end says that it has not any more."""
        self._over: str | None = None
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._runner: web.AppRunner | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Where it serves; empty before ``start``."""
        return self._url

    async def start(self, port: int = 0) -> str:
        """Serve on 127.0.0.1 (``port`` 0: any free one) and return the address. Raises RunFailed if it cannot."""
        app = web.Application(middlewares=[self._authorized], client_max_size=_BODY_BYTES)
        app.router.add_get("/v1/trainer/batch", self._batch)
        app.router.add_post("/v1/trainer/trained", self._trained)
        app.router.add_get("/v1/trainer/state", self._state)
        self._failed = asyncio.get_running_loop().create_future()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        except OSError as error:
            await self.close()
            raise RunFailed(f"the trainer API cannot serve on port {port}: {error}", "port_in_use") from error
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self._url

    async def close(self) -> None:
        """Answer the open polls and stop serving, in bounded time. Idempotent."""
        self.finish("the coordinator stops")
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def notify_batch_ready(self) -> None:
        """A batch was recorded: let the polls look again."""
        self._wake()

    def finish(self, reason: str) -> None:
        """The run is over: from now on polls are answered 410 with ``reason``. The first reason stays."""
        if self._over is None:
            self._over = reason
        self._wake()

    async def wait_failed(self) -> None:
        """Raise what went wrong on our side, if ever; for a supervisor. Returns after ``close``."""
        if self._failed is None:
            raise RunFailed("the trainer API was not started", "internal")
        await asyncio.shield(self._failed)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @web.middleware
    async def _authorized(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"}, text="a bearer key is needed")
        self.greeted = True
        return await handler(request)

    async def _batch(self, request: web.Request) -> web.Response:
        try:
            version = int(request.query["version"])
            wait_s = float(request.query.get("wait_s", "0"))
        except (KeyError, ValueError):
            return _bad("ask with ?version=N&wait_s=S")
        if version < 0 or not (wait_s >= 0 and math.isfinite(wait_s)):
            return _bad("version and wait_s must not be negative")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, LONGEST_POLL_S)):
                await self._until_answerable(version)
        if self._over is not None:
            return web.Response(status=410, text=self._over)
        if self._store.batch_record(version) is not None:
            return await self._serve(version)
        return web.Response(status=204, headers={"X-Waiting-For": _header(self._waiting_for())})

    async def _until_answerable(self, version: int) -> None:
        while True:
            changed = self._changed  # taken before looking, so that no change is missed
            if self._over is not None or self._store.batch_record(version) is not None:
                return
            await changed.wait()

    async def _serve(self, version: int) -> web.Response:
        # Reading megabytes back is no work for the event loop.
        try:
            body = await asyncio.to_thread(self._store.batch_bytes, version)
        except StoreError as error:
            return self._fail(error)
        return web.Response(body=body, content_type=MSGPACK)

    async def _trained(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            report = _decoded(body, request.content_type)
        except msgspec.MsgspecError as error:
            return _bad(f"not a report: {error}")
        try:
            news = self._store.mark_trained(report)
        except StoreConflict as error:
            return web.Response(status=409, text=str(error))
        except StoreError as error:
            return self._fail(error)
        try:
            self._on_trained(report, news)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must end the run and not just this request
            return self._fail(error)
        return web.Response(status=204)

    async def _state(self, request: web.Request) -> web.Response:
        state = {"version": self._store.current_version(), "max_steps": self._max_steps}
        if "json" in request.headers.get("Accept", ""):
            return web.json_response(state)
        return web.Response(body=msgspec.msgpack.encode(state), content_type=MSGPACK)

    def _fail(self, error: Exception) -> web.Response:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
        status = _INSUFFICIENT_STORAGE if isinstance(error, StoreFull) else 500
        return web.Response(status=status, text=f"{type(error).__name__}: {error}")


def _decoded(body: bytes, content_type: str) -> TrainedReport:
    decode: Any = msgspec.json.decode if content_type == "application/json" else msgspec.msgpack.decode
    report: TrainedReport = decode(body, type=TrainedReport)
    return report


def _bad(text: str) -> web.Response:
    return web.Response(status=400, text=text)


def _header(text: str) -> str:
    """One printable ASCII line, which is all that a header can carry."""
    return json.dumps(" ".join(text.split()))[1:-1][:500] or "unknown"
