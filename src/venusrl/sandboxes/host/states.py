"""States of this host's sandboxes and snapshots on their way out, and of others' on their way in.

Owns: the directories that states are copied from and to, the digests of their pieces.

Must not know: where copies are kept, who asks.

Guarantees: what goes out is one instant's state, whatever the sandbox does afterwards; what comes in is a sandbox only
when every piece is the one announced, and then by the same way as one that moved here; names are plain and stay below
their directory; what nobody asked for in ``FORGET_S`` is removed, and what a crash left at the next start.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.host import arrivals
from venusrl.sandboxes.host.api import PIECE, ZEROS, KeptState, StateFile, StateKind
from venusrl.sandboxes.host.cells import Cell, Cells
from venusrl.sandboxes.host.errors import AlreadyExists, MoveUnsupported, within
from venusrl.sandboxes.host.records import Record, check_id, full_disk_named
from venusrl.sandboxes.host.snapshots import Kept, Snapshots
from venusrl.sandboxes.protocol import HostDiskFull, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.base import Snapshot, Spec
from venusrl.sandboxes.runtimes.moving import Base, Leaning
from venusrl.sandboxes.templates.api import Image

_T = TypeVar("_T")
FORGET_S = 600.0
_AT_ONCE = 16
_SPARE = 256 << 20
"""Bytes of the disk that a state coming in must leave."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_FILES = 1000
Resolve = Callable[[str, str], Awaitable[Image]]


class Ways(NamedTuple):
    """What a host does with what arrives: find its template, give it pages that it may share, make a sandbox of it."""

    resolve: Resolve
    own: Callable[[Spec], Awaitable[Spec]]
    take: arrivals.Take


class _Open:
    """A state on its way. ``left``: pieces that have not come yet, None for one that goes out."""

    def __init__(self, state: KeptState, directory: Path, now: float, left: set[tuple[int, int]] | None) -> None:
        self.state = state
        self.directory = directory
        self.used = now
        self.left = left


class LocalStates:
    """Implements ``host.api.States``. ``root`` is a directory of its own."""

    def __init__(self, name: str, root: Path, cells: Cells, snapshots: Snapshots, ways: Ways, clock: Clock) -> None:
        self._name = name
        self._root = root
        self._cells = cells
        self._snapshots = snapshots
        self._ways = ways
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def clear(self) -> None:
        """Remove what a crash left. Blocks."""
        shutil.rmtree(self._root, ignore_errors=True)

    # -- out

    async def take(self, kind: StateKind, subject: str) -> KeptState:
        await self._tidy()
        name = secrets.token_hex(8)
        work = self._root / f"out-{name}"
        try:
            with full_disk_named(self._root):
                work.mkdir(mode=0o700, parents=True)
            take = {"sandbox": self._of_sandbox, "snapshot": self._of_snapshot, "base": self._of_base}[kind]
            state = await take(name, subject, work / "data")
            files = await asyncio.to_thread(listed, work / "data")
        except BaseException:  # whatever it was, cancellation too: raised again below
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
            raise
        state = msgspec.structs.replace(state, files=files)
        self._open[name] = _Open(state, work, self._clock.monotonic(), None)
        return state

    async def _of_sandbox(self, name: str, subject: str, data: Path) -> KeptState:
        cell = self._cells.get(subject)

        async def work() -> KeptState:
            if not cell.paused:
                raise SandboxError(f"sandbox {subject} is {cell.record.state}: only of a paused one a copy is kept")
            async with within(self._cells.time_limits.snapshot, "snapshot", f"sandbox {subject}"):
                snapshot, whole = await _snapshot(cell, data)
            record = cell.record
            return KeptState(
                id=name,
                kind="sandbox",
                subject=subject,
                origin=self._name,
                runtime=snapshot.runtime,
                template=record.image.id,
                epoch=record.epoch,
                changed=record.changed,
                memory=snapshot.memory,
                whole=whole,
                record=msgspec.json.encode(msgspec.structs.replace(record, runtime=b"")),
                files=(),
                base=base.name if (base := self._base(cell)) is not None else "",
            )

        return await self._cells.alone(cell, "state", work)

    def _base(self, cell: Cell) -> Base | None:
        runtime = self._cells.runtime(cell.record.order.runtime)
        return runtime.base(cell.alive()) if isinstance(runtime, Leaning) else None

    async def _of_base(self, name: str, subject: str, data: Path) -> KeptState:
        cell = self._cells.get(subject)
        record, base = cell.record, self._base(cell)
        if base is None:
            raise SandboxError(f"sandbox {subject} leans on nothing")
        await asyncio.to_thread(_linked, base, data)
        return KeptState(
            id=name,
            kind="base",
            subject=subject,
            origin=self._name,
            runtime=record.order.runtime,
            template=record.image.id,
            epoch=0,
            changed=0.0,
            memory=True,
            whole=True,
            record=msgspec.json.encode(msgspec.structs.replace(record, runtime=b"")),
            files=(),
            base=base.name,
        )

    async def _of_snapshot(self, name: str, subject: str, data: Path) -> KeptState:
        async with self._snapshots.reading(subject) as (kept, snapshot):
            await asyncio.to_thread(shutil.copytree, snapshot.directory, data)
            info = kept.info
            return KeptState(
                id=name,
                kind="snapshot",
                subject=subject,
                origin=self._name,
                runtime=info.runtime,
                template=info.template,
                epoch=0,
                changed=info.created,
                memory=info.memory,
                whole=True,
                record=msgspec.json.encode(kept),
                files=(),
            )

    async def read(self, state: str, file: int, piece: int) -> bytes:
        found = self._known(state)
        if not (0 <= file < len(found.state.files) and 0 <= piece < len(found.state.files[file].pieces)):
            raise SandboxError(f"the state {state} has no piece {piece} of a file {file}")
        path = found.directory / "data" / found.state.files[file].path
        return await asyncio.to_thread(_read, path, piece)

    # -- in

    async def begin(self, state: KeptState) -> bool:
        await self._tidy()
        await self.drop(check_id(state.id))
        _check(state)
        if state.kind == "base":
            runtime, spec = await self._leaning(state)
            if await runtime.has_base(spec, state.base):
                return False
        work = self._root / f"in-{state.id}"
        with full_disk_named(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(self._root).free
            if state.total + _SPARE > free:
                raise HostDiskFull(
                    f"a state of {state.total >> 20} MiB does not fit on {self._name} ({free >> 20} MiB are free there)"
                )
            await asyncio.to_thread(_lay_out, state, work / "data")
        left = {
            (number, piece)
            for number, file in enumerate(state.files)
            for piece, digest in enumerate(file.pieces)
            if digest != ZEROS
        }
        self._open[state.id] = _Open(state, work, self._clock.monotonic(), left)
        return True

    async def write(self, state: str, file: int, piece: int, data: bytes) -> None:
        found = self._known(state)
        if found.left is None or (file, piece) not in found.left:
            raise SandboxError(f"the state {state} takes no piece {piece} of a file {file}")
        wanted = found.state.files[file]
        if len(data) != _length(wanted, piece) or hashlib.sha256(data).hexdigest() != wanted.pieces[piece]:
            raise SandboxError(f"piece {piece} of {wanted.path} of the state {state} is not the one announced: damaged")
        with full_disk_named(self._root):
            await asyncio.to_thread(_write, found.directory / "data" / wanted.path, piece, data)
        found.left.discard((file, piece))

    async def restore(self, state: str, epoch: int) -> None:
        found = self._known(state)
        if found.left is None or found.left:
            raise SandboxError(f"the state {state} is not whole: {len(found.left or ())} pieces are lacking")
        del self._open[state]
        try:
            if found.state.kind == "sandbox":
                await self._restore_sandbox(found, epoch)
            elif found.state.kind == "snapshot":
                await self._restore_snapshot(found)
            else:
                runtime, spec = await self._leaning(found.state)
                with full_disk_named(self._root):
                    await runtime.bring(spec, found.state.base, found.directory / "data")
        finally:
            await asyncio.to_thread(shutil.rmtree, found.directory, ignore_errors=True)

    async def _restore_sandbox(self, found: _Open, epoch: int) -> None:
        state = found.state
        record = self._record(state)
        if state.subject in self._cells:
            older = self._cells.get(state.subject)
            if older.record.epoch >= epoch:
                raise AlreadyExists(f"sandbox {state.subject} is on {self._name}, and no older one")
            await self._cells.kill(state.subject)
        record.epoch, record.given_to, record.sending_to, record.was_paused = epoch, "", "", False
        record.image = await arrivals.image_here(self._ways.resolve, record, self._name)
        snapshot = Snapshot(str(found.directory / "data"), state.memory, state.total, state.runtime)
        await self._ways.take(arrivals.Taken(record, snapshot, False))

    async def _restore_snapshot(self, found: _Open) -> None:
        kept = _decoded(found.state, Kept, self._name)
        if kept.info.id != found.state.subject:
            raise MoveUnsupported(f"the state {found.state.id} is not of the snapshot {found.state.subject}")
        image = await self._ways.resolve(kept.image.id, "")

        async def write(directory: Path) -> Kept:
            await asyncio.to_thread((found.directory / "data").rename, directory)
            return msgspec.structs.replace(kept, image=image)

        await self._snapshots.add(kept.info.id, write)

    async def drop(self, state: str) -> None:
        found = self._open.pop(state, None)
        if found is not None:
            await asyncio.to_thread(shutil.rmtree, found.directory, ignore_errors=True)

    # -- inside

    def _record(self, state: KeptState) -> Record:
        """The origin's record of the sandbox. Raises MoveUnsupported."""
        record = _decoded(state, Record, self._name)
        if record.order.id != state.subject or record.order.limits is None:
            raise MoveUnsupported(f"the state {state.id} is not of sandbox {state.subject}")
        return record

    async def _leaning(self, state: KeptState) -> tuple[Leaning, Spec]:
        """The runtime that a base is for, and the spec of a sandbox that leans on it. Raises MoveUnsupported."""
        runtime = self._cells.runtime(state.runtime)
        if not isinstance(runtime, Leaning):
            raise MoveUnsupported(f"{state.runtime} sandboxes on {self._name} lean on nothing")
        record = self._record(state)
        record.image = await arrivals.image_here(self._ways.resolve, record, self._name)
        return runtime, await self._ways.own(arrivals.spec_of(record))

    def _known(self, state: str) -> _Open:
        found = self._open.get(state)
        if found is None:
            raise SandboxGone(f"{self._name} has no state {state[:100]!r} on its way (any more): begin again")
        found.used = self._clock.monotonic()
        return found

    async def _tidy(self) -> None:
        """Drop what was left lying. Raises SandboxError when too many are on their way."""
        now = self._clock.monotonic()
        for name in [name for name, one in self._open.items() if now - one.used > FORGET_S]:
            await self.drop(name)
        if len(self._open) >= _AT_ONCE:
            raise SandboxError(f"{_AT_ONCE} states are on their way on {self._name} already: try again later")


async def _snapshot(cell: Cell, data: Path) -> tuple[Snapshot, bool]:
    """Everything, or, where its processes cannot be copied, its files; whether it is everything."""
    instance = cell.alive()
    try:
        return await instance.snapshot(data, memory=True), True
    except (SandboxGone, HostDiskFull):
        raise
    except SandboxError:
        return await instance.snapshot(data, memory=False), False


def _linked(base: Base, data: Path) -> None:
    """The files of a base in a directory of their own. They never change: no copy is needed on one disk."""
    data.mkdir(mode=0o700)
    for name in base.files:
        source = Path(base.directory, name)
        try:
            os.link(source, data / name)
        except OSError:
            shutil.copyfile(source, data / name)


def listed(directory: Path) -> tuple[StateFile, ...]:
    """The files below ``directory`` with their digests. Blocks. Raises SandboxError for what is no plain file."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or not path.is_file():
            raise SandboxError(f"a state has something that is no plain file: {path.name[:100]!r}")
        size = path.stat().st_size
        with path.open("rb") as file:
            digests = tuple(_digest(file.fileno(), at, min(PIECE, size - at)) for at in range(0, size, PIECE))
        found.append(StateFile(str(path.relative_to(directory)), size, digests))
    return tuple(found)


def _digest(descriptor: int, at: int, length: int) -> str:
    """Of one piece. Holes are not read: a virtual machine's memory is mostly that."""
    try:
        if os.lseek(descriptor, at, os.SEEK_DATA) >= at + length:
            return _hole(length)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole follows
            return _hole(length)
    return hashlib.sha256(os.pread(descriptor, length, at)).hexdigest()


def _hole(length: int) -> str:
    return ZEROS if length == PIECE else hashlib.sha256(bytes(length)).hexdigest()


def _check(state: KeptState) -> None:
    """Raises SandboxError for a state that cannot be one."""
    check_id(state.subject)
    paths = {file.path for file in state.files}
    if not state.files or len(state.files) > _FILES or len(paths) != len(state.files):
        raise SandboxError(f"the state {state.id} has no files, too many, or one twice")
    for file in state.files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in file.path:
            raise SandboxError(f"the state {state.id} is out of bounds at {file.path[:100]!r}")
        if len(file.pieces) != -(-file.size // PIECE) or not all(map(_DIGEST.match, file.pieces)):
            raise SandboxError(f"the state {state.id} does not fit together at {file.path[:100]!r}")


def _lay_out(state: KeptState, data: Path) -> None:
    """Every file at its size, all holes."""
    shutil.rmtree(data.parent, ignore_errors=True)
    data.mkdir(mode=0o700, parents=True)
    for file in state.files:
        path = data / file.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("xb") as made:
            made.truncate(file.size)
        path.chmod(0o600)


def _length(file: StateFile, piece: int) -> int:
    return min(PIECE, file.size - piece * PIECE)


def _read(path: Path, piece: int) -> bytes:
    with path.open("rb") as file:
        file.seek(piece * PIECE)
        return file.read(PIECE)


def _write(path: Path, piece: int, data: bytes) -> None:
    if not data.strip(b"\0"):
        return  # it is a hole already
    with path.open("r+b") as file:
        file.seek(piece * PIECE)
        file.write(data)


def _decoded(state: KeptState, kind: type[_T], here: str) -> _T:
    try:
        return msgspec.json.decode(state.record, type=kind)
    except msgspec.MsgspecError as error:
        raise MoveUnsupported(f"the hosts {state.origin} and {here} are of different versions: {error}") from None
