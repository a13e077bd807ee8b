"""The embedded engine's state and its step: requests in, tokens out.

Owns: live requests, the loaded version, pausing, counters.

Must not know: HTTP, event loops. One thread calls it; nothing here blocks but ``step`` and ``reload``.

Guarantees: ``on_done`` is called exactly once a request, from ``step``, ``abort`` or ``fail``. An abort returns what
was generated so far at once, paused or not. Every token carries the version whose weights sampled it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from venusrl.rollout.engines.embedded.batcher import Batcher, Chunk, Sequence
from venusrl.rollout.engines.embedded.model import Model, ModelUnusable
from venusrl.rollout.engines.embedded.pages import Pages
from venusrl.rollout.engines.embedded.rows import Pass, Rows
from venusrl.rollout.engines.embedded.sampling import Draw, sample
from venusrl.rollout.engines.protocol import EngineLoad
from venusrl.rollout.engines.wire import UNNAMED_VERSION
from venusrl.types import SamplingParams


class Refused(Exception):
    """The request cannot be served as it is; the message says why."""


class Ended(NamedTuple):
    """``finish``: stop, length or abort, as on the wire. ``error``: the engine failed instead."""

    sequence: Sequence
    finish: str
    error: str = ""


class EngineConfig(NamedTuple):
    kv_capacity_tokens: int
    slots: int
    context_tokens: int
    page_tokens: int = 16
    prefill_tokens: int = 512
    seed: int = 0


@dataclass(eq=False)
class _Request:
    sequence: Sequence
    draw: Draw
    on_done: Callable[[Ended], None]


class Engine:
    """Serve ``model``. Raises ModelUnusable when the configuration does not fit it."""

    def __init__(self, model: Model, config: EngineConfig, dtype: torch.dtype) -> None:
        pages = config.kv_capacity_tokens // config.page_tokens
        if config.context_tokens > pages * config.page_tokens:
            raise ModelUnusable(
                f"a context of {config.context_tokens} tokens does not fit a KV cache of {pages * config.page_tokens}"
            )
        if config.context_tokens > model.positions:
            raise ModelUnusable(f"the model knows {model.positions} positions, not {config.context_tokens}")
        self.config = config
        self.version = UNNAMED_VERSION
        self.paused = False
        self.generated_tokens = 0
        self._model = model
        self._pages = Pages(pages, config.page_tokens)
        self._rows = Rows(
            model.kv_shape,
            rows=config.slots,
            row_tokens=config.context_tokens,
            pages=pages,
            page_tokens=config.page_tokens,
            dtype=dtype,
        )
        self._batcher = Batcher(self._pages, self._rows, slots=config.slots, prefill_tokens=config.prefill_tokens)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._requests: dict[str, _Request] = {}

    @property
    def idle(self) -> bool:
        """Whether ``step`` would do nothing."""
        return self.paused or not self._requests

    @property
    def live(self) -> int:
        return len(self._requests)

    def submit(
        self,
        request_id: str,
        tokens: list[int],
        max_tokens: int,
        sampling: SamplingParams,
        on_done: Callable[[Ended], None],
        *,
        priority: int = 0,
        salt: str = "",
        session: str = "",
    ) -> None:
        """Queue a request. Raises Refused."""
        self._check(request_id, tokens, max_tokens, sampling)
        limit = min(len(tokens) + max_tokens, self.config.context_tokens)
        sequence = Sequence(request_id, list(tokens), limit, sampling, priority, salt, session)
        generator = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        self._requests[request_id] = _Request(sequence, Draw(sampling, generator), on_done)
        self._batcher.add(sequence)

    def abort(self, request_ids: list[str] | None) -> int:
        """End these requests (all when None) with what they have; unknown ids are ignored. Returns how many ended."""
        chosen = list(self._requests) if request_ids is None else request_ids
        live = [request for i in chosen if (request := self._requests.get(i)) is not None]
        for request in live:
            self._end(request, "abort")
        return len(live)

    def fail(self, error: str) -> None:
        """End all requests with ``error``: the engine cannot go on."""
        for request in list(self._requests.values()):
            del self._requests[request.sequence.request_id]
            request.on_done(Ended(request.sequence, "abort", error))

    def step(self) -> None:
        """One forward pass over all that can run. Raises NotFinite when the weights have diverged."""
        if self.paused or not (chunks := self._batcher.plan()):
            return
        tokens, rows_pass, wanted = self._pass(chunks)
        logits = self._model.logits(tokens, rows_pass, wanted)
        for chunk in chunks:
            self._batcher.computed(chunk)
        sampled = [self._requests[c.sequence.request_id] for c in chunks if c.end == len(c.sequence.tokens)]
        if not sampled:
            return
        drawn, logprobs = sample(logits, [request.draw for request in sampled], self._generator)
        self.generated_tokens += len(drawn)
        for request, token, logprob in zip(sampled, drawn, logprobs, strict=True):
            self._append(request, token, logprob)

    def reload(self, directory: Path) -> None:
        """Replace the weights in place; running requests go on with the KV they have. Raises ModelUnusable."""
        self._model.reload(directory)
        self._batcher.reset_cache(new_weights=True)

    def reset_prefix_cache(self) -> None:
        self._batcher.reset_cache(new_weights=False)

    def order_kv(self, release: list[str], retain: list[str]) -> None:
        """Which sessions' cached pages go first and which last; see ``Pages``."""
        for session in release:
            self._pages.dismiss(session)
        for session in retain:
            self._pages.retain(session)

    def load(self) -> EngineLoad:
        size = self.config.page_tokens
        return EngineLoad(
            running=len(self._batcher.running),
            waiting=len(self._batcher.waiting),
            kv_used=self._pages.held * size,
            kv_capacity=self._pages.count * size,
            slots=self.config.slots,
            generated_tokens_total=self.generated_tokens,
            prefill_tokens_total=self._batcher.prefilled_tokens,
        )

    @property
    def cached_tokens_total(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self._batcher.cached_tokens

    @property
    def preemptions(self) -> int:
        return self._batcher.preemptions

    def _check(self, request_id: str, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> None:
        context = self.config.context_tokens
        if request_id in self._requests:
            raise Refused(f"request {request_id} is running already")
        if not tokens or max_tokens < 1:
            raise Refused("a request needs at least one prompt token and max_tokens of at least 1")
        if len(tokens) >= context:
            raise Refused(f"a prompt of {len(tokens)} tokens leaves no room in the context of {context} tokens")
        if min(tokens) < 0 or max(tokens) >= self._model.vocabulary:
            raise Refused(f"token ids must be in 0..{self._model.vocabulary - 1}")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise Refused("temperature must be at least 0, top_p in (0, 1], top_k at least 0 (0 = off)")

    def _pass(self, chunks: list[Chunk]) -> tuple[list[int], Pass, list[int]]:
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        prompt_chunks: list[tuple[int, int]] = []
        decodes = 0
        for chunk in chunks:
            first = len(tokens)
            tokens += chunk.sequence.tokens[chunk.start : chunk.end]
            rows += [chunk.sequence.row] * (chunk.end - chunk.start)
            positions += range(chunk.start, chunk.end)
            if chunk.decode:
                decodes += 1
            else:
                prompt_chunks.append((first, len(tokens)))
            if chunk.samples:
                wanted.append(len(tokens) - 1)
        return tokens, Pass(self._rows, rows, positions, decodes, prompt_chunks), wanted

    def _append(self, request: _Request, token: int, logprob: float) -> None:
        sequence = request.sequence
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.versions.append(self.version)
        if token in sequence.sampling.stop_token_ids:
            self._end(request, "stop")
        elif len(sequence.tokens) >= sequence.limit:
            self._end(request, "length")

    def _end(self, request: _Request, finish: str) -> None:
        del self._requests[request.sequence.request_id]
        self._batcher.remove(request.sequence)
        request.on_done(Ended(request.sequence, finish))
