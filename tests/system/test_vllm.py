"""Whole runs through the command line on a real vLLM: exact training, and kill -9 of each of its processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import Recipes, Start
from tests.system.harness import TrainProcess, all_gone, descendants, events, faults, write_recipe
from tests.system.tiny import build_model

from venusrl.coordinator.store import RunStore
from venusrl.rollout.engines.install import vllm_python
from venusrl.sandboxes.runtimes.namespace.instance import start_time

WAIT_S = 400.0
"""How long one start of vLLM and a few steps may take on a machine that is busy with other things."""
EXACT = 1e-4
"""Largest difference of a log-probability in nats, where engine and trainer compute the same in float32."""
NO_EVALUATION = {"at_start": False, "at_end": False}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(vllm_python() is None, reason="no vLLM environment: venusrl engine install vllm"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on the CPU takes heads of 32 dimensions and more."""
    return build_model(tmp_path_factory.mktemp("for-vllm") / "model", head_dim=32)


@pytest.fixture
def recipes(model: Path, tiny: dict[str, Path], tmp_path: Path) -> Recipes:
    def make(name: str = "recipe", **changes: dict[str, Any]) -> Path:
        changes["rollout"] = {"engine": "vllm"} | changes.get("rollout", {})
        return write_recipe(tmp_path / f"{name}.toml", model, tiny["tasks"], tiny["held_out"], **changes)

    return make


def test_every_step_on_vllm_trains_on_what_its_own_weights_sampled(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    on_policy = {"schedule": {"async_factor": 0}, "rollout": {"weight_update": "drain"}}
    process = start(recipes(evaluation={"greedy": True}, **on_policy), run_dir, "--json")
    assert process.wait(WAIT_S) == 0, process.said()
    assert faults(run_dir) == []
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["trained_trajectories"]) == ("finished", 3, 24)
    assert summary["staleness_max"] == 0
    assert {(e["version"], e["mode"]) for e in summary["evaluations"]} == {
        (version, mode) for version in (0, 3) for mode in ("sampled", "greedy")
    }
    differences = [e["values"]["train/logprob_diff_max"] for e in scalars(run_dir, "train/logprob_diff_max")]
    assert len(differences) == 3
    assert max(differences) < EXACT, "the engine sampled with other weights than the trainer has"


def test_kills_of_vllms_processes_and_of_the_run_lose_nothing_and_train_nothing_twice(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(recipes(training={"steps": 100_000}, evaluation=NO_EVALUATION), run_dir)
    process.until_event("worker_up", WAIT_S, restarts=0)
    for restarts, victim in enumerate(("vllm server", "vllm core"), 1):
        until_a_new_batch(process)
        before = {pid: start_time(pid) for kind in ("vllm server", "vllm core") for pid in process.descendants(kind)}
        kill_one(process, victim)
        process.until_event("worker_up", WAIT_S, restarts=restarts)
        assert all_gone(before, 0), "a part of the killed engine lives on beside the new one"
    until_a_new_batch(process)
    below = {pid: start_time(pid) for pid in descendants(process.pid)}
    process.kill()
    assert all_gone(below, WAIT_S), "children outlive their coordinator"
    assert faults(run_dir) == []

    # More steps than what the killed run had sampled ahead is good for: vLLM has to serve again.
    last = recipes("last", training={"steps": version(run_dir) + 4}, evaluation=NO_EVALUATION)
    again = start(last, run_dir, "--resume")
    assert again.wait(WAIT_S) == 0, again.said()
    assert faults(run_dir) == []
    starts = [e["kind"] for e in events(run_dir) if e["kind"] in ("run_started", "worker_up")]
    assert (starts.count("run_started"), starts[-1]) == (2, "worker_up")
    with RunStore.read(run_dir) as store:
        batches = [store.batch_for(number) for number in range(store.current_version())]
    groups = [group for batch in batches if batch is not None for group in batch.groups]
    assert len(groups) == 2 * len(batches)
    assert len({group.id for group in groups}) == len(groups), "a group was trained twice"
    assert len({group.ordinal for group in groups}) == len(groups), "a place in the order was trained twice"


def scalars(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in events(run_dir) if e["kind"] == "scalars" and name in e["values"]]


def version(run_dir: Path) -> int:
    with RunStore.read(run_dir) as store:
        return store.current_version()


def until_a_new_batch(process: TrainProcess) -> None:
    formed = [e["version"] for e in events(process.run_dir) if e["kind"] == "batch_formed"]
    process.until_event("batch_formed", WAIT_S, version=max(formed, default=-1) + 1)


def kill_one(process: TrainProcess, kind: str) -> None:
    process.until_descendant(kind, WAIT_S)
    (victim,) = process.descendants(kind)
    os.kill(victim, signal.SIGKILL)
