"""How a host isolates: one interface, three runtimes.

Owns: ``Runtime`` and ``Instance`` and their data. Implementations: ``namespace``, ``microvm``, ``gvisor``.

Must not know: E2B, HTTP, admission, who owns a sandbox.

Guarantees asked of every implementation: ids are the caller's and never reused; a failed or cancelled call leaves
nothing behind; ``kill`` leaves no process, mount, cgroup, file or memory, and is idempotent; a sandbox outlives the
service that made it (kill -9 included) and is taken up again by ``adopt`` with its processes, streams and exit codes;
every failure is a ``SandboxError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from venusrl.sandboxes.agent.api import Agent
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.templates.api import Image


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox may reach outside itself. Never the host, its loopback, link-local or metadata addresses.

    ``allow`` and ``deny`` are CIDR blocks, addresses or host names; allow wins over deny. Without ``internet`` only
    what is allowed; with it everything not denied.
    """

    internet: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    @property
    def reaches_out(self) -> bool:
        return self.internet or bool(self.allow)


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sandbox to make. ``tenant`` matters where pages are shared per tenant. ``merge``: its own memory may be
    merged, page by page, with equal memory of others for which the same is said."""

    id: str
    image: Image
    limits: Limits
    network: Network = Network()
    env: dict[str, str] = {}
    tenant: str = ""
    merge: bool = False


class Footprint(msgspec.Struct, frozen=True):
    """Memory of one sandbox in bytes. Shared template pages are not its own: they are the template's, counted once.

    ``private`` is private-dirty of its processes (QEMU included), ``kernel`` what its cgroup's kernel memory holds,
    ``files`` the pages of its writable layer that live in memory, ``swap`` what was paged out, as it is kept (zram:
    compressed).
    """

    private: int = 0
    kernel: int = 0
    files: int = 0
    swap: int = 0

    @property
    def total(self) -> int:
        return self.private + self.kernel + self.files + self.swap


class Shortages(msgspec.Struct, frozen=True):
    """What a sandbox has been short of: ``memory_kills`` processes were ended by the kernel for want of memory since it
    was made; ``disk_full`` = no further block or file fits now."""

    memory_kills: int = 0
    disk_full: bool = False


class Snapshot(msgspec.Struct, frozen=True):
    """A sandbox's state at one instant, on disk: ``directory`` is self-contained but for the template's own files.

    ``memory`` = processes are in it. ``bytes`` is what it takes on disk.
    """

    directory: str
    memory: bool
    bytes: int
    runtime: str


class Abilities(msgspec.Struct, frozen=True):
    """What a runtime can do here, and, where it cannot, why (``lacks``: ability to reason with its mend)."""

    memory_snapshot: bool
    live_migration: bool
    egress: bool
    lacks: dict[str, str] = {}


class Instance(Protocol):
    """One sandbox on this host. Not safe for concurrent state changes: the host serialises them."""

    @property
    def spec(self) -> Spec: ...

    @property
    def agent(self) -> Agent:
        """Raises SandboxGone when it ended, SandboxPaused while paused."""
        ...

    def record(self) -> bytes:
        """What ``adopt`` needs, at any time after a state change; the host keeps it on disk."""
        ...

    async def pause(self, *, memory: bool = True) -> None:
        """Stop using memory and processors, keeping the id. ``memory`` False keeps the files only."""
        ...

    async def resume(self) -> None: ...

    async def snapshot(self, directory: Path, *, memory: bool = True) -> Snapshot:
        """Write the state into ``directory`` (new); the sandbox goes on, or stays paused."""
        ...

    async def set_network(self, network: Network) -> None: ...

    async def footprint(self) -> Footprint: ...

    async def shortages(self, disk: bool = True) -> Shortages:
        """Cheap: looked at around every command; ``disk`` False = the disk is not asked for. Raises SandboxGone,
        SandboxPaused."""
        ...

    async def died(self) -> str:
        """Wait until the sandbox ends other than by ``kill``; the cause (out of memory, its PID 1 ended...)."""
        ...

    async def kill(self) -> None: ...


class Runtime(Protocol):
    """One way to isolate, on this host. ``state`` directories given to the constructor are its own."""

    @property
    def name(self) -> str: ...

    async def start(self) -> Abilities:
        """Check the machine. Raises RuntimeUnavailable with the mend."""
        ...

    async def prepare(self, image: Image, *, network: bool = False) -> None:
        """Make what is derived from a template (disk image, memory, page cache touched), so that ``create`` is fast.
        ``network``: for sandboxes that reach out."""
        ...

    async def forget(self, image_id: str) -> None:
        """Remove what was derived from a template that nobody uses any more."""
        ...

    async def derived(self) -> set[str]:
        """Ids of the templates of which it keeps what ``forget`` removes."""
        ...

    async def shared(self, images: Sequence[str]) -> dict[str, int]:
        """Bytes of memory that sandboxes of these templates (by id) share, now resident: what several of them have in
        common counts once, for the first."""
        ...

    async def create(self, spec: Spec) -> Instance:
        """A running sandbox whose agent has settled: fresh entropy, clock, host name."""
        ...

    async def restore(self, spec: Spec, snapshot: Snapshot) -> Instance:
        """A running sandbox from a snapshot: a paused one's resume elsewhere, a fork, a snapshot's child."""
        ...

    async def adopt(self, record: bytes) -> Instance | None:
        """Take up a sandbox of an earlier process; None when it ended meanwhile (and nothing of it is left)."""
        ...

    async def sweep(self, known: set[str]) -> list[str]:
        """End whatever of this runtime's state on this host belongs to no sandbox in ``known``; say what it was."""
        ...

    async def close(self) -> None:
        """Let go; sandboxes go on."""
        ...
