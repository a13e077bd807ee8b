"""Scalars in the file format that TensorBoard reads.

Owns: the encoding: protocol-buffer ``Event`` messages in length-prefixed records with masked CRC-32C. One step is
one record. Must not know: what the scalars mean.

Why not a library: those at hand queue each scalar to a thread; on a full disk that thread dies and the queue then
blocks the run. The format is small and has not changed in years.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from venusrl.observe.files import AppendFile


def _crc_table() -> tuple[int, ...]:
    polynomial = 0x82F63B78  # Castagnoli, reflected
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (polynomial if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(event: bytes) -> bytes:
    """One framed record: length, its checksum, the event, its checksum."""
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _event(at: float) -> bytes:
    return b"\x09" + struct.pack("<d", at)  # Event.wall_time


def header(at: float) -> bytes:
    """The event that opens a file: ``Event.file_version``."""
    return _event(at) + _bytes_field(3, b"brain.Event:2")


def scalars(at: float, step: int, values: dict[str, float]) -> bytes:
    """An event with one ``Summary.Value`` (tag, simple_value) a scalar."""
    summary = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in values.items()
    )
    return _event(at) + b"\x10" + _varint(step) + _bytes_field(5, summary)


class ScalarFile:
    """One session's event file in ``folder``; TensorBoard joins the files of a folder. Opened at the first scalar."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendFile | None = None

    def add(self, step: int, values: dict[str, float]) -> None:
        """Append the scalars of ``step`` (finite numbers). Raises ObserveError."""
        now = time.time()
        if self._file is None:
            name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
            self._file = AppendFile(self._folder / name)
            self._file.append(record(header(now)))
        self._file.append(record(scalars(now, step, values)))

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
