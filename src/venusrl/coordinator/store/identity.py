"""Whether a run that is resumed is still the same run.

Owns: the list of recipe keys that may change between a run and its resumption, and the comparison. Pure.

Must not know: where the recipe is kept.

Guarantees: a key that is not listed here stops a resumption when it differs, so that one run never mixes two
experiments unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from venusrl.coordinator.errors import RecipeChanged
from venusrl.recipe import Recipe, RecipeError, resolve

MAY_CHANGE = frozenset(
    {
        # how far and how long
        "training.steps",
        "run.time_limit_s",
        "run.keep_trajectories_of_steps",
        "tasks.epochs",
        "evaluation.every",
        "evaluation.at_end",
        "evaluation.slots",
        # where and how fast
        "rollout.workers",
        "rollout.urls",
        "evaluation.urls",
        "rollout.kv_capacity_tokens",
        "rollout.slots",
        "rollout.threads",
        "rollout.cpus",
        "training.ranks",
        "training.threads",
        "training.cpus",
        "training.micro_batch_tokens",
        "training.checkpoint_every",
        "training.keep_checkpoints",
        "sandbox.concurrent_commands",
        "sandbox.max_sandboxes",
        # how patiently
        "rollout.weight_sync_timeout_s",
        "rollout.turn_timeout_s",
        "rollout.turn_reissues",
        "rollout.restarts",
        "training.restarts",
        "sandbox.wait_s",
        "schedule.drop_grace_s",
        "schedule.retries",
        "schedule.max_dead_groups",
    }
)
"""Keys that say where, how fast, how far or how patiently a run works, not what it learns."""


def encode(recipe: Recipe) -> str:
    return json.dumps(recipe.model_dump(mode="json"), sort_keys=True)


def decode(text: str) -> Recipe:
    """Raises RecipeChanged when this release no longer accepts the recorded recipe."""
    try:
        return resolve(json.loads(text))
    except RecipeError as error:
        raise RecipeChanged(
            f"this release of VenusRL does not accept the recipe the run was started with; resume with the "
            f"release that started it ({error})"
        ) from error


def fingerprint(recipe: Recipe) -> str:
    """The same for two recipes that are the same experiment."""
    fixed = {key: value for key, value in _flat(recipe.model_dump(mode="json")).items() if key not in MAY_CHANGE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def check_same(recorded: Recipe, given: Recipe) -> None:
    """Raises RecipeChanged, naming every key that differs and may not."""
    before, after = _flat(recorded.model_dump(mode="json")), _flat(given.model_dump(mode="json"))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    refused = [f"  {key}: {before.get(key)!r} -> {after.get(key)!r}" for key in changed if key not in MAY_CHANGE]
    if refused:
        raise RecipeChanged(
            "a run goes on with the recipe it was started with; start a new run, or take these changes back:\n"
            + "\n".join(refused)
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
