"""A sandbox's agent without a sandbox: files in memory, processes that are coroutines.

Owns: ``MemoryAgent``, an implementation of the ``Agent`` protocol for tests of what lies above it (E2B's services,
hosts). A program is a coroutine over a ``Call``; a few of coreutils' are there. ``["/bin/bash", "-l", "-c", line]``
runs one simple command of ``line`` (quotes are understood, nothing else of a shell is).

Must not know: real processes, real files, E2B.

Guarantees: the same errors as the real agent for unknown users, programs, paths and pids; output reaches only those
who follow a process when it is written; a process that ended stays known. Permissions are not modelled.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
import signal as signals
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Literal

import msgspec

from venusrl.sandboxes.agent.api import (
    AgentError,
    Change,
    Entry,
    Exit,
    Output,
    Process,
    ProcessInfo,
    ProcessSpec,
    Settings,
    Size,
    Stream,
    Usage,
)
from venusrl.sandboxes.protocol import SandboxError, SandboxGone

Event = Output | Exit


class Call:
    """A program's view of its own run: ``args``, ``env``, ``read`` (b"" = end of input), ``write``."""

    def __init__(self, agent: MemoryAgent, spec: ProcessSpec, pid: int) -> None:
        self.agent = agent
        self.spec = spec
        self.pid = pid
        self.args = spec.args
        self.env = {**agent.settings.env, **spec.env}
        self.size = spec.pty
        self.signals: list[int] = []
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._closed = not (spec.stdin or spec.pty)
        if self._closed:
            self._input.put_nowait(b"")
        self.followers: list[_Handle] = []
        self.exit: Exit | None = None
        self.task: asyncio.Task[None] | None = None

    async def read(self) -> bytes:
        data = await self._input.get()
        if not data:
            self._input.put_nowait(b"")
        return data

    def write(self, data: bytes | str, stream: Literal["stdout", "stderr", "pty"] = "stdout") -> None:
        raw = data.encode() if isinstance(data, str) else data
        self._publish(Output("pty" if self.spec.pty else stream, raw))

    def feed(self, data: bytes) -> None:
        if self._closed or self.exit is not None:
            raise AgentError("failed_precondition", f"process {self.pid} has no input (any more)")
        self._closed = not data
        self._input.put_nowait(data)

    def finish(self, end: Exit) -> None:
        """The first end counts."""
        if self.exit is not None:
            return
        self.exit = end
        self._publish(end)

    def _publish(self, event: Event) -> None:
        for follower in self.followers:
            follower.queue.put_nowait(event)


Program = Callable[[Call], Awaitable[int]]


class _Handle:
    """One follower of a process."""

    def __init__(self, call: Call, output: bool) -> None:
        self._call = call
        self._output = output
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        if call.exit is not None:
            self.queue.put_nowait(call.exit)
        else:
            call.followers.append(self)

    @property
    def pid(self) -> int:
        return self._call.pid

    @property
    def span(self) -> tuple[int, int] | None:
        return None

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self.queue.get()
            if isinstance(event, Exit) or self._output:
                yield event
            if isinstance(event, Exit):
                return

    async def send(self, data: bytes) -> None:
        if data:
            self._call.feed(data)

    async def close_stdin(self) -> None:
        if not self._call.spec.stdin:
            raise AgentError("failed_precondition", f"process {self.pid} has no stdin")
        with suppress(AgentError):
            self._call.feed(b"")

    async def signal(self, number: int) -> None:
        if self._call.exit is not None:
            raise AgentError("not_found", f"process {self.pid} ended")
        self._call.signals.append(number)
        if self._call.task is not None and number in (signals.SIGKILL, signals.SIGTERM, signals.SIGINT):
            self._call.task.cancel()

    async def resize(self, size: Size) -> None:
        if self._call.spec.pty is None:
            raise AgentError("failed_precondition", f"process {self.pid} has no terminal")
        self._call.size = size

    async def detach(self) -> None:
        with suppress(ValueError):
            self._call.followers.remove(self)


class _Pipe:
    """Half of a connection in memory."""

    def __init__(self) -> None:
        self._incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.peer: _Pipe = self

    async def read(self) -> bytes:
        data = await self._incoming.get()
        if not data:
            self._incoming.put_nowait(b"")
        return data

    async def write(self, data: bytes) -> None:
        if data:
            self.peer._incoming.put_nowait(data)

    async def write_eof(self) -> None:
        self.peer._incoming.put_nowait(b"")

    async def close(self) -> None:
        await self.write_eof()
        self._incoming.put_nowait(b"")


class _Node(msgspec.Struct):
    kind: Literal["file", "directory"]
    owner: str
    data: bytes = b""
    mode: int = 0o644
    modified_ns: int = 0
    attributes: dict[str, str] = {}


class MemoryAgent:
    """One sandbox in memory. ``programs`` adds to ``PROGRAMS`` by ``args[0]``'s last part; ``listen`` opens a port."""

    def __init__(
        self, programs: dict[str, Program] | None = None, users: tuple[str, ...] = ("root", "user", "nobody")
    ) -> None:
        self.programs = {**PROGRAMS, **(programs or {})}
        self.users = users
        self.settings = Settings(sandbox="")
        self.settled: list[Settings] = []
        self.calls: dict[int, Call] = {}
        self.nodes: dict[str, _Node] = {}
        self.ports: dict[int, Callable[[Stream], Awaitable[None]]] = {}
        self.quiesced = 0
        self.closed = False
        self.gone = False
        """Set by a test: the sandbox died, every call raises SandboxGone."""
        self._pids = count(2)
        self._ticks = count(1)
        self._watches: list[tuple[str, bool, asyncio.Queue[Change]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        for path in ("/", "/tmp", "/root", "/home", "/home/user"):
            self.nodes[path] = _Node("directory", "user" if path == "/home/user" else "root", mode=0o755)

    async def settle(self, settings: Settings) -> None:
        self._check()
        self.settings = settings
        self.settled.append(settings)

    # -- processes

    async def start(self, spec: ProcessSpec) -> Process:
        self._check()
        home = self._home(spec.user)
        if self.nodes.get(self._path(spec.cwd or home, spec.user), _Node("file", "")).kind != "directory":
            raise AgentError("invalid_argument", f"cwd {spec.cwd} is not a directory")
        args = spec.args
        if len(args) > 2 and posixpath.basename(args[0]) in ("bash", "sh") and args[-2] == "-c":
            args = tuple(shlex.split(args[-1])) or ("true",)
        program = self.programs.get(posixpath.basename(args[0])) if args else None
        if program is None:
            raise AgentError("not_found", f"program {args[:1]} not found on PATH")
        call = Call(self, spec, next(self._pids))
        call.args = args
        self.calls[call.pid] = call
        handle = _Handle(call, output=True)
        call.task = asyncio.create_task(self._run(call, program), name=f"memory agent: {args[0]}")
        call.task.add_done_callback(lambda _: call.finish(_killed(call)))  # it may have ended before it began
        return handle

    async def _run(self, call: Call, program: Program) -> None:
        try:
            call.finish(Exit(await program(call)))
        except asyncio.CancelledError:
            call.finish(_killed(call))

    async def attach(self, pid: int, *, output: bool = True, since: int | None = None) -> Process:
        self._check()
        if pid not in self.calls:
            raise AgentError("not_found", f"there is no process {pid}")
        return _Handle(self.calls[pid], output)

    async def processes(self) -> list[ProcessInfo]:
        self._check()
        return [ProcessInfo(pid, call.spec) for pid, call in self.calls.items() if call.exit is None]

    # -- files

    async def stat(self, path: str, user: str) -> Entry:
        self._check()
        return self._entry(self._path(path, user))

    async def list(self, path: str, user: str, depth: int = 1) -> list[Entry]:
        self._check()
        root = self._path(path, user)
        if self._node(root).kind != "directory":
            raise AgentError("invalid_argument", f"{root} is not a directory")
        if depth < 1:
            raise AgentError("invalid_argument", "depth must be at least 1")
        inside = [name for name in sorted(self.nodes) if name != root and _under(name, root)]
        return [self._entry(name) for name in inside if posixpath.relpath(name, root).count("/") < depth]

    async def make_directory(self, path: str, user: str) -> Entry:
        self._check()
        where = self._path(path, user)
        if where in self.nodes:
            raise AgentError("already_exists", f"{where} exists")
        self._make_parents(posixpath.join(where, "x"), user)
        return self._entry(where)

    async def move(self, source: str, target: str, user: str) -> Entry:
        self._check()
        old, new = self._path(source, user), self._path(target, user)
        self._node(old)
        self._make_parents(new, user)
        for name in [name for name in self.nodes if _under(name, old)]:
            self.nodes[new + name[len(old) :]] = self.nodes.pop(name)
        self._changed("rename", old)
        self._changed("create", new)
        return self._entry(new)

    async def remove(self, path: str, user: str) -> None:
        self._check()
        where = self._path(path, user)
        self._node(where)
        for name in [name for name in self.nodes if _under(name, where)]:
            del self.nodes[name]
        self._changed("remove", where)

    async def read(self, path: str, user: str) -> AsyncIterator[bytes]:
        self._check()
        node = self._node(self._path(path, user))
        if node.kind != "file":
            raise AgentError("invalid_argument", f"{path} is not a regular file")
        for start in range(0, len(node.data), 1 << 14):
            yield node.data[start : start + (1 << 14)]

    async def write(
        self, path: str, user: str, data: AsyncIterator[bytes], attributes: dict[str, str] | None = None
    ) -> Entry:
        self._check()
        where = self._path(path, user)
        before = self.nodes.get(where)
        if before is not None and before.kind == "directory":
            raise AgentError("invalid_argument", f"{where} is a directory")
        content = b"".join([piece async for piece in data])
        self._make_parents(where, user)
        kept = before or _Node("file", user)
        kept.data, kept.modified_ns = content, next(self._ticks)
        kept.attributes = dict(attributes or {})
        self.nodes[where] = kept
        if before is None:
            self._changed("create", where)
            self._changed("chmod", where)
        if content:
            self._changed("write", where)
        return self._entry(where)

    async def watch(
        self, path: str, user: str, recursive: bool = False, ready: asyncio.Event | None = None
    ) -> AsyncIterator[Change]:
        self._check()
        root = self._path(path, user)
        if self._node(root).kind != "directory":
            raise AgentError("invalid_argument", f"{root} is not a directory")
        queue: asyncio.Queue[Change] = asyncio.Queue()
        watch = (root, recursive, queue)
        self._watches.append(watch)
        if ready is not None:
            ready.set()
        try:
            while True:
                yield await queue.get()
        finally:
            self._watches.remove(watch)

    # -- the rest

    async def usage(self) -> Usage:
        self._check()
        used = sum(len(node.data) for node in self.nodes.values())
        return Usage(1, 0.0, 512 << 20, 1 << 20, 0, 1 << 30, used)

    async def quiesce(self) -> None:
        self._check()
        self.quiesced += 1

    async def sever(self) -> None:
        self._check()

    def listen(self, port: int, serve: Callable[[Stream], Awaitable[None]]) -> None:
        """What a connection to ``port`` meets."""
        self.ports[port] = serve

    async def connect(self, port: int) -> Stream:
        self._check()
        if port not in self.ports:
            raise AgentError("unavailable", f"nothing listens on port {port}")
        near, far = _Pipe(), _Pipe()
        near.peer, far.peer = far, near
        task = asyncio.ensure_future(self._serve(port, far))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return near

    async def _serve(self, port: int, stream: Stream) -> None:
        await self.ports[port](stream)

    async def close(self, error: SandboxError | None = None) -> None:
        self.closed = True

    def die(self) -> None:
        """As if the sandbox was killed: processes end, every later call raises SandboxGone."""
        self.gone = True
        for call in self.calls.values():
            if call.task is not None:
                call.task.cancel()

    def _check(self) -> None:
        if self.gone:
            raise SandboxGone("the sandbox ended")

    def _home(self, user: str) -> str:
        name = user or self.settings.user
        if name not in self.users:
            raise AgentError("unauthenticated", f"invalid username: '{name}'")
        return "/home/user" if name == "user" else "/root" if name == "root" else "/"

    def _path(self, path: str, user: str) -> str:
        home = self._home(user)
        if path == "~" or path.startswith("~/"):
            path = home + path[1:]
        return posixpath.normpath(posixpath.join(home, path))

    def _node(self, path: str) -> _Node:
        if path not in self.nodes:
            raise AgentError("not_found", f"{path} does not exist")
        return self.nodes[path]

    def _entry(self, path: str) -> Entry:
        node = self._node(path)
        return Entry(
            path, node.kind, len(node.data), node.mode, node.owner, node.owner, node.modified_ns, None, node.attributes
        )

    def _make_parents(self, path: str, user: str) -> None:
        parent = posixpath.dirname(path)
        if parent in self.nodes:
            if self.nodes[parent].kind != "directory":
                raise AgentError("invalid_argument", f"{parent} is not a directory")
            return
        self._make_parents(parent, user)
        self.nodes[parent] = _Node("directory", user or self.settings.user, mode=0o755)
        self._changed("create", parent)

    def _changed(self, kind: Literal["create", "write", "remove", "rename", "chmod"], path: str) -> None:
        for root, recursive, queue in self._watches:
            if path != root and _under(path, root):
                name = posixpath.relpath(path, root)
                if recursive or "/" not in name:
                    queue.put_nowait(Change(kind, name))


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _killed(call: Call) -> Exit:
    return Exit(-1, call.signals[-1] if call.signals else signals.SIGKILL)


async def _echo(call: Call) -> int:
    call.write(" ".join(call.args[1:]) + "\n")
    return 0


async def _cat(call: Call) -> int:
    for name in call.args[1:]:
        async for piece in call.agent.read(name, call.spec.user):
            call.write(piece)
    while len(call.args) == 1 and (data := await call.read()):
        call.write(data)
    return 0


async def _sleep(call: Call) -> int:
    """For ever: time does not pass here; a signal ends it."""
    await asyncio.Event().wait()
    return 0


async def _true(call: Call) -> int:
    return 0


async def _false(call: Call) -> int:
    return 1


async def _exit(call: Call) -> int:
    return int(call.args[1])


async def _env(call: Call) -> int:
    call.write("".join(f"{name}={value}\n" for name, value in call.env.items()))
    return 0


PROGRAMS: dict[str, Program] = {
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
    "true": _true,
    "false": _false,
    "exit": _exit,
    "env": _env,
}
"""Programs every ``MemoryAgent`` has."""
