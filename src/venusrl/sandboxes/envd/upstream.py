"""HTTP to a port inside a sandbox.

Owns: ``PortConnector``, which gives aiohttp's client connections made by an agent instead of by the operating system.

Must not know: whose request it is, headers.

Guarantees: at most ``HIGH_WATER`` bytes wait in either direction: a side that does not read stops the other; a
connection is used for one request and closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from aiohttp import BaseConnector, ClientConnectionError, ClientRequest, ClientTimeout
from aiohttp.client_proto import ResponseHandler

from venusrl.sandboxes.agent.api import Agent, AgentError, Stream
from venusrl.sandboxes.protocol import SandboxError

HIGH_WATER = 1 << 18


class PortClosed(ClientConnectionError):
    """Nothing listens on that port."""


class PortConnector(BaseConnector):
    """Every connection goes to one port of one sandbox, whatever the URL says."""

    def __init__(self, agent: Agent, port: int) -> None:
        super().__init__(force_close=True)
        self._agent = agent
        self._port = port

    async def _create_connection(
        self, req: ClientRequest, traces: list[Any], timeout: ClientTimeout
    ) -> ResponseHandler:
        try:
            stream = await self._agent.connect(self._port)
        except AgentError as error:
            raise PortClosed(str(error)) from error
        protocol = self._factory()
        StreamTransport(stream, protocol)
        return protocol


class StreamTransport(asyncio.Transport):
    """A ``Stream`` as asyncio's protocols want it."""

    def __init__(self, stream: Stream, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = protocol
        self._out: deque[bytes] = deque()
        self._waiting = 0
        self._wake = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._paused = False
        self._eof = False
        self._closing = False
        self._lost = False
        protocol.connection_made(self)
        self._writer = self._loop.create_task(self._write_all())
        self._reader = self._loop.create_task(self._read_all())

    # What protocols call

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._may_read.is_set()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        self._out.append(bytes(data))
        self._waiting += len(data)
        self._wake.set()
        if self._waiting > HIGH_WATER and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._eof = True
        self._wake.set()

    def close(self) -> None:
        """What was written goes out first."""
        self._closing = True
        self._wake.set()

    def abort(self) -> None:
        self._closing = True
        self._out.clear()
        self._waiting = 0
        self._finish(None)

    # Inside

    async def _write_all(self) -> None:
        try:
            while True:
                while self._out:
                    data = self._out.popleft()
                    await self._stream.write(data)
                    self._written(len(data))
                if self._closing:
                    break
                if self._eof:
                    self._eof = False
                    await self._stream.write_eof()
                self._wake.clear()
                if not self._out and not self._closing:
                    await self._wake.wait()
        except SandboxError as error:
            self._finish(ConnectionResetError(str(error)))
            return
        self._finish(None)

    def _written(self, size: int) -> None:
        self._waiting = max(0, self._waiting - size)
        if self._paused and self._waiting <= HIGH_WATER // 4:
            self._paused = False
            self._protocol.resume_writing()

    async def _read_all(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                data = await self._stream.read()
                if not data:
                    break
                await self._may_read.wait()
                self._protocol.data_received(data)
            self._protocol.eof_received()
        except SandboxError as error:
            self._finish(ConnectionResetError(str(error)))
            return
        self._closing = True
        self._wake.set()

    def _finish(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._closing = True
        self._reader.cancel()
        current = asyncio.current_task()
        if self._writer is not current:
            self._writer.cancel()
        self._loop.call_soon(self._protocol.connection_lost, error)
        self._closer = self._loop.create_task(self._stream.close())
