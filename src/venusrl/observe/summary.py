"""``summary.json``: the run in one object, for people, benchmarks and CI.

Owns: the summary's fields and how each follows from the history. Every figure is derived from
``events.jsonl``, so a summary can be made again at any time and of a run that was killed.

Guarantees: the required keys are always there; what never happened is ``null``, not a made-up number.
"""

from __future__ import annotations

import json
import math
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from venusrl.observe.history import EvaluationResult, History, read_history
from venusrl.observe.recorder import ObserveError, read_events

SUMMARY_FILE = "summary.json"
_DISCARDED = "tokens/discarded/"


class Summary(msgspec.Struct, frozen=True):
    """Rewards are means in [0, 1]; times are running seconds, pauses between sessions excluded."""

    name: str
    outcome: str
    """finished, stopped, time_limit, tasks_exhausted, failed; "unfinished" for a run that was killed or goes on."""
    error: str
    steps: int
    max_steps: int
    eval_reward_start: float | None
    eval_reward_end: float | None
    eval_reward_gain: float | None
    eval_greedy_start: float | None
    eval_greedy_end: float | None
    evaluations: list[dict[str, Any]]
    reward_first: float | None
    reward_last: float | None
    """Training reward, mean of the first and of the last tenth of the steps."""
    wall_s: float
    sessions: int
    trained_trajectories: int
    trained_tokens: int
    tokens_per_s: float | None
    staleness_max: int
    staleness_mean: float
    trainer_idle_fraction: float | None
    coordinator_critical_fraction: float | None
    discarded_tokens_by_reason: dict[str, int]
    engine_costs: dict[str, dict[str, Any]]
    """By worker, what its work takes as learned from its turns (``worker_calibrated``)."""
    seeds: dict[str, int]
    versions: dict[str, str]


def build_summary(run_dir: Path) -> Summary:
    """The summary of the run in ``run_dir`` as its files say. Raises ObserveError when there is no run."""
    recipe = _recipe(run_dir)
    return summarise(read_history(read_events(run_dir)), recipe, run_dir.name)


def summarise(history: History, recipe: dict[str, Any], name: str) -> Summary:
    """``recipe`` is the resolved recipe as plain data; an empty one leaves its facts out."""
    run, training = recipe.get("run", {}), recipe.get("training", {})
    sampled, greedy = history.curve("sampled"), history.curve("greedy")
    start, end = _ends(sampled or greedy)
    greedy_start, greedy_end = _ends(greedy)
    rewards = history.series("reward/mean")
    tenth = max(1, len(rewards) // 10)
    return Summary(
        name=run.get("name", name),
        outcome=history.outcome or "unfinished",
        error=history.error,
        steps=history.steps[-1].step if history.steps else 0,
        max_steps=int(training.get("steps", 0)),
        eval_reward_start=start,
        eval_reward_end=end,
        eval_reward_gain=None if start is None or end is None else end - start,
        eval_greedy_start=greedy_start,
        eval_greedy_end=greedy_end,
        evaluations=[_finite(msgspec.structs.asdict(e)) for e in history.evaluations],
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        wall_s=round(history.wall_s, 3),
        sessions=history.sessions,
        trained_trajectories=round(sum(history.series("train/trajectories"))),
        trained_tokens=round(sum(history.series("train/sampled_tokens"))),
        tokens_per_s=history.time_weighted("rollout/tokens_per_s"),
        staleness_max=round(max(history.series("rollout/staleness_max"), default=0.0)),
        staleness_mean=_staleness_mean(history),
        trainer_idle_fraction=history.time_weighted("perf/trainer_idle_fraction"),
        coordinator_critical_fraction=history.time_weighted("perf/coordinator_critical_fraction"),
        discarded_tokens_by_reason={
            key.removeprefix(_DISCARDED): round(value)
            for key, value in sorted(history.values.items())
            if key.startswith(_DISCARDED)
        },
        engine_costs=history.engines,
        seeds={
            section: int(recipe[section]["seed"])
            for section in ("run", "tasks", "training")
            if "seed" in recipe.get(section, {})
        },
        versions=package_versions(),
    )


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Build it, write ``summary.json`` (atomically) and return its content."""
    content = msgspec.structs.asdict(build_summary(run_dir))
    path = run_dir / SUMMARY_FILE
    scratch = path.with_suffix(".tmp")
    try:
        scratch.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(scratch, path)
    except OSError as error:
        raise ObserveError(f"cannot write {path}: {error.strerror}") from error
    return content


def package_versions() -> dict[str, str]:
    """Versions of what a result depends on; only what is installed."""
    found = {}
    for name in ("venusrl", "torch", "transformers", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _recipe(run_dir: Path) -> dict[str, Any]:
    try:
        recipe: dict[str, Any] = json.loads((run_dir / "recipe.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ObserveError(f"{run_dir / 'recipe.json'} cannot be read: {error}") from error
    return recipe


def _ends(curve: list[EvaluationResult]) -> tuple[float | None, float | None]:
    """Reward of version 0, and of the last version that was evaluated after it; each None without its evaluation."""
    finite = [e for e in curve if math.isfinite(e.reward)]
    start = next((e.reward for e in finite if e.version == 0), None)
    end = finite[-1].reward if finite and finite[-1].version > 0 else None
    return start, end


def _staleness_mean(history: History) -> float:
    """Over trajectories, so each step weighs as many as it trained."""
    pairs = [
        (p.values["rollout/staleness_mean"], p.values.get("train/trajectories", 1.0))
        for p in history.steps
        if "rollout/staleness_mean" in p.values
    ]
    weight = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / weight if weight else 0.0


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
