"""The listening socket: HTTP/1.1 for aiohttp, HTTP/2 with prior knowledge through to the sandbox.

Owns: ``Listener``. The first bytes of a connection tell which protocol it speaks.

Must not know: records, tokens, what is answered.

Guarantees: a connection that does not say within ``HEAD_S`` what it wants is closed; a spliced connection holds at
most ``PIECE`` bytes in each direction beyond the sockets' own buffers; ``stop`` ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from aiohttp import web
from multidict import CIMultiDict

from venusrl.sandboxes.agent.api import Stream
from venusrl.sandboxes.envd import answers
from venusrl.sandboxes.envd.door import RUNNER_OPTIONS
from venusrl.sandboxes.manager.gateway import Answered, Gateway
from venusrl.sandboxes.manager.gateway_address import ID_HEADER, PORT_HEADER, Address, BadAddress, address
from venusrl.sandboxes.manager.gateway_h2 import PREFACE, BadHttp2, RequestHeads, refusal
from venusrl.sandboxes.protocol import SandboxError

HEAD_S = 30.0
PIECE = 1 << 16
_MAX_HEAD = 1 << 16
_MAX_UNROUTED = 1 << 18
"""What a client may send before its first request's head is whole."""
_log = logging.getLogger(__name__)


class Listener:
    """Serves ``app`` and, for HTTP/2, ports of sandboxes."""

    def __init__(self, app: web.Application, gateway: Gateway) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, **RUNNER_OPTIONS)
        self._gateway = gateway
        self._servers: list[asyncio.Server] = []
        self._spliced: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which matters when 0 was asked for."""
        if self._runner.server is None:
            await self._runner.setup()
        made = self._runner.server
        assert made is not None
        server = await asyncio.get_running_loop().create_server(
            lambda: _Sniffer(made, self._splice), host, port, backlog=2048
        )
        self._servers.append(server)
        listening: int = server.sockets[0].getsockname()[1]
        return listening

    async def stop(self) -> None:
        """Close every connection."""
        for server in self._servers:
            server.close()
        for task in self._spliced:
            task.cancel()
        await asyncio.gather(*self._spliced, return_exceptions=True)
        await self._runner.cleanup()

    def _splice(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._http2(reader, writer), name="http/2 connection")
        self._spliced.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._spliced.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an HTTP/2 connection failed: %r", error, exc_info=error)

    async def _http2(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads = RequestHeads()
        received = bytearray()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                first = await _first(reader, heads, received)
            where = _where(first[0])
            for head in first[1:]:
                self._check(where, head)
            stream = await self._gateway.open(where, first[0])
            await stream.write(bytes(received))
            await self._both_ways(reader, writer, stream, heads, where)
        except Answered as end:
            body = end.response.body
            assert isinstance(body, bytes)
            writer.write(refusal(bytes(received), end.response.status, body, "application/json"))
            await writer.drain()
        except (BadHttp2, ConnectionError, TimeoutError, SandboxError) as error:
            _log.debug("an HTTP/2 connection was closed: %s", error)
        finally:
            if stream is not None:
                with contextlib.suppress(SandboxError):
                    await stream.close()
            writer.close()

    async def _both_ways(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stream: Stream,
        heads: RequestHeads,
        where: Address,
    ) -> None:
        async def inwards() -> None:
            while data := await reader.read(PIECE):
                for head in heads.feed(data):
                    self._check(where, head)
                await stream.write(data)
            await stream.write_eof()

        async def outwards() -> None:
            while data := await stream.read():
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        tasks = [asyncio.create_task(inwards()), asyncio.create_task(outwards())]
        try:
            # Once the service inside has ended there is nothing left to send to it.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await tasks[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, where: Address, head: CIMultiDict[str]) -> None:
        """A later request on the same connection. Raises BadHttp2."""
        if ":method" not in head:
            # Trailers.
            return
        try:
            if _where(head) != where:
                raise BadHttp2("a request for another sandbox came on the same connection")
            self._gateway.permit(where, head)
        except Answered as end:
            raise BadHttp2(f"refused with {end.response.status}") from None


class _Sniffer(asyncio.Protocol):
    """Waits for the head of the first request, then hands the connection over."""

    def __init__(
        self,
        http1: Callable[[], asyncio.Protocol],
        http2: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
    ) -> None:
        self._http1 = http1
        self._http2 = http2
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        self._received += data
        assert self._transport is not None
        if PREFACE.startswith(self._received[: len(PREFACE)]):
            if len(self._received) >= len(PREFACE):
                self._to_http2(self._transport)
        elif b"\r\n\r\n" in self._received or b"\n\n" in self._received or len(self._received) > _MAX_HEAD:
            # Over the limit: aiohttp answers that.
            self._to_http1(self._transport)

    def _to_http1(self, transport: asyncio.Transport) -> None:
        self._stop_timer()
        handler = self._http1()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(bytes(self._received))

    def _to_http2(self, transport: asyncio.Transport) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        reader.feed_data(bytes(self._received))
        self._http2(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def _first(reader: asyncio.StreamReader, heads: RequestHeads, received: bytearray) -> list[CIMultiDict[str]]:
    """Read until the first request's head is whole. Raises BadHttp2."""
    while True:
        data = await reader.read(PIECE)
        if not data:
            raise BadHttp2("the connection ended before its first request")
        received += data
        if found := heads.feed(data):
            return found
        if len(received) > _MAX_UNROUTED:
            raise BadHttp2("too much before the first request")


def _where(head: CIMultiDict[str]) -> Address:
    """Raises Answered, BadHttp2."""
    host = head.get(":authority") or head.get("host") or ""
    try:
        where = address(host, head.get(ID_HEADER, ""), head.get(PORT_HEADER, ""))
    except BadAddress as error:
        raise Answered(answers.error_answer(400, str(error))) from None
    if where is None:
        message = f"HTTP/2 with prior knowledge reaches ports of sandboxes only: send {ID_HEADER} and {PORT_HEADER}"
        raise Answered(answers.error_answer(400, message))
    return where
