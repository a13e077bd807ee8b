"""Engine load in Prometheus text, read and written.

Owns: the few of vLLM's metric names that say how loaded a worker is, and their text format.

Must not know: who asks or why.
"""

from __future__ import annotations

import re

from venusrl.rollout.engines.protocol import EngineLoad

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_CACHE = "vllm:cache_config_info"
_GENERATED = "vllm:generation_tokens_total"
_PREFILL = "vllm:prompt_tokens_by_source_total"
_PREEMPTIONS = "vllm:num_preemptions_total"


def read_load(text: str, slots: int) -> EngineLoad:
    """Raises KeyError when a server reports none of a needed metric, ValueError when one is not a number."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            samples.setdefault(match["name"], []).append((labels, float(match["value"])))

    def total(name: str) -> float:
        return sum(value for _, value in samples[name])

    cache = samples[_CACHE][0][0]
    capacity = int(cache["num_gpu_blocks"]) * int(cache["block_size"])
    computed = [value for labels, value in samples.get(_PREFILL, []) if labels.get("source") == "local_compute"]
    return EngineLoad(
        running=int(total(_RUNNING)),
        waiting=int(total(_WAITING)),
        kv_used=round(samples[_KV_USAGE][0][1] * capacity),
        kv_capacity=capacity,
        slots=slots,
        generated_tokens_total=int(total(_GENERATED)),
        prefill_tokens_total=int(sum(computed)),
    )


def write_load(load: EngineLoad, *, page_size: int, cached_tokens_total: int, preemptions_total: int) -> str:
    """The text that ``read_load`` reads, under vLLM's names."""
    lines = [
        f"{_RUNNING} {load.running}",
        f"{_WAITING} {load.waiting}",
        f"{_KV_USAGE} {load.kv_used / load.kv_capacity!r}",
        f'{_CACHE}{{block_size="{page_size}",num_gpu_blocks="{load.kv_capacity // page_size}"}} 1',
        f"{_GENERATED} {load.generated_tokens_total}",
        f'{_PREFILL}{{source="local_compute"}} {load.prefill_tokens_total}',
        f'{_PREFILL}{{source="local_cache_hit"}} {cached_tokens_total}',
        f"{_PREEMPTIONS} {preemptions_total}",
    ]
    return "\n".join(lines) + "\n"
