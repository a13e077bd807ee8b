"""The HTTP bodies of vLLM's token-level endpoints, as far as we use them.

Owns: the structs that the client and the embedded worker both speak, and the paths. Fields that we never
read are left out; the client ignores what else a server sends.

Must not know: sockets, torch, scheduling.

Guarantees: what the embedded worker accepts and answers is what vLLM 0.32 accepts and answers; ``KV_ORDER`` and
``session_id`` are its own, and sent to no server that does not know them.
"""

from __future__ import annotations

import msgspec

KEY_VARIABLE = "VENUSRL_API_KEY"
"""Environment variable in which a worker of ours finds its bearer key."""

GENERATE = "/inference/v1/generate"
ABORT = "/abort_requests"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
COLLECTIVE_RPC = "/collective_rpc"
UPDATE_WEIGHT_VERSION = "/update_weight_version"
WEIGHT_INFO = "/weight_info"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
KV_ORDER = "/kv_order"
HEALTH = "/health"
METRICS = "/metrics"
MODELS = "/v1/models"

UNNAMED_VERSION = "default"
"""The weight version of a server that was never told one."""


def external_id(request_id: str) -> str:
    """The id under which the server knows a generate request, and by which it is aborted."""
    return f"generate-tokens-{request_id}"


class WireSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """``logprobs = 0``: the log-probability of the sampled token alone. ``top_k`` 0 or -1: off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True


class WireGenerate(msgspec.Struct, frozen=True, omit_defaults=True):
    """``priority``: lower first."""

    request_id: str
    token_ids: list[int]
    sampling_params: WireSampling
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False
    session_id: str = ""


class WireLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[WireLogprob] = []


class WireLogprobs(msgspec.Struct, frozen=True):
    content: list[WireLogprob] | None = None


class WireSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class WireChoice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: WireLogprobs | None = None
    weight_versions: list[WireSpan] | None = None


class WirePromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: WirePromptDetails | None = None


class WireGenerated(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[WireChoice]
    usage: WireUsage | None = None


class WireModel(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class WireModels(msgspec.Struct, frozen=True):
    data: list[WireModel]


class WireRpc(msgspec.Struct, frozen=True):
    method: str
    kwargs: dict[str, str] = {}


class WireAbort(msgspec.Struct, frozen=True):
    """No ids: all requests."""

    request_ids: list[str] = []


class WireKvOrder(msgspec.Struct, frozen=True):
    """Sessions whose cached KV goes first, and those whose KV goes last."""

    release: list[str] = []
    retain: list[str] = []


class WireVersion(msgspec.Struct, frozen=True):
    new_version: str


class WireWeightInfo(msgspec.Struct, frozen=True):
    weight_version: str


class WirePaused(msgspec.Struct, frozen=True):
    is_paused: bool


class WireErrorInfo(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: int


class WireError(msgspec.Struct, frozen=True):
    error: WireErrorInfo
