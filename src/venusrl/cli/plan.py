"""What a recipe means before anything starts: derived sizes, what will run, what looks wrong here.

Owns: the arithmetic behind ``--dry-run``. Reads at most a model's ``config.json``. Must not know: how any of
it is carried out.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from venusrl import recipe as recipes
from venusrl.coordinator.policies import make_policy, make_predictor
from venusrl.models import ModelError, resolve
from venusrl.recipe import Recipe

# layers, key-value heads, head size: what KV costs. For models that are not on this machine, by directory name.
_KNOWN_SHAPES = {
    "qwen3-4b": (36, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "smollm2-135m": (30, 3, 64),
}
_GIB = 1 << 30
_IDLE_KV = {
    "embedded": "evicted in the order that the scheduler wishes",
    "vllm": "evicted least recently used first; what the scheduler keeps and releases is its own bookkeeping",
    "url": "evicted as the scheduler wishes where the engine can be told (the worker_up event says), else its own way",
}


class Plan(msgspec.Struct, frozen=True):
    """Everything derived from one recipe on this machine."""

    derived: dict[str, Any]
    starts: list[str]
    warnings: list[str]


def make_plan(recipe: Recipe) -> Plan:
    """Raises RecipeError for what the scheduling policy and its predictor do not have."""
    policy = make_policy(recipe, make_predictor(recipe))
    schedule = recipe.schedule
    window = math.floor((1 + schedule.async_factor) * schedule.batch_groups)
    derived: dict[str, Any] = {
        "window_groups": window,
        "window_trajectories": window * schedule.group_size,
        "batch_trajectories": schedule.batch_groups * schedule.group_size,
        "staleness_bound": schedule.staleness_bound,
        "trained_trajectories": recipe.training.steps * schedule.batch_groups * schedule.group_size,
        "engine_workers": len(recipe.rollout.urls) or recipe.rollout.workers,
    }
    shape, problem = _shape(recipe.model.path)
    if shape is not None:
        derived |= _kv(recipe, shape, derived["window_trajectories"], derived["engine_workers"])
    found = recipes.warnings(recipe) + ([problem] if problem else []) + _machine_warnings(recipe, derived)
    if policy.tokens_every_s is not None:
        found.append(
            f"schedule.policy = {policy.name} counts tokens of running turns; real engines tell them when a turn ends"
        )
    return Plan(derived=derived, starts=_starts(recipe), warnings=found)


def _shape(path: str) -> tuple[tuple[int, int, int] | None, str]:
    """(layers, KV heads, head size) of the model when that can be known, and what is wrong with its path."""
    problem = ""
    try:
        directory = resolve(path)
        config = json.loads((directory / "config.json").read_text())
    except ModelError as error:
        problem = str(error)
    except (OSError, ValueError) as error:
        problem = "" if path.startswith("builtin:") else f"model.path: {error}"
    else:
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        return (config["num_hidden_layers"], config.get("num_key_value_heads", heads), head), ""
    name = Path(path.removeprefix("builtin:")).name.lower()
    known = [shape for prefix, shape in _KNOWN_SHAPES.items() if name.startswith(prefix)]
    return (known[0] if known else None), problem


def _kv(recipe: Recipe, shape: tuple[int, int, int], trajectories: int, workers: int) -> dict[str, Any]:
    layers, heads, size = shape
    token = 2 * layers * heads * size * (4 if recipe.model.dtype == "float32" else 2)
    capacity = recipe.rollout.kv_capacity_tokens
    return {
        "kv_bytes_per_token": token,
        "kv_gib_per_worker": round(token * capacity / _GIB, 3),
        "kv_full_contexts_per_worker": capacity // recipe.rollout.context_tokens,
        # Were every trajectory of the window at its longest at once; above 1 some must wait or be recomputed.
        "kv_demand_at_most": round(trajectories * recipe.rollout.context_tokens / (capacity * workers), 2),
    }


def _starts(recipe: Recipe) -> list[str]:
    rollout, training, evaluation = recipe.rollout, recipe.training, recipe.evaluation
    if rollout.urls:
        lines = [f"engine worker at {url} (already running)" for url in rollout.urls]
    else:
        pinned = f", pinned to CPU {','.join(map(str, rollout.cpus))}" if rollout.cpus else ""
        where = f", {rollout.threads} thread(s){pinned}" if rollout.engine == "embedded" else ""
        sizes = f"KV {rollout.kv_capacity_tokens:,} tokens, {rollout.slots} slots"
        lines = [f"{rollout.workers} x engine worker ({rollout.engine}: {sizes}{where})"]
    lines.append(f"idle KV: {_IDLE_KV['url' if rollout.urls else rollout.engine]}")
    if evaluation.at_start or evaluation.at_end or evaluation.every:
        when = [
            name
            for name, on in (
                ("at the start", evaluation.at_start),
                (f"every {evaluation.every} steps", evaluation.every > 0),
                ("at the end", evaluation.at_end),
            )
            if on
        ]
        modes = f"sampled x {evaluation.samples}" + (" and greedy" if evaluation.greedy else "")
        where = f"at {evaluation.urls[0]} (already running)" if evaluation.urls else "low priority"
        lines.append(f"evaluation worker, {where}: {evaluation.tasks} held-out tasks, {modes}; {', '.join(when)}")
    pinned = f", pinned to CPU {','.join(map(str, training.cpus))}" if training.cpus else ""
    lines.append(f"trainer ({training.steps} steps, {training.threads} thread(s){pinned})")
    sandbox = recipe.sandbox
    if sandbox.runtime == "e2b":
        return [*lines, f"sandboxes at {sandbox.url} (E2B): limits and number are the service's"]
    limits = f"{sandbox.memory_mib} MiB, {sandbox.pids} processes, {sandbox.disk_mib} MiB disk each"
    return [*lines, f"at most {sandbox.max_sandboxes} sandboxes ({sandbox.runtime}: {limits})"]


def _machine_warnings(recipe: Recipe, derived: dict[str, Any]) -> list[str]:
    found = []
    local = recipe.rollout.engine == "embedded" and not recipe.rollout.urls
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    kv = derived.get("kv_gib_per_worker", 0.0) * derived["engine_workers"]
    if local and kv > memory / 2:
        found.append(
            f"the KV caches take {kv:.1f} GiB of this machine's {memory:.1f}: lower rollout.kv_capacity_tokens"
        )
    cores = sorted(os.sched_getaffinity(0))
    pins = {"rollout.cpus": recipe.rollout.cpus, "training.cpus": recipe.training.cpus}
    for key, cpus in pins.items():
        if missing := [cpu for cpu in cpus if cpu not in cores]:
            found.append(f"{key} names CPUs that this process may not use here: {missing} (it may use {cores})")
    window, most = derived["window_trajectories"], recipe.sandbox.max_sandboxes
    if recipe.sandbox.runtime != "e2b" and window > most:
        found.append(f"sandbox.max_sandboxes = {most}, but the window allows {window} trajectories: the rest wait")
    return found
