"""What a run needs of an inference server, whichever it is.

Owns: the request/answer structs, the ``EngineClient`` protocol and its errors. One HTTP adapter
(``client.py``) implements it for vLLM's token-level and control endpoints, which the embedded
worker serves too.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from venusrl.scheduling.calibration import Estimate
from venusrl.types import SamplingParams, StopReason, VersionSpan


class EngineError(Exception):
    """The engine refused or failed a call; the message carries the engine's own text."""

    reason = "engine_error"


class EngineLost(EngineError):
    """The engine does not answer (process gone, connection broken)."""

    reason = "engine_lost"


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token ids in. ``request_id`` is unique for ever. ``urgency``: higher first.

    ``cache_salt`` namespaces the prefix cache (by weight version where stale KV would matter). ``session``: whose later
    requests extend this one, for ``order_kv``.
    """

    request_id: str
    token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    urgency: int = 0
    cache_salt: str = ""
    session: str = ""


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token ids out. ``spans`` index ``token_ids`` (0 = first generated token).

    ``logprobs[i]``: natural log-probability of ``token_ids[i]`` under the processed (temperature, top-p)
    distribution it was sampled from. ``cached_tokens``: prompt tokens found in the prefix cache.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    stop: StopReason
    cached_tokens: int = 0


class EngineLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens and sequences. ``slots``: sequences decoded at once. ``learned``: what its work takes, once known."""

    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    slots: int
    generated_tokens_total: int = 0
    prefill_tokens_total: int = 0
    learned: Estimate | None = None


class EngineClient(Protocol):
    """One worker. All calls raise EngineLost when it is gone, EngineError when it refuses."""

    async def wait_ready(self, timeout_s: float) -> None: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns partial tokens with stop=ABORT after ``abort``. Cancelling this call aborts the request."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def pause(self) -> None:
        """Stop stepping; keep requests and KV. New requests queue."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: str, version: int) -> None:
        """Replace the weights in place from a safetensors directory. The caller pauses around it."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    @property
    def kv_control(self) -> bool:
        """Whether it obeys ``order_kv``; known once it was ready."""
        ...

    async def order_kv(self, release: list[str], retain: list[str]) -> None:
        """Evict what these sessions have cached before, or after, that of others."""
        ...

    async def version(self) -> int: ...

    async def load(self) -> EngineLoad: ...

    async def close(self) -> None: ...
