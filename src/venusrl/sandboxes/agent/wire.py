"""The frames between a host and an agent, and the fields in them. ``agent.h`` says the same in C.

Owns: layout of frames, of what opens a stream, of records; the bounds of all of them.

Must not know: asyncio, sockets, what a stream is for.

Guarantees: bytes of an agent are an enemy's: whatever they hold, parsing ends in values within the bounds below or in
``ProtocolError``, and keeps no more than one frame and one record.

A frame is u32 stream, u8 kind, u8 flags, u16 zero, u32 length, u64 offset, payload, u32 trailer (little-endian).
DATA carries bytes of a stream from ``offset`` on, flag 1 = these are its last; ACK: everything before ``offset`` was
taken (the end counts as one); RESET: the stream is no more; STOP: its input is not wanted from ``offset`` on; HELLO
begins a connection, BYE refuses it. A stream's first bytes to the agent are its open; what comes back is records.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from venusrl.sandboxes.agent.api import Change, Code, Entry, Exit, Usage

HELLO, DATA, ACK, RESET, STOP, BYE = range(1, 7)
SETTLE, START, ATTACH, PROCESSES, SIGNAL, RESIZE, USAGE, CONNECT, SEVER = range(1, 10)
STAT, LIST, MKDIR, MOVE, REMOVE, READ, WRITE, WATCH, QUIESCE = range(16, 25)
STARTED, ERROR, STDOUT, STDERR, PTY, EXIT, ENTRY, CHANGE, END, PROCESS, USED, POSITION = range(1, 13)

VERSION = 1
MAGIC = b"VenusRL1"
PAYLOAD = 16384
WINDOW = 65536
"""Bytes of a stream on their way or not yet taken, in either direction."""
RECORD = 32768
"""The longest record."""
OPEN = 1 << 20
STREAMS = 1024
SHOWN = 4096
"""The longest description of a process that the agent keeps for whoever asks."""
FIN = 1
PREAMBLE = b"\xa5" * (PAYLOAD + 512)
"""Longer than any frame: what a lost connection cut off ends in it, and is found out."""

_HEADER = struct.Struct("<IBBHIQ")
_TRAILER = struct.Struct("<I")
_RECORD = struct.Struct("<BI")
_SEAL = 0x56524C00
HEADER_BYTES = _HEADER.size
_CODES: tuple[Code, ...] = (
    "invalid_argument",
    "not_found",
    "already_exists",
    "permission_denied",
    "failed_precondition",
    "resource_exhausted",
    "unavailable",
    "unimplemented",
    "internal",
    "unauthenticated",
)
_KINDS: tuple[Literal["file", "directory", "symlink", "other"], ...] = ("file", "directory", "symlink", "other")
_CHANGES: tuple[Literal["create", "write", "remove", "rename", "chmod"], ...] = (
    "create",
    "write",
    "remove",
    "rename",
    "chmod",
)


class ProtocolError(Exception):
    """What came is not of this protocol."""


class Frame(NamedTuple):
    """One frame as it came."""

    stream: int
    kind: int
    flags: int
    offset: int
    payload: bytes


class Greeting(NamedTuple):
    """The agent's answer to HELLO: ``newest`` stream it ever saw, and how much of each it has (its end counts one)."""

    resumed: bool
    newest: int
    received: dict[int, int]


def frame(stream: int, kind: int, offset: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    """One frame. ``payload`` within ``PAYLOAD``."""
    size = len(payload)
    return _HEADER.pack(stream, kind, flags, 0, size, offset) + payload + _TRAILER.pack(_SEAL ^ size)


def hello(session: bytes, nonce: bytes, resume: bool, received: dict[int, int]) -> bytes:
    """What a host says first, preamble included. ``resume``: it means to go on, not to begin."""
    fixed = MAGIC + struct.pack("<IB", VERSION, resume) + session + nonce + struct.pack("<I", len(received))
    pairs = b"".join(struct.pack("<IQ", stream, offset) for stream, offset in received.items())
    return PREAMBLE + frame(0, HELLO, 0, fixed + pairs)


class Parser:
    """Frames out of bytes. Before the answer to HELLO was seen, whatever comes is skipped: on a serial port it may be
    the rest of what was meant for somebody earlier."""

    def __init__(self, nonce: bytes) -> None:
        self._sign = MAGIC + nonce
        self._met = False
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Whole frames, in order. Raises ProtocolError."""
        self._data += data
        if not self._met and not self._meet():
            return []
        frames = []
        at = 0
        while (found := self._next(at)) is not None:
            at += HEADER_BYTES + len(found.payload) + _TRAILER.size
            frames.append(found)
        del self._data[:at]
        return frames

    def _meet(self) -> bool:
        at = self._data.find(self._sign)
        if at < 0:
            del self._data[: max(0, len(self._data) - len(self._sign) - HEADER_BYTES)]
            return False
        if at < HEADER_BYTES:
            raise ProtocolError("the agent's greeting has no header")
        del self._data[: at - HEADER_BYTES]
        self._met = True
        return True

    def _next(self, at: int) -> Frame | None:
        if len(self._data) - at < HEADER_BYTES:
            return None
        stream, kind, flags, zero, size, offset = _HEADER.unpack_from(self._data, at)
        if not HELLO <= kind <= BYE or zero or size > PAYLOAD or flags > FIN:
            raise ProtocolError("a frame's header is not one")
        end = at + HEADER_BYTES + size
        if len(self._data) < end + _TRAILER.size:
            return None
        if _TRAILER.unpack_from(self._data, end)[0] != _SEAL ^ size:
            raise ProtocolError("a frame's end is not one")
        return Frame(stream, kind, flags, offset, bytes(self._data[at + HEADER_BYTES : end]))


def greeting(payload: bytes) -> Greeting:
    """The payload of the agent's HELLO. Raises ProtocolError."""
    fields = Fields(payload)
    fields.raw(len(MAGIC) + 16)
    if fields.u32() != VERSION:
        raise ProtocolError("the agent speaks another version")
    resumed, newest, count = fields.u8() == 1, fields.u32(), fields.u32()
    if count > STREAMS:
        raise ProtocolError("the agent lists more streams than there may be")
    return Greeting(resumed, newest, {fields.u32(): fields.u64() for _ in range(count)})


class Records:
    """Records out of a stream's bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes, int]]:
        """Whole records in order: type, payload, bytes they took. Raises ProtocolError."""
        self._data += data
        records = []
        at = 0
        while len(self._data) - at >= _RECORD.size:
            kind, size = _RECORD.unpack_from(self._data, at)
            if size > RECORD or not STARTED <= kind <= POSITION:
                raise ProtocolError("a record's header is not one")
            end = at + _RECORD.size + size
            if len(self._data) < end:
                break
            records.append((kind, bytes(self._data[at + _RECORD.size : end]), end - at))
            at = end
        del self._data[:at]
        return records

    @property
    def incomplete(self) -> bool:
        """Whether a record was begun and not ended."""
        return bool(self._data)


class Fields:
    """Fields out of a payload, each checked."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def raw(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ProtocolError("a field reaches beyond its record")
        self._at += size
        return self._data[self._at - size : self._at]

    def u8(self) -> int:
        return self.raw(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self.raw(4), "little")

    def i32(self) -> int:
        return int.from_bytes(self.raw(4), "little", signed=True)

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "little")

    def text(self) -> str:
        """Names inside are bytes: what is no UTF-8 is shown as U+FFFD."""
        return self.raw(self.u32()).decode(errors="replace")

    def rest(self) -> bytes:
        return self.raw(len(self._data) - self._at)


def u8(value: int) -> bytes:
    return value.to_bytes(1, "little")


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def text(value: str | bytes) -> bytes:
    """Raises UnicodeEncodeError for half a surrogate pair."""
    raw = value.encode() if isinstance(value, str) else value
    return u32(len(raw)) + raw


def opened(operation: int, *fields: bytes) -> bytes:
    """A stream's first bytes."""
    body = u8(operation) + b"".join(fields)
    return u32(len(body)) + body


def failure(payload: bytes) -> tuple[Code, str]:
    """An ERROR record."""
    fields = Fields(payload)
    code = fields.u8()
    if not 1 <= code <= len(_CODES):
        raise ProtocolError("an error's code is not one")
    return _CODES[code - 1], fields.rest().decode(errors="replace")


def ending(payload: bytes) -> Exit:
    """An EXIT record."""
    fields = Fields(payload)
    code, signal = fields.i32(), fields.u32()
    if not -1 <= code <= 255 or signal > 127:
        raise ProtocolError("a process ended in no known way")
    return Exit(code, signal or None)


def entry(payload: bytes) -> Entry:
    """An ENTRY record."""
    fields = Fields(payload)
    path, kind, size, mode = fields.text(), fields.u8(), fields.u64(), fields.u32()
    if not 1 <= kind <= len(_KINDS):
        raise ProtocolError("a file's kind is not one")
    owner, group, modified = fields.text(), fields.text(), fields.u64()
    if modified >= 1 << 63:  # before 1970
        modified -= 1 << 64
    target = fields.text() if fields.u8() else None
    count = fields.u32()
    if count > RECORD:
        raise ProtocolError("a file has too many attributes")
    attributes = {fields.text(): fields.text() for _ in range(count)}
    return Entry(path, _KINDS[kind - 1], size, mode & 0o7777, owner, group, modified, target, attributes)


def change(payload: bytes) -> Change:
    """A CHANGE record."""
    fields = Fields(payload)
    kind, name = fields.u8(), fields.text()
    if not 1 <= kind <= len(_CHANGES):
        raise ProtocolError("a change's kind is not one")
    return Change(_CHANGES[kind - 1], name)


def usage(payload: bytes) -> Usage:
    """A USED record."""
    fields = Fields(payload)
    cpus, percent = fields.u32(), fields.u32() / 100.0
    return Usage(cpus, percent, fields.u64(), fields.u64(), fields.u64(), fields.u64(), fields.u64())
