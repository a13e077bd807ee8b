"""The Connect protocol with its JSON codec, as far as E2B's clients speak it.

Owns: frames, error codes and their HTTP statuses, deadlines, reading and writing of messages.

Must not know: which services exist, agents' methods.

Guarantees: a message larger than ``MAX_MESSAGE`` is refused before it is read whole; a body that is not what the
protocol says is answered with ``invalid_argument``, never with a traceback; an error is one of Connect's codes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from venusrl.sandboxes.agent.api import AgentError
from venusrl.sandboxes.protocol import BadPath, DiskFull, SandboxError, SandboxGone, SandboxPaused

MAX_MESSAGE = 16 << 20
REQUEST_S = 60.0
"""How long a client may take to send the one message of a request."""
UNARY = "application/json"
STREAMING = "application/connect+json"
END_OF_STREAM = 0x02
_COMPRESSED = 0x01
HEADER = struct.Struct(">BI")
STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}
_SNAKE = {
    "include_entry": "includeEntry",
    "allow_network_mounts": "allowNetworkMounts",
    "watcher_id": "watcherId",
}
"""Fields whose two proto3-JSON spellings differ. All stand at the top of their message."""

M = TypeVar("M", bound=msgspec.Struct)


class Fault(Exception):
    """What a call is answered with when it fails. ``code`` is one of ``STATUS``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message}


class Bytes(Protocol):
    """A request's body: aiohttp's ``StreamReader``, as far as it is needed."""

    async def readexactly(self, n: int) -> bytes: ...

    async def read(self, n: int = -1) -> bytes: ...


def fault_of(error: SandboxError) -> Fault:
    """How a failure below looks on the wire."""
    text = str(error) or type(error).__name__
    match error:
        case AgentError():
            return Fault(error.code, text)
        case DiskFull():
            return Fault("resource_exhausted", text)
        case BadPath():
            return Fault("invalid_argument", text)
        case SandboxGone() | SandboxPaused():
            return Fault("unavailable", text)
        case _:
            return Fault("internal", text)


def frame(message: Any, flags: int = 0) -> bytes:
    """One enveloped message."""
    payload = msgspec.json.encode(message)
    return HEADER.pack(flags, len(payload)) + payload


def end_frame(fault: Fault | None) -> bytes:
    """The last frame of a stream."""
    return frame({} if fault is None else {"error": fault.body()}, END_OF_STREAM)


async def frames(body: Bytes, limit: int = MAX_MESSAGE) -> AsyncIterator[bytes]:
    """The messages of a streaming request. Raises Fault."""
    while True:
        try:
            head = await body.readexactly(HEADER.size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Fault("invalid_argument", "the request ended inside a frame's header") from None
            return
        flags, length = HEADER.unpack(head)
        if flags & _COMPRESSED:
            raise Fault("unimplemented", "compressed messages are not supported: send them with identity encoding")
        if length > limit:
            raise Fault("resource_exhausted", f"a message of {length} bytes is over the limit of {limit}")
        try:
            payload = await body.readexactly(length)
        except asyncio.IncompleteReadError:
            raise Fault("invalid_argument", "the request ended inside a message") from None
        if flags & END_OF_STREAM:
            return
        yield payload


async def one_frame(body: Bytes) -> bytes:
    """The only message of a server-streaming request. Raises Fault."""
    try:
        async with asyncio.timeout(REQUEST_S):
            async for payload in frames(body):
                return payload
    except TimeoutError:
        raise Fault("deadline_exceeded", f"the request's message did not arrive within {REQUEST_S:g} s") from None
    raise Fault("invalid_argument", "the request has no message")


async def whole(body: Bytes, limit: int = MAX_MESSAGE) -> bytes:
    """A unary request's message. Raises Fault."""
    parts: list[bytes] = []
    size = 0
    while piece := await body.read(1 << 16):
        size += len(piece)
        if size > limit:
            raise Fault("resource_exhausted", f"the message is over the limit of {limit} bytes")
        parts.append(piece)
    return b"".join(parts)


def decode(payload: bytes, type_: type[M]) -> M:
    """A message from proto3 JSON: unknown fields ignored, null = absent, numbers may be strings. Raises Fault."""
    try:
        raw = msgspec.json.decode(payload, type=dict[str, Any]) if payload.strip() else {}
        fields = {_SNAKE.get(name, name): value for name, value in raw.items() if value is not None}
        return msgspec.convert(fields, type_, strict=False)
    except (RecursionError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise Fault("invalid_argument", f"malformed {type_.__name__}: {error}") from None


def deadline_s(headers: Any) -> float | None:
    """Seconds that the client allows; None = any. Raises Fault."""
    text = headers.get("Connect-Timeout-Ms")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise Fault("invalid_argument", "Connect-Timeout-Ms must be at most ten digits")
    return int(text) / 1000


def unary_answer(message: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type=UNARY)


def unary_fault(fault: Fault) -> web.Response:
    return web.Response(status=fault.status, body=msgspec.json.encode(fault.body()), content_type=UNARY)
