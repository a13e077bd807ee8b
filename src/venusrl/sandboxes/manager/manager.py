"""What can be done with sandboxes, whoever asks.

Owns: creating, connecting to, pausing, resuming, ending; on which host each is. ``forks.py`` adds snapshots and forks,
``upkeep.py`` what happens by itself.

Must not know: HTTP, SQL, runtimes.

Guarantees: a create that failed or was cancelled leaves nothing; a sandbox is on exactly one host; no quota is passed;
a refusal for want of room says when to try again; what is answered is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AbstractContextManager

from msgspec.structs import replace

from venusrl.clock import Clock
from venusrl.sandboxes.admission.api import Admit, Deny
from venusrl.sandboxes.host.api import Held, Moved
from venusrl.sandboxes.host.background import Background
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import asks, lifecycle, tokens
from venusrl.sandboxes.manager.asks import Ask, Catalogue, Settings, Source
from venusrl.sandboxes.manager.book import Book
from venusrl.sandboxes.manager.errors import Conflict, Invalid
from venusrl.sandboxes.manager.fleet import Fleet
from venusrl.sandboxes.manager.keys import Keys
from venusrl.sandboxes.manager.records import Egress, Key, PausedBy, Record, SnapshotRecord
from venusrl.sandboxes.manager.recovery import Recovery
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.manager.store import Store
from venusrl.sandboxes.manager.tokens import Secret
from venusrl.sandboxes.protocol import Limits, SandboxError, SandboxGone, SandboxPaused

_log = logging.getLogger(__name__)
_HEALTHY_S = 5.0


class Manager:
    """All sandboxes of this service."""

    def __init__(
        self,
        store: Store,
        secret: Secret,
        fleet: Fleet,
        catalogue: Catalogue,
        clock: Clock,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        replicas: Replicas | None = None,
    ) -> None:
        self.store = store
        self.secret = secret
        self.fleet = fleet
        self.catalogue = catalogue
        self.clock = clock
        self.settings = settings
        self.keys = Keys(store, clock)
        self.book = Book(store, clock, turn_s=settings.turn_s)
        self.background = Background(clock)
        self.snapshots = {one.id: one for one in store.snapshots()}
        self.counters: dict[str, int] = {}
        self.making: set[str] = set()
        """Those being created now, by this process."""
        self.moving: set[str] = set()
        """Those on their way to another host. Their host serves them for as long as they run there."""
        self.recovery = Recovery(self, replicas)

    # Create

    async def create(self, key: Key, ask: Ask) -> Record:
        """Raises Refused, SandboxError."""
        source = await self.source(key.tenant, ask.template, ask.metadata.get(asks.RUNTIME, ""))
        with self.keys.starting(key, self.book.running(key.id)):
            return await self.make(self.draft(key, ask, source), source, ask.timeout_s)

    async def source(self, tenant: str, template: str, runtime: str = "") -> Source:
        """A snapshot of the tenant, else a template. Raises TemplateNotFound."""
        snapshot = self.find_snapshot(tenant, template)
        if snapshot is not None:
            return asks.snapshot_source(await self.recovery.snapshot(snapshot), template)
        image = await self.catalogue.resolve(template, tenant)
        limits = Limits(memory_mib=image.memory_mib, cpus=float(image.cpus), disk_mib=image.disk_mib)
        alias = template if template != image.id else image.name
        # A public template of another tenant can be had by its name alone.
        named = image.id if image.owner in ("", tenant) else template
        return Source(named, alias, runtime or self.settings.runtime, limits, None, image.id)

    def find_snapshot(self, tenant: str, name: str) -> SnapshotRecord | None:
        found = self.snapshots.get(name)
        if found is None:
            found = next((one for one in self.snapshots.values() if one.tenant == tenant and name in one.names), None)
        return found if found is not None and found.tenant == tenant else None

    def draft(self, key: Key, ask: Ask, source: Source) -> Record:
        """The record of a sandbox that does not exist yet. Raises Invalid."""
        if ask.auto_resume and (ask.on_timeout != "pause" or not ask.pause_memory):
            raise Invalid("autoResume needs autoPause with its memory kept")
        priority, mandatory = asks.wishes(ask.metadata)
        now = self.book.created_now()
        return Record(
            id=ask.id or tokens.new_id("s"),
            tenant=key.tenant,
            key=key.id,
            template=source.template,
            alias=source.alias,
            state="creating",
            created=now,
            ends=now + ask.timeout_s,
            timeout_s=ask.timeout_s,
            runtime=source.runtime,
            limits=source.limits,
            on_timeout=ask.on_timeout,
            pause_memory=ask.pause_memory,
            auto_resume=ask.auto_resume,
            secure=ask.secure,
            egress=ask.egress,
            metadata=ask.metadata,
            env=ask.env,
            group=ask.metadata.get(asks.GROUP, ""),
            priority=priority,
            mandatory=mandatory,
        )

    async def make(self, record: Record, source: Source, timeout_s: float) -> Record:
        """Turn a draft into a running sandbox, or leave nothing."""
        self.making.add(record.id)
        self.book.save(record)
        try:
            held, host = await self._on_some_host(record, source)
        except BaseException as error:  # whatever it was, a cancelled request too: nothing may stay behind
            last = self.book.records.get(record.id, record)
            self.book.drop(record)
            if last.host and not isinstance(error, SandboxError):
                self.background.operation(f"undo {record.id}", self._undo(last.host, record.id))
            self.count("create_failed")
            raise
        finally:
            self.making.discard(record.id)
        made = replace(record, limits=held.limits, runtime=held.runtime)
        made = self.book.save(lifecycle.running(made, self.clock.time(), timeout_s, host))
        self.book.log(made.id, "info", f"sandbox created on {host}", template=source.alias or source.template)
        self.count("created")
        return made

    async def _on_some_host(self, record: Record, source: Source) -> tuple[Held, str]:
        tried: list[str] = []
        failure: Exception | None = None
        while True:
            answer = self.fleet.place(asks.request(record, source.learnt_as), only=source.hosts, exclude=tried)
            if isinstance(answer, Deny):
                raise failure or asks.denied(answer)
            name = answer.host
            self.book.save(replace(record, host=name))
            self.fleet.placed(name, asks.view(record, source.learnt_as))
            try:
                await self.make_room(answer)
                held = await self.fleet.host(name).create(asks.order(record, self.settings.internet))
            except asks.NOT_HERE as error:
                self.fleet.removed(name, record.id)
                failure = error if isinstance(error, SandboxError) else HostLost(f"the node {name!r} failed: {error}")
                tried.append(name)
                continue
            except BaseException:  # whatever it was: put back what was, and pass it on
                self.fleet.removed(name, record.id)
                raise
            return held, name

    async def _undo(self, host: str, sandbox: str) -> None:
        with contextlib.suppress(SandboxError, OSError):  # gone is what is wanted; what is lost, reconciling ends
            await self.fleet.host(host).kill(sandbox)

    # Connect, resume, wake

    async def connect(
        self,
        key: Key,
        sandbox: str,
        timeout_s: float,
        *,
        reboot: bool = False,
        only_paused: bool = False,
        auto_pause: bool | None = None,
    ) -> tuple[Record, bool]:
        """A running sandbox, and whether it had to be resumed. ``reboot``: without its memory, files kept.

        ``only_paused`` (a running one is a conflict) and ``auto_pause`` are for E2B's older resume call.
        """
        self.book.get(key.tenant, sandbox)
        async with self.book.turn(sandbox) as record:
            if record.state == "running":
                if only_paused:
                    raise Conflict(f"sandbox {sandbox!r} is running already")
                return self.book.save(lifecycle.connected(record, self.clock.time(), timeout_s)), False
            with self._quota(record, key):
                record = await self._resume(record)
                if reboot and record.memory_kept:
                    await self._reboot(record)
                made = lifecycle.running(record, self.clock.time(), timeout_s, record.host)
                if auto_pause is not None:
                    made = replace(made, on_timeout="pause" if auto_pause else "kill")
                self.book.save(made)
            self.book.log(sandbox, "info", f"sandbox resumed on {made.host}")
            return made, True

    async def wake(self, sandbox: str, *, host_says_paused: bool = False) -> Record:
        """Resume for the sake of traffic. Raises Conflict when its user did not allow that, and as ``connect``.

        ``host_says_paused``: its host refused the traffic, so that it was paused there without the manager's doing.
        """
        async with self.book.turn(sandbox) as record:
            if record.state == "running" and host_says_paused:
                held = await self.ask(record)
                if held is not None and held.state == "paused":
                    record = self.book.save(lifecycle.paused(record, "pressure", True))
            if record.state == "running":
                return record
            kept = self.recovery.kept(record) if self.recovery.away(record) else None
            if not lifecycle.wakes_on_traffic(record) or (kept is not None and not kept.whole):
                raise Conflict(f"sandbox {sandbox!r} is paused, and not to be resumed by traffic: connect to it first")
            key = next((one for one in self.store.all_keys() if one.id == record.key), None)
            with self._quota(record, key):
                record = await self._resume(record)
                made = self.book.save(lifecycle.woken(record, self.clock.time(), record.host))
            self.book.log(sandbox, "info", f"sandbox resumed on {made.host} by traffic")
            self.count("woken")
            return made

    def _quota(self, record: Record, key: Key | None) -> AbstractContextManager[None]:
        """Room under the key's quota. What its host paused for memory's sake never stopped counting."""
        if key is None or record.paused_by == "pressure":
            return contextlib.nullcontext()
        return self.keys.starting(key, self.book.running(key.id), new=False)

    async def _resume(self, record: Record) -> Record:
        """Resume where it is, else where there is room, else from its copy; with the host it runs on then."""
        self.book.passing(record, "resuming")
        try:
            made = await self._resumed(record)
        except SandboxGone as error:
            self.fleet.removed(record.host, record.id)
            self.book.end(record, f"lost while it was paused: {error}")
            raise
        except BaseException:  # whatever it was: put back what was, and pass it on
            current = self.book.records.get(record.id)
            if current is not None:
                self.book.save(replace(record, host=current.host, fence=current.fence))
            raise
        self.fleet.placed(made.host, asks.view(record, record.template))
        self.count("resumed")
        return made

    async def _resumed(self, record: Record) -> Record:
        if self.recovery.away(record):
            return await self.recovery.sandbox(record)
        try:
            host = await self._where_to_resume(record)
            current = self.book.records[record.id]
            if record.replica:  # from here on its host may have more than the copy
                current = self.book.save(replace(record, host=host, replica=""))
                self.book.passing(current, "resuming")
            await self.fleet.host(host).resume(record.id)
        except (SandboxGone, HostLost) as error:
            record = replace(record, host=self.book.records[record.id].host)
            gone = isinstance(error, SandboxGone) or self.recovery.away(record)
            if not gone or self.recovery.kept(record) is None:
                raise
            return await self.recovery.sandbox(record)
        return replace(record, host=host)

    async def _where_to_resume(self, record: Record) -> str:
        held = self.fleet.held(record.host, record.id)
        private = held.footprint.total or None if held is not None else None
        request = asks.request(record, record.template, private)
        origin = self.fleet.host(record.host)
        here = self.fleet.place(request, only=(record.host,))
        if isinstance(here, Admit):
            await self.make_room(here)
            return record.host
        there = self.fleet.place(request, exclude=(record.host,))
        if isinstance(there, Deny):
            raise asks.denied(here)
        await self.make_room(there)
        how = await origin.move(record.id, self.fleet.host(there.host))
        self.moved(record, there.host, how)
        self.book.passing(self.book.records[record.id], "resuming")
        return there.host

    async def _reboot(self, record: Record) -> None:
        there = self.fleet.host(record.host)
        await there.pause(record.id, memory=False)
        await there.resume(record.id)

    def moved(self, record: Record, to: str, how: Moved) -> Record:
        """It is on another host now, as running or as paused as before."""
        self.fleet.removed(record.host, record.id)
        fields = {"how": how.how, "outage_ms": f"{1000 * how.outage_s:.0f}", **({"why": how.why} if how.why else {})}
        self.book.log(record.id, "info", f"sandbox moved from {record.host} to {to}", **fields)
        self.count("moved")
        self.count(f"moved_{how.how}")
        return self.book.save(replace(record, host=to))

    # Pause, end, time

    async def pause(
        self, tenant: str, sandbox: str, *, memory: bool = True, healthy: bool = False, by: PausedBy = "user"
    ) -> Record:
        """Raises Conflict when it is paused already."""
        self.book.get(tenant, sandbox)
        async with self.book.turn(sandbox) as record:
            return await self.pause_now(record, memory=memory, healthy=healthy, by=by)

    async def pause_now(self, record: Record, *, memory: bool, healthy: bool, by: PausedBy) -> Record:
        """For whoever has the turn."""
        if record.state == "paused":
            if record.paused_by != "pressure":
                raise Conflict(f"sandbox {record.id!r} is paused already")
            return self.book.save(lifecycle.paused(record, by, record.memory_kept))
        host = self.fleet.host(record.host)
        if healthy:
            await self._check_health(record)
        self.book.passing(record, "pausing")
        try:
            with contextlib.suppress(SandboxPaused):  # its host was quicker, for memory's sake
                await host.pause(record.id, memory=memory)
        except SandboxGone as error:
            self.fleet.removed(record.host, record.id)
            self.book.end(record, f"ended before it could be paused: {error}")
            raise
        except BaseException:  # whatever it was: put back what was, and pass it on
            self.book.save(record)
            raise
        self.book.log(record.id, "info", f"sandbox paused ({by})", memory=str(memory).lower())
        self.count("paused")
        return self.book.save(lifecycle.paused(record, by, memory))

    async def _check_health(self, record: Record) -> None:
        try:
            async with asyncio.timeout(_HEALTHY_S):
                await self.fleet.host(record.host).usage(record.id)
        except (TimeoutError, SandboxError) as error:
            raise Conflict(
                f"the sandbox does not answer ({error or 'timeout'}): it was not paused",
                error_code="sandbox_snapshot_guest_agent_unresponsive",
            ) from error

    async def kill(self, tenant: str, sandbox: str, cause: str = "killed by its user") -> None:
        """Raises NotFound when there is none (any more)."""
        self.book.get(tenant, sandbox)
        async with self.book.turn(sandbox) as record:
            await self.kill_now(record, cause)

    async def kill_now(self, record: Record, cause: str) -> None:
        """For whoever has the turn. On a host that does not answer it is ended when that one comes back."""
        try:
            await self.fleet.host(record.host).kill(record.id)
        except (SandboxGone, HostLost) as error:
            _log.info("ending %s: %s", record.id, error)
        self.fleet.removed(record.host, record.id)
        self.book.end(record, cause)
        self.count("ended")

    def set_timeout(self, tenant: str, sandbox: str, timeout_s: float) -> None:
        record = self.book.get(tenant, sandbox)
        self.book.save(lifecycle.retimed(record, self.clock.time(), timeout_s))

    def refresh(self, tenant: str, sandbox: str, duration_s: float) -> None:
        """Live at least that long from now."""
        record = self.book.get(tenant, sandbox)
        if record.state != "paused":
            self.book.save(lifecycle.connected(record, self.clock.time(), duration_s))

    async def set_network(self, tenant: str, sandbox: str, egress: Egress) -> None:
        self.book.get(tenant, sandbox)
        async with self.book.turn(sandbox) as record:
            if record.state != "running":
                raise Conflict(f"sandbox {sandbox!r} is not running")
            kept = replace(egress, public=record.egress.public, mask_host=record.egress.mask_host)
            await self.fleet.host(record.host).set_network(record.id, kept.network(self.settings.internet))
            self.book.save(replace(record, egress=kept))
            self.book.log(sandbox, "info", "network settings changed")

    async def set_priority(self, tenant: str, sandbox: str, priority: float, mandatory: bool) -> None:
        self.book.get(tenant, sandbox)
        async with self.book.turn(sandbox) as record:
            await self.fleet.host(record.host).set_priority(record.id, priority, mandatory)
            self.book.save(replace(record, priority=priority, mandatory=mandatory))

    # Shared

    async def make_room(self, answer: Admit) -> None:
        """Pause whom the policy displaces. Whoever is being changed just now is left alone."""
        for one in answer.pause:
            record = self.book.records.get(one.sandbox)
            if record is None or self.book.busy(record.id):
                continue
            async with self.book.turn(record.id) as current:
                if current.state == "running":
                    await self.pause_now(current, memory=True, healthy=False, by="pressure")

    async def ask(self, record: Record) -> Held | None:
        """What its host says of it now."""
        await self.fleet.refresh(record.host)
        return self.fleet.held(record.host, record.id)

    def count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1
