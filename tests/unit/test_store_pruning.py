"""Old trajectories are deleted, and nothing else: not what a checkpoint lacks, a sum needs, or a write has in hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from venusrl.coordinator.errors import StoreError, StorePruned
from venusrl.coordinator.store import EvaluationSample, RunStore, TrainedReport, blobs
from venusrl.testing.runs import complete_group, new_store


@pytest.fixture(autouse=True)
def one_record_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "SEGMENT_BYTES", 1)


def train(store: RunStore, version: int, *, checkpointed: bool = True) -> list[str]:
    """From ``version`` to the next, on two fresh groups; returns their names."""
    groups = [complete_group(store, version=version) for _ in range(2)]
    store.form_batch(version, groups)
    store.mark_trained(TrainedReport(f"b{version:06d}", version + 1, "/m", checkpointed))
    return groups


def files(run_dir: Path) -> int:
    return len(list((run_dir / "blobs").glob("*.seg")))


def test_old_trajectories_go_and_everything_else_stays(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        store.open_evaluation(0, "sampled")
        samples = [EvaluationSample(0, "task-0", 0, 1.0, 1, 2, "submitted")]
        store.finish_evaluation(0, "sampled", samples, wall_s=1.0)
        trained = [train(store, version) for version in range(5)]
        before = store.totals()
        waiting = complete_group(store, version=5)
        assert files(tmp_path) == 5 * 4 + 2 + 1
        assert store.prune(2) == 3 * 4
        assert files(tmp_path) == 2 * 4 + 2 + 1
        for version in range(3):
            with pytest.raises(StorePruned, match="from version 3 on"):
                store.batch_for(version)
            assert store.trajectory(f"{trained[version][0]}.0.0") is None
            assert store.batch_record(version) is not None
        for version in (3, 4):
            batch = store.batch_for(version)
            assert batch is not None
            assert len(batch.groups) == 2
        assert store.trajectory(f"{waiting}.0.0") is not None
        assert store.evaluation_samples(0, "sampled") == samples
        after = store.totals()
        assert (after.trained_trajectories, after.trained_tokens) == (
            before.trained_trajectories,
            before.trained_tokens,
        )
        assert store.check_invariants() == []
        assert store.prune(2) == 0
        assert store.prune(100) == 0, "what is gone does not come back"
        assert store.check_invariants() == []


def test_what_no_checkpoint_contains_is_kept(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        for version in range(5):
            train(store, version, checkpointed=version < 2)
        assert store.prune(1) == 2 * 4
        assert all(store.batch_for(version) is not None for version in (2, 3, 4))
        assert store.check_invariants() == []


def test_groups_that_were_given_up_go_with_the_steps_of_their_time(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        dropped = complete_group(store)
        store.close_group(dropped, "deadline")
        for version in range(3):
            train(store, version)
        late = complete_group(store, version=2)
        store.close_group(late, "deadline")
        assert store.prune(1) == 2 + 2 * 4
        assert store.trajectory(f"{dropped}.0.0") is None
        assert store.trajectory(f"{late}.0.0") is not None
        assert store.totals().discarded_tokens == {"deadline": 12}


def test_a_kill_between_the_mark_and_the_deletion_leaves_files_that_the_next_call_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_store(tmp_path) as store:
        for version in range(4):
            train(store, version)
        removed: list[int] = []

        def killed(segment: int) -> None:
            if len(removed) == 3:
                raise StoreError("killed")
            removed.append(segment)
            (tmp_path / "blobs" / f"{segment:06d}.seg").unlink()

        monkeypatch.setattr(store._blobs, "remove", killed)
        with pytest.raises(StoreError, match="killed"):
            store.prune(1)
    assert files(tmp_path) == 4 * 4 - 3
    with new_store(tmp_path, resume=True) as again:
        assert again.check_invariants() == [], "the rows do not promise what may be gone"
        with pytest.raises(StorePruned):
            again.batch_for(2)
        assert again.prune(1) == 3 * 4 - 3
        assert again.check_invariants() == []
    assert files(tmp_path) == 4


def test_what_is_being_written_is_nobodys_to_delete(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        for writer in (store._blobs, store._samples):
            ref = writer.append(blobs.pack(b"written, and not on record yet"))
            writer.append(blobs.pack(b"the writer is at the next file already"))
            store.prune(1)
            assert writer.read(ref) == b"written, and not on record yet"
            with writer.recording(ref):
                store.prune(1)
                assert writer.read(ref)
            assert store.prune(1) == 1, "never put on record: nobody can ask for it"
