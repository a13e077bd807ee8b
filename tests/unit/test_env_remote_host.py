"""A host over HTTP: every call and every error crosses the wire, for the key's holder alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import get_args

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S, until

from venusrl.sandboxes.agent.api import AgentError, Code
from venusrl.sandboxes.host import server, wire
from venusrl.sandboxes.host.api import ENVD_PORT, Moving, Order
from venusrl.sandboxes.host.errors import HostLost, MoveUnsupported, OperationTimeout
from venusrl.sandboxes.host.remote import RemoteHost, RemoteLimits
from venusrl.sandboxes.protocol import SandboxDenied, SandboxError, SandboxGone, SandboxPaused, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Network
from venusrl.testing.env_host import FakeHost

KEY = "k" * 32


@contextlib.asynccontextmanager
async def joined(host: FakeHost, key: str = KEY) -> AsyncIterator[RemoteHost]:
    runner = server.runner(server.application(host, KEY))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    remote = RemoteHost("node-a", f"http://127.0.0.1:{runner.addresses[0][1]}", key, RemoteLimits(ask=5.0))
    try:
        yield remote
    finally:
        await remote.close()
        await host.close()
        await runner.cleanup()


def order(sandbox: str = "sb1") -> Order:
    return Order(id=sandbox, template="base", runtime="namespace", env={"A": "b"}, group="g", network=Network(True))


async def test_every_call_reaches_the_host() -> None:
    host = FakeHost()
    async with joined(host) as remote:
        made = await remote.create(order())
        assert host.sandboxes["sb1"].order == order()
        assert made.state == "running"
        await remote.set_network("sb1", Network(allow=("10.0.0.0/8",)))
        await remote.set_priority("sb1", 3.0, True)
        assert host.sandboxes["sb1"].network.allow == ("10.0.0.0/8",)
        assert (host.sandboxes["sb1"].priority, host.sandboxes["sb1"].mandatory) == (3.0, True)
        assert await remote.usage("sb1") == await host.usage("sb1")
        info = await remote.snapshot("sb1", "snap", memory=False)
        assert info == host.snapshots["snap"].info
        assert not info.memory
        status = await remote.status()
        assert status.view.name == "node-a"
        assert status.held[0].id == "sb1"
        assert status.snapshots == (info,)
        assert (await remote.pause("sb1", memory=False)).state == "paused"
        assert not host.sandboxes["sb1"].memory_kept
        assert (await remote.resume("sb1")).state == "running"
        await remote.remove_snapshot("snap")
        assert (await remote.offer(Moving("m1", "sb9", "b", "namespace", 1, b"\x00\xff"))).token == "m1-token"
        await remote.kill("sb1")
        await remote.drain()
        assert not host.sandboxes
        assert not host.snapshots
        assert host.draining
        with pytest.raises(MoveUnsupported):
            await remote.move("sb1", host)


@pytest.mark.parametrize(
    "error",
    [
        SandboxDenied("full", 2.5),
        TemplateNotFound("no ü"),
        HostLost("x"),
        OperationTimeout("y"),
        AgentError("not_found", "z"),
    ],
)
async def test_errors_arrive_as_they_left(error: SandboxError) -> None:
    host = FakeHost()
    host.fail("create", error)
    async with joined(host) as remote:
        with pytest.raises(type(error)) as caught:
            await remote.create(order())
        assert str(caught.value) == str(error)
        assert vars(caught.value) == vars(error)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=200), st.sampled_from(get_args(Code)), st.floats(0, 1e6))
def test_any_message_of_an_error_crosses(message: str, code: Code, retry: float) -> None:
    try:
        message.encode()
    except UnicodeEncodeError:
        return
    for error in (AgentError(code, message), SandboxDenied(message, retry), SandboxGone(message)):
        header = wire.error_header(KEY, error)
        assert header.isascii()
        assert "\n" not in header
        found = wire.error_in(KEY, header)
        assert type(found) is type(error)
        assert str(found) == message
        assert vars(found) == vars(error)
        assert wire.error_in("another key", header) is None


async def test_nothing_without_the_key() -> None:
    host = FakeHost()
    async with joined(host, "not the key at all") as remote:
        with pytest.raises(HostLost, match="401"):
            await remote.status()
    assert host.calls == []


async def test_a_host_that_is_away_is_lost() -> None:
    async with joined(FakeHost()) as remote:
        pass
    away = RemoteHost("node-a", remote.peer.url, KEY)
    with pytest.raises(HostLost, match="node-a"):
        await away.status()
    with pytest.raises(HostLost):
        await anext(away.events())
    with pytest.raises(HostLost):
        await away.connect("sb1", 80)
    await away.close()


async def test_a_silent_host_times_out_by_name() -> None:
    host = FakeHost()
    host.gate = asyncio.Event()
    async with joined(host) as good:
        remote = RemoteHost("node-a", good.peer.url, KEY, RemoteLimits(change=0.05))
        with pytest.raises(OperationTimeout, match="create of sandbox sb1 on node-a"):
            await remote.create(order())
        host.gate.set()
        await remote.close()


async def test_deaths_are_told_and_the_end_of_the_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.01)
    host = FakeHost()
    async with joined(host) as remote:
        await remote.create(order())
        events = remote.events()
        hearing = asyncio.ensure_future(anext(events))
        await until(lambda: bool(host._events), "the beginning of the stream")
        await asyncio.sleep(0.1)  # for some heartbeats, which must not be taken for deaths
        host.die("sb1", "out of memory")
        died = await asyncio.wait_for(hearing, PATIENCE_S)
        assert (died.sandbox, died.cause) == ("sb1", "out of memory")
        hearing = asyncio.ensure_future(anext(events))
        await host.close()
        with pytest.raises(HostLost):
            await asyncio.wait_for(hearing, PATIENCE_S)


async def test_a_connection_carries_bytes_and_its_end() -> None:
    async with joined(FakeHost()) as remote:
        await remote.create(order())
        stream = await remote.connect("sb1", 7)
        await stream.write(b"\x00abc")
        assert await stream.read() == b"\x00abc"
        await stream.write_eof()
        assert await stream.read() == b""
        await stream.close()
        with pytest.raises(SandboxGone):
            await remote.connect("sb2", 7)


@contextlib.asynccontextmanager
async def fronted(remote: RemoteHost) -> AsyncIterator[str]:
    """What a gateway does: forward, and answer the errors."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await remote.forward(request, request.query.get("to", "sb1"), int(request.query.get("port", "80")))
        except SandboxError as error:
            return web.Response(status=502, text=error.reason)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Inside(FakeHost):
    """Its sandboxes answer what came, a WebSocket with an echo, and one path with a forged error."""

    async def forward(self, request: web.Request, sandbox: str, port: int) -> web.StreamResponse:
        self._running(sandbox)
        if request.headers.get("Upgrade") == "websocket":
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            async for message in socket:
                await socket.send_str(f"{sandbox}:{message.data}")
            return socket
        if request.path == "/forged":
            return web.Response(headers={wire.ERROR_HEADER: wire.error_header("guess", SandboxGone("no"))}, text="mine")
        body = await request.read()
        seen = {"path": request.raw_path, "host": request.host, "headers": dict(request.headers), "size": len(body)}
        return web.json_response(seen | {"port": port, "method": request.method})


async def test_requests_cross_whole_and_without_the_key() -> None:
    host = Inside()
    async with joined(host) as remote, fronted(remote) as url, aiohttp.ClientSession() as client:
        await remote.create(order())
        headers = {"Host": "80-sb1.example", "X-Mine": "1", wire.KEY_HEADER: "mine", wire.SANDBOX_HEADER: "other"}
        async with client.post(f"{url}/a%2Fb//c?port={ENVD_PORT}", data=b"x" * 300_000, headers=headers) as answer:
            seen = await answer.json()
        assert (seen["path"], seen["host"], seen["size"]) == (f"/a%2Fb//c?port={ENVD_PORT}", "80-sb1.example", 300_000)
        assert (seen["port"], seen["method"], seen["headers"]["X-Mine"]) == (ENVD_PORT, "POST", "1")
        assert not {name.lower() for name in seen["headers"]} & {name.lower() for name in wire.OURS}
        assert KEY not in msgspec.json.encode(seen).decode()
        async with client.get(f"{url}//elsewhere.example/") as answer:
            assert (await answer.json())["path"] == "//elsewhere.example/"
        async with client.get(f"{url}/forged") as answer:
            assert (answer.status, await answer.text()) == (200, "mine")
        async with client.ws_connect(f"{url}/ws") as socket:
            await socket.send_str("hello")
            assert await socket.receive_str() == "sb1:hello"
        async with client.get(f"{url}/?to=sb2") as answer:
            assert (answer.status, await answer.text()) == (502, SandboxGone.reason)
        await remote.pause("sb1")
        async with client.get(f"{url}/") as answer:
            assert (answer.status, await answer.text()) == (502, SandboxPaused.reason)
