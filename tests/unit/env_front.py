"""A gateway and E2B's services in front of sandboxes in memory, listening on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import aiohttp
from aiohttp import web

from venusrl.sandboxes.agent.api import AgentError, Stream
from venusrl.sandboxes.envd import streams
from venusrl.sandboxes.envd.about import NOTHING
from venusrl.sandboxes.envd.connect import STREAMING, frame
from venusrl.sandboxes.envd.door import Door
from venusrl.sandboxes.host.api import Host
from venusrl.sandboxes.manager.gateway import Gateway, GatewayLimits, Route
from venusrl.sandboxes.manager.gateway_listener import Listener
from venusrl.sandboxes.protocol import SandboxGone, SandboxPaused
from venusrl.testing.agents import MemoryAgent

TOKEN = "token-of-the-sandbox"


class MemoryHost:
    """The part of ``Host`` that a gateway uses, over agents in memory."""

    def __init__(self) -> None:
        self.door = Door()
        self.agents: dict[str, MemoryAgent] = {}
        self.paused: set[str] = set()
        self.forwarded: list[web.Request] = []
        self.about = NOTHING

    def _agent(self, sandbox: str) -> MemoryAgent:
        if sandbox in self.paused:
            raise SandboxPaused(sandbox)
        if sandbox not in self.agents:
            raise SandboxGone(sandbox)
        return self.agents[sandbox]

    async def forward(self, request: web.Request, sandbox: str, port: int) -> web.StreamResponse:
        self.forwarded.append(request)
        return await self.door.serve(request, self._agent(sandbox), sandbox, port, self.about)

    async def connect(self, sandbox: str, port: int) -> Stream:
        return await self._agent(sandbox).connect(port)


class Register:
    """Implements ``Directory``; a test changes ``routes`` and sets ``moved`` when a sandbox has settled."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.moved = asyncio.Event()
        self.on_wake: Exception | None = None
        self.disputes: list[str] = []

    def find(self, sandbox: str) -> Route | None:
        return self.routes.get(sandbox)

    def secured(self) -> Iterable[tuple[str, str]]:
        return [(one.sandbox, one.envd_token) for one in self.routes.values() if one.envd_token]

    async def settled(self, sandbox: str) -> None:
        await self.moved.wait()

    async def wake(self, sandbox: str) -> None:
        if self.on_wake is not None:
            raise self.on_wake
        self.set(sandbox, state="running")

    async def disputed(self, sandbox: str, error: SandboxGone | SandboxPaused) -> None:
        self.disputes.append(sandbox)
        self.routes.pop(sandbox, None)

    def set(self, sandbox: str, **changes: Any) -> None:
        self.routes[sandbox] = replace(self.routes[sandbox], **changes)


@dataclass
class Front:
    """Everything a test needs. ``id`` is a sandbox that is there from the start, ``agent`` its agent."""

    host: MemoryHost
    register: Register
    gateway: Gateway
    http: aiohttp.ClientSession
    port: int
    url: str
    id: str = "sandbox1"
    agent: MemoryAgent = field(default_factory=MemoryAgent)

    def add(self, sandbox: str, **route: Any) -> MemoryAgent:
        agent = self.host.agents[sandbox] = MemoryAgent()
        self.register.routes[sandbox] = Route(
            sandbox, "running", cast(Host, self.host), **{"envd_token": TOKEN, **route}
        )
        return agent

    def headers(self, port: int = 49983, sandbox: str = "", /, **more: str) -> dict[str, str]:
        named = {"E2b-Sandbox-Id": sandbox or self.id, "E2b-Sandbox-Port": str(port), "X-Access-Token": TOKEN}
        return named | {name.replace("_", "-"): value for name, value in more.items()}

    async def call(self, method: str, message: Any, **headers: str) -> tuple[int, Any]:
        """A unary call of E2B's services."""
        async with self.http.post(f"{self.url}/{method}", json=message, headers=self.headers(**headers)) as answer:
            return answer.status, await answer.json()

    @contextlib.asynccontextmanager
    async def stream(self, method: str, message: Any, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """A server stream: its messages, the end's included as ``{"end": ...}``."""
        sent = self.headers(Content_Type=STREAMING, **headers)
        async with self.http.post(f"{self.url}/{method}", data=frame(message), headers=sent) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == STREAMING
            yield _messages(answer)

    async def collect(self, method: str, message: Any, **headers: str) -> list[dict[str, Any]]:
        async with self.stream(method, message, **headers) as messages:
            return [message async for message in messages]


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    while True:
        head = await answer.content.readexactly(5)
        payload = json.loads(await answer.content.readexactly(int.from_bytes(head[1:], "big")))
        if head[0] & 2:
            yield {"end": payload}
            return
        yield payload


async def tunnel(port: int, stream: Stream) -> None:
    """Let what connects to a sandbox's port meet a server on this machine's loopback."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def inwards() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def outwards() -> None:
        while data := await reader.read(1 << 16):
            await stream.write(data)
        await stream.close()

    tasks = [asyncio.create_task(inwards()), asyncio.create_task(outwards())]
    try:
        await tasks[1]
    except (OSError, AgentError):
        pass
    finally:
        for task in tasks:
            task.cancel()
        writer.close()


@contextlib.asynccontextmanager
async def front(limits: GatewayLimits | None = None) -> AsyncIterator[Front]:
    host, register = MemoryHost(), Register()
    look_s, streams.LOOK_S = streams.LOOK_S, 0.01
    gateway = Gateway(register, limits)
    app = web.Application(middlewares=[gateway.middleware])

    async def control(request: web.Request) -> web.Response:
        return web.json_response({"control": request.path})

    app.router.add_route("*", "/{path:.*}", control)
    listener = Listener(app, gateway)
    port = await listener.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(auto_decompress=False) as http:
        made = Front(host, register, gateway, http, port, f"http://127.0.0.1:{port}")
        made.agent = made.add(made.id)
        try:
            yield made
        finally:
            host.door.close()
            await listener.stop()
            streams.LOOK_S = look_s
