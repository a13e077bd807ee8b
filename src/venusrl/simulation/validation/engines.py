"""The engines of the published measurements.

Owns: their costs, by the formulas of ``models`` from public shapes. Nothing here is fitted to a result.
"""

from __future__ import annotations

from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.models import BANDWIDTH_SHARE, H100, PREFILL_UTILISATION, STEP_OVERHEAD_S
from venusrl.simulation.scenario import EngineSpec

POD_KV = 2_237_040
"""As scraped from the pod (zetxqx, step 6)."""


def coder_30b_pod(name: str = "pod") -> EngineSpec:
    """Qwen3-Coder-30B-A3B-FP8 on two H100 with vLLM.

    30.5B parameters of one byte, 3.3B active a token; 48 layers, 32 heads of 128, 4 KV heads. The KV of 2.24M tokens
    fits only with one byte a value: 49,152 bytes a token. Every step reads all experts (from a few dozen sequences on
    nearly all are hit). Prefill of FP8 weights still runs its attention in 16 bits, so the bf16 peak is taken.
    """
    flops = 2 * H100.flops * PREFILL_UTILISATION
    bandwidth = 2 * H100.bandwidth * BANDWIDTH_SHARE
    token_s = 2 * 3.3e9 / flops
    costs = EngineCosts(
        step_base_s=STEP_OVERHEAD_S + 30.5e9 / bandwidth,
        step_sequence_s=token_s,
        step_kv_token_s=2 * 48 * 4 * 128 / bandwidth,
        prefill_token_s=token_s,
        prefill_token_context_s=4 * 48 * 32 * 128 / flops,
    )
    return EngineSpec(name, POD_KV, slots=256, costs=costs, prefill_chunk=8192, priority_queue=False)


def small_engine() -> EngineSpec:
    """Qwen3-0.6B on an unnamed GPU with 47,760 tokens of KV (SARPAT's log). A first turn of 64 tokens takes 0.48 s
    there, alone: 7.3 ms a step. All prompts are prefixes of one text, so next to nothing is computed of them."""
    costs = EngineCosts(
        step_base_s=0.0073,
        step_sequence_s=0.0,
        step_kv_token_s=0.0,
        prefill_token_s=1e-6,
        prefill_token_context_s=0.0,
    )
    return EngineSpec("engine", 47_760, slots=256, costs=costs, priority_queue=False)
