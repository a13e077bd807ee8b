"""Append-only files whose every record is whole.

Owns: ``AppendFile`` and the error of this package. Must not know: what a record means.

Guarantees: a record is at the operating system when ``append`` returns, or it is not in the file at all and an
``ObserveError`` says why. Nothing is buffered, no thread is involved: a full disk cannot hang a run.
"""

from __future__ import annotations

import os
from pathlib import Path


class ObserveError(Exception):
    """A record of the run could not be written or read; the message names the file and the mend."""


class AppendFile:
    """One file, one writer. The parent directory is made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ObserveError(f"cannot open {path}: {error.strerror}") from error

    def append(self, record: bytes) -> None:
        if self._closed:
            raise ObserveError(f"{self.path} is closed")
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, record)
        except OSError as error:
            raise ObserveError(f"cannot write {self.path}: {error.strerror}; free space, then resume") from error
        if written != len(record):
            os.ftruncate(self._fd, size)
            raise ObserveError(f"cannot write {self.path}: the disk is full; free space, then resume")

    def last_byte(self) -> bytes:
        """Empty when the file is."""
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, 1, size - 1) if size else b""

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
