"""A host without a machine: sandboxes are dictionaries.

Owns: ``FakeHost``, which implements ``venusrl.sandboxes.host.api.Host``. Files of a sandbox are set by a test through
``files`` and follow it through pause, snapshot, fork and move, so that a test can see that they did.

Must not know: E2B, the manager.

Guarantees: the state changes and errors a real host promises (gone, paused, denied, ids never reused); nothing happens
by itself: deaths, pauses under pressure and failures come when a test asks for them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from venusrl.clock import Clock, SystemClock
from venusrl.sandboxes.admission.api import HostView, SandboxView
from venusrl.sandboxes.agent.api import Stream, Usage
from venusrl.sandboxes.host.api import (
    ENVD_PORT,
    Address,
    Died,
    Held,
    Host,
    HostStatus,
    KeptState,
    Moved,
    Moving,
    Order,
    Peer,
    SnapshotInfo,
    State,
    StateFile,
    StateKind,
)
from venusrl.sandboxes.host.errors import AlreadyExists
from venusrl.sandboxes.protocol import Limits, SandboxDenied, SandboxError, SandboxGone, SandboxPaused, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Abilities, Footprint, Network

MIB = 1 << 20


class FakeSandbox:
    """One sandbox; a test may change ``files``, ``private`` and ``idle_s``."""

    def __init__(self, order: Order, limits: Limits, now: float, files: dict[str, bytes]) -> None:
        self.order = order
        self.limits = limits
        self.network = order.network
        self.priority = order.priority
        self.mandatory = order.mandatory
        self.state: State = "running"
        self.memory_kept = True
        self.created = now
        self.changed = now
        self.files = dict(files)
        self.private = 4 * MIB
        self.idle_s: float | None = 0.0
        self.given_to = ""
        self.epoch = 0


class FakeSnapshot:
    """A snapshot's files, and what it is of."""

    def __init__(self, info: SnapshotInfo, limits: Limits, files: dict[str, bytes]) -> None:
        self.info = info
        self.limits = limits
        self.files = dict(files)


class FakeHost:
    """Implements ``Host``. ``calls`` is what was asked, in order."""

    def __init__(
        self,
        name: str = "host-1",
        *,
        clock: Clock | None = None,
        templates: tuple[str, ...] = ("base", "host"),
        memory: int = 8 << 30,
        capacity: int | None = None,
        cpus: float = 4.0,
    ) -> None:
        """``capacity``: how many sandboxes may run at once; None = any number."""
        self._name = name
        self._clock = clock or SystemClock()
        self._memory = memory
        self._cpus = cpus
        self._capacity = capacity
        self._templates = templates
        self._events: list[asyncio.Queue[Died | None]] = []
        self._failures: dict[str, list[Exception]] = {}
        self._used_ids: set[str] = set()
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.snapshots: dict[str, FakeSnapshot] = {}
        self.calls: list[tuple[str, str]] = []
        self.states = FakeStates(self)
        self.draining = False
        self.closed = False
        self.peer: Peer | None = None
        self.hung_up = 0
        self.gate: asyncio.Event | None = None
        """When set to an Event, create, pause, resume and ``states.restore`` wait for it after they began."""

    # What a test does

    def fail(self, call: str, error: Exception, times: int = 1) -> None:
        """Let the next ``times`` calls of that name raise ``error``."""
        self._failures.setdefault(call, []).extend([error] * times)

    def die(self, sandbox: str, cause: str = "out of memory") -> None:
        """End a sandbox as if by itself."""
        self._find(sandbox)
        del self.sandboxes[sandbox]
        for queue in self._events:
            queue.put_nowait(Died(sandbox, cause))

    def pause_under_pressure(self, sandbox: str) -> None:
        """What a host's guard does, without being asked by the manager."""
        self._change(sandbox, "paused")

    # Host

    @property
    def name(self) -> str:
        return self._name

    async def status(self) -> HostStatus:
        self._called("status", "")
        return HostStatus(
            view=self._view(),
            runtimes={"namespace": Abilities(memory_snapshot=True, live_migration=False, egress=True)},
            memory_total=self._memory,
            memory_reserve=self._memory // 10,
            held=tuple(self._held(one) for one in self.sandboxes.values()),
            snapshots=tuple(snapshot.info for snapshot in self.snapshots.values()),
            templates=self._templates,
        )

    async def create(self, order: Order) -> Held:
        self._called("create", order.id)
        if order.id in self._used_ids:
            raise SandboxError(f"the id {order.id} was used before")
        if self.draining:
            raise SandboxDenied(f"{self._name} is being drained", 5.0)
        running = sum(one.state == "running" for one in self.sandboxes.values())
        if self._capacity is not None and running >= self._capacity:
            raise SandboxDenied(f"{self._name} has room for {self._capacity} sandboxes", 2.0)
        limits, files = self._source(order)
        await self._pass_gate()
        self._used_ids.add(order.id)
        made = self.sandboxes[order.id] = FakeSandbox(order, limits, self._clock.time(), files)
        return self._held(made)

    async def kill(self, sandbox: str) -> None:
        self._called("kill", sandbox)
        self._find(sandbox)
        del self.sandboxes[sandbox]

    async def pause(self, sandbox: str, *, memory: bool = True) -> Held:
        self._called("pause", sandbox)
        one = self._find(sandbox)
        if one.state == "paused":
            raise SandboxPaused(f"{sandbox} is paused already")
        await self._pass_gate()
        one.memory_kept = memory
        return self._change(sandbox, "paused")

    async def resume(self, sandbox: str) -> Held:
        self._called("resume", sandbox)
        self._find(sandbox)
        await self._pass_gate()
        return self._change(sandbox, "running")

    async def snapshot(self, sandbox: str, snapshot: str, *, memory: bool = True) -> SnapshotInfo:
        self._called("snapshot", sandbox)
        one = self._find(sandbox)
        size = sum(len(data) for data in one.files.values()) + (one.private if memory else 0)
        info = SnapshotInfo(snapshot, sandbox, one.order.template, one.order.runtime, memory, size, self._clock.time())
        self.snapshots[snapshot] = FakeSnapshot(info, one.limits, one.files)
        return info

    async def remove_snapshot(self, snapshot: str) -> None:
        self._called("remove_snapshot", snapshot)
        if self.snapshots.pop(snapshot, None) is None:
            raise SandboxGone(f"there is no snapshot {snapshot} on {self._name}")

    async def set_network(self, sandbox: str, network: Network) -> None:
        self._called("set_network", sandbox)
        self._find(sandbox).network = network

    async def set_priority(self, sandbox: str, priority: float, mandatory: bool) -> None:
        self._called("set_priority", sandbox)
        one = self._find(sandbox)
        one.priority, one.mandatory = priority, mandatory

    async def move(self, sandbox: str, to: Host) -> Moved:
        self._called("move", sandbox)
        one = self._find(sandbox)
        if not isinstance(to, FakeHost):
            raise SandboxError("a fake host moves sandboxes to fake hosts only")
        to.sandboxes[sandbox] = self.sandboxes.pop(sandbox)
        one.epoch += 1
        to._used_ids.add(one.order.id)
        return Moved("snapshot", "a fake host moves nothing that runs", 0.25)

    async def settle(self, sandbox: str, to: Host | None) -> bool:
        """Of one whose ``given_to`` a test has set: it is where ``to`` says."""
        self._called("settle", sandbox)
        one = self._find(sandbox)
        there = to is not None and await to.has(sandbox)
        if there:
            del self.sandboxes[sandbox]
        one.given_to = ""
        return there

    async def has(self, sandbox: str) -> bool:
        self._called("has", sandbox)
        return sandbox in self.sandboxes

    async def offer(self, move: Moving) -> Address:
        """Where nobody listens: what a test looks at is that the call came."""
        self._called("offer", move.sandbox)
        return Address("127.0.0.1", 9, f"{move.id}-token")

    async def forward(self, request: web.Request, sandbox: str, port: int) -> web.StreamResponse:
        """``GET /health`` as E2B's services answer it; else the sandbox, port, method and path as JSON."""
        self._called("forward", sandbox)
        self._running(sandbox)
        if port == ENVD_PORT and request.path == "/health":
            return web.Response(status=204)
        return web.json_response(
            {"sandbox": sandbox, "host": self._name, "port": port, "method": request.method, "path": request.path_qs}
        )

    async def connect(self, sandbox: str, port: int) -> Stream:
        self._called("connect", sandbox)
        self._running(sandbox)
        return _Echo()

    async def usage(self, sandbox: str) -> Usage:
        self._called("usage", sandbox)
        one = self._running(sandbox)
        return Usage(
            cpus=max(1, round(one.limits.cpus)),
            cpu_percent=1.5,
            memory_total=one.limits.memory_mib * MIB,
            memory_used=one.private,
            memory_cache=MIB,
            disk_total=one.limits.disk_mib * MIB,
            disk_used=sum(len(data) for data in one.files.values()),
        )

    async def events(self) -> AsyncIterator[Died]:
        queue: asyncio.Queue[Died | None] = asyncio.Queue()
        self._events.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._events.remove(queue)

    async def drain(self, on: bool = True) -> None:
        self._called("drain", "")
        self.draining = on

    async def hang_up(self) -> None:
        self.hung_up += 1

    async def close(self) -> None:
        self.closed = True
        for queue in self._events:
            queue.put_nowait(None)

    # Inside

    def _called(self, call: str, subject: str) -> None:
        self.calls.append((call, subject))
        waiting = self._failures.get(call)
        if waiting:
            raise waiting.pop(0)

    async def _pass_gate(self) -> None:
        await asyncio.sleep(0)  # a real host always lets others run
        if self.gate is not None:
            await self.gate.wait()

    def _source(self, order: Order) -> tuple[Limits, dict[str, bytes]]:
        if order.template in self.snapshots:
            snapshot = self.snapshots[order.template]
            return order.limits or snapshot.limits, snapshot.files
        if order.template not in self._templates:
            raise TemplateNotFound(f"there is no template {order.template!r}; templates: {', '.join(self._templates)}")
        return order.limits or Limits(), {}

    def _find(self, sandbox: str) -> FakeSandbox:
        if sandbox not in self.sandboxes:
            raise SandboxGone(f"there is no sandbox {sandbox} on {self._name}")
        return self.sandboxes[sandbox]

    def _running(self, sandbox: str) -> FakeSandbox:
        one = self._find(sandbox)
        if one.state == "paused":
            raise SandboxPaused(f"{sandbox} is paused")
        return one

    def _change(self, sandbox: str, state: State) -> Held:
        one = self._find(sandbox)
        one.state = state
        one.changed = self._clock.time()
        return self._held(one)

    def _held(self, one: FakeSandbox) -> Held:
        order = one.order
        return Held(
            id=order.id,
            template=order.template,
            runtime=order.runtime,
            state=one.state,
            limits=one.limits,
            tenant=order.tenant,
            group=order.group,
            created=one.created,
            changed=one.changed,
            footprint=Footprint(private=0 if one.state == "paused" else one.private),
            idle_s=one.idle_s,
            epoch=one.epoch,
            given_to=one.given_to,
        )

    def _view(self) -> HostView:
        now = self._clock.time()
        views = tuple(
            SandboxView(
                id=one.order.id,
                template=one.order.template,
                group=one.order.group,
                age_s=now - one.created,
                private=one.private,
                declared=one.limits.memory_mib * MIB,
                paused=one.state == "paused",
                priority=one.priority,
                mandatory=one.mandatory,
                idle_s=one.idle_s,
            )
            for one in self.sandboxes.values()
        )
        used = sum(view.private for view in views if not view.paused)
        return HostView(
            name=self._name,
            capacity=self._memory - self._memory // 10,
            available=self._memory - used,
            cpus=self._cpus,
            shared={one.order.template: 16 * MIB for one in self.sandboxes.values()},
            sandboxes=views,
            draining=self.draining,
        )


class FakeStates:
    """Implements ``host.api.States``: a state is the sandbox's files, each of one piece."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._out: dict[str, dict[str, bytes]] = {}
        self._in: dict[str, tuple[KeptState, dict[str, bytes]]] = {}
        self._taken = 0

    async def take(self, kind: StateKind, subject: str) -> KeptState:
        host = self._host
        host._called("take", subject)
        self._taken += 1
        name = f"{host.name}-{self._taken}"
        epoch, changed, memory = 0, 0.0, True
        if kind == "sandbox":
            one = host._find(subject)
            if one.state != "paused":
                raise SandboxError(f"{subject} is {one.state}")
            order, files = one.order, one.files
            epoch, changed, memory = one.epoch, one.changed, one.memory_kept
        else:
            snapshot = host.snapshots[subject]
            order, files = Order(subject, snapshot.info.template, snapshot.info.runtime), snapshot.files
        self._out[name] = dict(sorted(files.items()))
        return KeptState(
            id=name,
            kind=kind,
            subject=subject,
            origin=host.name,
            runtime=order.runtime,
            template=order.template,
            epoch=epoch,
            changed=changed,
            memory=memory,
            whole=memory,
            record=msgspec.json.encode(order),
            files=tuple(
                StateFile(path, len(data), (hashlib.sha256(data).hexdigest(),))
                for path, data in self._out[name].items()
            ),
        )

    async def read(self, state: str, file: int, piece: int) -> bytes:
        self._host._called("read", state)
        return list(self._out[state].values())[file]

    async def begin(self, state: KeptState) -> bool:
        self._host._called("begin", state.subject)
        self._in[state.id] = (state, {})
        return True

    async def write(self, state: str, file: int, piece: int, data: bytes) -> None:
        kept, files = self._in[state]
        files[kept.files[file].path] = data

    async def restore(self, state: str, epoch: int) -> None:
        kept, files = self._in.pop(state)
        host = self._host
        host._called("restore", kept.subject)
        await host._pass_gate()
        order = msgspec.json.decode(kept.record, type=Order)
        if kept.kind == "snapshot":
            size = kept.total
            info = SnapshotInfo(kept.subject, "", kept.template, kept.runtime, kept.memory, size, kept.changed)
            host.snapshots[kept.subject] = FakeSnapshot(info, Limits(), files)
            return
        older = host.sandboxes.get(kept.subject)
        if older is not None and older.epoch >= epoch:
            raise AlreadyExists(f"{kept.subject} is on {host.name} already")
        if host.draining:
            raise SandboxDenied(f"{host.name} is being drained", 5.0)
        made = host.sandboxes[kept.subject] = FakeSandbox(order, Limits(), host._clock.time(), files)
        made.epoch = epoch
        host._called("restored", kept.subject)

    async def drop(self, state: str) -> None:
        self._out.pop(state, None)
        self._in.pop(state, None)


class _Echo:
    """A stream that gives back what it is given."""

    def __init__(self) -> None:
        self._bytes: asyncio.Queue[bytes] = asyncio.Queue()

    async def read(self) -> bytes:
        return await self._bytes.get()

    async def write(self, data: bytes) -> None:
        await self._bytes.put(data)

    async def write_eof(self) -> None:
        await self._bytes.put(b"")

    async def close(self) -> None:
        await self._bytes.put(b"")
