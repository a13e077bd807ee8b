"""One run at a time on one directory.

Owns: the ``lock`` file of a run directory. Must not know: what the lock protects.

Guarantees: the kernel holds the lock (flock), so that it ends with its process however that dies: nothing is
ever stale. What the file says is for the message alone. The file stays: removing it would let two processes
lock two different files of one name.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from venusrl.coordinator.errors import StoreError, StoreLocked
from venusrl.coordinator.store.disk import translated

NAME = "lock"


class Holder(msgspec.Struct, frozen=True):
    """Who holds, or held last, a run directory."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {began}"


class RunLock:
    """A held lock; ``release`` ends it."""

    def __init__(self, descriptor: int, previous: Holder | None) -> None:
        self._descriptor = descriptor
        self.previous = previous
        """Whose lock was taken over, if the directory was ever locked."""

    @classmethod
    def acquire(cls, run_dir: Path) -> RunLock:
        """Lock ``run_dir`` (which must exist). Raises StoreLocked, naming the holder, if another process has it."""
        path = run_dir / NAME
        with translated(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            previous = _read(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = previous or "another process"
                raise StoreLocked(
                    f"a run is already going on in {run_dir} ({who}): stop it, or choose another --run-dir"
                ) from None
            except OSError as error:
                raise StoreError(
                    f"{path} cannot be locked ({error.strerror}): choose a --run-dir on a local disk"
                ) from error
            _write(descriptor, Holder(os.getpid(), socket.gethostname(), time.time()))
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            os.close(descriptor)
            raise
        return cls(descriptor, previous)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _read(descriptor: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except msgspec.MsgspecError:
        return None  # empty, or its writer died half-way: only the message suffers


def _write(descriptor: int, holder: Holder) -> None:
    os.ftruncate(descriptor, 0)
    try:
        os.pwrite(descriptor, msgspec.json.encode(holder), 0)
    except OSError:
        os.ftruncate(descriptor, 0)  # a full disk costs the message, not the lock
