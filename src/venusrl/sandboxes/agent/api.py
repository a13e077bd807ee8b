"""What the rest of VenusRL may ask of the program inside a persistent sandbox.

Owns: the ``Agent`` and ``Process`` protocols, their data and ``AgentError``. The implementation over a socket is
``agent/client.py``; ``venusrl.testing`` has one in memory. Both runtimes speak it: over a Unix socket to PID 1 of a
namespace, over virtio-serial to a virtual machine.

Must not know: E2B, HTTP, which runtime is below.

Guarantees asked of every implementation: what the sandbox says is data of an enemy, bounded and checked; a lost
connection (the host's service restarts, the sandbox moves) loses and repeats no byte of a process's output; every
failure is an ``AgentError`` or ``SandboxGone``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from venusrl.sandboxes.protocol import SandboxError

Code = Literal[
    "invalid_argument",
    "not_found",
    "already_exists",
    "permission_denied",
    "failed_precondition",
    "resource_exhausted",
    "unavailable",
    "unimplemented",
    "internal",
    "unauthenticated",
]
"""The names that gRPC and Connect use for the same failures."""


class AgentError(SandboxError):
    """The agent could not do what was asked; ``code`` is stable, the message is for people."""

    reason = "agent_error"

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Size(msgspec.Struct, frozen=True):
    """A terminal's size in characters."""

    cols: int
    rows: int


class ProcessSpec(msgspec.Struct, frozen=True):
    """What to start. ``args[0]`` is looked up on the environment's PATH; ``cwd`` "" is the user's home, a relative one
    starts there, "~" expands. ``env`` is added to the sandbox's own (``Settings.env``) and to HOME, USER, LOGNAME and
    PATH."""

    args: tuple[str, ...]
    user: str
    env: dict[str, str] = {}
    cwd: str = ""
    tag: str = ""
    stdin: bool = False
    """Whether stdin is a pipe that can be written to; else /dev/null."""
    pty: Size | None = None


class ProcessInfo(msgspec.Struct, frozen=True):
    """A process that was started through the agent and runs, or ended and is still remembered."""

    pid: int
    spec: ProcessSpec


class Output(msgspec.Struct, frozen=True):
    """Bytes in the order they were written to one stream."""

    stream: Literal["stdout", "stderr", "pty"]
    data: bytes


class Exit(msgspec.Struct, frozen=True):
    """The end of a process. ``code`` is -1 when ``signal`` ended it."""

    code: int
    signal: int | None = None


class Entry(msgspec.Struct, frozen=True):
    """One file. ``modified_ns`` since the epoch; ``target`` for a symbolic link only."""

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    owner: str
    group: str
    modified_ns: int
    target: str | None = None
    attributes: dict[str, str] = {}
    """Extended attributes ``user.e2b.*``, without that prefix."""


class Change(msgspec.Struct, frozen=True):
    """Something that happened below a watched directory; ``name`` is relative to it."""

    kind: Literal["create", "write", "remove", "rename", "chmod"]
    name: str


class Usage(msgspec.Struct, frozen=True):
    """What the sandbox itself sees. Bytes; ``cpu_percent`` of all its cores together since the last call."""

    cpus: int
    cpu_percent: float
    memory_total: int
    memory_used: int
    memory_cache: int
    disk_total: int
    disk_used: int


class Settings(msgspec.Struct, frozen=True):
    """Identity of a sandbox, told to its agent before its first command and again after every clone or resume.

    ``entropy`` (64 bytes or more) reseeds the kernel's generator where the agent may; ``now_ns`` sets the clock of a
    virtual machine. Empty strings leave things as they are.
    """

    sandbox: str
    hostname: str = ""
    machine_id: str = ""
    entropy: bytes = b""
    now_ns: int = 0
    env: dict[str, str] = {}
    user: str = "user"
    """Used where a request names none."""


class Process(Protocol):
    """One process, for as long as somebody holds it. Dropping it neither ends nor disturbs the process."""

    @property
    def pid(self) -> int: ...

    @property
    def span(self) -> tuple[int, int] | None:
        """Where the newest of ``events`` begins and ends in all that the process says, whichever host followed it: to
        be compared with others of the same process only. None: nothing came yet, or the agent does not tell."""
        ...

    def events(self) -> AsyncIterator[Output | Exit]:
        """Output from when this handle was made, then exactly one Exit. Ends after it. A slow reader slows its own
        process (pipes fill), no other stream."""
        ...

    async def send(self, data: bytes) -> None:
        """To stdin or the terminal, all of it. Raises AgentError(failed_precondition) when it has none (any more)."""
        ...

    async def close_stdin(self) -> None: ...

    async def signal(self, number: int) -> None:
        """To the process and everything in its process group; 9 also takes whatever left the group with it."""
        ...

    async def resize(self, size: Size) -> None: ...

    async def detach(self) -> None:
        """Stop following it. Its further output is dropped (nobody asked for it), its Exit remembered for a while."""
        ...


class Agent(Protocol):
    """One sandbox's agent. Paths are the sandbox's; relative ones start at the home of ``user``."""

    async def settle(self, settings: Settings) -> None: ...

    async def start(self, spec: ProcessSpec) -> Process:
        """Raises AgentError: not_found (program or user), invalid_argument (cwd, environment), resource_exhausted."""
        ...

    async def attach(self, pid: int, *, output: bool = True, since: int | None = None) -> Process:
        """Follow a process from now on; one that ended a short while ago gives its Exit. Raises not_found.

        After the host's service was restarted, the first to attach also gets what the former one had not taken yet.
        ``output`` False: only to send, signal, resize; such a handle holds nothing up, its events are the Exit alone.
        ``since``, a place as in ``Process.span``: where an earlier host's follower goes on, shortly after that host's
        end; others may have taken more meanwhile.
        """
        ...

    async def processes(self) -> list[ProcessInfo]: ...

    async def stat(self, path: str, user: str) -> Entry: ...

    async def list(self, path: str, user: str, depth: int = 1) -> list[Entry]: ...

    async def make_directory(self, path: str, user: str) -> Entry:
        """With its parents. Raises already_exists."""
        ...

    async def move(self, source: str, target: str, user: str) -> Entry: ...

    async def remove(self, path: str, user: str) -> None:
        """A file or a whole tree."""
        ...

    def read(self, path: str, user: str) -> AsyncIterator[bytes]:
        """A regular file, in pieces. Raises not_found, permission_denied, invalid_argument (not a regular file)."""
        ...

    async def write(
        self, path: str, user: str, data: AsyncIterator[bytes], attributes: dict[str, str] | None = None
    ) -> Entry:
        """Replace a file, making parents; mode 0644 when new. Raises resource_exhausted when the disk is full."""
        ...

    def watch(
        self, path: str, user: str, recursive: bool = False, ready: asyncio.Event | None = None
    ) -> AsyncIterator[Change]:
        """Until closed. The first step sets it up; ``ready`` is set once it stands: no later change is missed."""
        ...

    async def usage(self) -> Usage: ...

    async def quiesce(self) -> None:
        """Write files to disk and let go of the page cache, before a virtual machine's state is saved."""
        ...

    async def sever(self) -> None:
        """End every TCP connection that goes out of the sandbox, for a network that is no more; those within it stay.
        Raises unavailable where its kernel cannot."""
        ...

    async def connect(self, port: int) -> Stream:
        """A TCP connection to 127.0.0.1:``port`` (or ::1) inside. Raises unavailable when nothing listens."""
        ...

    async def close(self, error: SandboxError | None = None) -> None:
        """Let go of the connection; the sandbox goes on. ``error``: what whoever still waits gets instead of
        SandboxGone."""
        ...


class Stream(Protocol):
    """A byte stream into the sandbox, half-closable."""

    async def read(self) -> bytes:
        """The next bytes; b"" at the end."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def write_eof(self) -> None: ...

    async def close(self) -> None: ...
