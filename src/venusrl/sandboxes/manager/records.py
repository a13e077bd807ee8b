"""What the manager remembers: sandboxes, keys, snapshots, nodes.

Owns: the data alone. ``store.py`` keeps it, ``lifecycle.py`` says how a sandbox's record changes.

Must not know: SQLite, HTTP, hosts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Network

State = Literal["creating", "running", "pausing", "paused", "resuming", "moving", "ended"]
PausedBy = Literal["", "user", "timeout", "pressure"]
Level = Literal["debug", "info", "warn", "error"]


class Egress(msgspec.Struct, frozen=True):
    """Network settings as the user gave them. ``internet`` None = not said: the service's default."""

    internet: bool | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    public: bool = True
    """Whether ports of the sandbox answer without a traffic token."""
    mask_host: str = ""
    """What services inside see as Host; "" = as it came."""

    def network(self, default: bool) -> Network:
        """What a runtime is to enforce."""
        internet = default if self.internet is None else self.internet
        return Network(internet=internet, allow=self.allow, deny=self.deny)


class Record(msgspec.Struct, frozen=True):
    """One sandbox. Times are seconds since the epoch; ``created`` differs between any two sandboxes."""

    id: str
    tenant: str
    key: str
    template: str
    """Its template's id, or the snapshot's id it was made from."""
    alias: str
    """The name it was asked for by; "" = by id."""
    state: State
    created: float
    ends: float
    timeout_s: float
    """What its last create, connect or timeout call asked for."""
    runtime: str
    host: str = ""
    limits: Limits = Limits()
    on_timeout: Literal["kill", "pause"] = "kill"
    pause_memory: bool = True
    auto_resume: bool = False
    secure: bool = True
    egress: Egress = Egress()
    metadata: dict[str, str] = {}
    env: dict[str, str] = {}
    group: str = ""
    priority: float = 0.0
    mandatory: bool = False
    paused_by: PausedBy = ""
    memory_kept: bool = True
    """Whether the last pause kept its processes."""
    fence: int = 0
    """Copies of a smaller epoch are not this sandbox any more (``fencing``)."""
    replica: str = ""
    """The copy of this pause that is kept in a second place."""
    cause: str = ""
    """Why it ended."""
    ended: float = 0.0

    @property
    def alive(self) -> bool:
        return self.state != "ended"

    @property
    def shown(self) -> Literal["running", "paused"]:
        """The state as E2B knows it."""
        return "paused" if self.state in ("paused", "pausing") else "running"


class Key(msgspec.Struct, frozen=True):
    """An API key; the key itself is known to its holder alone. ``max_sandboxes`` run at once; ``creates_per_minute``
    0 = no limit."""

    id: str
    name: str
    tenant: str
    mask: str
    created: float
    max_sandboxes: int = 1000
    creates_per_minute: int = 0
    last_used: float = 0.0


class SnapshotRecord(msgspec.Struct, frozen=True):
    """A snapshot that new sandboxes can be made from. It outlives the sandbox it is of."""

    id: str
    tenant: str
    sandbox: str
    template: str
    host: str
    runtime: str
    limits: Limits
    memory: bool
    bytes: int
    created: float
    names: tuple[str, ...] = ()
    replica: str = ""
    """The copy of it that is kept in a second place."""


class NodeRecord(msgspec.Struct, frozen=True):
    """A machine that joined. ``url`` is where its host server answers, ``key`` what it asks for."""

    name: str
    url: str
    key: str
    joined: float
    draining: bool = False


class LogLine(msgspec.Struct, frozen=True):
    """Something that happened to a sandbox."""

    at: float
    level: Level
    message: str
    fields: dict[str, str] = {}
