"""What a sandbox serves itself, through the gateway: HTTP, WebSocket, HTTP/2, and clients that mean harm."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, RequestReceived, ResponseReceived, StreamEnded
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.env_front import Front, front, tunnel
from tests.waiting import PATIENCE_S
from yarl import URL

from venusrl.sandboxes.agent.api import Stream
from venusrl.sandboxes.manager import gateway_listener
from venusrl.sandboxes.manager.gateway_h2 import MAX_HEAD, PREFACE, BadHttp2, RequestHeads

PORT = 8000


@contextlib.asynccontextmanager
async def inside(it: Front, app: web.Application) -> AsyncIterator[None]:
    """``app`` listens on port 8000 inside the sandbox."""
    runner = web.AppRunner(app, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    it.agent.listen(PORT, partial(tunnel, runner.addresses[0][1]))
    try:
        yield
    finally:
        await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    body = await request.read()
    seen = {name.lower(): value for name, value in request.headers.items()}
    return web.json_response(
        {"method": request.method, "path": request.raw_path, "body": body.hex(), "headers": seen},
        status=201,
        headers={"X-Mine": "1", "Connection": "close", "Set-Cookie": "a=b"},
    )


def application(handler: object) -> web.Application:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
    return app


async def test_a_request_goes_in_and_its_answer_comes_out() -> None:
    async with front() as it, inside(it, application(echo)):
        headers = it.headers(PORT, Content_Encoding="gzip", X_API_Key="k", X_Custom="v", Keep_Alive="x")
        url = f"{it.url}/a%2Fb/c?x=%20y&z"
        async with it.http.put(URL(url, encoded=True), data=b"\x1f\x8bxyz", headers=headers) as answer:
            seen = await answer.json()
            assert (answer.status, answer.headers["X-Mine"], answer.headers["Set-Cookie"]) == (201, "1", "a=b")
        assert (seen["method"], seen["path"], seen["body"]) == ("PUT", "/a%2Fb/c?x=%20y&z", b"\x1f\x8bxyz".hex())
        kept = seen["headers"]
        assert (kept["x-custom"], kept["content-encoding"], kept["host"]) == ("v", "gzip", f"127.0.0.1:{it.port}")
        secrets = ("x-api-key", "x-access-token", "e2b-sandbox-id", "e2b-traffic-access-token", "keep-alive")
        assert not set(secrets) & set(kept)


async def test_bodies_stream_in_both_directions() -> None:
    piece = bytes(1 << 16)

    async def mirror(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for data in request.content.iter_any():
            await response.write(data)
        return response

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield piece

    async with front() as it, inside(it, application(mirror)):
        answer = await it.http.post(it.url, data=upload(), headers=it.headers(PORT))
        assert len(await answer.read()) == 40 * len(piece)


async def test_a_slow_client_stops_the_sender() -> None:
    sent = 0

    async def endless(stream: Stream) -> None:
        nonlocal sent
        await stream.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.write(bytes(1 << 14))
            sent += 1 << 14
            while stream.peer._incoming.qsize() > 4:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async with front() as it:
        it.agent.listen(PORT, endless)
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1 << 10)
        writer.write(f"GET / HTTP/1.1\r\nHost: {PORT}-{it.id}.x.test\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        last = -1
        async with asyncio.timeout(PATIENCE_S):
            while sent != last:
                last = sent
                await asyncio.sleep(0.1)
        # The sockets' own buffers and ours, not the memory of this process.
        assert sent < 16 << 20
        writer.close()


async def test_an_answer_that_is_not_http() -> None:
    async def rude(stream: Stream) -> None:
        await stream.read()
        await stream.write(b"SSH-2.0-x\r\n")
        await stream.close()

    async with front() as it:
        it.agent.listen(PORT, rude)
        async with it.http.get(it.url, headers=it.headers(PORT)) as answer:
            assert answer.status == 502
            assert "no proper answer" in (await answer.json())["message"]


async def test_an_answer_cannot_run_over_into_the_next() -> None:
    smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    heads = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + smuggled,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + smuggled,
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + smuggled,
    )
    async with front() as it:
        for head in heads:

            async def hostile(stream: Stream, head: bytes = head) -> None:
                await stream.read()
                await stream.write(head)
                await stream.close()

            it.agent.listen(PORT, hostile)
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            for path in ("/a", "/health"):
                named = f"Host: {PORT if path == '/a' else 49983}-{it.id}.x.test"
                writer.write(f"GET {path} HTTP/1.1\r\n{named}\r\n\r\n".encode())
            said = b""
            async with asyncio.timeout(PATIENCE_S):
                while b"204 No Content" not in said and (data := await reader.read(1 << 16)):
                    said += data
            with contextlib.suppress(TimeoutError):  # time for what must not come
                async with asyncio.timeout(0.3):
                    while data := await reader.read(1 << 16):
                        said += data
            assert b"forged" not in said
            assert b"204 No Content" in said
            writer.close()


async def test_an_answer_that_breaks_off_is_not_made_whole() -> None:
    async def short(stream: Stream) -> None:
        await stream.read()
        await stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await stream.close()

    async with front() as it:
        it.agent.listen(PORT, short)
        async with it.http.get(it.url, headers=it.headers(PORT)) as answer:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()


async def test_websockets() -> None:
    async def socket(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(protocols=("b",))
        await ws.prepare(request)
        async for message in ws:
            if message.type is WSMsgType.TEXT and message.data == "bye":
                await ws.close(code=4001, message=b"enough")
            elif message.type is WSMsgType.TEXT:
                await ws.send_str(message.data[::-1])
            else:
                await ws.send_bytes(message.data + b"!")
        return ws

    async with front() as it, inside(it, application(socket)):
        async with it.http.ws_connect(it.url, headers=it.headers(PORT), protocols=("a", "b")) as ws:
            assert ws.protocol == "b"
            await ws.send_str("abc")
            assert (await ws.receive_str()) == "cba"
            await ws.send_bytes(b"x")
            assert (await ws.receive_bytes()) == b"x!"
            await ws.send_str("bye")
            end = await ws.receive()
            assert (end.type, end.data, end.extra) == (WSMsgType.CLOSE, 4001, "enough")
        it.register.set(it.id, traffic_token="secret")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await it.http.ws_connect(it.url, headers=it.headers(PORT))
        assert refused.value.status == 403


async def test_a_service_that_speaks_no_websocket() -> None:
    async with front() as it, inside(it, application(echo)):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await it.http.ws_connect(it.url, headers=it.headers(PORT))
        assert refused.value.status == 201


# HTTP/2 with prior knowledge


def field(headers: object, name: str) -> str:
    assert isinstance(headers, list)
    return str(dict(headers)[name])


class Client:
    """An HTTP/2 client on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()

    def ask(self, authority: str, **headers: str) -> int:
        stream = self.h2.get_next_available_stream_id()
        fields = [(":method", "GET"), (":scheme", "http"), (":path", "/x"), (":authority", authority)]
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.h2.send_headers(stream, [*fields, *more], end_stream=True)
        self.writer.write(self.h2.data_to_send())
        return stream

    async def events(self) -> AsyncIterator[Event]:
        while data := await self.reader.read(1 << 16):
            for event in self.h2.receive_data(data):
                yield event
            self.writer.write(self.h2.data_to_send())

    async def answer(self, stream: int) -> tuple[str, bytes]:
        status, body = "", b""
        async for event in self.events():
            if isinstance(event, ResponseReceived) and event.stream_id == stream:
                status = field(event.headers, ":status")
            if isinstance(event, DataReceived) and event.stream_id == stream:
                body += event.data or b""
            if isinstance(event, StreamEnded) and event.stream_id == stream:
                return status, body
            if isinstance(event, ConnectionTerminated):
                break
        return status, body


async def speak_http2(stream: Stream) -> None:
    """A server inside: answers every request with its authority."""
    h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
    h2.initiate_connection()
    await stream.write(h2.data_to_send())
    while data := await stream.read():
        for event in h2.receive_data(data):
            if isinstance(event, RequestReceived):
                assert event.stream_id is not None
                authority = field(event.headers, ":authority")
                h2.send_headers(event.stream_id, [(":status", "200")])
                h2.send_data(event.stream_id, authority.encode(), end_stream=True)
        await stream.write(h2.data_to_send())


@contextlib.asynccontextmanager
async def http2(it: Front) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def test_http2_goes_through() -> None:
    async with front() as it:
        it.agent.listen(PORT, speak_http2)
        host = f"{PORT}-{it.id}.example.test"
        async with http2(it) as client:
            for _ in range(3):
                assert await client.answer(client.ask(host)) == ("200", host.encode())


async def test_http2_is_refused_in_http2() -> None:
    async with front() as it:
        cases: list[tuple[str, dict[str, str], str, bytes]] = [
            (f"{PORT}-{it.id}.x.test", {}, "502", b"port is not open"),
            (f"{PORT}-nobody.x.test", {}, "502", b"was not found"),
            (f"49983-{it.id}.x.test", {}, "400", b"HTTP/1.1"),
            (f"127.0.0.1:{it.port}", {}, "400", b"E2b-Sandbox-Id"),
        ]
        for authority, headers, status, text in cases:
            async with http2(it) as client:
                answer = await client.answer(client.ask(authority, **headers))
                assert (answer[0], text in answer[1]) == (status, True)
        it.register.set(it.id, traffic_token="secret")
        it.agent.listen(PORT, speak_http2)
        async with http2(it) as client:
            assert (await client.answer(client.ask(f"{PORT}-{it.id}.x.test")))[0] == "403"
        async with http2(it) as client:
            right = {"e2b_traffic_access_token": "secret"}
            assert (await client.answer(client.ask(f"{PORT}-{it.id}.x.test", **right)))[0] == "200"


async def test_a_shared_connection_carries_nobody_past_a_check() -> None:
    async with front() as it:
        it.agent.listen(PORT, speak_http2)
        it.register.set(it.id, traffic_token="secret")
        host = f"{PORT}-{it.id}.x.test"
        for second in ({}, {"e2b_traffic_access_token": "wrong"}):
            async with http2(it) as client:
                assert (await client.answer(client.ask(host, e2b_traffic_access_token="secret")))[0] == "200"
                assert await client.answer(client.ask(host, **second)) == ("", b"")
        other = it.add("other")
        other.listen(PORT, speak_http2)
        async with http2(it) as client:
            assert (await client.answer(client.ask(host, e2b_traffic_access_token="secret")))[0] == "200"
            assert await client.answer(client.ask(f"{PORT}-other.x.test")) == ("", b"")


@settings(max_examples=25)
@given(st.data())
def test_heads_are_found_however_the_bytes_are_cut(data: st.DataObject) -> None:
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    paths = data.draw(st.lists(st.text("abc/", min_size=1, max_size=300), min_size=1, max_size=4))
    for path in paths:
        stream = client.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/" + path), (":authority", "h")]
        client.send_headers(stream, fields)
        client.send_data(stream, data.draw(st.binary(max_size=50)), end_stream=True)
    sent = client.data_to_send()
    heads = RequestHeads()
    found = []
    while sent:
        cut = data.draw(st.integers(1, len(sent)))
        found += heads.feed(sent[:cut])
        sent = sent[cut:]
    assert [head[":path"] for head in found] == ["/" + path for path in paths]


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=100), max_size=5))
def test_any_bytes_are_heads_or_refused(pieces: list[bytes]) -> None:
    heads = RequestHeads()
    heads.feed(PREFACE)
    with contextlib.suppress(BadHttp2):
        for piece in pieces:
            heads.feed(piece)


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + payload


def test_heads_are_bounded() -> None:
    for bad in (
        frame(1, 0, b"x" * 10) + b"".join(frame(9, 0, b"y" * 16000) for _ in range(5)),
        frame(1, 0, b"x") + frame(9, 0, b""),
        frame(1, 0, b"x") + frame(0, 0, b"data between"),
        frame(9, 4, b"x"),
        frame(1, 8 | 4, b"\xff"),
        (MAX_HEAD + 1).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01",
    ):
        heads = RequestHeads()
        with pytest.raises(BadHttp2):
            heads.feed(PREFACE + bad)
    with pytest.raises(BadHttp2):
        RequestHeads().feed(b"PRI * HTTP/1.0\r\n\r\nSM\r\n\r\n")


async def test_a_client_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_listener, "HEAD_S", 0.02)
    async with front() as it:
        for start in (b"", b"GET / HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(start)
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(100):
                        pass
            writer.close()
