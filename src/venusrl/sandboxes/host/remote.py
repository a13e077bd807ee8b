"""A host on another machine, spoken to over HTTP.

Owns: ``RemoteHost``, the ``Host`` of a node that joined: one HTTP client, the time limits of calls.

Must not know: E2B's wire, keys of users, which sandbox should be where.

Guarantees: those of ``host/api.py``; a host that does not answer raises HostLost, a call that takes longer than its
limit OperationTimeout naming that limit; a silent stream of deaths ends with HostLost after ``silence_s``, and whoever
listens begins again and compares (deaths in between are in ``status``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    DummyCookieJar,
    TCPConnector,
    WSMsgType,
    WSServerHandshakeError,
    web,
)
from multidict import CIMultiDict
from yarl import URL

from venusrl.sandboxes.agent.api import Stream, Usage
from venusrl.sandboxes.envd import following
from venusrl.sandboxes.envd.proxy import SILENCE_S, is_websocket, kept, relay_http, relay_websocket
from venusrl.sandboxes.host import wire
from venusrl.sandboxes.host.api import (
    Address,
    Died,
    Held,
    Host,
    HostStatus,
    KeptState,
    Moved,
    Moving,
    Order,
    Peer,
    SnapshotInfo,
    StateKind,
    StatePart,
)
from venusrl.sandboxes.host.errors import HostLost, MoveUnsupported, within
from venusrl.sandboxes.host.wire import CALLS, MAX_MESSAGE, One
from venusrl.sandboxes.runtimes.base import Network

_HEADER_LIMIT = 1 << 16


class RemoteLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds. The host limits its operations itself: these are for a host that says nothing. A ``change`` may have to
    prepare a template first."""

    connect: float = 5.0
    ask: float = 15.0
    change: float = 1000.0
    move: float = 1700.0
    silence: float = 4 * wire.HEARTBEAT_S


class RemoteHost:
    """Implements ``host.api.Host`` over ``host/server.py``."""

    def __init__(self, name: str, url: str, key: str, limits: RemoteLimits | None = None) -> None:
        self._name = name
        self.peer = Peer(name, url.rstrip("/"), key)
        self._limits = limits or RemoteLimits()
        self._client: ClientSession | None = None
        self._closed = False
        self.states = _RemoteStates(self._call, self._limits)

    @property
    def name(self) -> str:
        return self._name

    # -- calls

    async def status(self) -> HostStatus:
        status: HostStatus = await self._call("status", One(), self._limits.ask)
        # It goes by the name it joined under, whatever it calls itself.
        return msgspec.structs.replace(status, view=msgspec.structs.replace(status.view, name=self._name))

    async def create(self, order: Order) -> Held:
        held: Held = await self._call("create", order, self._limits.change)
        return held

    async def kill(self, sandbox: str) -> None:
        await self._call("kill", One(sandbox), self._limits.change)

    async def pause(self, sandbox: str, *, memory: bool = True) -> Held:
        held: Held = await self._call("pause", One(sandbox, memory=memory), self._limits.change)
        return held

    async def resume(self, sandbox: str) -> Held:
        held: Held = await self._call("resume", One(sandbox), self._limits.change)
        return held

    async def snapshot(self, sandbox: str, snapshot: str, *, memory: bool = True) -> SnapshotInfo:
        asked = One(sandbox, snapshot=snapshot, memory=memory)
        info: SnapshotInfo = await self._call("snapshot", asked, self._limits.change)
        return info

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._call("remove_snapshot", One(snapshot=snapshot), self._limits.change)

    async def set_network(self, sandbox: str, network: Network) -> None:
        await self._call("set_network", One(sandbox, network=network), self._limits.change)

    async def set_priority(self, sandbox: str, priority: float, mandatory: bool) -> None:
        await self._call("set_priority", One(sandbox, priority=priority, mandatory=mandatory), self._limits.ask)

    async def move(self, sandbox: str, to: Host) -> Moved:
        """Raises MoveUnsupported when ``to`` is not one that the other can reach."""
        moved: Moved = await self._call("move", One(sandbox, to=self._reachable(sandbox, to)), self._limits.move)
        return moved

    async def settle(self, sandbox: str, to: Host | None) -> bool:
        peer = None if to is None else self._reachable(sandbox, to)
        there: bool = await self._call("settle", One(sandbox, to=peer), self._limits.change)
        return there

    async def has(self, sandbox: str) -> bool:
        there: bool = await self._call("has", One(sandbox), self._limits.ask)
        return there

    async def offer(self, move: Moving) -> Address:
        """It listens where it answers, whatever it calls that address itself. It may have to fetch the template."""
        address: Address = await self._call("offer", move, self._limits.change)
        return msgspec.structs.replace(address, host=URL(self.peer.url).host or address.host)

    def _reachable(self, sandbox: str, to: Host) -> Peer:
        if to.peer is None:
            raise MoveUnsupported(
                f"sandbox {sandbox} stays on {self._name}: {to.name} has no address that other nodes could send it to; "
                f"move it to a node that joined"
            )
        return to.peer

    async def usage(self, sandbox: str) -> Usage:
        usage: Usage = await self._call("usage", One(sandbox), self._limits.ask)
        return usage

    async def drain(self, on: bool = True) -> None:
        await self._call("drain", One(on=on), self._limits.ask)

    async def hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        self._closed = True
        if self._client is not None:
            await self._client.close()

    # -- streams

    async def events(self) -> AsyncIterator[Died]:
        timeout = ClientTimeout(total=None, sock_connect=self._limits.connect, sock_read=self._limits.silence)
        try:
            async with self._session().get(f"{self.peer.url}/events", headers=self._key(), timeout=timeout) as answer:
                self._check(answer)
                async for line in answer.content:
                    if line.strip():
                        yield msgspec.json.decode(line, type=Died)
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._lost(error) from error

    async def connect(self, sandbox: str, port: int) -> Stream:
        url = f"{self.peer.url}/tunnel/{URL.build(path=sandbox).raw_path}/{port}"
        try:
            async with within(self._limits.ask, "connect", f"sandbox {sandbox}"):
                socket = await self._session().ws_connect(url, headers=self._key(), max_msg_size=MAX_MESSAGE)
        except (ClientError, OSError, TimeoutError) as error:
            self._raise_refusal(error)
            raise self._lost(error) from error
        return _Tunnel(socket)

    async def forward(self, request: web.Request, sandbox: str, port: int) -> web.StreamResponse:
        headers = kept(request.headers, (*(name.lower() for name in wire.OURS), "expect"))
        headers.update({**self._key(), wire.SANDBOX_HEADER: sandbox, wire.PORT_HEADER: str(port)})
        target = request.raw_path if request.raw_path.startswith("/") else "/"
        url = URL(self.peer.url + target, encoded=True)
        try:
            if is_websocket(request):
                return await relay_websocket(request, self._session(), url, headers)
            return await relay_http(request, self._session(), url, headers, self._check, following.of(request))
        except WSServerHandshakeError as error:
            self._raise_refusal(error)
            return web.Response(status=error.status, text=f"the service on port {port} refused the WebSocket")
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._lost(error) from error

    # -- inside

    async def _call(self, name: str, asked: Any, limit: float) -> Any:
        url = f"{self.peer.url}/call/{name}"
        try:
            async with (
                within(limit, name, f"{self._subject(asked)} on {self._name}"),
                self._session().post(url, data=msgspec.json.encode(asked), headers=self._key()) as answer,
            ):
                self._check(answer)
                if answer.status != 200:
                    raise self._lost(f"{name} was answered with {answer.status}: {(await answer.text())[:200]}")
                return msgspec.json.decode(await answer.read(), type=CALLS[name][1])
        except (ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise self._lost(error) from error

    def _subject(self, asked: Any) -> str:
        sandbox = getattr(asked, "sandbox", "") or getattr(asked, "id", "")
        return f"sandbox {sandbox}" if sandbox else "the host"

    def _check(self, answer: ClientResponse) -> None:
        error = wire.error_in(self.peer.key, answer.headers.get(wire.ERROR_HEADER))
        if error is not None:
            raise error

    def _raise_refusal(self, error: Exception) -> None:
        """What the host itself said, if it did."""
        if isinstance(error, WSServerHandshakeError):
            headers = error.headers if error.headers is not None else CIMultiDict[str]()
            told = wire.error_in(self.peer.key, headers.get(wire.ERROR_HEADER))
            if told is not None:
                raise told from None

    def _lost(self, error: Exception | str) -> HostLost:
        what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return HostLost(f"the node {self._name} at {self.peer.url} does not answer: {what}")

    def _key(self) -> dict[str, str]:
        return {wire.KEY_HEADER: self.peer.key}

    def _session(self) -> ClientSession:
        if self._closed:
            raise self._lost("it was let go of")
        if self._client is None:
            self._client = ClientSession(
                connector=TCPConnector(limit=0, keepalive_timeout=10.0),
                cookie_jar=DummyCookieJar(),
                auto_decompress=False,
                timeout=ClientTimeout(total=None, sock_connect=self._limits.connect, sock_read=SILENCE_S),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                max_line_size=_HEADER_LIMIT,
                max_field_size=_HEADER_LIMIT,
            )
        return self._client


class _RemoteStates:
    """Implements ``host.api.States`` by calls."""

    def __init__(self, call: Callable[[str, Any, float], Awaitable[Any]], limits: RemoteLimits) -> None:
        self._call = call
        self._limits = limits

    async def take(self, kind: StateKind, subject: str) -> KeptState:
        state: KeptState = await self._call("state_take", StatePart("", kind, subject), self._limits.change)
        return state

    async def read(self, state: str, file: int, piece: int) -> bytes:
        data: bytes = await self._call("state_read", StatePart(state, file=file, piece=piece), self._limits.ask)
        return data

    async def begin(self, state: KeptState) -> bool:
        wanted: bool = await self._call("state_begin", state, self._limits.ask)
        return wanted

    async def write(self, state: str, file: int, piece: int, data: bytes) -> None:
        part = StatePart(state, file=file, piece=piece, data=data)
        await self._call("state_write", part, self._limits.ask)

    async def restore(self, state: str, epoch: int) -> None:
        await self._call("state_restore", StatePart(state, epoch=epoch), self._limits.change)

    async def drop(self, state: str) -> None:
        await self._call("state_drop", StatePart(state), self._limits.ask)


class _Tunnel:
    """A connection to a port inside, over one WebSocket."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ended = False

    async def read(self) -> bytes:
        if self._ended:
            return b""
        message = await self._socket.receive()
        if message.type is WSMsgType.BINARY:
            data: bytes = message.data
            return data
        self._ended = True
        if message.type is WSMsgType.ERROR:
            raise ConnectionResetError(f"the tunnel broke: {message.data}")
        return b""

    async def write(self, data: bytes) -> None:
        await self._socket.send_bytes(data)

    async def write_eof(self) -> None:
        await self._socket.send_str("eof")

    async def close(self) -> None:
        # The closing handshake needs a reader; whoever closes reads no more.
        await asyncio.shield(self._socket.close())
