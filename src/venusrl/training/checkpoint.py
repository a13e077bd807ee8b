"""Checkpoints on disk: complete or not there.

Owns: the layout of ``checkpoints/`` (``v%06d/{model/, optimizer.pt, manifest.json}``), atomic writing, finding the
newest usable one, pruning.

Must not know: what a model or an optimizer is (it is handed writers), HTTP.

Guarantees: a directory named ``v%06d`` was completely written and synced before it got that name; a failed write
(disk full included) leaves every earlier checkpoint as it was and no debris after the next ``clean``; pruning removes
neither the newest version, nor the newest one that can be resumed from, nor one that carries a keep mark.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from venusrl.training.errors import CheckpointError, DiskFull

FORMAT = 1
_NAME = re.compile(r"v(\d{6,})")
_MANIFEST = "manifest.json"
MIN_PUBLISHED = 2
"""Versions kept whatever the recipe says: an engine may still be reading the last but one."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``batch_ids[n]`` is the batch that turned version n into n + 1; there are ``version`` of them."""

    version: int
    batch_ids: list[str]
    checkpointed: bool
    """Whether training can resume from here; otherwise only ``model/`` is there, for the engines."""
    metrics: dict[str, float] = {}
    """Of the step that made this version, to be reported again after a crash between checkpoint and report."""
    files: dict[str, int] = {}
    """Size of every file beside the manifest; a file that is missing or cut is noticed."""
    format: int = FORMAT


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: Manifest

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def optimizer(self) -> Path:
        return self.path / "optimizer.pt"


def path_of(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def keep_mark(root: Path, version: int) -> Path:
    """A file that, while it exists, protects ``version`` from pruning."""
    return root / f"v{version:06d}.keep"


def write(root: Path, manifest: Manifest, write_files: Callable[[Path], None], *, expected_bytes: int) -> Checkpoint:
    """Write a version atomically, replacing one of the same number. Raises DiskFull, CheckpointError.

    ``write_files(directory)`` writes ``model/`` and, for a full checkpoint, ``optimizer.pt``.
    """
    final = path_of(root, manifest.version)
    staging = root / f".new-{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _require_space(root, expected_bytes)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        write_files(staging)
        manifest = msgspec.structs.replace(manifest, files=_sizes(staging))
        (staging / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        _sync_tree(staging)
        _put_in_place(staging, final)
    except CheckpointError:
        raise
    except Exception as error:  # writers of safetensors and torch raise types of their own for a full disk
        shutil.rmtree(staging, ignore_errors=True)
        if is_disk_full(error):
            raise DiskFull(_full_message(root)) from error
        raise CheckpointError(f"the checkpoint of version {manifest.version} could not be written: {error}") from error
    return Checkpoint(final, manifest)


def is_disk_full(error: BaseException) -> bool:
    """Whether this error, or one that caused it, says that a disk (or a quota) is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _full_message(root: Path) -> str:
    return (
        f"the disk of {root} is full; earlier checkpoints are intact. Free space, or lower "
        "training.keep_checkpoints, then resume"
    )


def _require_space(root: Path, expected_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < expected_bytes:
        raise DiskFull(
            f"{_full_message(root)} (the checkpoint needs {expected_bytes / 1e6:.1f} MB, {free / 1e6:.1f} MB are free)"
        )


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(staging: Path, final: Path) -> None:
    """Directories do not replace each other: the old one steps aside first; ``clean`` mends a crash in between."""
    aside = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(staging, final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what an interrupted write left. Only the one trainer of a run may call this."""
    for aside in root.glob(".old-v*"):
        final = root / aside.name.removeprefix(".old-")
        if final.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, final)
    for staging in root.glob(".new-v*"):
        shutil.rmtree(staging)


def versions(root: Path) -> list[int]:
    """Version numbers of the directories present, ascending, complete or not."""
    if not root.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def read(root: Path, version: int) -> Checkpoint:
    """Raises CheckpointError when the version is not there, incomplete or of another format."""
    path = path_of(root, version)
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} has no readable manifest: {error}") from error
    if manifest.format != FORMAT or manifest.version != version or len(manifest.batch_ids) != version:
        raise CheckpointError(f"{path}: the manifest does not describe version {version} in format {FORMAT}")
    damaged = [name for name, size in manifest.files.items() if _size(path / name) != size]
    if damaged:
        raise CheckpointError(f"{path} is incomplete: {', '.join(damaged)}")
    return Checkpoint(path, manifest)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def latest(root: Path, on_ignored: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """The newest complete version that can be resumed from; damaged ones are named to ``on_ignored``."""
    for version in reversed(versions(root)):
        try:
            checkpoint = read(root, version)
        except CheckpointError as error:
            on_ignored(str(error))
            continue
        if checkpoint.manifest.checkpointed:
            return checkpoint
    return None


def prune(root: Path, keep: int) -> list[int]:
    """Remove old versions, keeping the newest ``keep`` full checkpoints, the newest two of any kind and marked ones."""
    present = versions(root)
    full: list[int] = []
    for version in reversed(present):
        if len(full) == keep:
            break
        try:
            if read(root, version).manifest.checkpointed:
                full.append(version)
        except CheckpointError:
            continue
    kept = {*full, *present[-MIN_PUBLISHED:]}
    removed = [v for v in present if v not in kept and not keep_mark(root, v).exists()]
    if not full:  # nothing to resume from but what is damaged: leave everything to the user
        return []
    for version in removed:
        shutil.rmtree(path_of(root, version))
    return removed
