"""The run store, method by method: what it records, what it refuses, and how it says so."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from venusrl.coordinator.errors import (
    RecipeChanged,
    StoreConflict,
    StoreCorrupt,
    StoreError,
    StoreExists,
    StoreLocked,
    StoreMissing,
    StoreVersionError,
    TasksChanged,
)
from venusrl.coordinator.store import (
    BatchState,
    EvaluationKey,
    EvaluationSample,
    GroupState,
    OpenedGroup,
    RunStore,
    TrainedReport,
    Vacancy,
)
from venusrl.coordinator.store.identity import MAY_CHANGE
from venusrl.coordinator.store.order import TaskOrder
from venusrl.testing.runs import TASKS, complete_group, made_up_trajectory, new_store, small_recipe
from venusrl.types import Batch, Failure, FailureKind

INFRASTRUCTURE = Failure(FailureKind.INFRASTRUCTURE, "sandbox_died", "it is gone")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a memory disk where there is one: the store syncs often, and a busy disk would make that slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def open_group(store: RunStore, size: int = 2) -> OpenedGroup:
    group = store.open_group(size)
    assert group is not None
    return group


def report(version: int, *, checkpointed: bool = True, path: str = "/m") -> TrainedReport:
    return TrainedReport(f"b{version - 1:06d}", version, path, checkpointed, {"loss": 0.5})


def train(store: RunStore, version: int, *, checkpointed: bool = True) -> None:
    """From ``version`` to the next, on two fresh groups."""
    store.form_batch(version, [complete_group(store, version=version) for _ in range(2)])
    store.mark_trained(report(version + 1, checkpointed=checkpointed))


# --- opening --------------------------------------------------------------------------------------------
def test_a_second_run_on_the_directory_is_refused_with_the_holder(tmp_path: Path) -> None:
    with new_store(tmp_path), pytest.raises(StoreLocked, match=r"process \d+ on .*--run-dir"):
        new_store(tmp_path, resume=True)
    with new_store(tmp_path, resume=True) as store:
        assert store.identity().resumes == 1


def test_a_run_is_not_begun_twice_nor_resumed_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match="no run"):
        new_store(tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(StoreMissing):
        RunStore.read(tmp_path)
    new_store(tmp_path).close()
    with pytest.raises(StoreExists, match="--resume"):
        new_store(tmp_path)


def test_a_run_that_died_while_it_began_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with new_store(tmp_path, resume=True) as store:
        assert store.identity().resumes == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "store.sqlite").touch()
    with new_store(other, resume=True) as store:
        assert open_group(store).ordinal == 0


def test_the_recipe_may_change_in_listed_keys_only(tmp_path: Path) -> None:
    new_store(tmp_path).close()
    with pytest.raises(RecipeChanged, match=r"training\.learning_rate: 0\.0001 -> 0\.1"):
        new_store(tmp_path, resume=True, training={"learning_rate": 0.1, "steps": 9})
    with new_store(tmp_path, resume=True, training={"steps": 9}) as store:
        assert store.recipe().training.steps == 9
        assert store.identity().recipe_hash
    with RunStore.read(tmp_path) as store:
        assert store.recipe() == small_recipe(training={"steps": 9})


def test_the_listed_keys_exist() -> None:
    table = small_recipe().model_dump()
    assert [key for key in MAY_CHANGE if (parts := key.split("."))[1] not in table[parts[0]]] == []


def test_a_store_of_another_release_or_kind_is_refused(tmp_path: Path) -> None:
    new_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreVersionError, match="newer VenusRL"):
        new_store(tmp_path, resume=True)
    with pytest.raises(StoreVersionError):
        RunStore.read(tmp_path)

    other = tmp_path / "other"
    other.mkdir()
    with sqlite3.connect(other / "store.sqlite") as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(StoreVersionError, match="not a VenusRL run store"):
        new_store(other)
    (other / "store.sqlite").write_text("no database at all, but a text that is long enough" * 30)
    with pytest.raises(StoreVersionError, match="not a VenusRL run store"):
        new_store(other)


def test_a_reader_sees_a_running_run_and_cannot_write(tmp_path: Path) -> None:
    with new_store(tmp_path) as store, RunStore.read(tmp_path) as reader:
        train(store, 0)
        assert reader.current_version() == 1
        assert reader.totals().trained_trajectories == 4
        with pytest.raises(StoreError):
            reader.discard("lost", 1)
    with RunStore.read(tmp_path) as reader:
        assert reader.check_invariants() == []


def test_a_directory_that_cannot_be_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file/run cannot be written: Not a directory"):
        new_store(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match="cannot be written"):
        new_store(Path("/proc/no-such-run"))


# --- the order of tasks -----------------------------------------------------------------------------------
def test_T28_every_epoch_takes_each_task_once_in_its_own_order(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, small_recipe()) as store:
        store.set_task_order(reversed(TASKS), seed=3, epochs=2)
        taken = [open_group(store).task_id for _ in range(16)]
        assert store.open_group(2) is None
    assert sorted(taken[:8]) == sorted(taken[8:]) == sorted(TASKS)
    assert taken[:8] != taken[8:]
    assert taken[:8] != sorted(TASKS)
    order = TaskOrder(TASKS, seed=3, epochs=0)
    assert [order.task_at(ordinal) for ordinal in range(16)] == taken
    assert order.task_at(10**6) in TASKS
    assert TaskOrder(TASKS, seed=4, epochs=0).task_at(0) is not None


def test_T28_a_run_that_came_to_the_end_of_its_tasks_can_be_given_more_epochs(tmp_path: Path) -> None:
    def reopened(epochs: int) -> RunStore:
        store = new_store(tmp_path, resume=(tmp_path / "lock").exists())
        store.set_task_order(TASKS, seed=0, epochs=epochs)
        return store

    with reopened(1) as store:
        assert [store.open_group(2) is None for _ in range(9)] == [False] * 8 + [True]
    with reopened(2) as store:
        assert open_group(store).ordinal == 8
        with pytest.raises(TasksChanged, match=r"past 1 epochs"):
            store.set_task_order(TASKS, seed=0, epochs=1)
        assert store.check_invariants() == []


def test_other_tasks_are_refused_on_resume(tmp_path: Path) -> None:
    new_store(tmp_path).close()
    with RunStore.open(tmp_path, small_recipe(), resume=True) as store:
        with pytest.raises(TasksChanged, match=r"missing 1 \(task-7\); new 1 \(task-new\)"):
            store.set_task_order([*TASKS[:7], "task-new"], seed=0, epochs=0)
        with pytest.raises(TasksChanged, match="seeded otherwise"):
            store.set_task_order(TASKS, seed=1, epochs=0)
        store.set_task_order(reversed(TASKS), seed=0, epochs=0)


# --- groups and trajectories -------------------------------------------------------------------------------
def test_a_trajectory_reads_back_as_it_was_finished(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        group = open_group(store)
        kept = made_up_trajectory(group.trajectories[0], group.task_id, sampled=500)
        store.finish_trajectory(kept)
        assert store.trajectory(kept.id) == kept
        assert store.trajectory(group.trajectories[1].id) is None
        with pytest.raises(StoreConflict, match="finished, not running"):
            store.finish_trajectory(kept)


def test_T19_only_a_trainable_trajectory_finishes(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        group = open_group(store)
        first, second = group.trajectories
        with pytest.raises(StoreConflict, match="fail_trajectory"):
            store.finish_trajectory(made_up_trajectory(first, group.task_id, failure=INFRASTRUCTURE))
        with pytest.raises(StoreConflict, match="fail_trajectory"):
            store.finish_trajectory(made_up_trajectory(first, group.task_id, reward=None))
        policy = Failure(FailureKind.POLICY, "max_turns")
        store.finish_trajectory(made_up_trajectory(first, group.task_id, failure=policy, reward=0.0))
        with pytest.raises(StoreConflict, match="handed the content"):
            store.fail_trajectory(second.id, INFRASTRUCTURE, vacant=False, transcript=store.trajectory(first.id))
        store.fail_trajectory(second.id, INFRASTRUCTURE, vacant=False)
        assert store.totals().failures == {"infrastructure/sandbox_died": 1, "policy/max_turns": 1}
        assert store.complete_group(group.id) == 0


def test_T04_a_replacement_is_a_new_attempt_with_its_own_start(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        train(store, 0)
        group = open_group(store)
        first, second = group.trajectories
        store.record_progress(first.id, start_version=0, tokens=7)
        store.fail_trajectory(first.id, INFRASTRUCTURE, vacant=True)
        with pytest.raises(StoreConflict, match="places"):
            store.complete_group(group.id)
        again = store.replace_trajectory(group.id, first.index)
        assert (again.id, again.attempt) == (f"{group.id}.0.1", 1)
        with pytest.raises(StoreConflict, match="not vacant"):
            store.replace_trajectory(group.id, first.index)
        for member in (again, second):
            store.finish_trajectory(made_up_trajectory(member, group.task_id, version=1))
        assert store.complete_group(group.id) == 1  # the failed attempt's start does not count
        assert store.totals().discarded_tokens == {"sandbox_died": 7}
        assert store.check_invariants() == []


def test_T39_a_failed_trajectory_keeps_its_transcript(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        group = open_group(store)
        member = group.trajectories[0]
        transcript = made_up_trajectory(member, group.task_id, failure=INFRASTRUCTURE, reward=None)
        store.record_progress(member.id, 0, 2)
        store.fail_trajectory(member.id, INFRASTRUCTURE, vacant=True, transcript=transcript)
        assert store.trajectory(member.id) == transcript
        assert store.totals().discarded_tokens == {"sandbox_died": 3}


def test_a_group_without_a_finished_member_can_only_be_closed(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        group = open_group(store)
        for member in group.trajectories:
            store.fail_trajectory(member.id, INFRASTRUCTURE, vacant=True)
            store.give_up_place(group.id, member.index)
        with pytest.raises(StoreConflict, match="close it"):
            store.complete_group(group.id)
        store.close_group(group.id, "all_failed")
        with pytest.raises(StoreConflict, match="closed"):
            store.close_group(group.id, "again")
        assert store.totals().closed_groups == {"all_failed": 1}


def test_T44_every_lost_token_has_a_reason(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        stale = complete_group(store)
        store.close_group(stale, "stale")
        group = open_group(store)
        store.record_progress(group.trajectories[0].id, 0, 11)
        store.finish_trajectory(made_up_trajectory(group.trajectories[1], group.task_id))
        store.close_group(group.id, "dropped")
        store.discard("rolled_back_turn", 5)
        store.discard("rolled_back_turn", 2)
        totals = store.totals()
        assert totals.discarded_tokens == {"dropped": 14, "rolled_back_turn": 7, "stale": 6}
        assert store.discarded_tokens() == totals.discarded_tokens
        assert totals.failures == {"cancelled/dropped": 1}
        with pytest.raises(StoreConflict, match="not running"):
            store.record_progress(group.trajectories[0].id, 0, 12)


def test_a_reissued_group_keeps_the_place_in_the_order(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        first = open_group(store)
        open_group(store)
        with pytest.raises(StoreConflict, match="open, not closed"):
            store.open_group(2, reissue_of=first.id)
        store.close_group(first.id, "dropped")
        assert [(c.id, c.reason, c.reissues) for c in store.recover().closed] == [(first.id, "dropped", 0)]
        again = store.open_group(2, reissue_of=first.id)
        assert again is not None
        assert store.recover().closed == ()
        assert (again.ordinal, again.task_id, again.id) == (first.ordinal, first.task_id, "g000000r1")
        with pytest.raises(StoreConflict):
            store.open_group(2, reissue_of=first.id)  # one live group a place
        assert open_group(store).ordinal == 2
        assert store.check_invariants() == []


# --- batches and versions ------------------------------------------------------------------------------------
def test_a_batch_is_served_as_it_was_formed(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.record_version(0, "/m/0", checkpointed=True)
        groups = [complete_group(store) for _ in range(3)]
        assert store.batch_for(0) is None
        store.form_batch(0, [groups[2], groups[0]])
        body = store.batch_bytes(0)
        assert body is not None
        batch = msgspec.msgpack.decode(body, type=Batch)
        assert [group.id for group in batch.groups] == [groups[2], groups[0]]
        assert [t.reward for t in batch.groups[0].trajectories] == [0.0, 1.0]
        assert batch.groups[1].trajectories[0] == store.trajectory(f"{groups[0]}.0.0")
        assert store.mark_trained(report(1))
        assert store.batch_for(0) == batch
        record = store.batch_record(0)
        assert record is not None
        assert (record.state, record.group_ids) == (BatchState.CLOSED, (groups[2], groups[0]))
        assert store.check_invariants() == []


@pytest.mark.parametrize("version", [1, 2])
def test_T01_form_batch_refuses_what_breaks_the_order_or_the_bound(tmp_path: Path, version: int) -> None:
    with new_store(tmp_path) as store:
        for step in range(2):
            train(store, step)
        stale, fresh = complete_group(store, version=0), complete_group(store, version=2)
        with pytest.raises(StoreConflict):
            store.form_batch(version, [fresh, stale] if version == 2 else [fresh, fresh])
        future = complete_group(store, version=3)
        with pytest.raises(StoreConflict):
            store.form_batch(2, [fresh, future])
        with pytest.raises(StoreConflict, match="batched"):
            store.form_batch(2, [fresh, fresh])
        with pytest.raises(StoreConflict, match="no nothing"):
            store.form_batch(2, [fresh, "nothing"])
        assert store.batch_record(2) is None  # refused as a whole
        store.close_group(stale, "stale")
        store.close_group(future, "test")
        store.form_batch(2, [fresh, complete_group(store, version=1)])
        assert store.check_invariants() == []


def test_mark_trained_is_idempotent_and_ordered(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.form_batch(0, [complete_group(store) for _ in range(2)])
        store.form_batch(1, [complete_group(store) for _ in range(2)])
        with pytest.raises(StoreConflict, match="not trained yet"):
            store.mark_trained(report(2))
        with pytest.raises(StoreConflict, match="no b000007"):
            store.mark_trained(report(8))
        assert store.mark_trained(report(1, checkpointed=False, path="/a"))
        assert not store.mark_trained(report(1, checkpointed=False, path="/b"))
        version = store.version(1)
        assert version is not None
        assert (version.model_path, version.checkpointed, version.metrics) == ("/b", False, {"loss": 0.5})
        assert [batch.id for batch in store.recover().unclosed_batches] == ["b000000"]
        assert store.mark_trained(report(2))
        assert store.recover().unclosed_batches == ()
        assert not store.mark_trained(report(1, checkpointed=False))  # a trainer that went back is heard again
        store.record_version(2, "/moved", checkpointed=False)
        assert [(v.version, v.model_path, v.checkpointed) for v in store.versions()] == [
            (1, "/m", False),
            (2, "/moved", True),
        ]
        with pytest.raises(StoreConflict, match="was not trained"):
            store.record_version(3, "/m", checkpointed=True)
        assert store.check_invariants() == []


# --- evaluations -----------------------------------------------------------------------------------------------
def test_T41_an_evaluation_is_pending_until_its_own_samples_are_kept(tmp_path: Path) -> None:
    def sample(version: int, number: int, reward: float | None) -> EvaluationSample:
        return EvaluationSample(version, TASKS[0], number, reward, turns=1, tokens=5, end="submitted")

    with new_store(tmp_path) as store:
        store.open_evaluation(0, "sampled")
    with new_store(tmp_path, resume=True) as store:
        store.open_evaluation(0, "sampled")
        assert store.recover().pending_evaluations == (EvaluationKey(0, "sampled"),)
        with pytest.raises(StoreConflict, match=r"version 0 holds samples of \[1\]"):
            store.finish_evaluation(0, "sampled", [sample(0, 0, 1.0), sample(1, 1, 1.0)], wall_s=1.0)
        with pytest.raises(StoreConflict, match="pending"):
            store.finish_evaluation(0, "greedy", [], wall_s=1.0)
        samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, None)]
        record = store.finish_evaluation(0, "sampled", samples, wall_s=2.0)
        assert (record.reward, record.samples, record.failed) == (0.5, 3, 1)
        assert store.evaluations() == [record]
        assert store.evaluation_samples(0, "sampled") == samples
        assert store.evaluation_samples(0, "greedy") == []
        assert store.recover().pending_evaluations == ()
        assert store.check_invariants() == []


# --- after a crash ---------------------------------------------------------------------------------------------
def test_recovery_cancels_what_was_in_flight_and_reopens_its_place(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        group = open_group(store, size=3)
        flying, failed, done = group.trajectories
        store.record_progress(flying.id, 0, 13)
        store.fail_trajectory(failed.id, INFRASTRUCTURE, vacant=True)
        store.finish_trajectory(made_up_trajectory(done, group.task_id))
    with new_store(tmp_path, resume=True) as store:
        state = store.recover()
        assert (state.lost_trajectories, state.lost_tokens, state.next_ordinal) == (1, 13, 1)
        assert store.recover() == msgspec.structs.replace(state, lost_trajectories=0, lost_tokens=0)
        (again,) = state.groups
        assert (again.id, again.state, again.start_version) == (group.id, GroupState.OPEN, 0)
        assert [member.id for member in again.finished] == [done.id]
        assert again.vacancies == (Vacancy(0, 1, 0), Vacancy(1, 1, 1))
        assert store.totals().discarded_tokens == {"crash": 13}
        for vacancy in again.vacancies:
            opened = store.replace_trajectory(group.id, vacancy.index)
            assert opened.attempt == vacancy.next_attempt
            store.finish_trajectory(made_up_trajectory(opened, group.task_id))
        assert store.complete_group(group.id) == 0
        assert store.check_invariants() == []


def test_a_damaged_blob_is_noticed(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        group = complete_group(store)
        (segment,) = (tmp_path / "blobs").iterdir()
        data = bytearray(segment.read_bytes())
        data[len(data) // 4] ^= 0xFF
        segment.write_bytes(data)
        with pytest.raises(StoreCorrupt, match="damaged or cut"):
            store.trajectory(f"{group}.0.0")
        assert len(store.check_invariants()) == 1
        segment.write_bytes(b"")
        assert len(store.check_invariants()) == 2
        segment.unlink()
        assert len(store.check_invariants()) == 2


def test_invariants_see_what_the_methods_would_never_do(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        train(store, 0)
        train(store, 1)
        assert store.check_invariants() == []
    faults = {
        "UPDATE groups SET ordinal = 77, id = 'g000077' WHERE id = 'g000003'": "skipped",
        "UPDATE groups SET task_id = (SELECT max(id) FROM tasks) WHERE ordinal < 2": "not the task",
        "UPDATE batches SET version = 5 WHERE version = 1": "was next",
        "UPDATE groups SET state = 'closed', reason = 'x', batch_id = NULL WHERE ordinal = 1": "holds 1 groups",
        "UPDATE versions SET version = 4 WHERE version = 2": "not consecutive",
        "UPDATE versions SET checkpointed = 0": "no checkpoint contains it",
        "UPDATE trajectories SET reward = 0.25": "another reward",
        "UPDATE trajectories SET start_version = 1 WHERE group_id = 'g000000'": "says it started at 0",
        "UPDATE groups SET state = 'batched' WHERE ordinal = 0": "are not trained",
        "UPDATE batches SET state = 'formed' WHERE version = 0": "is formed while version 2",
    }
    for number, (damage, words) in enumerate(faults.items()):
        copy = tmp_path / f"copy-{number}"
        (copy / "blobs").mkdir(parents=True)
        for file in [tmp_path / "store.sqlite", *(tmp_path / "blobs").iterdir()]:
            (copy / file.relative_to(tmp_path)).write_bytes(file.read_bytes())
        db = sqlite3.connect(copy / "store.sqlite")
        db.execute(damage)
        db.commit()
        db.close()
        with RunStore.read(copy) as store:
            assert words in "\n".join(store.check_invariants())
