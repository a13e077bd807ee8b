"""The one adapter between a run and an inference server: vLLM's HTTP surface, vLLM or embedded behind it.

Owns: ``HttpEngineClient``: requests, their timeouts, the mapping of answers and failures onto the contract
of ``protocol.py``.

Must not know: how a server is started or works, what its answers are used for.

Guarantees:
- Every call ends within its own timeout, as an answer, an ``EngineError`` with the server's own text, or an
  ``EngineLost``. A failed call leaves nothing behind that would keep the next attempt from working.
- Cancelling ``generate`` returns only after the request was aborted at the server (bounded), so that a retry
  never runs beside its orphan.
- The prefix cache is namespaced by weight version on top of the caller's salt, and requests wait here while the
  engine is paused: what begins after new weights were loaded never meets the KV of older ones.
- A cut by the context window comes back as ``CONTEXT``, never as a normal end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable
from typing import TypeVar

import aiohttp
import msgspec

from venusrl.rollout.engines import wire
from venusrl.rollout.engines.metrics import read_load
from venusrl.rollout.engines.protocol import EngineError, EngineLoad, EngineLost, GenerateRequest, Generation
from venusrl.scheduling.calibration import TurnLog
from venusrl.types import StopReason, VersionSpan

_T = TypeVar("_T")

_POLL_S = 0.05
_UNAVAILABLE = 503
_STOP = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


class HttpEngineClient:
    """One worker. Implements ``EngineClient``; make it inside a running event loop and ``close`` it."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        version: int = 0,
        slots: int = 1,
        context_tokens: int | None = None,
        control_timeout_s: float = 30.0,
        weight_timeout_s: float = 120.0,
        generate_timeout_s: float = 3600.0,
        abort_timeout_s: float = 5.0,
    ) -> None:
        """``version``: of the weights that the server was started with, named to it by ``wait_ready``.

        ``slots``: sequences it decodes at once (servers do not report it). ``context_tokens``: asked from the
        server when None. ``weight_timeout_s`` bounds each call of ``load_weights``; ``generate_timeout_s`` is the last
        resort against a server that never answers a turn.
        """
        self._base_url = base_url.rstrip("/")
        self._version = version
        self._slots = slots
        self._context_tokens = context_tokens
        self._control_timeout_s = control_timeout_s
        self._weight_timeout_s = weight_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._abort_timeout_s = abort_timeout_s
        self.kv_control = False
        self._log = TurnLog(slots)
        self._aborts: set[asyncio.Task[None]] = set()
        self._paused = False
        self._held: dict[str, asyncio.Future[bool]] = {}
        """Requests that wait for the end of a pause: True = send it, False = aborted."""
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"},
            # A connection a call: servers drop idle connections, and those on which they failed, without a word,
            # and a turn must not be taken for lost because it met one of them.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server serves, learn its context, name its weights. Raises EngineLost when it does not."""
        deadline = time.monotonic() + timeout_s
        words = "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                await self._call("GET", wire.HEALTH, timeout_s=min(left, self._control_timeout_s))
                if self._context_tokens is None:
                    self._context_tokens = await self._ask_context()
                if await self._weight_version() == wire.UNNAMED_VERSION:
                    await self._name_version(self._version)
            except EngineError as error:
                words = str(error)
            else:
                self.kv_control = await self._knows_kv_order()
                return
            await asyncio.sleep(_POLL_S)
        raise EngineLost(f"engine {self._base_url} was not ready within {timeout_s:g} s: {words}")

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``EngineClient.generate``."""
        context = self._context_tokens if self._context_tokens is not None else await self._learn_context()
        if len(request.token_ids) >= context:
            return Generation([], [], [], StopReason.CONTEXT)
        try:
            async with asyncio.timeout(self._generate_timeout_s):
                if not await self._may_start(request.request_id):
                    return Generation([], [], [], StopReason.ABORT)
                return await self._generate(request, context)
        except TimeoutError:
            await self._abort_orphan(request.request_id)
            limit = f"{self._generate_timeout_s:g} s"
            raise EngineError(
                f"engine {self._base_url} did not finish request {request.request_id} within {limit}"
            ) from None
        except asyncio.CancelledError:
            await self._abort_orphan(request.request_id)
            raise

    async def abort(self, request_ids: list[str]) -> None:
        """Ask the server to end these requests now; unknown ids are ignored."""
        if not request_ids:
            return  # An empty list would mean all of them.
        for request_id in request_ids:
            self._let_go(request_id, send=False)
        ids = [wire.external_id(r) for r in request_ids]
        await self._call("POST", wire.ABORT, wire.WireAbort(ids), timeout_s=self._abort_timeout_s)

    async def pause(self) -> None:
        """See ``EngineClient.pause``. Pausing twice is the same as once."""
        self._paused = True
        self._log.disturb()
        try:
            await self._call("POST", f"{wire.PAUSE}?mode=keep&clear_cache=false")
        except BaseException:  # whatever it is, cancellation too: raised again below
            self._open()
            raise

    async def resume(self) -> None:
        """Go on, in the engine and with the requests that wait here (which fail by themselves if it is gone)."""
        try:
            await self._call("POST", wire.RESUME)
        finally:
            self._open()

    async def is_paused(self) -> bool:
        return _decode(await self._call("GET", wire.IS_PAUSED), wire.WirePaused).is_paused

    async def load_weights(self, path: str, version: int) -> None:
        """See ``EngineClient.load_weights``. After a failure the server may hold either version: call again."""
        rpc = wire.WireRpc("reload_weights", {"weights_path": path})
        await self._call("POST", wire.COLLECTIVE_RPC, rpc, timeout_s=self._weight_timeout_s)
        await self._name_version(version)
        self._version = version

    async def reset_prefix_cache(self) -> None:
        """Free cached prefixes. What running requests hold stays (the version's namespace isolates it)."""
        await self._call("POST", wire.RESET_PREFIX_CACHE)

    async def order_kv(self, release: list[str], retain: list[str]) -> None:
        """See ``EngineClient.order_kv``. vLLM has no such control (``kv_control`` is False): EngineError."""
        await self._call("POST", wire.KV_ORDER, wire.WireKvOrder(release, retain))

    async def version(self) -> int:
        return _version_number(await self._weight_version())

    async def load(self) -> EngineLoad:
        text = await self._call("GET", wire.METRICS)
        try:
            return msgspec.structs.replace(read_load(text.decode(), self._slots), learned=self._log.estimate)
        except (KeyError, ValueError) as error:
            raise EngineError(f"engine {self._base_url} reports metrics that cannot be read: {error!r}") from error

    async def close(self) -> None:
        """Close the connections, after aborts under way (each bounded)."""
        self._open()
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=self._abort_timeout_s)
        await self._session.close()

    # --- requests -------------------------------------------------------------------------------
    async def _generate(self, request: GenerateRequest, context: int) -> Generation:
        """Send it, and note how long it took beside what else ran."""
        body, name = msgspec.json.encode(self._wire_request(request)), request.request_id
        self._log.begin(name, len(request.token_ids), time.monotonic(), request.urgency)
        try:
            answer = await self._exchange("POST", wire.GENERATE, body)
            generation = _generation(_decode(answer, wire.WireGenerated), len(request.token_ids), context)
        except BaseException:  # whatever it is, cancellation too: raised again
            self._log.lose(name, time.monotonic())
            raise
        whole = generation.stop is not StopReason.ABORT and len(generation.spans) == 1
        made = len(generation.token_ids)
        self._log.end(name, generation.cached_tokens, made, time.monotonic(), clean=whole)
        return generation

    async def _knows_kv_order(self) -> bool:
        try:
            await self.order_kv([], [])
        except EngineError:
            return False
        return True

    def _wire_request(self, request: GenerateRequest) -> wire.WireGenerate:
        sampling = request.sampling
        return wire.WireGenerate(
            request_id=request.request_id,
            token_ids=request.token_ids,
            sampling_params=wire.WireSampling(
                max_tokens=request.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            ),
            cache_salt=_salt(self._version, request.cache_salt),
            priority=-request.urgency,
            session_id=request.session if self.kv_control else "",
        )

    async def _may_start(self, request_id: str) -> bool:
        if not self._paused:
            return True
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._held[request_id] = held
        try:
            return await held
        finally:
            self._held.pop(request_id, None)

    def _open(self) -> None:
        self._paused = False
        for request_id in list(self._held):
            self._let_go(request_id, send=True)

    def _let_go(self, request_id: str, *, send: bool) -> None:
        held = self._held.get(request_id)
        if held is not None and not held.done():
            held.set_result(send)

    async def _abort_orphan(self, request_id: str) -> None:
        """Abort a request whose caller is gone; a second cancellation leaves the abort running, not the request."""
        task = asyncio.create_task(self._abort_quietly(request_id), name=f"abort:{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        await asyncio.shield(task)

    async def _abort_quietly(self, request_id: str) -> None:
        # An engine that cannot be told is gone or hung; closing the connection has told it what can be told.
        with contextlib.suppress(EngineError):
            await self.abort([request_id])

    async def _learn_context(self) -> int:
        self._context_tokens = await self._ask_context()
        return self._context_tokens

    async def _ask_context(self) -> int:
        models = _decode(await self._call("GET", wire.MODELS), wire.WireModels)
        lengths = [model.max_model_len for model in models.data if model.max_model_len]
        if not lengths:
            raise EngineError(f"engine {self._base_url} does not say how long its context is: pass context_tokens")
        return min(lengths)

    async def _weight_version(self) -> str:
        return _decode(await self._call("GET", wire.WEIGHT_INFO), wire.WireWeightInfo).weight_version

    async def _name_version(self, version: int) -> None:
        await self._call("POST", wire.UPDATE_WEIGHT_VERSION, wire.WireVersion(str(version)))

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        limit = self._control_timeout_s if timeout_s is None else timeout_s
        payload = b"" if body is None else msgspec.json.encode(body)
        return await self._within(limit, path, self._exchange(method, path, payload))

    async def _within(self, limit_s: float, path: str, call: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise EngineLost(f"engine {self._base_url} did not answer {path} within {limit_s:g} s") from None

    async def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} if body else None
        try:
            async with self._session.request(method, self._base_url + path, data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"engine {self._base_url} is gone ({type(error).__name__}): {error}") from error
        if response.status == _UNAVAILABLE:
            raise EngineLost(f"engine {self._base_url} no longer serves: {_words(answer)}")
        if response.status >= 400:
            raise EngineError(f"engine {self._base_url} answered {path} with {response.status}: {_words(answer)}")
        return answer


def _generation(answer: wire.WireGenerated, prompt_tokens: int, context: int) -> Generation:
    choice = answer.choices[0] if answer.choices else None
    if choice is None or choice.finish_reason not in _STOP:
        raise EngineError(f"the engine ended request {answer.request_id} in an unknown way: {choice}")
    tokens = choice.token_ids or []
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    if [entry.token_id for entry in entries] != tokens:
        raise EngineError(f"the log-probabilities of request {answer.request_id} are not those of its tokens")
    stop = _STOP[choice.finish_reason]
    if stop is StopReason.LENGTH and prompt_tokens + len(tokens) >= context:
        stop = StopReason.CONTEXT
    details = answer.usage.prompt_tokens_details if answer.usage else None
    spans = [VersionSpan(_version_number(s.version), s.start, s.end) for s in choice.weight_versions or []]
    if sum(span.end - span.start for span in spans) != len(tokens):
        raise EngineError(f"the weight versions of request {answer.request_id} do not cover its tokens: {spans}")
    return Generation(
        token_ids=tokens,
        logprobs=[entry.logprob for entry in entries],
        spans=spans,
        stop=stop,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
    )


def _salt(version: int, salt: str) -> str:
    """Servers limit a salt's length and characters; callers need not know."""
    return f"v{version}-{hashlib.sha256(salt.encode()).hexdigest()[:32]}" if salt else f"v{version}"


def _version_number(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise EngineError(f"the engine serves weights of an unnamed version {name!r}: call wait_ready first") from None


def _decode(answer: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine's answer cannot be read ({error}): {_words(answer)}") from error


def _words(answer: bytes) -> str:
    """The message of an error body in either of the two shapes servers use, else its beginning."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer, type=wire.WireError).error.message
    with contextlib.suppress(msgspec.DecodeError, KeyError):
        return str(msgspec.json.decode(answer, type=dict[str, object])["error"])
    return answer[:2000].decode(errors="replace").strip() or "(empty body)"
