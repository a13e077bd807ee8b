"""Checkpoints: complete or not there, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.training.checkpoint import Manifest, clean, keep_mark, latest, path_of, prune, read, versions, write
from venusrl.training.errors import CheckpointError, DiskFull


def manifest(version: int, *, full: bool = True) -> Manifest:
    return Manifest(version=version, batch_ids=[f"b{n}" for n in range(version)], checkpointed=full)


def writer(content: str = "weights") -> Callable[[Path], None]:
    def write_files(directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "model.safetensors").write_text(content)
        (directory / "optimizer.pt").write_text("moments")

    return write_files


def put(root: Path, version: int, *, full: bool = True, content: str = "weights") -> None:
    write(root, manifest(version, full=full), writer(content), expected_bytes=10)


def contents(root: Path) -> dict[str, str]:
    return {p.relative_to(root).as_posix(): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert latest(root) is None
    put(root, 0)
    put(root, 1)
    found = latest(root)
    assert found is not None
    assert found.manifest.batch_ids == ["b0"]
    assert found.manifest.files == {"model/model.safetensors": 7, "optimizer.pt": 7}
    assert found.path == root / "v000001"
    assert (found.model / "model.safetensors").read_text() == "weights"


def test_a_version_can_be_written_again(tmp_path: Path) -> None:
    put(tmp_path, 1, full=False, content="first")
    put(tmp_path, 1, content="second")
    assert (tmp_path / "v000001/model/model.safetensors").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001"]


def test_a_version_without_optimizer_is_not_resumed_from(tmp_path: Path) -> None:
    put(tmp_path, 2)
    put(tmp_path, 3, full=False)
    found = latest(tmp_path)
    assert found is not None
    assert found.manifest.version == 2


def cut_weights(path: Path) -> None:
    (path / "model/model.safetensors").write_text("wei")


def lose_optimizer(path: Path) -> None:
    (path / "optimizer.pt").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"version": 2, "batch')


def misplace(path: Path) -> None:
    shutil.copytree(path, path.with_name("v000009"))
    shutil.rmtree(path)


@pytest.mark.parametrize("damage", [cut_weights, lose_optimizer, lose_manifest, cut_manifest, misplace])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    damage(path_of(tmp_path, 2))
    faults: list[str] = []
    found = latest(tmp_path, on_ignored=faults.append)
    assert found is not None
    assert found.manifest.version == 1
    assert len(faults) == 1
    assert "v00000" in faults[0]


def test_a_full_disk_leaves_earlier_checkpoints_and_no_debris(tmp_path: Path) -> None:
    put(tmp_path, 1)
    before = contents(tmp_path)

    def fills_the_disk(directory: Path) -> None:
        writer()(directory)
        with Path("/dev/full").open("w") as device:
            device.write("x")

    with pytest.raises(DiskFull, match="earlier checkpoints are intact"):
        write(tmp_path, manifest(2), fills_the_disk, expected_bytes=10)
    assert contents(tmp_path) == before
    assert versions(tmp_path) == [1]


def test_a_writer_that_wraps_the_full_disk_is_understood(tmp_path: Path) -> None:
    def fails_its_own_way(directory: Path) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(DiskFull):
        write(tmp_path, manifest(2), fails_its_own_way, expected_bytes=10)


def test_too_little_space_is_noticed_before_writing(tmp_path: Path) -> None:
    put(tmp_path, 1)
    with pytest.raises(DiskFull, match="MB are free"):
        write(tmp_path, manifest(2), writer(), expected_bytes=1 << 60)
    assert versions(tmp_path) == [1]


def test_another_failure_is_a_checkpoint_error_with_its_cause(tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        raise ValueError("odd tensor")

    with pytest.raises(CheckpointError, match="version 2 could not be written: odd tensor") as caught:
        write(tmp_path, manifest(2), fails, expected_bytes=10)
    assert not isinstance(caught.value, DiskFull)
    assert list(tmp_path.iterdir()) == []


def test_clean_mends_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    put(tmp_path, 1, content="old")
    path_of(tmp_path, 1).rename(tmp_path / ".old-v000001")
    (tmp_path / ".new-v000001").mkdir()
    assert latest(tmp_path) is None
    clean(tmp_path)
    assert read(tmp_path, 1).manifest.version == 1
    put(tmp_path, 1, content="new")
    shutil.copytree(path_of(tmp_path, 1), tmp_path / ".old-v000001")
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001"]


def test_a_kill_at_any_call_leaves_a_usable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at each rename, sync and removal of a rewrite in turn, as a kill would; then start anew."""

    class Killed(BaseException):
        pass

    calls = 0
    limit = 0

    def counted(name: str, module: object) -> None:
        real = getattr(module, name)

        def call(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == limit:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    counted("rename", os)
    counted("fsync", os)
    counted("rmtree", shutil)
    for attempt in range(1, 100):
        root = tmp_path / str(attempt)
        limit = 0
        put(root, 1)
        put(root, 2, content="before")
        calls, limit = 0, attempt
        try:
            put(root, 2, content="after")
        except Killed:
            limit = 0
            clean(root)
            found = latest(root)
            assert found is not None
            assert found.manifest.version == 2
            assert (found.model / "model.safetensors").read_text() in ("before", "after")
            assert not [path for path in root.iterdir() if path.name.startswith(".")]
        else:
            assert attempt > 5
            return
    pytest.fail("the rewrite never finished")


# --- pruning ------------------------------------------------------------------------------------------------------
def test_pruning_keeps_the_newest_full_ones_the_marked_and_what_engines_may_read(tmp_path: Path) -> None:
    for version in range(10):
        put(tmp_path, version, full=version % 3 == 0)
    keep_mark(tmp_path, 4).touch()
    assert prune(tmp_path, keep=2) == [0, 1, 2, 3, 5, 7]
    assert versions(tmp_path) == [4, 6, 8, 9]
    keep_mark(tmp_path, 4).unlink()
    assert prune(tmp_path, keep=2) == [4]


def test_pruning_counts_no_damaged_checkpoint(tmp_path: Path) -> None:
    for version in range(4):
        put(tmp_path, version)
    cut_weights(path_of(tmp_path, 3))
    prune(tmp_path, keep=1)
    found = latest(tmp_path)
    assert found is not None
    assert found.manifest.version == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 4), st.sets(st.integers(0, 7)))
def test_pruning_never_removes_what_is_needed(
    tmp_path_factory: pytest.TempPathFactory, full: list[bool], keep: int, marked: set[int]
) -> None:
    root = tmp_path_factory.mktemp("c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # this test is about names, not about power loss
        for version, checkpointed in enumerate(full):
            put(root, version, full=checkpointed)
    for version in marked:
        keep_mark(root, version).touch()
    before = latest(root)
    removed = prune(root, keep)
    after = latest(root)
    assert (before and before.manifest) == (after and after.manifest)
    assert not set(removed) & marked
    assert len(full) - 1 not in removed
    assert prune(root, keep) == []
