"""How an engine worker is started: argument vector and environment, without importing torch.

Owns: the command lines of the embedded worker and of vLLM. The bearer key travels in the environment, never
on a command line that other users of the machine could read.

Must not know: processes (``coordinator.processes`` runs what this returns).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import msgspec

from venusrl.rollout.engines import wire
from venusrl.rollout.engines.install import EngineMissing, vllm_python
from venusrl.rollout.engines.protocol import EngineError

EngineKind = Literal["embedded", "vllm"]

VLLM_START_TIMEOUT_S = 300.0
EMBEDDED_START_TIMEOUT_S = 180.0
_VLLM_BLOCK = 32


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker is told. ``nice`` > 0 and ``cpus`` keep an evaluation worker out of the way."""

    model_path: str
    kv_capacity_tokens: int
    slots: int
    context_tokens: int
    threads: int = 1
    cpus: tuple[int, ...] = ()
    nice: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0


class Launch(msgspec.Struct, frozen=True):
    """``env`` is added to the parent's environment. ``start_timeout_s``: a generous limit on becoming ready."""

    argv: list[str]
    env: dict[str, str]
    base_url: str
    start_timeout_s: float


def engine_command(
    kind: EngineKind, settings: EngineSettings, *, port: int, api_key: str, python: Path | None = None
) -> Launch:
    """The command that serves ``settings`` on 127.0.0.1:``port``.

    ``python``: the interpreter of the engine's own environment (vLLM; found when None). Raises EngineMissing.
    """
    if kind == "embedded":
        return _embedded(settings, port, api_key)
    return _vllm(settings, port, api_key, python or _installed_vllm())


def _embedded(settings: EngineSettings, port: int, api_key: str) -> Launch:
    argv = [sys.executable, "-m", "venusrl.rollout.engines.worker"]
    argv += ["--model", settings.model_path, "--port", str(port)]
    argv += ["--kv-capacity-tokens", str(settings.kv_capacity_tokens), "--slots", str(settings.slots)]
    argv += ["--context-tokens", str(settings.context_tokens), "--threads", str(settings.threads)]
    argv += ["--dtype", settings.dtype, "--nice", str(settings.nice), "--seed", str(settings.seed)]
    if settings.cpus:
        argv += ["--cpus", ",".join(map(str, settings.cpus))]
    env = {
        wire.KEY_VARIABLE: api_key,
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return Launch(argv, env, f"http://127.0.0.1:{port}", EMBEDDED_START_TIMEOUT_S)


def _vllm(settings: EngineSettings, port: int, api_key: str, python: Path) -> Launch:
    if port == 0:
        raise EngineError("vLLM does not say which port it chose: pass one")
    server = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    server += ["--model", settings.model_path, "--served-model-name", "policy", "--skip-tokenizer-init"]
    server += ["--dtype", settings.dtype, "--max-model-len", str(settings.context_tokens)]
    server += ["--max-num-seqs", str(settings.slots), "--block-size", str(_VLLM_BLOCK)]
    blocks = max(settings.kv_capacity_tokens // _VLLM_BLOCK, 1)
    server += ["--num-gpu-blocks-override", str(blocks), "--enforce-eager", "--enable-scale-out"]
    server += ["--scheduling-policy", "priority", "--logprobs-mode", "processed_logprobs"]
    server += ["--enable-prompt-tokens-details", "--enable-prefix-caching", "--seed", str(settings.seed)]
    server += ["--generation-config", "vllm", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    server += ["--worker-extension-cls", "venusrl_tied_head.TiedHead"]
    argv = [str(python), *server]
    if settings.cpus:
        argv = ["taskset", "-c", ",".join(map(str, settings.cpus)), *argv]
    if settings.nice:
        argv = ["nice", "-n", str(settings.nice), *argv]
    env = {
        "VLLM_API_KEY": api_key,
        "VLLM_SERVER_DEV_MODE": "1",
        # Only this: vLLM's environment must see neither our packages nor the user's.
        "PYTHONPATH": str(Path(__file__).with_name("vllm_side")),
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Launch(argv, env, f"http://127.0.0.1:{port}", VLLM_START_TIMEOUT_S)


def _installed_vllm() -> Path:
    python = vllm_python()
    if python is None:
        raise EngineMissing('rollout.engine = "vllm" needs its own environment: run `venusrl engine install vllm`')
    return python
