"""How a sandbox goes to another host with its memory: what a runtime that can do so offers beside ``Runtime``.

Owns: the ``Movable`` protocol and its data.

Must not know: how the two hosts reach each other (streams are given), who owns the sandbox while it moves.

Guarantees asked: the sandbox runs on one side at most, whatever fails; until ``give`` was called it can go on where it
was, and after that only by ``stay``; what arrives is checked before it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from venusrl.sandboxes.runtimes.base import Instance, Spec

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[str], Awaitable[Streams]]
"""Gives the stream of that name, the same on both sides. Whoever asks for it closes it."""


class Base(msgspec.Struct, frozen=True):
    """Plain files that never change and that many sandboxes' snapshots lean on. ``name`` is made of what they hold."""

    name: str
    directory: str
    files: tuple[str, ...]


@runtime_checkable
class Leaning(Protocol):
    """Implemented by a runtime whose snapshots are not whole without files that they share."""

    def base(self, instance: Instance) -> Base:
        """What a snapshot of this sandbox leans on."""
        ...

    async def has_base(self, spec: Spec, name: str) -> bool:
        """Whether a sandbox with that spec could lean on it here."""
        ...

    async def bring(self, spec: Spec, name: str, directory: Path) -> None:
        """Take the files in ``directory`` as that base; they are moved. Raises SandboxError when they are not it."""
        ...


class Objection(msgspec.Struct, frozen=True):
    """Why a sandbox cannot come here: with its memory at all (``memory``), or while it runs (``live``); "" = it can."""

    memory: str = ""
    live: str = ""


@runtime_checkable
class Movable(Protocol):
    """Implemented by a runtime whose sandboxes have memory that another host can take over."""

    def passport(self, instance: Instance) -> bytes:
        """What this sandbox asks of another host, for ``objection`` there."""
        ...

    def objection(self, passport: bytes) -> Objection:
        """Whether a sandbox with that passport can come here."""
        ...

    def has_memory(self, instance: Instance) -> bool:
        """Whether its processes are kept: not of one that was paused with its files only."""
        ...

    async def lend(self, instance: Instance, streams: Streams) -> None:
        """Give the other side, which calls ``borrow``, what a snapshot of this sandbox leans on, if it lacks it."""
        ...

    async def borrow(self, spec: Spec, streams: Streams) -> None: ...

    async def part(self, instance: Instance) -> None:
        """Before a running one is paused to be moved with its memory: whoever follows what runs in it is let go with
        SandboxMoving, and can go on there."""
        ...

    async def send(self, instance: Instance, dial: Dial, stopped: Callable[[], None], give: Callable[[], None]) -> None:
        """Move a running sandbox to the other side, which calls ``receive``. ``stopped`` is called when it stops here,
        ``give`` when it is whole there and before it may run there. It is stopped here when this returns: ``kill`` it.
        Raised before ``give`` returned, it runs here as before; afterwards it is stopped here, and may run there.
        """
        ...

    async def receive(self, spec: Spec, dial: Dial) -> Instance:
        """The sandbox, running. Raised, nothing is left here."""
        ...

    async def stay(self, instance: Instance) -> None:
        """Run on here after all: the other side does not have it. Nothing happens to one that was not sent."""
        ...
