"""Copies of paused sandboxes and of snapshots in a second place: a directory, of this machine or a shared one.

Owns: the directory: pieces by their digest, each kept once however many states have it, and one list a state.

Must not know: records, which copy is needed, how a host makes a sandbox of one.

Guarantees: a state is listed once all of it is on disk, the base it leans on included (kept once, for as long as any
state leans on it); copying again what is there copies only what changed; what a host sends is kept only if it is what
its digest says; a limit and a spare room of the disk are never passed; one service a directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from venusrl.sandboxes.host.api import PIECE, ZEROS, KeptState, StateKind, States
from venusrl.sandboxes.host.records import check_id, full_disk_named, read_record, write_whole
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.store import StateLock
from venusrl.sandboxes.protocol import HostDiskFull, SandboxError

_SPARE = 256 << 20
"""Bytes of the disk that are left alone."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class Replicas:
    """``limit``: bytes that the directory may take, None = what the disk has. ``open`` first, ``close`` last."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self._root = root
        self._limit = limit
        self._lock: StateLock | None = None
        self._states: dict[str, KeptState] = {}
        self._coming: dict[str, KeptState] = {}
        self._sizes: dict[str, int] = {}
        self._bases = asyncio.Lock()
        """Whoever copies a base: the next one finds it."""
        self._files = asyncio.Lock()
        """Whoever writes or removes pieces."""
        self.sent = 0
        """Bytes that were copied here since the start."""

    def open(self) -> None:
        """Take up what is there; blocks. Raises ManagerError."""
        try:
            for folder in (self._root, self._root / "states", self._root / "pieces"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ManagerError(
                f"copies cannot be kept in {self._root} ({error.strerror}): choose another --replicas"
            ) from error
        self._lock = StateLock.acquire(self._root)
        for path in sorted((self._root / "states").glob("*.json")):
            state = read_record(path, KeptState)
            if state is not None:
                self._states[state.id] = state
        self._sizes = {path.name: path.stat().st_size for path in (self._root / "pieces").glob("??/*")}
        self._unlink(self._unused())  # half-written ones too

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def used(self) -> int:
        """Bytes of pieces."""
        return sum(self._sizes.values())

    def get(self, state: str) -> KeptState | None:
        return self._states.get(state)

    async def pull(self, states: States, kind: StateKind, subject: str) -> KeptState:
        """Keep a copy, and what it leans on. Raises SandboxError, HostDiskFull; nothing is listed then."""
        state = await states.take(kind, subject)
        try:
            _check(state, kind, subject)
            self._coming[state.id] = state
            if state.base and kind != "base":
                async with self._bases:
                    if self._base_of(state) is None:
                        await self.pull(states, "base", subject)
            self._room(state)
            for number, piece, digest in _pieces(state):
                if digest not in self._sizes:
                    data = await states.read(state.id, number, piece)
                    async with self._files:
                        await self._keep(digest, data)
            path = self._root / "states" / f"{state.id}.json"
            await asyncio.to_thread(write_whole, path, msgspec.json.encode(state), durable=True)
            self._states[state.id] = state
        finally:
            self._coming.pop(state.id, None)
            await states.drop(state.id)
        return state

    async def push(self, state: KeptState, states: States) -> None:
        """Bring a copy to a host, which has nothing of it before ``restore``; what it leans on is made before.
        Raises SandboxError."""
        if state.base and state.kind != "base":
            base = self._base_of(state)
            if base is None:
                raise SandboxError(f"the copy {state.id} in {self._root} is damaged: what it leans on is not there")
            await self.push(base, states)
        if not await states.begin(state):
            return
        for number, piece, digest in _pieces(state):
            try:
                data = await asyncio.to_thread(self._path(digest).read_bytes)
            except OSError as error:
                raise SandboxError(f"the copy {state.id} in {self._root} is damaged: {error}") from None
            await states.write(state.id, number, piece, data)
        if state.kind == "base":
            await states.restore(state.id, 0)

    async def keep_only(self, wanted: Callable[[KeptState], bool]) -> None:
        """Let go of every other state, and of pieces that no state has."""
        kept = [state for state in self._states.values() if state.kind != "base" and wanted(state)]
        bases = {state.base for state in (*kept, *self._coming.values())}
        kept += [state for state in self._states.values() if state.kind == "base" and state.base in bases]
        names = {state.id for state in kept}
        gone = [state for state in self._states.values() if state.id not in names]
        for state in gone:
            del self._states[state.id]
            await asyncio.to_thread((self._root / "states" / f"{state.id}.json").unlink, missing_ok=True)
        if gone:
            async with self._files:
                await asyncio.to_thread(self._unlink, self._unused())

    # -- inside

    def _base_of(self, state: KeptState) -> KeptState | None:
        named = (one for one in self._states.values() if one.kind == "base" and one.base == state.base)
        return next(named, None)

    def _room(self, state: KeptState) -> None:
        new = {digest: min(PIECE, state.files[file].size) for file, _, digest in _pieces(state)}
        need = sum(size for digest, size in new.items() if digest not in self._sizes)
        if self._limit is not None and self.used + need > self._limit:
            raise HostDiskFull(
                f"a copy takes {need >> 20} MiB more, and {self._root} has {self.used >> 20} of "
                f"{self._limit >> 20} MiB: raise --replicas-mib, or end paused sandboxes"
            )
        free = shutil.disk_usage(self._root).free
        if need + _SPARE > free:
            raise HostDiskFull(f"a copy takes {need >> 20} MiB, and the disk of {self._root} has {free >> 20} MiB free")

    async def _keep(self, digest: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != digest:
            raise SandboxError("a piece of a state is not the one that was announced: it was not kept")
        path = self._path(digest)
        with full_disk_named(self._root):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            await asyncio.to_thread(_write, path, data)
        self._sizes[digest] = len(data)
        self.sent += len(data)

    def _unused(self) -> list[str]:
        """Pieces that no state has, forgotten already."""
        listed = [*self._states.values(), *self._coming.values()]
        used = {digest for state in listed for file in state.files for digest in file.pieces}
        found = [name for name in self._sizes if name not in used]
        for name in found:
            del self._sizes[name]
        return found

    def _unlink(self, pieces: list[str]) -> None:
        for piece in pieces:
            self._path(piece).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._root / "pieces" / digest[:2] / digest


def _pieces(state: KeptState) -> Iterator[tuple[int, int, str]]:
    """File, piece and digest of all that is no hole."""
    for number, file in enumerate(state.files):
        for piece, digest in enumerate(file.pieces):
            if digest != ZEROS:
                yield number, piece, digest


def _check(state: KeptState, kind: StateKind, subject: str) -> None:
    """A node's word is not taken for names that become paths here."""
    check_id(state.id)
    if (state.kind, state.subject) != (kind, subject):
        raise SandboxError(f"the node {state.origin} sent the state of another {state.kind}")
    if not all(_DIGEST.match(digest) for file in state.files for digest in file.pieces):
        raise SandboxError(f"the node {state.origin} sent a state that has no digests")


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
