"""What a host remembers on disk: one file a sandbox.

Owns: the records, their files, the lock that keeps a second service off the same directory.

Must not know: asyncio, runtimes, what a record's changes mean.

Guarantees: a reader sees a whole record or none, whatever instant the writer died at. ``durable`` also survives the
machine's end (fsync): it is asked for where memory no longer holds the sandbox. A full disk is HostDiskFull and leaves
the earlier record.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from venusrl.sandboxes.host.api import Order, State
from venusrl.sandboxes.protocol import HostDiskFull, RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.base import Footprint
from venusrl.sandboxes.templates.api import Image

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """A sandbox on this host. ``given_to``: the host that owns it from the moment this is on disk; ``sending_to``:
    where a move that is not decided yet goes."""

    order: Order
    image: Image
    state: State
    epoch: int
    created: float
    changed: float
    runtime: bytes = b""
    footprint: Footprint = Footprint()
    sending_to: str = ""
    given_to: str = ""
    was_paused: bool = False
    """Before it was given away."""


def check_id(name: str) -> str:
    """``name``, if it can be a file's name. Raises SandboxError."""
    if not _ID.match(name):
        raise SandboxError(f"{name[:120]!r} cannot be an id here: letters, digits, '_', '-' and '.', at most 100")
    return name


class Records:
    """The records below ``root``. Blocking; each call is one small file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None

    def open(self) -> None:
        """Make the directory and take its lock. Raises RuntimeUnavailable when another service has it."""
        with full_disk_named(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise RuntimeUnavailable(
                f"another service keeps its sandboxes in {self._root}: stop it, or give this one another directory"
            ) from None
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def put(self, record: Record, *, durable: bool = False) -> None:
        write_whole(self._path(record.order.id), msgspec.json.encode(record), durable=durable)

    def remove(self, sandbox: str) -> None:
        self._path(sandbox).unlink(missing_ok=True)

    def load(self) -> list[Record]:
        """Every record. A damaged one is put aside, named in the log."""
        found = []
        for path in sorted(self._root.glob("*.json")):
            record = read_record(path, Record)
            if record is not None:
                found.append(record)
        for path in self._root.glob("*.part"):
            path.unlink(missing_ok=True)
        return found

    def _path(self, sandbox: str) -> Path:
        return self._root / f"{check_id(sandbox)}.json"


def read_record(path: Path, kind: type[_T]) -> _T | None:
    """One record; None, and the file put aside, when it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        aside = path.with_suffix(".damaged")
        path.rename(aside)
        _log.error("the record %s is damaged (%s); it is kept as %s and not used", path, error, aside.name)
        return None


def write_whole(path: Path, content: bytes, *, durable: bool) -> None:
    """Replace a file at once. Raises HostDiskFull, SandboxError; then the file is as before."""
    part = path.with_suffix(".part")
    try:
        with full_disk_named(path.parent):
            with part.open("wb") as stream:
                stream.write(content)
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            part.rename(path)
            if durable:
                sync_directory(path.parent)
    except SandboxError:
        part.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive the machine's end."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def full_disk_named(where: Path) -> Iterator[None]:
    """Turn what the disk says into this package's errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostDiskFull(f"no space left in {where}: free some, or use another disk") from None
        raise SandboxError(f"a host's records cannot be kept in {where}: {error}") from None
