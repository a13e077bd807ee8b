"""The sandboxes of this machine, one cell each.

Owns: the table of cells, the lock of each, its record on disk, its instance, its adoption after a restart, its end.

Must not know: admission, HTTP, who asked, templates.

Guarantees: state changes of one sandbox happen one after another; a change is on disk as begun before it begins and as
done before it returns; a record's removal is the sandbox's end, and whatever a crash leaves after it is swept at the
next start; a removal that failed is tried again until it succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.host import lifecycle
from venusrl.sandboxes.host.api import Died, Held, State
from venusrl.sandboxes.host.background import Background
from venusrl.sandboxes.host.deaths import Deaths
from venusrl.sandboxes.host.errors import AlreadyExists, within
from venusrl.sandboxes.host.records import Record, Records
from venusrl.sandboxes.protocol import (
    HostDiskFull,
    Limits,
    RuntimeUnavailable,
    SandboxError,
    SandboxGone,
    SandboxPaused,
)
from venusrl.sandboxes.runtimes.base import Instance, Runtime, Spec

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_ADOPT_AT_ONCE = 16
_TRY_AGAIN_S = 5.0


class TimeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that an operation may take. There is no other limit on it below the manager."""

    prepare: float = 900.0
    create: float = 60.0
    pause: float = 120.0
    resume: float = 60.0
    snapshot: float = 300.0
    network: float = 30.0
    kill: float = 30.0
    adopt: float = 30.0
    move: float = 600.0
    queue: float = 30.0
    """Waiting for a turn to be created."""


class Cell:
    """One sandbox. ``busy`` requests are on their way into it, the last one ended at ``used``."""

    def __init__(self, record: Record, now: float) -> None:
        self.record = record
        self.instance: Instance | None = None
        self.lacks = ""
        self.making: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        self.doomed = False
        self.unsaved = False
        self.busy = 0
        self.used = now
        self.sampled: float | None = None
        self.watcher: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.record.order.id

    @property
    def limits(self) -> Limits:
        assert self.record.order.limits is not None
        return self.record.order.limits

    @property
    def paused(self) -> bool:
        return self.record.state == "paused"

    def idle_s(self, now: float) -> float | None:
        return None if self.busy else max(0.0, now - self.used)

    def held(self, now: float) -> Held:
        record = self.record
        return Held(
            id=self.id,
            template=record.image.id,
            runtime=record.order.runtime,
            state=record.state,
            limits=self.limits,
            tenant=record.order.tenant,
            group=record.order.group,
            created=record.created,
            changed=record.changed,
            footprint=record.footprint,
            idle_s=self.idle_s(now),
            epoch=record.epoch,
            given_to=record.given_to,
        )

    def spec(self) -> Spec:
        order = self.record.order
        return Spec(
            id=order.id,
            image=self.record.image,
            limits=self.limits,
            network=order.network,
            env=order.env,
            tenant=order.tenant,
        )

    def alive(self) -> Instance:
        """Its instance. Raises SandboxGone, RuntimeUnavailable."""
        if self.doomed:
            raise SandboxGone(f"sandbox {self.id} is being killed")
        if self.lacks:
            raise RuntimeUnavailable(self.lacks)
        if self.instance is None:
            raise SandboxGone(f"sandbox {self.id} is not made yet")
        return self.instance


Build = Callable[[Runtime, Spec], Awaitable[Instance]]


class Cells:
    """``runtimes`` by name. ``ended`` is called once for every sandbox that is no longer here, whatever ended it."""

    def __init__(
        self,
        records: Records,
        runtimes: Mapping[str, Runtime],
        background: Background,
        clock: Clock,
        limits: TimeLimits,
        deaths: Deaths,
        ended: Callable[[str], None],
    ) -> None:
        self._records = records
        self._runtimes = runtimes
        self._background = background
        self._clock = clock
        self.time_limits = limits
        self._deaths = deaths
        self._ended = ended
        self._cells: dict[str, Cell] = {}
        self._leftovers: list[tuple[str, Instance]] = []
        self.counters: dict[str, float] = {}

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells.values()))

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, sandbox: object) -> bool:
        return sandbox in self._cells

    def made(self) -> list[Cell]:
        """Those whose ``create`` has returned."""
        return [cell for cell in self._cells.values() if cell.instance is not None or cell.lacks]

    def get(self, sandbox: str) -> Cell:
        try:
            return self._cells[sandbox]
        except KeyError:
            raise SandboxGone(f"sandbox {sandbox} does not exist (any more)") from None

    def running(self, sandbox: str) -> tuple[Cell, Instance]:
        """Raises SandboxGone, SandboxPaused."""
        cell = self.get(sandbox)
        instance = cell.alive()
        if cell.record.state != "running":
            raise SandboxPaused(f"sandbox {sandbox} is {cell.record.state}")
        return cell, instance

    def count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1

    def runtime(self, name: str) -> Runtime:
        try:
            return self._runtimes[name]
        except KeyError:
            have = ", ".join(sorted(self._runtimes)) or "none"
            raise RuntimeUnavailable(f"this host has no runtime {name!r} (it has: {have})") from None

    # -- making

    async def make(self, record: Record, build: Build, *, durable: bool = False) -> Cell:
        """A new sandbox, by ``build``. Cancelled or failed, nothing of it is left."""
        if record.order.id in self._cells:
            raise AlreadyExists(f"there is a sandbox {record.order.id} already")
        runtime = self.runtime(record.order.runtime)
        cell = Cell(record, self._clock.monotonic())
        self._cells[cell.id] = cell
        cell.making = self._background.operation(f"create {cell.id}", self._make(cell, runtime, build, durable))
        try:
            await asyncio.shield(cell.making)
        except asyncio.CancelledError:
            if cell.making.cancelled() and cell.doomed:
                raise SandboxGone(f"sandbox {cell.id} was killed while it was made") from None
            await self._unmake(cell)
            raise
        return cell

    async def _make(self, cell: Cell, runtime: Runtime, build: Build, durable: bool) -> None:
        try:
            instance = await build(runtime, cell.spec())
            cell.instance = instance
            cell.record.runtime = instance.record()
            try:
                self._save(cell, durable=durable)
            except SandboxError:
                await self._take_down(cell)
                raise
        except BaseException:  # whatever it was, the id is free again
            cell.instance = None
            self._forget(cell)
            raise
        self.count("created")
        self._watch(cell)

    async def _unmake(self, cell: Cell) -> None:
        """After a caller gave up: what it asked for is not wanted, however far it came."""
        assert cell.making is not None
        self.count("creates_cancelled")
        cell.making.cancel()
        await asyncio.wait((cell.making,))
        if cell.instance is not None:
            await asyncio.shield(self._background.operation(f"undo {cell.id}", self.kill(cell.id)))

    # -- changing

    async def change(
        self,
        cell: Cell,
        via: State,
        operation: str,
        seconds: float,
        work: Callable[[Instance], Awaitable[None]],
    ) -> None:
        """``work``, under the cell's lock held by the caller, on disk as begun and as done. Goes on when cancelled."""
        instance = cell.alive()
        before = msgspec.structs.replace(cell.record)
        self._enter(cell, via)
        try:
            self._save(cell, durable=via != "pausing")
        except SandboxError:
            cell.record = before
            raise
        try:
            async with within(seconds, operation, f"sandbox {cell.id}"):
                await work(instance)
        finally:
            if not cell.doomed and cell.id in self._cells:
                self._enter(cell, lifecycle.settled(is_paused(instance)))
                cell.record.runtime = instance.record()
                self._save(cell, durable=True)

    def begin_move(self, cell: Cell, to: str) -> None:
        """On disk: it is about to be sent to ``to``."""
        before = msgspec.structs.replace(cell.record)
        self._enter(cell, "moving")
        cell.record.sending_to = to
        try:
            self._save(cell, durable=True)
        except SandboxError:
            cell.record = before
            raise

    def begin_live(self, cell: Cell, to: str) -> None:
        """On disk: it is being sent to ``to``, and runs on here meanwhile."""
        cell.record.sending_to = to
        try:
            self._save(cell)
        except SandboxError:
            cell.record.sending_to = ""
            raise

    def stop_for_move(self, cell: Cell) -> None:
        """It is stopped, and served no more."""
        self._enter(cell, "moving")

    def give(self, cell: Cell, to: str, paused: bool, *, durable: bool = True) -> None:
        """On disk: from now on it is ``to``'s, if ``to`` has it."""
        before = msgspec.structs.replace(cell.record)
        cell.record.given_to, cell.record.was_paused = to, paused
        cell.record.runtime = cell.alive().record()
        try:
            self._save(cell, durable=durable)
        except SandboxError:
            cell.record = before
            raise

    def end_move(self, cell: Cell) -> None:
        """On disk: it stays, whatever was sent. Its epoch passes the one that was offered."""
        if cell.doomed or cell.id not in self._cells:
            return
        cell.record.sending_to = cell.record.given_to = ""
        cell.record.epoch += 2
        instance = cell.alive()
        if cell.record.state == "moving":  # else it was never stopped
            self._enter(cell, lifecycle.settled(is_paused(instance)))
        cell.record.runtime = instance.record()
        self._save(cell, durable=True)

    async def saved(self, cell: Cell) -> None:
        """Put a change of the record that is no change of state on disk."""
        self._save(cell)

    async def alone(self, cell: Cell, name: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """``work`` under the cell's lock, to its end even when the caller gives up."""

        async def locked() -> _T:
            async with cell.lock:
                cell.alive()
                return await work()

        return await asyncio.shield(self._background.operation(f"{name} {cell.id}", locked()))

    def _enter(self, cell: Cell, state: State) -> None:
        cell.record.state = lifecycle.follow(cell.record.state, state)
        cell.record.changed = self._clock.time()

    def _save(self, cell: Cell, *, durable: bool = False) -> None:
        try:
            self._records.put(cell.record, durable=durable)
            cell.unsaved = False
        except HostDiskFull:
            cell.unsaved = True
            raise

    # -- ending

    async def kill(self, sandbox: str) -> None:
        """End it, whatever it is doing. Raises SandboxGone."""
        cell = self.get(sandbox)
        cell.doomed = True
        if cell.making is not None and not cell.making.done():
            cell.making.cancel()
            await asyncio.wait((cell.making,))
            return
        await asyncio.shield(self._background.operation(f"kill {sandbox}", self._kill(cell)))

    async def _kill(self, cell: Cell) -> None:
        async with cell.lock:
            if self._cells.get(cell.id) is cell:
                self.count("killed")
                await self.remove(cell)

    async def remove(self, cell: Cell) -> None:
        """Forget it and take it down, under its lock."""
        cell.doomed = True
        if cell.watcher is not None and cell.watcher is not asyncio.current_task():
            cell.watcher.cancel()
        self._records.remove(cell.id)
        self._forget(cell)
        await self._take_down(cell)

    def _forget(self, cell: Cell) -> None:
        if self._cells.get(cell.id) is cell:
            del self._cells[cell.id]
            self._ended(cell.id)

    async def _take_down(self, cell: Cell) -> None:
        instance = cell.instance
        if instance is None:
            return
        try:
            async with within(self.time_limits.kill, "kill", f"sandbox {cell.id}"):
                await instance.kill()
        except SandboxError as error:
            _log.warning("sandbox %s could not be removed yet: %s", cell.id, error)
            self.count("kills_tried_again")
            self._leftovers.append((cell.id, instance))

    async def tidy(self) -> None:
        """One round of trying again: what could not be removed, what could not be written."""
        await self._clock.sleep(_TRY_AGAIN_S)
        waiting, self._leftovers = self._leftovers, []
        for sandbox, instance in waiting:
            try:
                async with within(self.time_limits.kill, "kill", f"sandbox {sandbox}"):
                    await instance.kill()
            except SandboxError as error:
                _log.warning("sandbox %s still cannot be removed: %s", sandbox, error)
                self._leftovers.append((sandbox, instance))
        for cell in self:
            if cell.unsaved and not cell.lock.locked():
                self._save(cell, durable=True)

    def _watch(self, cell: Cell) -> None:
        cell.watcher = self._background.watch(f"death of {cell.id}", self._bury(cell))

    async def _bury(self, cell: Cell) -> None:
        assert cell.instance is not None
        cause = await cell.instance.died()
        async with cell.lock:
            if self._cells.get(cell.id) is not cell:
                return
            _log.info("sandbox %s ended: %s", cell.id, cause)
            self.count("died")
            await self.remove(cell)
        self._deaths.tell(Died(cell.id, cause))

    # -- after a restart

    async def adopt(self) -> list[Died]:
        """Take up every recorded sandbox and sweep what nobody knows. Returns those that ended meanwhile."""
        turns = asyncio.Semaphore(_ADOPT_AT_ONCE)
        records = self._records.load()
        gone = await asyncio.gather(*(self._adopt(record, turns) for record in records))
        for name, runtime in self._runtimes.items():
            known = {cell.id for cell in self if cell.record.order.runtime == name}
            for leftover in await runtime.sweep(known):
                self.count("swept")
                _log.warning("swept what no sandbox owns: %s", leftover)
        return [death for death in gone if death is not None]

    async def _adopt(self, record: Record, turns: asyncio.Semaphore) -> Died | None:
        cell = Cell(record, self._clock.monotonic())
        try:
            runtime = self.runtime(record.order.runtime)
            async with turns, within(self.time_limits.adopt, "adopt", f"sandbox {cell.id}"):
                cell.instance = await runtime.adopt(record.runtime)
        except SandboxError as error:
            cell.lacks = f"sandbox {cell.id} could not be taken up again: {error}"
            _log.warning("%s", cell.lacks)
            self._cells[cell.id] = cell
            return None
        if cell.instance is None:
            self._records.remove(cell.id)
            self.count("died")
            self._ended(cell.id)
            return Died(cell.id, "it ended while the host's service was away")
        self._settle(cell)
        self._cells[cell.id] = cell
        self.count("adopted")
        self._watch(cell)
        return None

    def _settle(self, cell: Cell) -> None:
        """Make the record of a change that a crash interrupted say what is."""
        record = cell.record
        assert cell.instance is not None
        if record.given_to:
            return
        if record.sending_to:
            record.sending_to = ""
            record.epoch += 2
        if record.state not in lifecycle.LASTING or record.state != lifecycle.settled(is_paused(cell.instance)):
            record.state = lifecycle.settled(is_paused(cell.instance))
            record.changed = self._clock.time()
        record.runtime = cell.instance.record()
        self._save(cell)


def is_paused(instance: Instance) -> bool:
    """What the runtime says; a sandbox that ended counts as running until its end is told."""
    try:
        _ = instance.agent
    except SandboxPaused:
        return True
    except SandboxGone:
        return False
    return False
