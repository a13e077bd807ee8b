"""Kill -9 of every process of a run, again and again at random instants: nothing finished is lost or trained twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.system.conftest import Recipes, Start
from tests.system.harness import TrainProcess, all_gone, descendants, events, faults, sandboxes_left

from venusrl.coordinator.store import RunStore
from venusrl.sandboxes.runtimes.namespace.instance import start_time

SEED = 20
KILLS = {"coordinator": 5, "trainer": 5, "engine": 5, "sandbox": 7, "launcher": 2}
PATIENCE_S = 240.0
"""How long a process may take to come (back) on a machine that is busy with other things."""


def kill_one(process: TrainProcess, kind: str, dice: random.Random) -> None:
    """Kill -9 one process of ``kind``, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.popen.poll() is None, process.said()
        found = [process.pid] if kind == "coordinator" else process.descendants(kind)
        if found:
            try:
                os.kill(dice.choice(found), signal.SIGKILL)
            except ProcessLookupError:
                continue
            return
        time.sleep(0.005)
    raise AssertionError(f"no {kind} process to kill within {PATIENCE_S:g} s; the run said:\n{process.said()}")


def wait_for_life(process: TrainProcess, dice: random.Random) -> None:
    """Let the run do something, then a random moment more."""
    seen = len(events(process.run_dir))
    deadline = time.monotonic() + 3.0
    while len(events(process.run_dir)) == seen and time.monotonic() < deadline and process.popen.poll() is None:
        time.sleep(0.02)
    time.sleep(dice.random())


@pytest.mark.timeout(1500)
def test_kills_at_random_instants_lose_nothing_and_train_nothing_twice(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    dice = random.Random(SEED)
    patient = {
        "schedule": {"retries": 50, "max_dead_groups": 50, "async_factor": 1},
        "rollout": {"restarts": 100, "turn_reissues": 20},
        "evaluation": {"every": 3, "greedy": False, "at_start": True, "at_end": False},
    }
    endless = recipes(**patient, training={"steps": 1000, "restarts": 100})
    victims = [kind for kind, times in KILLS.items() for _ in range(times)]
    dice.shuffle(victims)
    killed: Counter[str] = Counter()
    process = start(endless, run_dir)
    process.until_event("worker_up", PATIENCE_S)
    for kind in victims:
        wait_for_life(process, dice)
        below = {pid: start_time(pid) for pid in descendants(process.pid)}
        kill_one(process, kind, dice)
        killed[kind] += 1
        if kind == "coordinator":
            process.popen.wait()
            assert all_gone(below, PATIENCE_S), "children outlive their coordinator"
            assert faults(run_dir) == []
            process = start(endless, run_dir, "--resume")
    assert sum(killed.values()) >= 20
    reached = _version(run_dir)
    process.until_event("batch_formed", PATIENCE_S, version=reached + 1)
    process.interrupt()
    assert process.wait(PATIENCE_S) == 130, process.said()
    last = recipes("last", **patient, training={"steps": _version(run_dir) + 1, "restarts": 100})
    process = start(last, run_dir, "--resume")
    assert process.wait(PATIENCE_S) == 0, process.said()
    _check(run_dir)


def _check(run_dir: Path) -> None:
    """The store's invariants, and what they mean, once more from the batches themselves."""
    assert faults(run_dir) == []
    assert sandboxes_left(run_dir) == []
    with RunStore.read(run_dir) as store:
        batches = [store.batch_for(version) for version in range(store.current_version())]
        totals = store.totals()
    groups = [group for batch in batches if batch is not None for group in batch.groups]
    assert len(batches) >= 3
    assert all(len(batch.groups) == 2 for batch in batches if batch is not None)
    assert len({group.id for group in groups}) == len(groups), "a group was trained twice"
    assert len({group.ordinal for group in groups}) == len(groups), "a place in the order was trained twice"
    members = [t.id for group in groups for t in group.trajectories]
    assert len(set(members)) == len(members)
    for batch in batches:
        assert batch is not None
        for group in batch.groups:
            for trajectory in group.trajectories:
                assert trajectory.start_version is not None
                assert 0 <= batch.version - trajectory.start_version <= 1, "the staleness bound"
    assert totals.staleness_max <= 1
    # What a kill cost is named: every discarded token has a reason.
    assert set(totals.discarded_tokens) <= KNOWN_REASONS, totals.discarded_tokens


KNOWN_REASONS = {"crash", "shutdown", "engine_lost", "sandbox_gone", "sandbox_error", "reissued", "group_too_small"}
KNOWN_REASONS |= {"verifier_no_reward"}  # the kill hit what was verifying


def _version(run_dir: Path) -> int:
    with RunStore.read(run_dir) as store:
        return store.current_version()
