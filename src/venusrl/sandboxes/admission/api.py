"""What admission is asked and what it answers: plain data, no I/O.

Owns: the data and the ``Admission`` protocol. ``admission/footprint.py`` is ours; ``admission/baselines.py`` holds
``e2b``, ``declared``, ``declared x R``, ``usage`` and ``oracle``. The host, the manager and the simulation ask the
same objects.

All memory in bytes, time in seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class SandboxView(msgspec.Struct, frozen=True):
    """A sandbox on a host, as far as it matters for memory.

    ``group`` is its trajectory group ("" = itself alone): those of one group burst together. ``private`` is its last
    measured footprint (0 while none). ``priority``: larger matters more; ``mandatory`` = the trainer waits for it.
    ``idle_s``: since its last command ended, None while one runs. ``resume_cost_s``: expected time to bring it back.
    ``reclaimable``: what a pause would free now (None = all of ``private``; 0 for a namespace without swap whose
    processes still run).
    """

    id: str
    template: str
    group: str
    age_s: float
    private: int
    declared: int
    paused: bool = False
    priority: float = 0.0
    mandatory: bool = False
    idle_s: float | None = None
    resume_cost_s: float = 0.1
    cpus: float = 1.0
    reclaimable: int | None = None


class HostView(msgspec.Struct, frozen=True):
    """A host. ``capacity`` is memory minus reserve; ``shared``: template to bytes resident for all its sandboxes, all
    copies together. ``copies``: template to whose copies there are (``Request.pages``); a template that is not in it
    has one, for everybody. ``stored``: ids of templates that are on its disk.

    ``available`` is MemAvailable (or what is left below the cgroup's limit), ``pressure`` PSI memory "some" over 10 s
    in percent (None where the kernel has none).
    """

    name: str
    capacity: int
    available: int
    cpus: float
    cpu_used: float = 0.0
    pressure: float | None = None
    shared: dict[str, int] = {}
    sandboxes: tuple[SandboxView, ...] = ()
    draining: bool = False
    copies: dict[str, tuple[str, ...]] = {}
    stored: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """A sandbox that wants in (new, or to be resumed with ``private`` bytes). ``pages``: whose copy of the template's
    pages it may share ("" = anybody's)."""

    template: str
    group: str
    declared: int
    cpus: float = 1.0
    priority: float = 0.0
    mandatory: bool = False
    private: int | None = None
    pages: str = ""


class Pause(msgspec.Struct, frozen=True):
    """Pause this one for memory's sake."""

    sandbox: str
    reason: str


class Admit(msgspec.Struct, frozen=True):
    """It may run on ``host``, once those in ``pause`` are paused (a mandatory request displaces idle ones that matter
    less; empty for every other)."""

    host: str
    pause: tuple[Pause, ...] = ()


class Deny(msgspec.Struct, frozen=True):
    """Not now. ``reason`` is a stable code, ``message`` says what is short and by how much."""

    reason: str
    message: str
    retry_after_s: float


class Admission(Protocol):
    """A policy. Deterministic: what it knows of footprints comes from ``observe`` and ``ended`` alone."""

    def observe(self, template: str, group: str, sandbox: str, age_s: float, private: int) -> None:
        """A measured footprint."""
        ...

    def ended(self, sandbox: str) -> None:
        """Its life is known whole now."""
        ...

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        """Choose a host, preferring those that hold the template."""
        ...

    def relieve(self, host: HostView) -> tuple[Pause, ...]:
        """Whom to pause now, most reclaimable memory per resume cost first, never a mandatory one while another will
        do. Empty without pressure."""
        ...
