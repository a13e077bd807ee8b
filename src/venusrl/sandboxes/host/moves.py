"""A sandbox's way from this host to another: the origin's side.

Owns: ``Sender``: whether it goes while it runs or as a snapshot, the order of steps, what becomes of a failure.

Must not know: how a runtime isolates or sends memory, E2B, who asked for the move. ``arrivals.py`` is the other side.

Guarantees: one owner at every instant. Until the origin's record says ``given_to`` it is the origin's, running or
paused as before, and whatever fails leaves it so; from then on it is the target's, if the target has it. That is not
guessed: the origin serves it no more until the target has told (``Host.has``), which it is asked at once, at every
further move and whenever the manager compares (``settle``). It is served while it can be: what moves while it runs is
stopped only for the last of its memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from pathlib import Path

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.host import archive
from venusrl.sandboxes.host.api import Address, Host, Moved, Moving
from venusrl.sandboxes.host.cells import Cell, Cells, is_paused
from venusrl.sandboxes.host.errors import HostLost, MoveUnsupported, OperationTimeout
from venusrl.sandboxes.host.move_line import Line, Word
from venusrl.sandboxes.host.records import full_disk_named
from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.moving import Movable

_log = logging.getLogger(__name__)
_PIECE = 1 << 20


class Sender:
    """Gives sandboxes of ``cells`` away. ``scratch`` is a directory of its own."""

    def __init__(self, name: str, cells: Cells, scratch: Path, clock: Clock) -> None:
        self._name = name
        self._cells = cells
        self._scratch = scratch
        self._clock = clock

    async def send(self, cell: Cell, to: Host, *, memory: bool) -> Moved:
        """Under the cell's lock. On return it is ``to``'s. Raises SandboxError: it is here as before, unless the
        error is HostLost and its record says ``given_to``; then ``settle`` finds out."""
        if cell.record.given_to:
            if cell.record.given_to != to.name:
                raise HostLost(f"sandbox {cell.id} was given to {cell.record.given_to}: move it there first")
            if await self.settle(cell, to):
                return Moved("found", "an earlier move had come through")
        runtime = self._cells.runtime(cell.record.order.runtime)
        movable = runtime if isinstance(runtime, Movable) else None
        paused = is_paused(cell.alive())
        address = await to.offer(self._moving(cell, movable))
        if movable is None:
            why = f"{runtime.name} sandboxes cannot move while they run"
        else:
            why = "it is paused" if paused else address.live_lacks
        if movable is not None and not why:
            return await self._live(cell, to, address, movable)
        return await self._snapshot(cell, to, address, paused, memory, why)

    async def settle(self, cell: Cell, to: Host | None) -> bool:
        """Of one that was given to ``to``: whether it is there; it is gone from here then, and as before otherwise.
        ``to`` None: that host will not come back, so that it is here. Raises HostLost while that is not known."""
        if not cell.record.given_to:
            return False  # somebody else found out
        if to is not None and to.name != cell.record.given_to:
            raise MoveUnsupported(f"sandbox {cell.id} was given to {cell.record.given_to}, not to {to.name}")
        there = False if to is None else await to.has(cell.id)
        if there:
            await self._cells.remove(cell)
        else:
            await self._undo(cell, cell.record.was_paused)
        return there

    def _moving(self, cell: Cell, movable: Movable | None) -> Moving:
        record = msgspec.structs.replace(cell.record, epoch=cell.record.epoch + 1, sending_to="", given_to="")
        return Moving(
            id=secrets.token_hex(8),
            sandbox=cell.id,
            origin=self._name,
            runtime=record.order.runtime,
            epoch=record.epoch,
            record=msgspec.json.encode(record),
            private=record.footprint.total,
            passport=b"" if movable is None else movable.passport(cell.alive()),
        )

    # -- while it runs

    async def _live(self, cell: Cell, to: Host, address: Address, movable: Movable) -> Moved:
        stopped_at = self._clock.monotonic()

        def stopped() -> None:
            nonlocal stopped_at
            self._cells.stop_for_move(cell)
            stopped_at = self._clock.monotonic()

        def give() -> None:
            cell.alive()  # a kill that came meanwhile ends it here
            self._cells.give(cell, to.name, False, durable=False)  # running memory does not survive the machine's end

        self._cells.begin_live(cell, to.name)
        try:
            async with Line.open(address) as line:
                await line.say(Word("live"))
                await movable.send(cell.alive(), line.dial, stopped, give)
                outage = self._clock.monotonic() - stopped_at
                await line.hear("taken", seconds=self._cells.time_limits.move)
        except BaseException as error:  # whatever it was, cancellation too: raised again unless it came through
            if not await self._came_through(cell, to, False, error):
                raise
            outage = self._clock.monotonic() - stopped_at
        else:
            await self._cells.remove(cell)
        return Moved("live", outage_s=outage)

    # -- as a snapshot

    async def _snapshot(self, cell: Cell, to: Host, address: Address, paused: bool, memory: bool, why: str) -> Moved:
        runtime = self._cells.runtime(cell.record.order.runtime)
        work = self._scratch / f"send-{secrets.token_hex(6)}"
        began = self._clock.monotonic()
        kept = memory
        try:
            async with Line.open(address) as line:
                if isinstance(runtime, Movable):
                    await line.say(Word("lend"))
                    await runtime.lend(cell.alive(), line.streams)
                self._cells.begin_move(cell, to.name)
                began = self._clock.monotonic()
                kept = await self._write(cell, work, memory)
                await self._hand_over(cell, to, line, work / "tar", kept, paused)
        except BaseException as error:  # whatever it was, cancellation too: raised again unless it came through
            if not await self._came_through(cell, to, paused, error):
                raise
        else:
            await self._cells.remove(cell)
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
        outage = 0.0 if paused else self._clock.monotonic() - began
        return Moved("snapshot" if kept else "files", why, outage)

    async def _write(self, cell: Cell, work: Path, memory: bool) -> bool:
        """Its state into one file; whether its processes are in it."""
        with full_disk_named(self._scratch):
            await asyncio.to_thread(work.mkdir, mode=0o700, parents=True)
        instance = cell.alive()
        runtime = self._cells.runtime(cell.record.order.runtime)
        if not is_paused(instance):
            if isinstance(runtime, Movable) and memory:
                await runtime.part(instance)
            await instance.pause()
        memory = memory and (not isinstance(runtime, Movable) or runtime.has_memory(instance))
        snapshot = await instance.snapshot(work / "data", memory=memory)
        await asyncio.to_thread(archive.pack, work / "data", work / "tar")
        return snapshot.memory

    async def _hand_over(self, cell: Cell, to: Host, line: Line, packed: Path, memory: bool, paused: bool) -> None:
        limit = self._cells.time_limits.move
        size = (await asyncio.to_thread(packed.stat)).st_size
        await line.say(Word("state", size=size, memory=memory, paused=paused))
        with packed.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _PIECE):
                line.streams[1].write(piece)
                await line.streams[1].drain()
        await line.hear("kept", seconds=limit)
        cell.alive()  # a kill that came meanwhile ends it here
        self._cells.give(cell, to.name, paused)
        await line.say(Word("go"))
        await line.hear("taken", seconds=limit)

    # -- what becomes of a failure

    async def _came_through(self, cell: Cell, to: Host, paused: bool, error: BaseException) -> bool:
        """Whether it is ``to``'s although ``error`` was raised; it is here as before otherwise. Raises HostLost when
        nobody knows."""
        if not cell.record.given_to:
            await self._undo(cell, paused)
            return False
        if not isinstance(error, SandboxError | OSError):
            return False  # the host closes: its next start asks
        try:
            return await self.settle(cell, to)
        except (HostLost, OperationTimeout) as lost:
            what = f"sandbox {cell.id} was given to {to.name}, which does not say whether it has it"
            raise HostLost(f"{what}: {lost}") from error

    async def _undo(self, cell: Cell, paused: bool) -> None:
        """It stays; the epoch passes what was offered."""
        instance = cell.alive()
        runtime = self._cells.runtime(cell.record.order.runtime)
        try:
            if isinstance(runtime, Movable):
                await runtime.stay(instance)
            if not paused and is_paused(instance):
                await instance.resume()
        except SandboxError as failed:  # it stays paused, and its record says so; or it ended, which is told as such
            _log.warning("sandbox %s could not go on after a move that failed: %s", cell.id, failed)
        self._cells.end_move(cell)
