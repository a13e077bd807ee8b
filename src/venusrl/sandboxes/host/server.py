"""A host's side of HTTP: what a manager on another machine asks, answered by this machine's host.

Owns: ``application``: calls, the stream of deaths, requests and connections into sandboxes.

Must not know: E2B's wire, keys of users, what a host does with a call.

Guarantees: nothing is answered without the node's key (compared in constant time); the key reaches nothing inside a
sandbox; every error of the host is told as such; a listener on the stream of deaths hears something every
``HEARTBEAT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from venusrl.sandboxes.agent.api import Stream
from venusrl.sandboxes.envd.door import RUNNER_OPTIONS
from venusrl.sandboxes.host import wire
from venusrl.sandboxes.host.api import Died, Host, Moved, Peer
from venusrl.sandboxes.host.errors import MoveUnsupported
from venusrl.sandboxes.host.wire import CALLS, HEARTBEAT_S, OF_PEERS, One
from venusrl.sandboxes.protocol import SandboxError

_log = logging.getLogger(__name__)
_STALL_S = 30.0
"""A manager that takes nothing of the stream of deaths for so long is gone."""
Connector = Callable[[Peer], Host]
"""How the other host of a move is spoken to."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(host: Host, key: str, connect: Connector | None = None) -> web.Application:
    """Serve it with ``runner``. ``connect`` None: this host sends no sandbox to another."""
    if len(key) < 16:
        raise ValueError("a node's key has at least 16 characters")
    server = _Server(host, key, connect)
    app = web.Application(middlewares=[server.gate], client_max_size=wire.MAX_MESSAGE)
    app.add_routes(
        [
            web.post("/call/{call}", server.call),
            web.get("/events", server.events),
            web.get("/tunnel/{sandbox}/{port:[0-9]{1,5}}", server.tunnel),
        ]
    )
    return app


def for_peers(host: Host, key: str) -> web.Application:
    """What another host may ask while a sandbox moves here, and nothing else: for a host whose manager is in the same
    process. To be served below another application."""
    server = _Server(host, key, None, calls=OF_PEERS)
    app = web.Application(middlewares=[server.gate])
    app.router.add_post("/call/{call}", server.call)
    return app


def runner(app: web.Application) -> web.AppRunner:
    """What runs ``application``: bodies meant for sandboxes must arrive as they were sent."""
    return web.AppRunner(app, access_log=None, shutdown_timeout=2.0, handler_cancellation=False, **RUNNER_OPTIONS)


class _Server:
    def __init__(
        self, host: Host, key: str, connect: Connector | None, calls: frozenset[str] = frozenset(CALLS)
    ) -> None:
        self._calls = calls
        self._host = host
        self._key = key
        self._connect = connect

    @web.middleware
    async def gate(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Who may, whether it is for a sandbox, and what becomes of errors."""
        given = request.headers.get(wire.KEY_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._key.encode()):
            return web.Response(status=401, text=f"{wire.KEY_HEADER} is not this node's key")
        try:
            if wire.SANDBOX_HEADER in request.headers and self._calls == frozenset(CALLS):
                return await self._forward(request)
            return await handler(request)
        except SandboxError as error:
            value = wire.error_header(self._key, error)
            return web.Response(status=wire.ERROR_STATUS, headers={wire.ERROR_HEADER: value})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        sandbox = request.headers[wire.SANDBOX_HEADER]
        port = request.headers.get(wire.PORT_HEADER, "")
        if not (port.isascii() and port.isdigit() and len(port) < 6):
            return web.Response(status=400, text=f"{wire.PORT_HEADER} is no port")
        headers = request.headers.copy()
        for name in wire.OURS:
            headers.popall(name, None)
        return await self._host.forward(request.clone(headers=headers), sandbox, int(port))

    async def call(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["call"]
        if name not in self._calls:
            return web.Response(status=404, text=f"{name!r} is no call of a host")
        try:
            asked: Any = msgspec.json.decode(await request.read(), type=CALLS[name][0])
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"{name}: {error}")
        answer = await self._answer(name, asked)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _answer(self, name: str, asked: Any) -> Any:
        host = self._host
        match name:
            case "create" | "offer":
                return await getattr(host, name)(asked)
            case "status":
                return await host.status()
            case "drain":
                await host.drain(asked.on)
            case "kill" | "resume" | "usage" | "has":
                return await getattr(host, name)(asked.sandbox)
            case "pause":
                return await host.pause(asked.sandbox, memory=asked.memory)
            case "snapshot":
                return await host.snapshot(asked.sandbox, asked.snapshot, memory=asked.memory)
            case "remove_snapshot":
                await host.remove_snapshot(asked.snapshot)
            case "set_network":
                await host.set_network(asked.sandbox, asked.network)
            case "set_priority":
                await host.set_priority(asked.sandbox, asked.priority, asked.mandatory)
            case "move":
                return await self._move(asked)
            case "settle":
                return await self._settle(asked)
            case _ if name.startswith("state_"):
                return await self._state(name, asked)
        return None

    async def _state(self, name: str, asked: Any) -> Any:
        states = self._host.states
        match name:
            case "state_take":
                return await states.take(asked.kind, asked.subject)
            case "state_read":
                return await states.read(asked.state, asked.file, asked.piece)
            case "state_begin":
                return await states.begin(asked)
            case "state_write":
                await states.write(asked.state, asked.file, asked.piece, asked.data)
            case "state_restore":
                await states.restore(asked.state, asked.epoch)
            case "state_drop":
                await states.drop(asked.state)
        return None

    async def _move(self, asked: One) -> Moved:
        if asked.to is None:
            raise MoveUnsupported(f"no host was named to send sandbox {asked.sandbox} to")
        async with self._other(asked.to) as other:
            return await self._host.move(asked.sandbox, other)

    async def _settle(self, asked: One) -> bool:
        if asked.to is None:
            return await self._host.settle(asked.sandbox, None)
        async with self._other(asked.to) as other:
            return await self._host.settle(asked.sandbox, other)

    @contextlib.asynccontextmanager
    async def _other(self, peer: Peer) -> AsyncIterator[Host]:
        if self._connect is None:
            raise MoveUnsupported(f"{self._host.name} sends no sandbox to another host")
        other = self._connect(peer)
        try:
            yield other
        finally:
            await other.close()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """A line of JSON a death, an empty one every ``HEARTBEAT_S``; without end."""
        deaths = self._host.events()
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        waiting: asyncio.Task[Died] = asyncio.ensure_future(anext(deaths))
        try:
            await asyncio.sleep(0)  # listening begins before the client is told that it has
            await response.prepare(request)
            while True:
                await asyncio.wait({waiting}, timeout=HEARTBEAT_S)
                line = b""
                if waiting.done():
                    line = msgspec.json.encode(waiting.result())
                    waiting = asyncio.ensure_future(anext(deaths))
                async with asyncio.timeout(_STALL_S):
                    await response.write(line + b"\n")
        except (ConnectionError, TimeoutError, StopAsyncIteration, SandboxError) as error:
            _log.info("a listener to the deaths of %s ended: %s", self._host.name, error or type(error).__name__)
            if request.transport is not None:
                request.transport.abort()  # an orderly end would say that no more can come
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return response

    async def tunnel(self, request: web.Request) -> web.StreamResponse:
        """A connection to a port inside: binary messages are its bytes, a text message is the end of one direction."""
        stream = await self._host.connect(request.match_info["sandbox"], int(request.match_info["port"]))
        try:
            socket = web.WebSocketResponse(compress=False, max_msg_size=wire.MAX_MESSAGE)
            await socket.prepare(request)
            ways = [
                asyncio.create_task(_outward(stream, socket), name="tunnel out"),
                asyncio.create_task(_inward(stream, socket), name="tunnel in"),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            with contextlib.suppress(ConnectionError):
                await socket.close()
        finally:
            await stream.close()
        return socket


class _Ended(Exception):
    """The other end of a tunnel is gone."""


async def _outward(stream: Stream, socket: web.WebSocketResponse) -> None:
    while data := await stream.read():
        await socket.send_bytes(data)
    await socket.send_str("eof")


async def _inward(stream: Stream, socket: web.WebSocketResponse) -> None:
    while True:
        message = await socket.receive()
        if message.type is WSMsgType.BINARY:
            await stream.write(message.data)
        elif message.type is WSMsgType.TEXT:
            await stream.write_eof()
        else:
            raise _Ended  # whatever is still to come out has nobody to read it
