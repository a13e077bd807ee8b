"""This machine as a host of sandboxes.

Owns: ``LocalHost``, the ``Host`` of the machine the service runs on: whom it admits, what it starts, pauses, resumes,
snapshots and ends, and what it tells of itself.

Must not know: E2B's wire, keys, other machines, how a runtime isolates.

Guarantees: those of ``host/api.py``. A service that is killed at any instant finds on ``start`` every sandbox it had:
running ones run on, paused ones are paused, half-made ones are gone. Under memory pressure it first admits no more,
then pauses whom admission names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from venusrl.clock import Clock, SystemClock
from venusrl.sandboxes.admission.api import Admission, Admit, Deny, HostView, Pause, Request
from venusrl.sandboxes.agent.api import Agent, Stream, Usage
from venusrl.sandboxes.envd.about import About
from venusrl.sandboxes.host.api import (
    ENVD_PORT,
    Address,
    Died,
    Held,
    Host,
    HostStatus,
    Moved,
    Moving,
    Order,
    Peer,
    SnapshotInfo,
)
from venusrl.sandboxes.host.arrivals import Arrivals, How
from venusrl.sandboxes.host.background import Background
from venusrl.sandboxes.host.cells import Cell, Cells, TimeLimits
from venusrl.sandboxes.host.deaths import Deaths
from venusrl.sandboxes.host.errors import MoveUnsupported, within
from venusrl.sandboxes.host.footprints import Footprints, Learned
from venusrl.sandboxes.host.machine import Machine, reserve_of
from venusrl.sandboxes.host.moves import Sender
from venusrl.sandboxes.host.pages import Pages
from venusrl.sandboxes.host.records import Record, Records, check_id
from venusrl.sandboxes.host.snapshots import Kept, Snapshots
from venusrl.sandboxes.host.states import LocalStates, Ways
from venusrl.sandboxes.host.streams import CountedStream, Turn
from venusrl.sandboxes.protocol import (
    Limits,
    RuntimeUnavailable,
    SandboxDenied,
    SandboxError,
    SandboxPaused,
)
from venusrl.sandboxes.runtimes.base import Abilities, Instance, Network, Runtime, Spec
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.sharing import Sharing

_log = logging.getLogger(__name__)
MIB = 1 << 20
_Start = Callable[[Runtime, Spec], Awaitable[Instance]]


class Images(Protocol):
    """Where this host finds templates."""

    async def resolve(self, template: str, tenant: str) -> Image:
        """By id or name. Raises TemplateNotFound."""
        ...

    def names(self) -> tuple[str, ...]:
        """Ids of the templates that are on this machine."""
        ...

    def counters(self) -> dict[str, float]:
        """Of templates on their way here, for ``HostStatus.counters``."""
        ...


class Door(Protocol):
    """Answers requests meant for a sandbox."""

    async def serve(
        self, request: web.Request, agent: Agent, sandbox: str, port: int, about: About
    ) -> web.StreamResponse: ...

    def forget(self, sandbox: str) -> None:
        """Let go of what was kept for a sandbox that is here no longer."""
        ...


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``memory``: bytes for everything, None = what the machine or its control group has. ``reserve``: bytes of it that
    sandboxes never get, None = the larger of 512 MiB and a twentieth."""

    name: str = "local"
    memory: int | None = None
    reserve: int | None = None
    starting: int = 16
    """So many sandboxes are created or resumed at once; more wait."""
    guard_s: float = 0.5
    listen: str = "127.0.0.1"
    """The address at which it takes sandboxes of other hosts; it must be one that they reach."""
    time_limits: TimeLimits = TimeLimits()


class LocalHost:
    """Implements ``host.api.Host``. ``await start()`` first, ``await close()`` last (sandboxes go on)."""

    def __init__(
        self,
        state: Path,
        runtimes: Mapping[str, Runtime],
        images: Images,
        admission: Admission,
        door: Door,
        config: HostConfig | None = None,
        clock: Clock | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """``sharing``: which sandboxes may share pages; None = all."""
        self._config = config or HostConfig()
        self._clock = clock or SystemClock()
        self._runtimes = dict(runtimes)
        self._images = images
        self._admission = admission
        self._door = door
        self._records = Records(state / "sandboxes")
        self._snapshots = Snapshots(state / "snapshots")
        self._background = Background(self._clock)
        self._deaths = Deaths()
        self._machine = Machine(self._clock)
        limits, ended = self._config.time_limits, self._on_ended
        self.cells = Cells(self._records, self._runtimes, self._background, self._clock, limits, self._deaths, ended)
        self._sharing = sharing or Sharing()
        self._sender = Sender(self.name, self.cells, state / "moves", self._clock)
        self._arrivals = Arrivals(
            self.name,
            self._config.listen,
            state / "moves",
            self.cells,
            images.resolve,
            self._admit,
            self._begin,
            self._sharing.made_of,
            self._clock,
        )
        ways = Ways(images.resolve, self._sharing.made_of, self._arrivals.take)
        self.states = LocalStates(self.name, state / "states", self.cells, self._snapshots, ways, self._clock)
        self._pages = Pages(self._sharing, self.cells, self._runtimes, self._background, self._clock)
        self._learned = Learned()
        self._footprints = Footprints(self.cells, admission, self._clock, self._pages.measure)
        self._starting = asyncio.Semaphore(self._config.starting)
        self._abilities: dict[str, Abilities] = {}
        self._draining = False
        self.peer: Peer | None = None
        """Set by who serves it to other hosts."""
        total = self._machine.total
        self._memory = total if self._config.memory is None else min(total, self._config.memory)
        self._reserve = reserve_of(self._memory, self._config.reserve)

    @property
    def name(self) -> str:
        return self._config.name

    # -- beginning and end

    async def start(self) -> list[Died]:
        """Check the runtimes, take up what an earlier service left. Returns what ended meanwhile.

        Raises RuntimeUnavailable when no runtime works here or another service has the directory.
        """
        self._records.open()
        try:
            await self._start_runtimes()
            await asyncio.to_thread(self._snapshots.open)
            await asyncio.to_thread(self._arrivals.clear)
            await asyncio.to_thread(self.states.clear)
            lost = await self.cells.adopt()
            await self._pages.sweep()
        except BaseException:  # whatever it was, the next try must find the lock free
            self._records.close()
            raise
        for cell in self.cells:
            await self._footprints.measure(cell)
        self._background.loop("footprints", self._footprints.step)
        self._background.loop("pressure guard", self._guard)
        self._background.loop("tidying", self.cells.tidy)
        self._background.loop("forgetting templates", lambda: self._pages.forget_gone(self._templates_needed))
        free, kept = (size >> 20 for size in (max(0, self._memory - self._reserve), self._reserve))
        text = "host %s: %s; memory for sandboxes %d MiB, kept back %d MiB; sandboxes taken up: %d"
        _log.info(text, self.name, ", ".join(self._abilities), free, kept, len(self.cells))
        return lost

    async def close(self) -> None:
        await self._arrivals.close()
        await self._background.close()
        for runtime in self._runtimes.values():
            await runtime.close()
        self._records.close()

    async def drain(self, on: bool = True) -> None:
        self._draining = on

    async def hang_up(self) -> None:
        """In this process no answer is waited for."""

    # -- telling

    async def status(self) -> HostStatus:
        now, templates = self._clock.monotonic(), self._images.names()
        return HostStatus(
            view=msgspec.structs.replace(self.view(), stored=templates),
            runtimes=dict(self._abilities),
            memory_total=self._memory,
            memory_reserve=self._reserve,
            held=tuple(cell.held(now) for cell in self.cells.made()),
            snapshots=self._snapshots.infos(),
            templates=templates,
            counters=self._counters(),
            time_limits=msgspec.structs.asdict(self._config.time_limits),
        )

    def view(self) -> HostView:
        """This host as admission sees it, with those that are being made."""
        reading = self._machine.read()
        now, wall = self._clock.monotonic(), self._clock.time()
        return HostView(
            name=self.name,
            capacity=max(0, self._memory - self._reserve),
            available=min(reading.available, self._memory),
            cpus=self._machine.cpus,
            cpu_used=reading.cpu_used,
            pressure=reading.pressure,
            shared=dict(self._pages.shared),
            copies=dict(self._pages.copies),
            sandboxes=tuple(self._learned.view(cell, now, wall) for cell in self.cells),
            draining=self._draining,
        )

    def events(self) -> AsyncIterator[Died]:
        return self._deaths.listen()

    async def usage(self, sandbox: str) -> Usage:
        return await self.cells.running(sandbox)[1].agent.usage()

    # -- changing

    async def create(self, order: Order) -> Held:
        check_id(order.id)
        self.cells.runtime(order.runtime)
        if self._snapshots.get(order.template) is not None:
            async with self._snapshots.reading(order.template) as (kept, snapshot):
                order = msgspec.structs.replace(order, env={**kept.env, **order.env})
                return await self._create(
                    order, kept.image, kept.limits, lambda runtime, spec: runtime.restore(spec, snapshot)
                )
        image = await self._images.resolve(order.template, order.tenant)
        limits = Limits(memory_mib=image.memory_mib, cpus=image.cpus, disk_mib=image.disk_mib)
        return await self._create(order, image, limits, lambda runtime, spec: runtime.create(spec))

    async def kill(self, sandbox: str) -> None:
        await self.cells.kill(sandbox)

    async def pause(self, sandbox: str, *, memory: bool = True) -> Held:
        cell = self.cells.get(sandbox)
        return await self.cells.alone(cell, "pause", lambda: self._pause(cell, memory))

    async def resume(self, sandbox: str) -> Held:
        cell = self.cells.get(sandbox)
        return await self.cells.alone(cell, "resume", lambda: self._resume(cell))

    async def snapshot(self, sandbox: str, snapshot: str, *, memory: bool = True) -> SnapshotInfo:
        cell = self.cells.get(sandbox)
        return await self.cells.alone(cell, "snapshot", lambda: self._snapshot(cell, snapshot, memory))

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._snapshots.remove(snapshot)

    async def set_network(self, sandbox: str, network: Network) -> None:
        cell = self.cells.get(sandbox)

        async def work() -> None:
            async with within(self.cells.time_limits.network, "network", f"sandbox {sandbox}"):
                await cell.alive().set_network(network)
            cell.record.order = msgspec.structs.replace(cell.record.order, network=network)
            await self.cells.saved(cell)

        await self.cells.alone(cell, "network", work)

    async def set_priority(self, sandbox: str, priority: float, mandatory: bool) -> None:
        cell = self.cells.get(sandbox)
        cell.record.order = msgspec.structs.replace(cell.record.order, priority=priority, mandatory=mandatory)
        await self.cells.saved(cell)

    async def move(self, sandbox: str, to: Host) -> Moved:
        """Raises MoveUnsupported, SandboxDenied, HostLost; see ``moves``."""
        cell = self.cells.get(sandbox)
        if to is self or to.name == self.name:
            raise MoveUnsupported(f"sandbox {sandbox} is on {self.name} already: name another host")
        ability = self._abilities.get(cell.record.order.runtime)
        memory = ability is not None and ability.memory_snapshot
        moved = await self.cells.alone(cell, "move", lambda: self._sender.send(cell, to, memory=memory))
        self.cells.count("moved_away")
        self.cells.count(f"moved_away_{moved.how}")
        return moved

    async def settle(self, sandbox: str, to: Host | None) -> bool:
        cell = self.cells.get(sandbox)
        return await self.cells.alone(cell, "settle", lambda: self._sender.settle(cell, to))

    async def has(self, sandbox: str) -> bool:
        return await self._arrivals.has(sandbox)

    async def offer(self, move: Moving) -> Address:
        return await self._arrivals.offer(move)

    # -- requests into a sandbox

    async def forward(self, request: web.Request, sandbox: str, port: int = ENVD_PORT) -> web.StreamResponse:
        cell, instance = self.cells.running(sandbox)
        cell.busy += 1
        try:
            about = About(cell.record.image.workdir, instance.shortages)
            return await self._door.serve(request, instance.agent, sandbox, port, about)
        finally:
            self._no_longer_busy(cell)

    async def connect(self, sandbox: str, port: int) -> Stream:
        cell, instance = self.cells.running(sandbox)
        stream = await instance.agent.connect(port)
        cell.busy += 1
        return CountedStream(stream, lambda: self._no_longer_busy(cell))

    def _no_longer_busy(self, cell: Cell) -> None:
        cell.busy -= 1
        cell.used = self._clock.monotonic()

    # -- inside: making

    async def _create(self, order: Order, image: Image, limits: Limits, how: _Start) -> Held:
        now = self._clock.time()
        order = msgspec.structs.replace(order, limits=order.limits or limits)
        assert order.limits is not None
        record = Record(order=order, image=image, state="running", epoch=0, created=now, changed=now)
        displaced = self._admit(image, order, order.limits, None)

        async def build(runtime: Runtime, spec: Spec) -> Instance:
            await self._displace(displaced)
            spec = await self._pages.ready(runtime, spec)
            async with self._turn(spec.id), within(self.cells.time_limits.create, "create", f"sandbox {spec.id}"):
                return await how(runtime, spec)

        cell = await self.cells.make(record, build)
        self._pages.known(image.id)
        return cell.held(self._clock.monotonic())

    async def _begin(self, record: Record, displaced: tuple[Pause, ...], how: How, prepared: bool) -> None:
        """One that comes from elsewhere; on disk when this returns."""

        async def build(runtime: Runtime, spec: Spec) -> Instance:
            await self._displace(displaced)
            spec = await (self._pages.ready(runtime, spec) if prepared else self._sharing.made_of(spec))
            # While it runs elsewhere it may take as long as the move; what must be made anew, as long as a resume.
            limits = self.cells.time_limits
            seconds = limits.resume if prepared else limits.move
            async with self._turn(spec.id), within(seconds, "resume", f"sandbox {spec.id}"):
                return await how(runtime, spec)

        await self.cells.make(record, build, durable=True)
        self._pages.known(record.image.id)

    def _admit(self, image: Image, order: Order, limits: Limits, private: int | None) -> tuple[Pause, ...]:
        """Whom to pause first. Raises SandboxDenied. Nothing may be awaited between this and the cell it is for."""
        if self._draining:
            self.cells.count("denied")
            raise SandboxDenied(f"host {self.name} is being drained: try another", 5.0)
        request = Request(
            template=image.id,
            pages=self._pages.asked(image, order.runtime, order.tenant, order.id),
            group=order.group,
            declared=limits.memory_mib * MIB,
            cpus=limits.cpus,
            priority=order.priority,
            mandatory=order.mandatory,
            private=private,
        )
        answer = self._admission.place((self.view(),), request)
        if isinstance(answer, Deny):
            self.cells.count("denied")
            raise SandboxDenied(answer.message, answer.retry_after_s)
        assert isinstance(answer, Admit)
        return answer.pause

    def _templates_needed(self) -> set[str]:
        return {*self._images.names(), *(kept.template for kept in self._snapshots.infos())}

    async def _displace(self, pauses: tuple[Pause, ...]) -> None:
        for pause in pauses:
            await self._pause_for_memory(pause)

    def _turn(self, sandbox: str) -> Turn:
        return Turn(self._starting, self.cells.time_limits.queue, sandbox)

    async def _start_runtimes(self) -> None:
        failed: dict[str, str] = {}
        for name, runtime in list(self._runtimes.items()):
            try:
                self._abilities[name] = await runtime.start()
            except RuntimeUnavailable as error:
                failed[name] = str(error)
                _log.warning("runtime %s does not work here: %s", name, error)
                del self._runtimes[name]
        if not self._runtimes:
            raise RuntimeUnavailable("; ".join(f"{name}: {why}" for name, why in failed.items()) or "no runtime given")

    # -- inside: pausing and resuming

    async def _pause(self, cell: Cell, memory: bool) -> Held:
        if cell.record.state != "running":
            raise SandboxPaused(f"sandbox {cell.id} is {cell.record.state} already")
        before = cell.record.footprint.total
        await self.cells.change(
            cell, "pausing", "pause", self.cells.time_limits.pause, lambda instance: instance.pause(memory=memory)
        )
        self.cells.count("paused")
        await self._footprints.measure(cell)
        self._learned.paused(cell.record.order.runtime, before, cell.record.footprint.total)
        return cell.held(self._clock.monotonic())

    async def _resume(self, cell: Cell) -> Held:
        if cell.record.state != "running":
            order = cell.record.order
            displaced = self._admit(cell.record.image, order, cell.limits, cell.record.footprint.total)
            await self._displace(displaced)
            async with self._turn(cell.id):
                began = self._clock.monotonic()
                await self.cells.change(
                    cell, "resuming", "resume", self.cells.time_limits.resume, lambda instance: instance.resume()
                )
            cell.used = self._clock.monotonic()
            self._learned.resumed(order.runtime, cell.used - began)
            self.cells.count("resumed")
        return cell.held(self._clock.monotonic())

    async def _snapshot(self, cell: Cell, snapshot: str, memory: bool) -> SnapshotInfo:
        record = cell.record

        async def write(directory: Path) -> Kept:
            async with within(self.cells.time_limits.snapshot, "snapshot", f"sandbox {cell.id}"):
                taken = await cell.alive().snapshot(directory, memory=memory)
            info = SnapshotInfo(
                id=snapshot,
                sandbox=cell.id,
                template=record.image.id,
                runtime=taken.runtime,
                memory=taken.memory,
                bytes=taken.bytes,
                created=self._clock.time(),
            )
            return Kept(info, record.image, cell.limits, record.order.env)

        return await self._snapshots.add(snapshot, write)

    # -- inside: watching memory

    async def _guard(self) -> None:
        await self._clock.sleep(self._config.guard_s)
        for pause in self._admission.relieve(self.view()):
            await self._pause_for_memory(pause)

    async def _pause_for_memory(self, pause: Pause) -> None:
        try:
            cell = self.cells.get(pause.sandbox)
            await self.cells.alone(cell, "pause", lambda: self._pause(cell, True))
        except SandboxError as error:
            self.cells.count("pauses_for_memory_failed")
            _log.warning("sandbox %s could not be paused for %s: %s", pause.sandbox, pause.reason, error)
        else:
            self.cells.count("paused_for_memory")
            _log.info("sandbox %s is paused: %s", pause.sandbox, pause.reason)

    def _on_ended(self, sandbox: str) -> None:
        self._admission.ended(sandbox)
        self._door.forget(sandbox)
        self._pages.ended(sandbox)

    def _counters(self) -> dict[str, float]:
        errors = {f"errors_in_{name.replace(' ', '_')}": float(n) for name, n in self._background.errors.items()}
        return {**self.cells.counters, **self._images.counters(), **errors}
