"""Requests for what a sandbox serves itself: HTTP and WebSocket to any port inside.

Owns: what of a request goes on and what of an answer comes back.

Must not know: which sandbox, keys (checked before), E2B's own services.

Guarantees: bodies stream in both directions with bounded memory; secrets of the way here (tokens, API keys) do not
reach what runs inside; what runs inside cannot keep a client's connection open beyond its own answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    DummyCookieJar,
    WSMessage,
    WSMsgType,
    WSServerHandshakeError,
    web,
)
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from venusrl.sandboxes.agent.api import Agent
from venusrl.sandboxes.envd.answers import PORT_CLOSED, sandbox_answer
from venusrl.sandboxes.envd.following import Follow
from venusrl.sandboxes.envd.streams import STALL_S
from venusrl.sandboxes.envd.upstream import PortClosed, PortConnector

MAX_WEBSOCKET_MESSAGE = 16 << 20
SILENCE_S = 3600.0
"""A service inside may think this long before it says anything."""
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_OURS = {"e2b-sandbox-id", "e2b-sandbox-port", "e2b-traffic-access-token", "x-access-token", "x-api-key", "expect"}
_HEADER_LIMIT = 1 << 16


async def proxy(request: web.Request, agent: Agent, sandbox: str, port: int) -> web.StreamResponse:
    """Answer ``request`` with what listens on ``port``."""
    session = ClientSession(
        connector=PortConnector(agent, port),
        cookie_jar=DummyCookieJar(),
        auto_decompress=False,
        timeout=ClientTimeout(total=None, sock_read=SILENCE_S),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=_HEADER_LIMIT,
        max_field_size=_HEADER_LIMIT,
    )
    async with session:
        try:
            if is_websocket(request):
                return await _websocket(request, session, port)
            return await relay_http(request, session, _url(request, port), kept(request.headers, _OURS))
        except PortClosed:
            return sandbox_answer(502, sandbox, PORT_CLOSED, port=port)
        except (ClientError, ValueError) as error:
            # What came back is not HTTP, or broke off before it was.
            return sandbox_answer(502, sandbox, f"The service on port {port} gave no proper answer: {error}", port=port)


def kept(headers: CIMultiDictProxy[str] | CIMultiDict[str], drop: Iterable[str] = ()) -> CIMultiDict[str]:
    """The end-to-end headers."""
    named = {token.strip().lower() for value in headers.getall("Connection", ()) for token in value.split(",")}
    dropped = _HOP_BY_HOP | named | set(drop)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _url(request: web.Request, port: int) -> URL:
    target = request.raw_path if request.raw_path.startswith("/") else "/"
    return URL(f"http://127.0.0.1:{port}{target}", encoded=True)


async def relay_http(
    request: web.Request,
    session: ClientSession,
    url: URL,
    headers: CIMultiDict[str],
    check: Callable[[ClientResponse], None] | None = None,
    follow: Follow | None = None,
) -> web.StreamResponse:
    """Answer with what ``url`` answers. ``check`` sees that first and may raise. ``follow``: one turn of its stream.
    Raises ClientError, ValueError before the answer has begun."""
    sending = session.request(
        request.method,
        url,
        headers=headers,
        data=(follow and follow.message) or (_body(request) if request.can_read_body else None),
        allow_redirects=False,
    )
    async with sending as upstream:
        if check is not None:
            check(upstream)
        if upstream.status < 200:
            raise ValueError(f"status {upstream.status} was not asked for")
        if follow is not None and upstream.status != 200:
            if follow.response is not None:  # how the turn was refused, for whoever holds the stream
                return web.Response(status=upstream.status, body=await upstream.read())
            follow = None
        # Given both, a length that is not the chunks' would let an answer run over into the next one.
        chunked = ("content-length",) if "Transfer-Encoding" in upstream.headers else ()
        headers = kept(upstream.headers, chunked)
        response = None if follow is None else follow.response
        if response is None:
            response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
            await response.prepare(request)
            if follow is not None:
                follow.response = response
        try:
            async for piece in upstream.content.iter_any():
                if follow is not None and not (piece := follow.passed(piece)):
                    continue
                async with asyncio.timeout(STALL_S):
                    await response.write(piece)
            if follow is None or follow.parted is None:
                await response.write_eof()
        except (ClientError, ConnectionError, TimeoutError):
            # The status is out already: break off, so that nobody takes a part for the whole.
            if request.transport is not None:
                request.transport.abort()
        return response


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    async for piece in request.content.iter_any():
        yield piece


def is_websocket(request: web.Request) -> bool:
    upgrade = request.headers.get("Upgrade", "").lower()
    connection = request.headers.get("Connection", "").lower()
    return request.method == "GET" and upgrade == "websocket" and "upgrade" in connection


async def _websocket(request: web.Request, session: ClientSession, port: int) -> web.StreamResponse:
    try:
        return await relay_websocket(request, session, _url(request, port), kept(request.headers, _OURS))
    except WSServerHandshakeError as error:
        return web.Response(status=error.status, text=f"the service on port {port} refused the WebSocket")


async def relay_websocket(
    request: web.Request, session: ClientSession, url: URL, headers: CIMultiDict[str]
) -> web.StreamResponse:
    """Connect both ends. Raises WSServerHandshakeError when ``url`` will not."""
    offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if name.strip()]
    names = {name.lower() for name in request.headers if name.lower().startswith("sec-websocket-")}
    inside = await session.ws_connect(
        url,
        headers=kept(headers, names),
        protocols=offered,
        autoping=False,
        autoclose=False,
        max_msg_size=MAX_WEBSOCKET_MESSAGE,
    )
    outside = web.WebSocketResponse(
        protocols=(inside.protocol,) if inside.protocol else (),
        autoping=False,
        autoclose=False,
        compress=False,
        max_msg_size=MAX_WEBSOCKET_MESSAGE,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(inside.close)
        await outside.prepare(request)
        await _relay(inside, outside)
    return outside


async def _relay(inside: ClientWebSocketResponse, outside: web.WebSocketResponse) -> None:
    """Until either side closes; the other is told the same code and reason."""
    ways = [
        asyncio.create_task(_one_way(inside, outside), name="websocket out"),
        asyncio.create_task(_one_way(outside, inside), name="websocket in"),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        await outside.close()


_Side = ClientWebSocketResponse | web.WebSocketResponse


async def _one_way(source: _Side, target: _Side) -> None:
    while True:
        message: WSMessage = await source.receive()
        try:
            async with asyncio.timeout(STALL_S):
                if not await _pass_on(message, target):
                    return
        except (ConnectionError, TimeoutError):
            return


async def _pass_on(message: WSMessage, target: _Side) -> bool:
    match message.type:
        case WSMsgType.TEXT:
            await target.send_str(message.data)
        case WSMsgType.BINARY:
            await target.send_bytes(message.data)
        case WSMsgType.PING:
            await target.ping(message.data)
        case WSMsgType.PONG:
            await target.pong(message.data)
        case WSMsgType.CLOSE:
            await target.close(code=message.data or 1000, message=(message.extra or "").encode())
            return False
        case _:
            return False
    return True
