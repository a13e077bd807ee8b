"""The host's end of an agent: ``AgentClient`` implements ``agent.api.Agent`` over a line that may break and heal.

Owns: what each operation sends and understands, its time limits and its bounds; ``unix``, the usual connector.

Must not know: frames, reconnecting (``link.py``), how processes are shared (``follow.py``), runtimes.

Guarantees: those of ``agent.api``; an operation that is given up, or gets no answer, is ended in the sandbox too.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from venusrl.sandboxes.agent import wire
from venusrl.sandboxes.agent.api import (
    AgentError,
    Change,
    Entry,
    Process,
    ProcessInfo,
    ProcessSpec,
    Settings,
    Stream,
    Usage,
)
from venusrl.sandboxes.agent.follow import Followed, Handle
from venusrl.sandboxes.agent.link import Channel, Connector, Line, Record
from venusrl.sandboxes.protocol import SandboxError, SandboxGone

_LIST_LIMIT = 200_000
_PROCESS_LIMIT = 4096
Payloads = list[bytes]
_T = TypeVar("_T")


def unix(path: str | Path) -> Connector:
    """Connects to the agent behind a Unix socket: a namespace's listener, or QEMU's end of a serial port.

    A socket that is not there (any more) means that the sandbox is gone.
    """

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise SandboxGone(f"nothing is behind the sandbox's socket: {error.strerror}") from error

    return connect


class AgentClient:
    """One sandbox's agent. ``patience_s``: how long it may be out of reach before the sandbox counts as gone;
    ``answer_s``: how long it may take over one step of an answer."""

    def __init__(self, connect: Connector, *, patience_s: float = 30.0, answer_s: float = 60.0) -> None:
        self._line = Line(connect, patience_s)
        self._answer_s = answer_s
        self._followed: dict[int, Followed] = {}
        self._attaching: weakref.WeakValueDictionary[int, asyncio.Lock] = weakref.WeakValueDictionary()

    async def settle(self, settings: Settings) -> None:
        await self._ask(
            wire.SETTLE,
            _text(settings.hostname),
            _text(settings.machine_id),
            wire.text(settings.entropy),
            wire.u64(settings.now_ns),
            _environment(settings.env),
            _text(settings.user),
        )

    # -- processes

    async def start(self, spec: ProcessSpec) -> Process:
        if not spec.args:
            raise AgentError("invalid_argument", "there is no program to start")
        fields = wire.opened(
            wire.START,
            wire.text(_shown(spec)),
            wire.u32(len(spec.args)),
            *(_text(arg) for arg in spec.args),
            _environment(spec.env),
            _text(spec.user),
            _text(spec.cwd),
            wire.u8((1 if spec.stdin else 0) | (2 if spec.pty is not None else 0)),
            wire.u32(spec.pty.cols & 0xFFFF if spec.pty else 0),
            wire.u32(spec.pty.rows & 0xFFFF if spec.pty else 0),
        )
        channel = self._line.open(fields, last=False)
        return self._handle(await self._begun(channel, spec), output=True)

    async def attach(self, pid: int, *, output: bool = True, since: int | None = None) -> Process:
        if not 0 < pid < 1 << 31:
            raise AgentError("not_found", f"there is no process {pid}")
        lock = self._attaching.get(pid) or asyncio.Lock()
        self._attaching[pid] = lock
        async with lock:  # two channels to one process would take its output from each other
            followed = self._followed.get(pid)
            if followed is None:
                channel = self._line.open(wire.opened(wire.ATTACH, wire.u32(pid)), last=False)
                followed = await self._begun(channel, None)
            return self._handle(followed, output, since)

    async def _begun(self, channel: Channel, spec: ProcessSpec | None) -> Followed:
        """The first record of a process's stream. Given up before it came, the agent ends what was to be started."""
        try:
            payload = await self._expect(channel, wire.STARTED)
            pid, shown = _understood(_numbered, payload)
        except BaseException:  # cancelled too: nobody else will end it
            channel.close()
            raise
        channel.took(5 + len(payload))
        followed = Followed(channel, pid, spec or _spec(shown), self._over, new=spec is not None)
        self._followed[pid] = followed
        return followed

    def _handle(self, followed: Followed, output: bool, since: int | None = None) -> Process:
        return Handle(followed, output, self._ask, since)

    def _over(self, followed: Followed) -> None:
        if self._followed.get(followed.pid) is followed:
            del self._followed[followed.pid]

    async def processes(self) -> list[ProcessInfo]:
        found = []
        for payload in await self._ask(wire.PROCESSES, kind=wire.PROCESS, limit=_PROCESS_LIMIT):
            pid, shown = _understood(_numbered, payload)
            followed = self._followed.get(pid)
            found.append(ProcessInfo(pid, followed.spec if followed else _spec(shown)))
        return sorted(found, key=lambda info: info.pid)

    # -- files

    async def stat(self, path: str, user: str) -> Entry:
        return _understood(
            wire.entry, _one(await self._ask(wire.STAT, _text(user), _text(path), kind=wire.ENTRY, limit=1))
        )

    async def list(self, path: str, user: str, depth: int = 1) -> list[Entry]:
        if depth < 1:
            raise AgentError("invalid_argument", "depth must be at least 1")
        fields = (_text(user), _text(path), wire.u32(min(depth, 0xFFFFFFFF)))
        found = await self._ask(wire.LIST, *fields, kind=wire.ENTRY, limit=_LIST_LIMIT)
        return sorted((_understood(wire.entry, payload) for payload in found), key=lambda entry: entry.path)

    async def make_directory(self, path: str, user: str) -> Entry:
        return _understood(
            wire.entry, _one(await self._ask(wire.MKDIR, _text(user), _text(path), kind=wire.ENTRY, limit=1))
        )

    async def move(self, source: str, target: str, user: str) -> Entry:
        fields = (_text(user), _text(source), _text(target))
        return _understood(wire.entry, _one(await self._ask(wire.MOVE, *fields, kind=wire.ENTRY, limit=1)))

    async def remove(self, path: str, user: str) -> None:
        await self._ask(wire.REMOVE, _text(user), _text(path))

    async def read(self, path: str, user: str) -> AsyncIterator[bytes]:
        channel = self._line.open(wire.opened(wire.READ, _text(user), _text(path)))
        try:
            await self._expect(channel, wire.STARTED)
            while (payload := await self._piece(channel, wire.STDOUT)) is not None:
                yield payload
        finally:
            _leave(channel)

    async def write(
        self, path: str, user: str, data: AsyncIterator[bytes], attributes: dict[str, str] | None = None
    ) -> Entry:
        extra = wire.u8(attributes is not None) + _pairs(attributes or {})
        channel = self._line.open(wire.opened(wire.WRITE, _text(user), _text(path), extra), last=False)
        try:
            async for piece in data:
                if not await channel.write(piece, self._answer_s):
                    break
            channel.write_end()
            payload = await self._expect(channel, wire.ENTRY)
            await self._piece(channel, wire.ENTRY)
            return _understood(wire.entry, payload)
        finally:
            _leave(channel)

    async def watch(
        self, path: str, user: str, recursive: bool = False, ready: asyncio.Event | None = None
    ) -> AsyncIterator[Change]:
        fields = (_text(user), _text(path), wire.u8(recursive))
        channel = self._line.open(wire.opened(wire.WATCH, *fields), last=False)
        try:
            await self._expect(channel, wire.STARTED)
            if ready is not None:
                ready.set()
            while (payload := await self._piece(channel, wire.CHANGE, for_ever=True)) is not None:
                yield _understood(wire.change, payload)
        finally:
            _leave(channel)

    # -- the sandbox

    async def usage(self) -> Usage:
        return _understood(wire.usage, _one(await self._ask(wire.USAGE, kind=wire.USED, limit=1)))

    async def quiesce(self) -> None:
        await self._ask(wire.QUIESCE, _text(""), _text(""))

    async def sever(self) -> None:
        await self._ask(wire.SEVER)

    async def connect(self, port: int) -> Stream:
        if not 0 < port < 65536:
            raise AgentError("invalid_argument", f"there is no port {port}")
        channel = self._line.open(wire.opened(wire.CONNECT, wire.u32(port)), last=False)
        try:
            await self._expect(channel, wire.STARTED)
        except BaseException:  # cancelled too: nobody else will close it
            _leave(channel)
            raise
        return _Connection(channel)

    async def close(self, error: SandboxError | None = None) -> None:
        await self._line.close(error)

    # -- asking

    async def _ask(self, operation: int, *fields: bytes, kind: int = wire.END, limit: int = 0) -> Payloads:
        """Everything of ``kind`` that comes before the end."""
        channel = self._line.open(wire.opened(operation, *fields))
        found: Payloads = []
        try:
            while (payload := await self._piece(channel, kind)) is not None:
                found.append(payload)
                if len(found) > limit:
                    raise AgentError("resource_exhausted", f"the answer has more than {limit} parts")
        finally:
            _leave(channel)
        return found

    async def _expect(self, channel: Channel, kind: int) -> bytes:
        payload = await self._piece(channel, kind)
        if payload is None:
            raise AgentError("internal", "the sandbox's agent ended its answer early")
        return payload

    async def _piece(self, channel: Channel, kind: int, *, for_ever: bool = False) -> bytes | None:
        """The next of ``kind``, None at a proper end. Raises what the sandbox says went wrong."""
        record: Record | None = await channel.record(None if for_ever else self._answer_s)
        if record is None:
            raise AgentError("internal", "the work was ended in the sandbox, by a shortage of memory perhaps")
        got, payload = record
        if got == wire.ERROR:
            code, message = _understood(wire.failure, payload)
            raise AgentError(code, message)
        if got == wire.END:
            return None
        if got != kind:
            raise AgentError("internal", "the sandbox's agent answered something else")
        return payload


class _Connection:
    """A TCP connection inside. The channel stays until ``close``: one side may end before the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def read(self) -> bytes:
        record = await self._channel.record()
        if record is None:
            return b""
        kind, payload = record
        if kind != wire.STDOUT or not payload:
            raise AgentError("internal", "a connection's stream holds what it may not")
        return payload

    async def write(self, data: bytes) -> None:
        if self._channel.last or not await self._channel.write(data):
            raise AgentError("failed_precondition", "the connection takes no more")

    async def write_eof(self) -> None:
        self._channel.write_end()

    async def close(self) -> None:
        _leave(self._channel)


def _leave(channel: Channel) -> None:
    if channel.ended and not channel.queue:
        channel.finish()
    elif channel.open:
        channel.close()


def _understood(parse: Callable[[bytes], _T], payload: bytes) -> _T:
    """A record of an answer; what cannot be one fails the answer, not the line."""
    try:
        return parse(payload)
    except wire.ProtocolError as error:
        raise AgentError("internal", f"the sandbox's agent broke the protocol: {error}") from error


def _numbered(payload: bytes) -> tuple[int, bytes]:
    fields = wire.Fields(payload)
    return fields.u32(), fields.rest()


def _one(found: Payloads) -> bytes:
    if not found:
        raise AgentError("internal", "the sandbox's agent left out its answer")
    return found[0]


def _text(value: str) -> bytes:
    try:
        raw = wire.text(value)
    except UnicodeEncodeError as error:
        raise AgentError("invalid_argument", "a text is no valid Unicode") from error
    if b"\0" in raw[4:]:
        raise AgentError("invalid_argument", "a text holds a zero byte")
    return raw


def _pairs(values: dict[str, str]) -> bytes:
    return wire.u32(len(values)) + b"".join(_text(name) + _text(value) for name, value in values.items())


def _environment(env: dict[str, str]) -> bytes:
    for name in env:
        if not name or "=" in name:
            raise AgentError("invalid_argument", f"{name!r} is no name of an environment variable")
    return wire.u32(len(env)) + b"".join(_text(f"{name}={value}") for name, value in env.items())


def _shown(spec: ProcessSpec) -> bytes:
    """What the agent tells whoever asks what runs: the specification, shortened where it is long."""
    raw = msgspec.msgpack.encode(spec)
    if len(raw) <= wire.SHOWN:
        return raw
    short = tuple(arg.encode()[:1024].decode(errors="ignore") for arg in spec.args[:2])
    return msgspec.msgpack.encode(ProcessSpec(short, spec.user[:128], {}, "", spec.tag[:256], spec.stdin, spec.pty))


def _spec(shown: bytes) -> ProcessSpec:
    if not shown:
        return ProcessSpec((), "")  # it ended: only its exit is remembered
    try:
        return msgspec.msgpack.decode(shown, type=ProcessSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AgentError("internal", "a process's description cannot be read") from error
