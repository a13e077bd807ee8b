"""The stream of a process that goes on over a move of its sandbox.

Owns: ``Follow``: a client's answer while one host after the other fills it; ``Parted``: how a host ends its turn.

Must not know: where a sandbox goes, who may ask, how hosts are reached.

Guarantees: the client sees one stream with one end, no output twice and none left out; of what a host says only a
frame's header and the end of its turn are kept. Where nobody holds a ``Follow``, a turn's end is a stream's end:
Connect's ``unavailable``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec
from aiohttp import web

from venusrl.sandboxes.envd.connect import (
    END_OF_STREAM,
    HEADER,
    MAX_MESSAGE,
    STATUS,
    STREAMING,
    Fault,
    deadline_s,
    end_frame,
    frame,
)

START, CONNECT = "/process.Process/Start", "/process.Process/Connect"
_DEADLINE = "Connect-Timeout-Ms"


class Part(msgspec.Struct, frozen=True):
    """What whoever goes on must know: the process, where in all that it says the client is (None: unknown), whether its
    deadline is the client's."""

    pid: int
    position: int | None = None
    ends: bool = False


class Parted(Fault):
    """The sandbox moves: this host's turn is over."""

    def __init__(self, message: str, part: Part) -> None:
        super().__init__("unavailable", message)
        self._part = part

    def body(self) -> dict[str, Any]:
        return {**super().body(), "moving": msgspec.to_builtins(self._part)}


class _Error(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""
    moving: Part | None = None


class _End(msgspec.Struct, frozen=True):
    error: _Error | None = None


class Follow:
    """One client's stream. ``response`` is there once a host has begun it, ``parted`` once that host's turn is over."""

    def __init__(self, request: web.Request) -> None:
        """Raises Fault."""
        self._request = request
        self._began = asyncio.get_running_loop().time()
        self._limit = deadline_s(request.headers)
        self._held = bytearray()
        self._passing = 0
        self.response: web.StreamResponse | None = None
        self.parted: Part | None = None
        self.message = b""
        """What the next host is asked, in place of the client's body."""

    def passed(self, data: bytes) -> bytes:
        """What the client gets of it: everything but the end of a turn."""
        out = bytearray()
        self._held += data
        while self._held:
            if not self._passing:
                if len(self._held) < HEADER.size:
                    break
                flags, length = HEADER.unpack_from(self._held)
                size = HEADER.size + length
                if flags & END_OF_STREAM and length <= MAX_MESSAGE:
                    if len(self._held) < size:
                        break
                    self.parted = _parted(bytes(self._held[HEADER.size : size]))
                    if self.parted is not None:
                        self._held.clear()
                        break
                self._passing = size
            piece = self._held[: self._passing]
            del self._held[: len(piece)]
            self._passing -= len(piece)
            out += piece
        return bytes(out)

    def turn(self) -> web.Request:
        """The request for the host that goes on."""
        assert self.parted is not None
        part, self.parted = self.parted, None
        self.message = frame({"process": {"pid": part.pid}, "since": msgspec.to_builtins(part)})
        headers = self._request.headers.copy()
        headers.popall("Content-Length", None)
        if self._limit is not None:
            left = self._limit - (asyncio.get_running_loop().time() - self._began)
            headers[_DEADLINE] = str(max(1, round(left * 1000)))
        sent = self._request.clone(rel_url=CONNECT, headers=headers)
        sent[_KEY] = self
        return sent

    async def end(self, answer: web.StreamResponse) -> web.StreamResponse:
        """Nobody goes on: tell the client what ``answer`` says. A sandbox that is no more resets its connection."""
        assert self.response is not None
        if answer.status == 502:
            reset(self._request)
            return self.response
        try:
            await self.response.write(end_frame(_fault(answer)))
            await self.response.write_eof()
        except ConnectionError:
            pass  # nobody is left to tell
        return self.response


_KEY = web.RequestKey("venusrl.follow", Follow)


def begin(request: web.Request) -> Follow | None:
    """Of a request for a process's stream; None for any other, and for one that will be refused."""
    if request.method != "POST" or request.path not in (START, CONNECT) or request.content_type != STREAMING:
        return None
    try:
        follow = Follow(request)
    except Fault:
        return None
    request[_KEY] = follow
    return follow


def of(request: web.BaseRequest) -> Follow | None:
    """Whether somebody holds the client's stream open for other hosts."""
    return request.get(_KEY)


def reset(request: web.BaseRequest) -> None:
    """Drop the connection with a reset: clients take one that just ends for a malformed answer."""
    transport = request.transport
    if transport is None:
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _parted(payload: bytes) -> Part | None:
    try:
        end = msgspec.json.decode(payload, type=_End)
    except msgspec.DecodeError:
        return None
    return None if end.error is None else end.error.moving


def _fault(answer: web.StreamResponse) -> Fault:
    body = answer.body if isinstance(answer, web.Response) else b""
    try:
        told = msgspec.json.decode(body if isinstance(body, bytes) else b"", type=_Error)
    except msgspec.DecodeError:
        told = _Error()
    code = told.code if told.code in STATUS else "unavailable"
    return Fault(code, told.message or "the sandbox moved, and its stream could not go on: connect again")
