"""The embedded engine behind vLLM's HTTP surface.

Owns: the routes, the bearer key, the loop that steps the engine between requests.

Must not know: tensors, how the engine decides.

Guarantees: everything runs on one thread, so that every call sees the engine between two steps. A request
whose client went away is aborted. When a step fails, every open request and every later call is answered 503
with the cause (``/health``: 500), and ``Server.run`` raises it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from venusrl.rollout.engines import wire
from venusrl.rollout.engines.embedded.engine import Ended, Engine, Refused
from venusrl.rollout.engines.embedded.model import ModelUnusable
from venusrl.rollout.engines.metrics import write_load
from venusrl.types import SamplingParams

_T = TypeVar("_T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LOOP_TURNS = 4
"""Turns of the event loop between two steps: enough to accept, read and start a request."""
_MAX_BODY_BYTES = 64 << 20
_FAREWELL_S = 0.5
"""Time for the last answers to leave when the engine has failed."""


class EngineFailed(Exception):
    """A step of the engine failed; the cause is chained."""


class Server:
    """Serve ``engine`` as ``model_name`` to holders of ``api_key``."""

    def __init__(self, engine: Engine, api_key: str, model_name: str) -> None:
        self._engine = engine
        self._key = api_key
        self._model_name = model_name
        self._work = asyncio.Event()
        self._failure: str | None = None

    async def run(self, port: int, on_bound: Callable[[int], None], stop: asyncio.Event) -> None:
        """Serve on 127.0.0.1:``port`` (0 = any, told to ``on_bound``) until ``stop``. Raises EngineFailed."""
        runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=_FAREWELL_S)
        await runner.setup()
        tasks: list[asyncio.Task[object]] = []
        try:
            site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
            await site.start()
            on_bound(runner.addresses[0][1])
            tasks = [asyncio.create_task(self._drive(), name="drive"), asyncio.create_task(stop.wait(), name="stop")]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                await asyncio.sleep(_FAREWELL_S)
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._engine.fail("the engine is shutting down")
            await runner.cleanup()

    async def _drive(self) -> None:
        while True:
            if self._engine.idle:
                self._work.clear()
                await self._work.wait()
            try:
                self._engine.step()
            except Exception as error:  # any failure of a step ends the engine, and is told to everybody who waits
                self._failure = f"the engine failed: {type(error).__name__}: {error}"
                self._engine.fail(self._failure)
                raise EngineFailed(self._failure) from error
            for _ in range(_LOOP_TURNS):
                await asyncio.sleep(0)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get(wire.HEALTH, self._health),
                web.get(wire.METRICS, self._metrics),
                web.get(wire.MODELS, self._models),
                web.get(wire.IS_PAUSED, self._is_paused),
                web.get(wire.WEIGHT_INFO, self._weight_info),
                web.post(wire.GENERATE, self._generate),
                web.post(wire.ABORT, self._abort),
                web.post(wire.PAUSE, self._pause),
                web.post(wire.RESUME, self._resume),
                web.post(wire.COLLECTIVE_RPC, self._collective_rpc),
                web.post(wire.UPDATE_WEIGHT_VERSION, self._update_weight_version),
                web.post(wire.RESET_PREFIX_CACHE, self._reset_prefix_cache),
                web.post(wire.KV_ORDER, self._kv_order),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path != wire.HEALTH and not self._authorised(request):
            return _error(401, "this engine needs its bearer key")
        if self._failure is not None:
            return _error(500 if request.path == wire.HEALTH else 503, self._failure)
        try:
            return await handler(request)
        except (msgspec.DecodeError, Refused) as error:
            return _error(400, str(error))
        except ModelUnusable as error:
            return _error(500, str(error))

    def _authorised(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode())

    # --- requests -----------------------------------------------------------------------------------
    async def _generate(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.WireGenerate)
        params = body.sampling_params
        if body.stream or not params.ignore_eos or params.logprobs not in (0, 1):
            raise Refused("this engine answers whole (stream=false), with ignore_eos=true and logprobs=0 or 1")
        sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop_token_ids=tuple(params.stop_token_ids),
            seed=params.seed,
        )
        outcome: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        request_id = wire.external_id(body.request_id)
        self._engine.submit(
            request_id,
            body.token_ids,
            params.max_tokens,
            sampling,
            lambda ended: None if outcome.done() else outcome.set_result(ended),
            priority=body.priority,
            salt=body.cache_salt or "",
            session=body.session_id,
        )
        self._work.set()
        try:
            ended = await outcome
        except asyncio.CancelledError:  # the client went away
            self._engine.abort([request_id])
            raise
        return _error(503, ended.error) if ended.error else _json(_answer(body, ended))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.WireAbort)
        count = self._engine.abort(body.request_ids or None)
        return _json({"status": "aborted", "aborted": count})

    # --- control ------------------------------------------------------------------------------------
    async def _pause(self, request: web.Request) -> web.Response:
        mode, clear = request.query.get("mode", "abort"), request.query.get("clear_cache", "true")
        if mode != "keep" or clear.lower() not in ("false", "0"):
            raise Refused(
                f"this engine pauses with mode=keep&clear_cache=false only, not mode={mode}&clear_cache={clear}"
            )
        self._engine.paused = True
        return _json({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._engine.paused = False
        self._work.set()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json(wire.WirePaused(self._engine.paused))

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.WireRpc)
        if body.method != "reload_weights" or set(body.kwargs) != {"weights_path"}:
            raise Refused(f"this engine knows reload_weights(weights_path) only, not {body.method}")
        self._engine.reload(Path(body.kwargs["weights_path"]))
        return _json({"results": [None]})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.WireVersion)
        self._engine.version = body.new_version
        return _json({"success": True, "new_version": body.new_version})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json(wire.WireWeightInfo(self._engine.version))

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._engine.reset_prefix_cache()
        return _json({"success": True})

    async def _kv_order(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.WireKvOrder)
        self._engine.order_kv(body.release, body.retain)
        return _json({"success": True})

    async def _models(self, request: web.Request) -> web.Response:
        return _json(wire.WireModels([wire.WireModel(self._model_name, self._engine.config.context_tokens)]))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = self._engine
        text = write_load(
            engine.load(),
            page_size=engine.config.page_tokens,
            cached_tokens_total=engine.cached_tokens_total,
            preemptions_total=engine.preemptions,
        )
        return web.Response(text=text)


def _answer(body: wire.WireGenerate, ended: Ended) -> wire.WireGenerated:
    sequence = ended.sequence
    tokens = sequence.tokens[sequence.prompt_tokens :]
    entries = [wire.WireLogprob(t, p) for t, p in zip(tokens, sequence.logprobs, strict=True)]
    choice = wire.WireChoice(
        index=0,
        token_ids=tokens,
        finish_reason=ended.finish,
        stop_reason=tokens[-1] if ended.finish == "stop" else None,
        logprobs=wire.WireLogprobs(entries),
        weight_versions=_spans(sequence.versions),
    )
    prompt, completion = sequence.prompt_tokens, len(tokens)
    details = wire.WirePromptDetails(sequence.cached_tokens)
    usage = wire.WireUsage(prompt, completion, prompt + completion, details)
    return wire.WireGenerated(body.request_id, [choice], usage)


def _spans(versions: list[str]) -> list[wire.WireSpan]:
    starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    return [wire.WireSpan(versions[a], a, b) for a, b in zip(starts, [*starts[1:], len(versions)], strict=True)]


async def _read(request: web.Request, kind: type[_T]) -> _T:
    return msgspec.json.decode(await request.read(), type=kind)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    names = {400: "BadRequestError", 401: "Unauthorized", 500: "InternalServerError", 503: "ServiceUnavailable"}
    body = wire.WireError(wire.WireErrorInfo(message, names[status], status))
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
