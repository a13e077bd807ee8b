"""Whole runs through the command line: real engine, real sandboxes, real trainer, seconds each."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.system.conftest import Recipes, Start
from tests.system.harness import TrainProcess, events, faults, sandboxes_left

from venusrl.coordinator.errors import StorePruned
from venusrl.coordinator.store import RunStore
from venusrl.types import Batch

pytestmark = pytest.mark.timeout(900)
WAIT_S = 280.0
"""How long a run of seconds may take on a machine that is busy with other things."""
ON_POLICY = {
    "schedule": {"async_factor": 0},
    "rollout": {"weight_update": "drain"},
    "evaluation": {"at_start": False, "at_end": False},
}


def batches(run_dir: Path) -> list[Batch]:
    with RunStore.read(run_dir) as store:
        found = [store.batch_for(version) for version in range(store.current_version())]
    return [batch for batch in found if batch is not None]


def test_a_run_from_nothing_to_a_trained_and_evaluated_model(recipes: Recipes, start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = recipes(
        evaluation={"every": 2, "greedy": True},
        run={"keep_trajectories_of_steps": 1},
        training={"keep_checkpoints": 1},
    )
    process = start(recipe, run_dir, "--json")
    assert process.wait(WAIT_S) == 0, process.said()
    assert faults(run_dir) == []
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["trained_trajectories"]) == ("finished", 3, 24)
    assert summary["staleness_max"] <= 1
    assert summary["trainer_idle_fraction"] is not None
    assert summary["coordinator_critical_fraction"] < 0.2
    assert {(e["version"], e["mode"]) for e in summary["evaluations"]} == {
        (version, mode) for version in (0, 2, 3) for mode in ("sampled", "greedy")
    }
    assert (run_dir / "reward.png").stat().st_size > 1000
    assert (run_dir / "checkpoints" / "v000003" / "model").is_dir()
    assert not list((run_dir / "checkpoints").glob("*.keep"))
    with RunStore.read(run_dir) as store:
        for version in (0, 2, 3):
            samples = store.evaluation_samples(version, "sampled")
            assert len(samples) == 4
            assert {sample.version for sample in samples} == {version}, "T41: pinned to the version that triggered it"
        with pytest.raises(StorePruned):
            store.batch_for(0)
        assert store.batch_for(2) is not None
        assert store.totals().staleness_max <= 1
    again = start(recipe, run_dir)
    assert again.wait(WAIT_S) != 0
    assert "--resume" in again.said()
    assert "Traceback" not in again.said()


def test_venus_schedules_a_run_whose_kv_holds_few_trajectories(recipes: Recipes, start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ends_only = {"at_start": False, "at_end": False}
    process = start(recipes(schedule={"policy": "venus"}, evaluation=ends_only), run_dir, "--json")
    assert process.wait(WAIT_S) == 0, process.said()
    assert faults(run_dir) == []
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["trained_trajectories"]) == ("finished", 3, 24)
    assert summary["staleness_max"] <= 1


def test_on_policy_every_token_of_a_batch_comes_from_exactly_its_version(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(recipes(**ON_POLICY), run_dir)
    assert process.wait(WAIT_S) == 0, process.said()
    assert faults(run_dir) == []
    trained = batches(run_dir)
    assert [batch.version for batch in trained] == [0, 1, 2]
    for batch in trained:
        members = [t for group in batch.groups for t in group.trajectories]
        assert len(members) == 8
        spans = [span for t in members for segment in t.segments for span in segment.spans]
        assert {span.version for span in spans} == {batch.version}


def test_a_fractional_window_keeps_its_bound_and_resumes_with_more_steps(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    changes = {"schedule": {"async_factor": 1.5}, "evaluation": {"at_start": False, "at_end": False}}
    assert (first := start(recipes(**changes), run_dir)).wait(WAIT_S) == 0, first.said()
    longer = recipes("longer", **changes, training={"steps": 5})
    assert (second := start(longer, run_dir, "--resume")).wait(WAIT_S) == 0, second.said()
    assert faults(run_dir) == []
    trained = batches(run_dir)
    assert [batch.version for batch in trained] == [0, 1, 2, 3, 4]
    ordinals = [group.ordinal for batch in trained for group in batch.groups]
    assert len(ordinals) == len(set(ordinals))
    for batch in trained:
        for group in batch.groups:
            assert 0 <= batch.version - group.start_version <= 2


def test_an_interrupt_finishes_cleanly_and_the_run_goes_on(recipes: Recipes, start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = recipes(training={"steps": 40}, evaluation={"at_start": False})
    process = start(recipe, run_dir)
    process.until_event("batch_formed", WAIT_S, version=1)
    children = process.descendants("engine") + process.descendants("trainer")
    process.interrupt()
    assert process.wait(WAIT_S) == 130, process.said()
    assert "--resume" in process.said()
    assert "Traceback" not in process.said()
    assert all(not Path(f"/proc/{pid}").exists() for pid in children), "T35: nothing is left behind"
    assert sandboxes_left(run_dir) == []
    assert faults(run_dir) == []
    with RunStore.read(run_dir) as store:
        stopped_at = store.current_version()
    assert stopped_at >= 1
    end = recipes("shorter", training={"steps": stopped_at + 1}, evaluation={"at_start": False})
    assert (again := start(end, run_dir, "--resume")).wait(WAIT_S) == 0, again.said()
    assert faults(run_dir) == []
    assert [batch.version for batch in batches(run_dir)] == list(range(stopped_at + 1))


def test_a_time_limit_ends_a_run_cleanly_and_a_longer_one_goes_on(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir, quick = tmp_path / "run", {"evaluation": {"at_start": False, "at_end": False}}
    limited = recipes(run={"time_limit_s": 25.0}, training={"steps": 1000}, **quick)
    begun = time.monotonic()
    process = start(limited, run_dir)
    assert process.wait(WAIT_S) == 0, process.said()
    assert time.monotonic() - begun >= 25
    assert "time_limit_s = 25" in process.said()
    assert "--resume" in process.said()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "time_limit"
    assert sandboxes_left(run_dir) == []
    assert faults(run_dir) == []
    reached = summary["steps"]
    more = recipes("more", run={"time_limit_s": 1000.0}, training={"steps": reached + 1}, **quick)
    assert (again := start(more, run_dir, "--resume")).wait(WAIT_S) == 0, again.said()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["sessions"]) == ("finished", reached + 1, 2)
    assert summary["trained_trajectories"] == 8 * (reached + 1)
    assert faults(run_dir) == []


def test_an_interrupt_before_anything_serves_waits_for_nothing(recipes: Recipes, start: Start, tmp_path: Path) -> None:
    recipe = recipes(schedule={"batch_groups": 16, "group_size": 8}, training={"checkpoint_every": 2})
    for attempt in range(5):  # an engine may come up before the interrupt does
        run_dir = tmp_path / f"run{attempt}"
        process = start(recipe, run_dir)
        process.until_event("run_started", WAIT_S)
        process.until_descendant("trainer", WAIT_S)
        process.interrupt()
        assert process.wait(WAIT_S) == 130, process.said()
        if not [e for e in events(run_dir) if e["kind"] == "worker_up"]:
            break
    else:
        pytest.fail("an engine served before every interrupt")
    assert "did not end within" not in (run_dir / "logs" / "coordinator.log").read_text()
    assert "episodes" in process.said(), "it says what it waits for"
    assert "--resume" in process.said()
    assert sandboxes_left(run_dir) == []
    assert faults(run_dir) == []


def test_a_second_run_on_the_same_directory_is_refused_and_the_first_goes_on(
    recipes: Recipes, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    recipe = recipes(training={"steps": 1000}, evaluation={"at_start": False, "at_end": False})
    first = start(recipe, run_dir)
    first.until_event("worker_up", WAIT_S)
    second = TrainProcess(recipe, run_dir, "--resume")
    try:
        assert second.wait(WAIT_S) != 0
    finally:
        second.end()
    assert str(first.pid) in second.said() or "another" in second.said().lower()
    assert "Traceback" not in second.said()
    seen = len(events(run_dir))
    first.until_event("published", WAIT_S)
    assert first.popen.poll() is None, first.said()
    assert len(events(run_dir)) >= seen
    first.interrupt()
    assert first.wait(WAIT_S) == 130, first.said()
    assert faults(run_dir) == []


def test_a_trainer_that_keeps_dying_ends_the_run_with_its_cause(recipes: Recipes, start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = recipes(training={"restarts": 1, "steps": 40}, evaluation={"at_start": False, "at_end": False})
    process = start(recipe, run_dir)
    killed: set[int] = set()
    deadline = time.monotonic() + WAIT_S
    while process.popen.poll() is None and time.monotonic() < deadline:
        for pid in process.descendants("trainer"):
            if pid not in killed:
                time.sleep(0.5)
                killed.add(pid)
                _kill(pid)
        time.sleep(0.05)
    assert process.wait(WAIT_S) == 1, process.said()
    assert "trainer" in process.said()
    assert "SIGKILL" in process.said()
    assert "--resume" in process.said()
    assert "Traceback" not in process.said()
    assert events(run_dir)[-1]["kind"] == "run_finished"
    assert sandboxes_left(run_dir) == []
    assert faults(run_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can only be mounted by root")
def test_a_full_disk_is_one_clear_message_and_loses_nothing(recipes: Recipes, start: Start, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=2500k tmpfs {disk}") != 0:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        run_dir = disk / "run"
        recipe = recipes(training={"steps": 500}, evaluation={"at_start": False, "at_end": False})
        process = start(recipe, run_dir)
        assert process.wait(WAIT_S) == 1, process.said()
        assert "disk" in process.said()
        assert len([e for e in events(run_dir) if e["kind"] == "trainer_down"]) <= 1, "a stated cause is final"
        assert "Traceback" not in process.said()
        os.system(f"mount -o remount,size=64m {disk}")
        assert faults(run_dir) == []
        with RunStore.read(run_dir) as store:
            reached = store.current_version()
        more = recipes("more", training={"steps": reached + 1}, evaluation={"at_start": False, "at_end": False})
        assert (again := start(more, run_dir, "--resume")).wait(WAIT_S) == 0, again.said()
        assert faults(run_dir) == []
    finally:
        os.system(f"umount -l {disk}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
