"""Append-only files of compressed records.

Owns: ``blobs/NNNNNN.seg``. Must not know: what a record means, the database.

Guarantees: ``append`` returns after the bytes are on the disk; a reference stays valid until its segment is removed;
a write that fails or is cut short by a crash harms no earlier record and is never referred to; ``read`` returns
exactly what was appended or raises. Each writer has segments of its own, so nothing is ever overwritten, and a
segment is offered for removal only once its writer has left it and every reference into it is on record.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zstandard

from venusrl.coordinator.errors import StoreCorrupt
from venusrl.coordinator.store.disk import sync_directories, translated

SEGMENT_BYTES = 64 << 20
"""A segment is left for the next one once it is this long: keeps files easy to copy, and room comes back in steps
of this size."""

_LEVEL = 3


class BlobRef(msgspec.Struct, frozen=True):
    segment: int
    offset: int
    length: int
    checksum: int


def pack(raw: bytes) -> bytes:
    """Compress a record. Apart from ``append``, so that it runs outside of any lock."""
    packed: bytes = zstandard.compress(raw, _LEVEL)
    return packed


class BlobFiles:
    """The segments of one run directory, and one writer's place among them. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unrecorded: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._descriptor = -1
        self._segment = 0
        self._end = 0

    def append(self, packed: bytes) -> BlobRef:
        """The reference is the caller's to put on record, ``recording`` it. Raises StoreFull without room."""
        with self._lock, translated(self._folder):
            if self._descriptor < 0 or self._end >= SEGMENT_BYTES:
                self._next_segment()
            offset = self._end
            try:
                _write_all(self._descriptor, packed, offset)
                os.fdatasync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, offset)  # hands back what a partial write took
                raise
            self._end = offset + len(packed)
            self._unrecorded[self._segment] += 1
            return BlobRef(self._segment, offset, len(packed), zlib.crc32(packed))

    @contextmanager
    def recording(self, ref: BlobRef | None) -> Iterator[None]:
        """The reference is on record afterwards, or never will be. None: there is nothing to record."""
        try:
            yield
        finally:
            with self._lock:
                if ref is not None:
                    self._unrecorded[ref.segment] -= 1

    def left_segments(self) -> list[int]:
        """Those that this writer does not write to and owes no record of."""
        with self._lock:
            busy = {segment for segment, count in self._unrecorded.items() if count > 0}
            busy |= {self._segment} if self._descriptor >= 0 else set()
            return sorted({int(file.stem) for file in self._folder.glob("*.seg")} - busy)

    def remove(self, segment: int) -> None:
        """Delete a segment that nothing refers to any more. Raises StoreError."""
        with translated(self._folder):
            self._path(segment).unlink(missing_ok=True)

    def read(self, ref: BlobRef) -> bytes:
        """The record as it was before ``pack``. Raises StoreCorrupt."""
        path = self._path(ref.segment)
        try:
            with path.open("rb", buffering=0) as file:
                packed = os.pread(file.fileno(), ref.length, ref.offset)
        except OSError as error:
            raise StoreCorrupt(f"{path} cannot be read: {error.strerror}") from error
        if len(packed) != ref.length or zlib.crc32(packed) != ref.checksum:
            raise StoreCorrupt(f"{path} does not hold what was written at byte {ref.offset} (damaged or cut file)")
        raw: bytes = zstandard.decompress(packed)
        return raw

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._leave_segment()

    def _leave_segment(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _next_segment(self) -> None:
        self._leave_segment()
        self._folder.mkdir(exist_ok=True)
        newest = max((int(f.stem) for f in self._folder.glob("*.seg")), default=0)
        descriptor = os.open(self._path(newest + 1), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._descriptor, self._segment, self._end = descriptor, newest + 1, 0
        sync_directories(self._folder, self._folder.parent)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:06d}.seg"


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
