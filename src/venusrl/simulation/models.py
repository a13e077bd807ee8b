"""What a model takes on a GPU: engine costs, KV capacity, trainer and publication times, whole clusters.

Owns: the constants and formulas below, each with its source. Must not know: scenarios beyond their specs, policies.

**Model shapes**: Qwen3's published configurations. KV of a token: 2 * layers * kv_heads * head_dim * 2 bytes (bf16):
147,456 B for 4B, 262,144 B for 32B.

**Prefill**: 2 FLOPs per parameter outside the embedding and token, and 4 * layers * heads * head_dim per token and
token of context that it attends to, at ``PREFILL_UTILISATION`` of the dense bf16 peak of all the worker's GPUs.

**Decode**: a step reads the weights and every sequence's KV at ``BANDWIDTH_SHARE`` of the memory bandwidth (this
reproduces the ML.ENERGY leaderboard's long-output rows for Qwen3-8B within 10%), computes 2 FLOPs per parameter and
sequence as prefill does, and has two fixed costs: ``STEP_OVERHEAD_S`` a step and ``SEQUENCE_OVERHEAD_S`` a sequence.
Those two are what is left of the leaderboard's inter-token latencies on H100 with vLLM (Qwen3-8B on one GPU: 7.6 +
0.093 * B ms, Qwen3-32B on two: 14.3 + 0.118 * B ms, about 400 tokens of context) when the rest is subtracted; the
test compares the sum with the leaderboard's rows, none of which is Qwen3-4B: that one is extrapolated.

**KV capacity**: 90% of the memory less ``RESERVED`` per GPU (activations, graphs) less the weights.

**Trainer**: 6 FLOPs per parameter and token, and 6 * layers * heads * head_dim * L^2 for a trajectory of L tokens
(causal attention, forward and backward), at ``TRAIN_UTILISATION`` of the peak. Megatron-Core reports up to 47% for
large dense models on H100 with uniform batches; ragged ones of long trajectories are given 40%.

**Publication**: a fixed part and bytes over bandwidth, through the two public measurements of a whole synchronisation
that we found: Qwen3-4B (8 GB) 5 s (redai-studio/Relax issue 240, eight GPUs, slime-like) and Qwen3-30B-A3B (61 GB) 7 s
(slime's own account of its optimisation). Engines stand still for all of it, as there; the trainer is busy with it too,
which is counted at the beginning of its next step.

**Transfer of KV** between workers: bytes over the link's bandwidth, and ``TRANSFER_LATENCY_S`` (from pulls of 2k
tokens over RDMA, 38 ms). SGLang and vLLM have no such call in the releases we know, so the default is none.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.scenario import EngineSpec, FleetSpec, TrainerSpec, WeightUpdate

BYTES = 2
PREFILL_UTILISATION = 0.5
BANDWIDTH_SHARE = 0.7
STEP_OVERHEAD_S = 0.5e-3
SEQUENCE_OVERHEAD_S = 0.037e-3
MEMORY_SHARE = 0.9
RESERVED = 4e9
TRAIN_UTILISATION = 0.40
SYNC_FIXED_S = 4.7
SYNC_BANDWIDTH = 26.5e9
TRANSFER_LATENCY_S = 0.03
LINKS = {"rdma400": 45e9, "ethernet100": 11e9, "ethernet25": 2.8e9}
"""Bytes a second that arrive, of 400, 100 and 25 Gbit/s."""

Link = Literal["rdma400", "ethernet100", "ethernet25"]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``parameters``: all; ``body``: without the input embedding."""

    name: str
    parameters: float
    body: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def attention(self) -> int:
        """Layers * heads * head_dim: FLOPs of attention per pair of tokens, up to a factor."""
        return self.layers * self.heads * self.head_dim


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``flops``: dense bf16 peak; ``bandwidth``: of its memory, bytes a second. NVIDIA's data sheets (SXM)."""

    name: str
    flops: float
    bandwidth: float
    memory: float


QWEN3_4B = Model("qwen3-4b", 4.02e9, 3.63e9, 36, 32, 8, 128)
QWEN3_8B = Model("qwen3-8b", 8.19e9, 6.95e9, 36, 32, 8, 128)
QWEN3_32B = Model("qwen3-32b", 32.76e9, 31.2e9, 64, 64, 8, 128)
MODELS = {model.name: model for model in (QWEN3_4B, QWEN3_8B, QWEN3_32B)}

H100 = Gpu("h100", 989e12, 3.35e12, 80e9)
H200 = Gpu("h200", 989e12, 4.8e12, 141e9)
GPUS = {gpu.name: gpu for gpu in (H100, H200)}

TENSOR_PARALLEL = {("qwen3-4b", "h100"): 1, ("qwen3-8b", "h100"): 1, ("qwen3-32b", "h100"): 2}
"""GPUs of a worker where one says nothing else: the fewest with room for more KV than weights. Else 1."""


def engine_costs(model: Model, gpu: Gpu, tensor_parallel: int = 1, link: Link | None = None) -> EngineCosts:
    """See the module."""
    flops = gpu.flops * PREFILL_UTILISATION * tensor_parallel
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE * tensor_parallel
    token_s = 2 * model.body / flops
    return EngineCosts(
        step_base_s=STEP_OVERHEAD_S + model.weight_bytes / bandwidth,
        step_sequence_s=SEQUENCE_OVERHEAD_S + token_s,
        step_kv_token_s=model.kv_bytes / bandwidth,
        prefill_token_s=token_s,
        prefill_token_context_s=4 * model.attention / flops,
        transfer_token_s=None if link is None else model.kv_bytes / LINKS[link],
        transfer_latency_s=0.0 if link is None else TRANSFER_LATENCY_S,
    )


def kv_capacity(model: Model, gpu: Gpu, tensor_parallel: int = 1) -> int:
    """Tokens. Raises ValueError where the weights leave no room."""
    room = tensor_parallel * (MEMORY_SHARE * gpu.memory - RESERVED) - model.weight_bytes
    if room <= 0:
        raise ValueError(f"{model.name} does not fit on {tensor_parallel} x {gpu.name}")
    return int(room / model.kv_bytes)


def sync_s(model: Model) -> float:
    """From the end of a step until the engines serve with its weights."""
    return SYNC_FIXED_S + model.weight_bytes / SYNC_BANDWIDTH


def trainer(model: Model, gpu: Gpu, gpus: int, *, scale: float = 1.0, sync_scale: float = 1.0) -> TrainerSpec:
    """``scale`` multiplies the time of a step, ``sync_scale`` that of the synchronisation before it."""
    flops = gpus * gpu.flops * TRAIN_UTILISATION / scale
    return TrainerSpec(
        fixed_s=sync_s(model) * sync_scale,
        token_s=6 * model.parameters / flops,
        # TrainerSpec halves the sum of squares.
        attention_s=2 * 6 * model.attention / flops,
    )


def cluster(
    model: Model,
    *,
    gpu: Gpu = H100,
    gpus: int = 32,
    trainer_gpus: int | None = None,
    tensor_parallel: int | None = None,
    slots: int = 256,
    weight_update: WeightUpdate = "in_flight",
    stale_kv: Literal["keep", "flush"] = "keep",
    kv_control: bool = False,
    link: Link | None = None,
    trainer_scale: float = 1.0,
    sync_scale: float = 1.0,
) -> tuple[FleetSpec, TrainerSpec]:
    """``gpus`` split between trainer (half of them, unless said otherwise) and engine workers.

    With the defaults: 16 workers of 406k KV tokens for Qwen3-4B, 8 of 269k for Qwen3-32B.
    """
    width = tensor_parallel or TENSOR_PARALLEL.get((model.name, gpu.name), 1)
    training = gpus // 2 if trainer_gpus is None else trainer_gpus
    workers = (gpus - training) // width
    if training < 1 or workers < 1:
        raise ValueError(f"{gpus} GPUs cannot be split into {training} for training and workers of {width}")
    costs, capacity = engine_costs(model, gpu, width, link), kv_capacity(model, gpu, width)
    engines = tuple(EngineSpec(f"engine-{i}", capacity, slots, costs, kv_control=kv_control) for i in range(workers))
    fleet = FleetSpec(engines, weight_update, stale_kv, sync_s(model) * sync_scale)
    return fleet, trainer(model, gpu, training, scale=trainer_scale, sync_scale=sync_scale)
