"""Snapshots kept on a host.

Owns: one directory a snapshot: what the runtime wrote, and a record beside it.

Must not know: how a snapshot is taken or restored.

Guarantees: a snapshot is listed once it is whole and on disk, and never before; one that is being restored from is not
removed under its reader; what a crash left half-written is gone after ``open``.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from venusrl.sandboxes.host.api import SnapshotInfo
from venusrl.sandboxes.host.errors import AlreadyExists
from venusrl.sandboxes.host.records import check_id, full_disk_named, read_record, sync_directory, write_whole
from venusrl.sandboxes.protocol import Limits, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Snapshot
from venusrl.sandboxes.templates.api import Image

_PART = ".part-"
DATA = "data"
_RECORD = "record.json"


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot and what a sandbox restored from it is like."""

    info: SnapshotInfo
    image: Image
    limits: Limits
    env: dict[str, str] = {}


class Snapshots:
    """The snapshots below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: dict[str, Kept] = {}
        self._readers: dict[str, int] = {}
        self._leaving: set[str] = set()

    def open(self) -> None:
        """Read what is there; remove what a crash left."""
        with full_disk_named(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in sorted(self._root.iterdir()):
            kept = None if directory.name.startswith(_PART) else self._read(directory)
            if kept is None:
                shutil.rmtree(directory)
            else:
                self._kept[kept.info.id] = kept

    def infos(self) -> tuple[SnapshotInfo, ...]:
        return tuple(kept.info for kept in self._kept.values())

    def get(self, snapshot: str) -> Kept | None:
        return self._kept.get(snapshot)

    async def add(self, snapshot: str, write: Callable[[Path], Awaitable[Kept]]) -> SnapshotInfo:
        """Keep what ``write`` puts into the (new) directory it is given. Raises AlreadyExists, HostDiskFull."""
        if check_id(snapshot) in self._kept or snapshot in self._readers:
            raise AlreadyExists(f"there is a snapshot {snapshot} already")
        part = self._root / f"{_PART}{snapshot}"
        self._readers[snapshot] = 0
        try:
            with full_disk_named(self._root):
                part.mkdir(mode=0o700)
                kept = await write(part / DATA)
                write_whole(part / _RECORD, msgspec.json.encode(kept), durable=True)
                part.rename(self._root / snapshot)
                sync_directory(self._root)
        except BaseException:  # whatever it was, nothing half-written stays
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
            raise
        finally:
            del self._readers[snapshot]
        self._kept[snapshot] = kept
        return kept.info

    @asynccontextmanager
    async def reading(self, snapshot: str) -> AsyncIterator[tuple[Kept, Snapshot]]:
        """The snapshot, which stays for as long as the body runs. Raises TemplateNotFound."""
        kept = self._kept.get(snapshot)
        if kept is None:
            raise TemplateNotFound(f"this host has no snapshot {snapshot!r}")
        self._readers[snapshot] = self._readers.get(snapshot, 0) + 1
        info = kept.info
        try:
            yield kept, Snapshot(str(self._root / snapshot / DATA), info.memory, info.bytes, info.runtime)
        finally:
            self._readers[snapshot] -= 1
            if not self._readers[snapshot]:
                del self._readers[snapshot]
                if snapshot in self._leaving:
                    await self._delete(snapshot)

    async def remove(self, snapshot: str) -> None:
        """It is listed no more; its files go when nobody reads them. Raises TemplateNotFound."""
        if self._kept.pop(snapshot, None) is None:
            raise TemplateNotFound(f"this host has no snapshot {snapshot!r}")
        await asyncio.to_thread((self._root / snapshot / _RECORD).unlink)
        if snapshot in self._readers:
            self._leaving.add(snapshot)
        else:
            await self._delete(snapshot)

    async def _delete(self, snapshot: str) -> None:
        self._leaving.discard(snapshot)
        await asyncio.to_thread(shutil.rmtree, self._root / snapshot, ignore_errors=True)

    def _read(self, directory: Path) -> Kept | None:
        record = directory / _RECORD
        return read_record(record, Kept) if record.is_file() else None
