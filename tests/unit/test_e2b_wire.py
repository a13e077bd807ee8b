"""A command is followed over a move of its sandbox, and only where nothing that it said can be lost."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from venusrl.sandboxes.e2b_wire import Ended, Made, Printed, Started, Wire
from venusrl.sandboxes.protocol import SandboxError, SandboxGone

MADE = Made("s1")


def frame(event: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(event).encode()
    return struct.pack(">BI", flags, len(data)) + data


def start() -> bytes:
    return frame({"event": {"start": {"pid": 7}}})


def said(text: str) -> bytes:
    return frame({"event": {"data": {"stdout": base64.b64encode(text.encode()).decode()}}})


END = frame({"event": {"end": {"exitCode": 3}}}) + frame({}, 2)
LEFT = frame({"error": {"code": "unavailable", "message": "the sandbox moves"}}, 2)
CUT = b""
"""The connection is aborted."""


class Service:
    """Answers each call inside a sandbox with the next of ``streams``; an int is a status."""

    def __init__(self, *streams: bytes | int) -> None:
        self.streams = list(streams)
        self.calls: list[tuple[str, Any]] = []
        self.alive = True

    async def inside(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.calls.append((request.match_info["call"], json.loads(body[5:])))
        stream = self.streams.pop(0)
        if isinstance(stream, int):
            return web.json_response({"message": "transitioning"}, status=stream)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(stream)
        if not stream.endswith((END, LEFT)):
            assert request.transport is not None
            request.transport.abort()
        return response

    async def sandbox(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({}) if self.alive else web.json_response({"message": "gone"}, status=404)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("venusrl.sandboxes.e2b_wire._BACKOFF_S", 0.0)


async def follow(service: Service) -> AsyncIterator[Started | Printed | Ended]:
    app = web.Application()
    app.add_routes(
        [web.post("/process.Process/{call}", service.inside), web.get("/sandboxes/{sandbox}", service.sandbox)]
    )
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        wire = Wire(url, "key", url)
        try:
            async for event in wire.start(MADE, "user", ["sh"], {}, "/", 30.0):
                yield event
        finally:
            await wire.close()


async def test_it_is_followed_where_the_sandbox_went() -> None:
    service = Service(start() + said("a") + LEFT, 409, start() + said("b") + LEFT, start() + said("c") + END)
    events = [event async for event in follow(service)]
    assert events == [Started(7), Printed(b"a"), Printed(b"b"), Printed(b"c"), Ended(3)]
    assert [call for call, _ in service.calls] == ["Start", "Connect", "Connect", "Connect"]
    assert service.calls[1][1] == {"process": {"pid": 7}}


async def test_what_a_broken_connection_lost_is_not_passed_over() -> None:
    service = Service(start() + said("a") + CUT)
    with pytest.raises(SandboxError, match="broke"):
        [event async for event in follow(service)]
    assert [call for call, _ in service.calls] == ["Start"]


async def test_one_that_was_not_begun_is_not_connected_to() -> None:
    service = Service(LEFT)
    with pytest.raises(SandboxError, match="the sandbox moves"):
        [event async for event in follow(service)]


async def test_a_sandbox_that_ended_is_gone() -> None:
    service = Service(start() + LEFT)
    service.alive = False
    with pytest.raises(SandboxGone):
        [event async for event in follow(service)]


async def test_it_is_not_asked_for_ever() -> None:
    service = Service(start() + LEFT, *[503] * 20)
    with pytest.raises(SandboxError, match="does not answer any more"):
        [event async for event in follow(service)]
    assert len(service.calls) == 7
