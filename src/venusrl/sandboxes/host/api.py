"""What the manager may ask of a host: the machine's own (in process) or one that joined (over HTTP).

Owns: the ``Host`` protocol and its data. ``host/local.py`` is the machine's own; ``host/remote.py`` speaks to
``host/server.py`` on another.

Must not know: E2B's wire, keys of users, which host a sandbox should be on.

Guarantees asked: state changes of one sandbox are serialised; whatever a call returns is on disk; errors are
``SandboxError`` subclasses, the same from either implementation.
"""

from __future__ import annotations

import hashlib
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
StateKind = Literal["sandbox", "snapshot", "base"]
PIECE = 1 << 20
"""Bytes of a state that are copied at once."""
ZEROS = hashlib.sha256(bytes(PIECE)).hexdigest()
"""Of a piece that is a hole: it is neither sent nor kept."""


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
    given_to: str = ""
    """The host that has it now, unless ``settle`` finds that it has not: a move's last answer was lost."""


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot kept on this host."""

    id: str
    sandbox: str
    template: str
    runtime: str
    memory: bool
    bytes: int
    created: float


class StateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a state: ``pieces`` are SHA-256 digests, of ``PIECE`` bytes each; the last one is shorter."""

    path: str
    size: int
    pieces: tuple[str, ...]


class KeptState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a paused sandbox or a snapshot is, as files that can be copied: enough to make it again on another host.

    ``memory``: its processes are in it. ``whole``: nothing of the sandbox is lacking (processes that cannot be copied
    would be). ``changed``: when it was paused. ``record`` is the origin's own record, which only ``states`` reads.

    ``base`` names files that it leans on ("" = none), such as the memory of a virtual machine's template: many states
    lean on one base, which never changes and is a state of its own kind, taken of any sandbox that leans on it.
    """

    id: str
    kind: StateKind
    subject: str
    origin: str
    runtime: str
    template: str
    epoch: int
    changed: float
    memory: bool
    whole: bool
    record: bytes
    files: tuple[StateFile, ...]
    base: str = ""

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(file.size for file in self.files)


class StatePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The argument of the calls about a state: which piece of which file. ``data`` is what is written."""

    state: str
    kind: StateKind = "sandbox"
    subject: str = ""
    file: int = 0
    piece: int = 0
    epoch: int = 0
    data: bytes = b""


class Died(msgspec.Struct, frozen=True):
    """A sandbox ended by itself, or lost its host."""

    sandbox: str
    cause: str


class Moving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A move that the origin asks the receiving host to make ready for. ``record`` is the origin's own record of the
    sandbox, which only ``arrivals`` reads. ``private`` is the memory it will take, for admission; ``passport`` what its
    memory asks of a host (``runtimes.moving``), b"" where it has none that can move."""

    id: str
    sandbox: str
    origin: str
    runtime: str
    epoch: int
    record: bytes = b""
    private: int = 0
    passport: bytes = b""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the streams of one move go. ``token`` is known to the two hosts alone and good for that move.
    ``live_lacks``: why the sandbox cannot come while it runs; "" = it can."""

    host: str
    port: int
    token: str
    live_lacks: str = ""


class Moved(msgspec.Struct, frozen=True):
    """How a sandbox went: ``live``, as a ``snapshot`` with its processes, with its ``files`` only (processes ended), or
    it was ``found`` there. ``why`` not live. ``outage_s``: how long it did not run, seconds; 0 for a paused one."""

    how: Literal["live", "snapshot", "files", "found"]
    why: str = ""
    outage_s: float = 0.0


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another host's server: what one host is told of the other to move a sandbox there. ``url`` "" = the service that
    the asked one joined."""

    name: str
    url: str
    key: str


class HostStatus(msgspec.Struct, frozen=True):
    """Enough for admission and for ``venusrl env top``."""

    view: HostView
    runtimes: dict[str, Abilities]
    memory_total: int
    memory_reserve: int
    held: tuple[Held, ...]
    snapshots: tuple[SnapshotInfo, ...]
    templates: tuple[str, ...]
    counters: dict[str, float] = {}
    """Totals since the service started, by a stable name: ``created``, ``died``, ``paused_for_memory``..."""
    time_limits: dict[str, float] = {}
    """Seconds that each operation may take, as in force."""


class States(Protocol):
    """States on their way out of a host and into one. What is on its way is dropped after a while without a call."""

    async def take(self, kind: StateKind, subject: str) -> KeptState:
        """A copy of a paused sandbox or of a snapshot, to be read. Raises SandboxError while it is not paused."""
        ...

    async def read(self, state: str, file: int, piece: int) -> bytes: ...

    async def begin(self, state: KeptState) -> bool:
        """Make ready to be written to; begun again it starts anew. False: it is a base that is here already. Raises
        HostDiskFull."""
        ...

    async def write(self, state: str, file: int, piece: int, data: bytes) -> None:
        """Raises SandboxError when ``data`` is not the piece that was announced."""
        ...

    async def restore(self, state: str, epoch: int) -> None:
        """Make the running sandbox (the snapshot, the base) of it, durably. An older copy of the sandbox here gives
        way. Raises SandboxDenied, TemplateNotFound, AlreadyExists."""
        ...

    async def drop(self, state: str) -> None:
        """Idempotent."""
        ...


class Host(Protocol):
    """One machine's sandboxes."""

    @property
    def name(self) -> str: ...

    @property
    def states(self) -> States: ...

    @property
    def peer(self) -> Peer | None:
        """How other hosts reach it; None = they cannot."""
        ...

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

    async def move(self, sandbox: str, to: Host) -> Moved:
        """Send it to another host, live where both can; on return it runs (or is paused) there and not here."""
        ...

    async def settle(self, sandbox: str, to: Host | None) -> bool:
        """Of one that was given to ``to`` (``Held.given_to``): True = it is there and not here any more; False = it is
        here as before. ``to`` None: that host will not come back. Raises HostLost while nobody can tell."""
        ...

    async def has(self, sandbox: str) -> bool:
        """Whether a sandbox that another host gave is here. After False no earlier try of that move can succeed.
        Raises HostLost while it is just arriving."""
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

    async def drain(self, on: bool = True) -> None:
        """Admit no more, or again."""
        ...

    async def hang_up(self) -> None:
        """It is taken for dead: whoever still waits for an answer of it gets HostLost now."""
        ...

    async def close(self) -> None:
        """Let go; sandboxes go on."""
        ...
