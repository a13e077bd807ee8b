"""An inference server in memory, for tests and for trying agents without a model.

Owns: ``FakeEngine`` (implements ``EngineClient``) and ``ScriptedModel`` (answers by rule). Time is a sequence
of ticks: on each, every running request gets ``tokens_per_tick`` tokens.

Must not know: who asks; clocks (pacing is an argument).

Guarantees: pause, abort, weight loading, version spans and prefix reuse behave as the contract says. The
prefix cache remembers which version computed each token and, like vLLM's, is namespaced by salt alone: a
caller that lets KV of two versions meet is counted in ``cross_version_hits``. Log-probabilities are a pure
function of the token and the version that sampled it (``fake_logprob``), so recorded ones can be checked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from venusrl.rollout.engines.protocol import EngineError, EngineLoad, EngineLost, GenerateRequest, Generation
from venusrl.scheduling.calibration import Estimate
from venusrl.types import StopReason, VersionSpan

Respond = Callable[[list[int]], list[int]]
"""Prompt ids in, the whole answer's ids out. A resumed prompt ends in a part of the answer: see ``ScriptedModel``."""


def fake_logprob(token: int, version: int) -> float:
    """What ``FakeEngine`` reports for ``token`` sampled by ``version``."""
    return -0.01 * (token % 97) - 0.001 * version


class ScriptedModel:
    """Answers the n-th turn of a conversation with the n-th script, whatever the observations say.

    ``turn_start`` is the token sequence that opens an assistant turn (the generation prompt's tail); its
    occurrences in the prompt tell which turn it is and how much of the answer is already there.
    """

    def __init__(self, turns: Iterable[list[int]], turn_start: list[int]) -> None:
        self._turns = list(turns)
        self._start = turn_start
        if not self._turns or not turn_start:
            raise ValueError("a scripted model needs at least one turn and the tokens that open one")

    def __call__(self, prompt: list[int]) -> list[int]:
        """The rest of the current turn. Turns beyond the script repeat the last one."""
        width = len(self._start)
        opened = [i + width for i in range(len(prompt) - width + 1) if prompt[i : i + width] == self._start]
        if not opened:
            raise EngineError("the prompt opens no assistant turn")
        answer = self._turns[min(len(opened), len(self._turns)) - 1]
        done = len(prompt) - opened[-1]
        return answer[done:]


@dataclass
class _Cached:
    tokens: list[int]
    versions: list[int]


@dataclass
class _Request:
    request: GenerateRequest
    order: int
    answer: list[int]
    outcome: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached_versions: list[int] = field(default_factory=list)
    """Versions of the prompt tokens found in the cache."""
    running: bool = False


class FakeEngine:
    """One worker in memory. ``crash`` makes every call raise EngineLost, ``fail_next_load`` the next weight load."""

    def __init__(
        self,
        respond: Respond,
        *,
        tokens_per_tick: int = 1,
        slots: int = 64,
        kv_capacity: int = 1 << 16,
        context_tokens: int = 1 << 16,
        version: int = 0,
        pace: Callable[[], Awaitable[None]] | None = None,
        cached_sequences: int = 4096,
    ) -> None:
        """``pace`` is awaited before each tick: nothing by default (as fast as the event loop turns), or e.g.
        ``lambda: clock.sleep(0.01)``, or a wait on a test's own event. It is not awaited while nothing runs."""
        self._respond = respond
        self._tokens_per_tick = tokens_per_tick
        self._slots = slots
        self._kv_capacity = kv_capacity
        self._context = context_tokens
        self._version = version
        self._pace = pace or (lambda: asyncio.sleep(0))
        self._requests: dict[str, _Request] = {}
        self._seen: set[str] = set()
        self._cache: dict[str, deque[_Cached]] = {}
        self._cached_sequences = cached_sequences
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._ticking: asyncio.Task[None] | None = None
        self._load_failure: str | None = None
        self.crashed = ""
        self.kv_control = False
        self.learned: Estimate | None = None
        self.calls: list[tuple[str, str]] = []
        """Every call in order: (method, request id or detail)."""
        self.cross_version_hits = 0
        self.peak_running = 0
        self.weights_path = ""
        self._generated = 0
        self._prefilled = 0

    # --- for tests --------------------------------------------------------------------------------
    @property
    def running(self) -> list[str]:
        """Ids of the requests that decode now."""
        return [r.request.request_id for r in self._requests.values() if r.running]

    @property
    def waiting(self) -> list[str]:
        return [r.request.request_id for r in self._requests.values() if not r.running]

    def crash(self, message: str = "killed") -> None:
        """Be gone: running and future calls raise EngineLost."""
        self.crashed = message
        self._fail_all(EngineLost(f"the fake engine is gone: {message}"))

    def fail_next_load(self, message: str) -> None:
        """Make the next ``load_weights`` raise EngineError with ``message``."""
        self._load_failure = message

    # --- EngineClient -----------------------------------------------------------------------------
    async def wait_ready(self, timeout_s: float) -> None:
        self._note("wait_ready", f"{timeout_s:g}")

    async def generate(self, request: GenerateRequest) -> Generation:
        self._note("generate", request.request_id)
        if request.request_id in self._seen:
            raise EngineError(f"request id {request.request_id} was used before")
        self._seen.add(request.request_id)
        if len(request.token_ids) >= self._context:
            return Generation([], [], [], StopReason.CONTEXT)
        answer = self._respond(list(request.token_ids))
        if not answer:
            raise EngineError("the scripted model answered nothing")
        outcome: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._requests[request.request_id] = _Request(request, len(self._seen), answer, outcome)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick_until_idle(), name="fake-engine")
        try:
            return await outcome
        finally:
            self._requests.pop(request.request_id, None)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._note("abort", request_id)
            if (entry := self._requests.get(request_id)) is not None:
                self._finish(entry, StopReason.ABORT)

    async def pause(self) -> None:
        self._note("pause", "")
        self._resumed.clear()

    async def resume(self) -> None:
        self._note("resume", "")
        self._resumed.set()

    async def load_weights(self, path: str, version: int) -> None:
        self._note("load_weights", f"{version}")
        if self._load_failure is not None:
            message, self._load_failure = self._load_failure, None
            raise EngineError(message)
        self._version = version
        self.weights_path = path

    async def reset_prefix_cache(self) -> None:
        self._note("reset_prefix_cache", "")
        self._cache.clear()

    async def order_kv(self, release: list[str], retain: list[str]) -> None:
        self._note("order_kv", f"-{','.join(release)} +{','.join(retain)}")

    async def version(self) -> int:
        self._note("version", "")
        return self._version

    async def load(self) -> EngineLoad:
        self._note("load", "")
        held = sum(len(r.request.token_ids) + len(r.tokens) for r in self._requests.values() if r.running)
        return EngineLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_used=held,
            kv_capacity=self._kv_capacity,
            slots=self._slots,
            generated_tokens_total=self._generated,
            prefill_tokens_total=self._prefilled,
            learned=self.learned,
        )

    async def close(self) -> None:
        self._fail_all(EngineLost("the fake engine was closed"))
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])

    # --- how it works -----------------------------------------------------------------------------
    def _note(self, call: str, detail: str) -> None:
        if self.crashed:
            raise EngineLost(f"the fake engine is gone: {self.crashed}")
        self.calls.append((call, detail))

    def _fail_all(self, error: BaseException) -> None:
        for entry in self._requests.values():
            if not entry.outcome.done():
                entry.outcome.set_exception(error)
        self._requests = {}

    async def _tick_until_idle(self) -> None:
        try:
            while self._requests:
                await self._pace()
                await self._resumed.wait()
                self._tick()
        except Exception as error:  # noqa: BLE001 - a pace that fails is its requests' failure, not a silent stop
            self._fail_all(error)

    def _tick(self) -> None:
        live = sorted(self._requests.values(), key=lambda r: (not r.running, -r.request.urgency, r.order))
        for entry in live:
            if entry.outcome.done():
                continue
            if not entry.running and len(self.running) < self._slots:
                self._start(entry)
            if entry.running:
                self._decode(entry)
        self.peak_running = max(self.peak_running, len(self.running))
        for entry in live:
            if (stop := self._stop(entry)) is not None:
                self._finish(entry, stop)

    def _decode(self, entry: _Request) -> None:
        for _ in range(self._tokens_per_tick):
            if self._stop(entry) is not None:
                return
            entry.tokens.append(entry.answer[len(entry.tokens)])
            entry.versions.append(self._version)
            self._generated += 1

    def _start(self, entry: _Request) -> None:
        entry.running = True
        prompt = entry.request.token_ids
        best: list[int] = []
        for cached in self._cache.get(entry.request.cache_salt, ()):
            common = _common(prompt[:-1], cached.tokens)
            if common > len(best):
                best = cached.versions[:common]
        entry.cached_versions = best
        self.cross_version_hits += any(version != self._version for version in best)
        self._prefilled += len(prompt) - len(best)

    def _remember(self, entry: _Request) -> None:
        """Keep the KV: the prompt's was computed at the version of the first token, a token's when it was fed."""
        if not entry.tokens:
            return
        request = entry.request
        fresh = len(request.token_ids) - len(entry.cached_versions)
        versions = entry.cached_versions + [entry.versions[0]] * fresh + entry.versions[1:]
        held = self._cache.setdefault(request.cache_salt, deque(maxlen=self._cached_sequences))
        held.append(_Cached((request.token_ids + entry.tokens)[:-1], versions))

    def _stop(self, entry: _Request) -> StopReason | None:
        request, tokens = entry.request, entry.tokens
        if not tokens:
            return None
        if tokens[-1] in request.sampling.stop_token_ids:
            return StopReason.STOP
        if len(request.token_ids) + len(tokens) >= self._context:
            return StopReason.CONTEXT
        if len(tokens) >= request.max_tokens:
            return StopReason.LENGTH
        return StopReason.STOP if len(tokens) >= len(entry.answer) else None

    def _finish(self, entry: _Request, stop: StopReason) -> None:
        if entry.outcome.done():
            return
        self._remember(entry)
        entry.running = False
        entry.outcome.set_result(
            Generation(
                token_ids=list(entry.tokens),
                logprobs=[fake_logprob(t, v) for t, v in zip(entry.tokens, entry.versions, strict=True)],
                spans=_spans(entry.versions),
                stop=stop,
                cached_tokens=len(entry.cached_versions),
            )
        )


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _spans(versions: list[int]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(VersionSpan(version, index, index + 1))
    return spans
