"""What the manager may ask of a host: the machine's own (in process) or one that joined (over HTTP).

Owns: the ``Host`` protocol and its data. ``host/local.py`` is the machine's own; ``host/remote.py`` speaks to
``host/server.py`` on another.

Must not know: E2B's wire, keys of users, which host a sandbox should be on.

Guarantees asked: state changes of one sandbox are serialised; whatever a call returns is on disk; errors are
``SandboxError`` subclasses, the same from either implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec
from aiohttp import web

from venusrl.sandboxes.admission.api import HostView
from venusrl.sandboxes.agent.api import Stream, Usage
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Abilities, Footprint, Network

ENVD_PORT = 49983
"""Where E2B's in-sandbox services answer."""
State = Literal["running", "pausing", "paused", "resuming", "moving"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sandbox to make. ``template`` is a template's id or name, or a snapshot's id."""

    id: str
    template: str
    runtime: str
    limits: Limits | None = None
    """None = what the template asks for."""
    network: Network = Network()
    env: dict[str, str] = {}
    tenant: str = ""
    group: str = ""
    priority: float = 0.0
    mandatory: bool = False


class Held(msgspec.Struct, frozen=True):
    """A sandbox this host has, running or paused. ``created`` and ``changed`` are seconds since the epoch."""

    id: str
    template: str
    runtime: str
    state: State
    limits: Limits
    tenant: str
    group: str
    created: float
    changed: float
    footprint: Footprint
    idle_s: float | None
    epoch: int = 0
    """Grows with every change of host: of two hosts that hold the same sandbox the larger one's is the sandbox."""


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot kept on this host."""

    id: str
    sandbox: str
    template: str
    runtime: str
    memory: bool
    bytes: int
    created: float


class Replica(msgspec.Struct, frozen=True):
    """State of a sandbox kept here for another host, ``origin``: it becomes the sandbox when that one gave it away or
    died (``moves.recover``)."""

    sandbox: str
    origin: str
    template: str
    runtime: str
    epoch: int
    memory: bool
    bytes: int
    created: float


class Died(msgspec.Struct, frozen=True):
    """A sandbox ended by itself, or lost its host."""

    sandbox: str
    cause: str


class Moving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A move that the origin asks the receiving host to make ready for. ``record`` is the origin's own record of the
    sandbox, which only ``moves`` reads. ``private`` is the memory it will take, for admission."""

    id: str
    sandbox: str
    origin: str
    runtime: str
    epoch: int
    record: bytes = b""
    private: int = 0


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the streams of one move go. ``token`` is known to the two hosts alone and good for that move."""

    host: str
    port: int
    token: str


class HostStatus(msgspec.Struct, frozen=True):
    """Enough for admission and for ``venusrl env top``."""

    view: HostView
    runtimes: dict[str, Abilities]
    memory_total: int
    memory_reserve: int
    held: tuple[Held, ...]
    snapshots: tuple[SnapshotInfo, ...]
    templates: tuple[str, ...]
    replicas: tuple[Replica, ...] = ()
    counters: dict[str, float] = {}
    """Totals since the service started, by a stable name: ``created``, ``died``, ``paused_for_memory``..."""
    time_limits: dict[str, float] = {}
    """Seconds that each operation may take, as in force."""


class Host(Protocol):
    """One machine's sandboxes."""

    @property
    def name(self) -> str: ...

    async def status(self) -> HostStatus: ...

    async def create(self, order: Order) -> Held: ...

    async def kill(self, sandbox: str) -> None:
        """Running or paused. Raises SandboxGone when there is none."""
        ...

    async def pause(self, sandbox: str, *, memory: bool = True) -> Held: ...

    async def resume(self, sandbox: str) -> Held: ...

    async def snapshot(self, sandbox: str, snapshot: str, *, memory: bool = True) -> SnapshotInfo: ...

    async def remove_snapshot(self, snapshot: str) -> None: ...

    async def set_network(self, sandbox: str, network: Network) -> None: ...

    async def set_priority(self, sandbox: str, priority: float, mandatory: bool) -> None: ...

    async def move(self, sandbox: str, to: Host) -> None:
        """Send it to another host, live where both can; on return it runs (or is paused) there and not here."""
        ...

    async def offer(self, move: Moving) -> Address:
        """Make ready to take a sandbox of another host: a one-time listener for the streams of that move. Raises
        SandboxDenied, MoveUnsupported."""
        ...

    async def forward(self, request: web.Request, sandbox: str, port: int) -> web.StreamResponse:
        """Answer an HTTP or WebSocket request meant for a running sandbox: its E2B services on ``ENVD_PORT``, else
        what listens on that port inside. The caller has checked keys. Raises SandboxGone, SandboxPaused."""
        ...

    async def connect(self, sandbox: str, port: int) -> Stream:
        """A raw TCP connection to a port inside (HTTP/2 and whatever else is not HTTP/1.1)."""
        ...

    async def usage(self, sandbox: str) -> Usage:
        """What a running sandbox says of itself, for metrics. Raises SandboxGone, SandboxPaused."""
        ...

    def events(self) -> AsyncIterator[Died]:
        """Every death from now on."""
        ...

    async def drain(self) -> None:
        """Admit no more."""
        ...

    async def close(self) -> None:
        """Let go; sandboxes go on."""
        ...
