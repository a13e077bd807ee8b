"""What a lost node does not take with it: copies kept of paused sandboxes and snapshots, and their way back.

Owns: which copies are made and when, what is told of them, the recovery of a sandbox or snapshot on another host.

Must not know: HTTP, files, what a copy consists of.

Guarantees: a copy stands for a sandbox from the moment the record names it, and the record names none that is older
than the pause; the fence is on disk before another host may make the sandbox of a copy, so that whatever comes back of
the lost node is not it; a copy that failed is told of with its reason and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from venusrl.sandboxes.admission.api import Deny, Request
from venusrl.sandboxes.host.api import Host, KeptState, StateKind
from venusrl.sandboxes.host.errors import AlreadyExists, HostLost, OperationTimeout
from venusrl.sandboxes.manager import asks, fencing
from venusrl.sandboxes.manager.errors import Busy
from venusrl.sandboxes.manager.records import Record, SnapshotRecord
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.protocol import SandboxError, SandboxGone

if TYPE_CHECKING:
    from venusrl.sandboxes.manager.manager import Manager

_log = logging.getLogger(__name__)
_STEP_S = 1.0
_AGAIN_S = 30.0
_AT_ONCE = 2
_UNKNOWN_RETRY_S = 5.0


class Recovery:
    """``replicas`` None: no copies are kept."""

    def __init__(self, manager: Manager, replicas: Replicas | None) -> None:
        self._manager = manager
        self.replicas = replicas
        self._copying: set[str] = set()
        self._failed: dict[str, tuple[str, float]] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._snapshots: dict[str, asyncio.Lock] = {}

    # -- telling

    def kept(self, owner: Record | SnapshotRecord) -> KeptState | None:
        """The copy that stands for it."""
        return None if self.replicas is None or not owner.replica else self.replicas.get(owner.replica)

    def told(self, record: Record) -> dict[str, Any] | None:
        """What a list shows of its copy; None while it is not paused."""
        if record.state != "paused":
            return None
        state = self.kept(record)
        if state is not None:
            return {"state": "kept", "reason": "", "bytes": state.total, "memory": state.memory}
        name, reason = self._lacking(record)
        return {"state": name, "reason": reason, "bytes": 0, "memory": False}

    def lost(self, record: Record) -> str:
        """Why it cannot be had now: its node is lost and there is no copy. "" = it can."""
        if record.state != "paused" or not self.away(record) or self.kept(record) is not None:
            return ""
        return (
            f"it is paused on the node {record.host}, which does not answer, and no copy is kept elsewhere "
            f"({self._lacking(record)[1]}): it waits for that node"
        )

    def away(self, record: Record) -> bool:
        """Whether its host is lost, forgotten, or holds what is not the sandbox any more."""
        node = self._manager.fleet.nodes.get(record.host)
        if node is None or node.lost:
            return True
        held = node.held.get(record.id)
        return held is not None and held.epoch < record.fence

    def _lacking(self, record: Record) -> tuple[str, str]:
        if self.replicas is None:
            return "off", "the service was started without --replicas"
        if record.paused_by == "pressure":
            return "none", "its host paused it for memory's sake: it counts as running"
        if record.id in self._copying:
            return "copying", "the copy was not whole yet"
        if record.id in self._failed:
            return "failed", self._failed[record.id][0]
        return "waiting", "it was not its turn yet"

    # -- keeping

    async def step(self) -> None:
        """One round: begin copies of what has none, let go of those that nothing needs."""
        manager, now = self._manager, self._manager.clock.monotonic()
        if self.replicas is not None:
            living = {*manager.book.records, *manager.snapshots}
            self._failed = {one: entry for one, entry in self._failed.items() if one in living}
            owners: list[Record | SnapshotRecord] = [*manager.book.records.values(), *manager.snapshots.values()]
            for owner in owners:
                if self._wants(owner, now):
                    self._copying.add(owner.id)
                    manager.background.watch(f"copy {owner.id}", self._copy(owner))
            named = {owner.replica for owner in owners}
            await self.replicas.keep_only(lambda state: state.id in named or self._changing(state.subject))
        await manager.clock.sleep(_STEP_S)

    def _wants(self, owner: Record | SnapshotRecord, now: float) -> bool:
        node = self._manager.fleet.nodes.get(owner.host)
        if owner.id in self._copying or self.kept(owner) is not None or node is None or node.view() is None:
            return False
        if owner.id in self._failed and now < self._failed[owner.id][1]:
            return False
        if isinstance(owner, SnapshotRecord):
            return True
        paused = owner.state == "paused" and owner.paused_by != "pressure"
        return paused and not self.away(owner) and not self._manager.book.busy(owner.id)

    def _changing(self, subject: str) -> bool:
        return subject in self._copying or self._manager.book.busy(subject)

    async def _copy(self, owner: Record | SnapshotRecord) -> None:
        manager = self._manager
        assert self.replicas is not None
        try:
            async with self._room:
                before = manager.book.touched.get(owner.id)
                kind: StateKind = "sandbox" if isinstance(owner, Record) else "snapshot"
                states = manager.fleet.host(owner.host).states
                state = await self.replicas.pull(states, kind, owner.id)
            if isinstance(owner, Record):
                await self._name(owner, state, before)
            elif owner.id in manager.snapshots:
                self._put_snapshot(replace(manager.snapshots[owner.id], replica=state.id))
            self._failed.pop(owner.id, None)
        except (SandboxError, OSError) as error:
            if owner.id in manager.book.records or owner.id in manager.snapshots:
                _log.warning("no copy of %s could be kept: %s", owner.id, error)
                reason = str(error) or type(error).__name__
                self._failed[owner.id] = (reason, manager.clock.monotonic() + _AGAIN_S)
        finally:
            self._copying.discard(owner.id)

    async def _name(self, record: Record, state: KeptState, before: float | None) -> None:
        """Let the record name its copy, if nothing has changed it since: else that round is for nothing."""
        book = self._manager.book
        async with book.turn(record.id) as current:
            if current.state == "paused" and current.host == record.host and book.touched.get(record.id) == before:
                book.save(replace(current, replica=state.id))
                self._manager.count("copies_kept")

    # -- recovering

    async def sandbox(self, record: Record) -> Record:
        """For whoever has its turn: the paused sandbox, running on another host. Raises HostLost when there is no copy,
        Busy when there is no room or it is not known whether it came to be."""
        state = self.kept(record)
        if state is None:
            raise HostLost(f"sandbox {record.id}: {self.lost(record) or 'no copy of it is kept'}")
        request = asks.request(record, state.template)
        tried = {record.host}
        failure: SandboxError | None = None
        while True:
            answer = self._manager.fleet.place(request, exclude=tried)
            if isinstance(answer, Deny):
                raise failure or asks.denied(answer)
            try:
                await self._manager.make_room(answer)
                return await self._made(record, state, answer.host)
            except (*asks.NOT_HERE, SandboxGone) as error:  # gone is what was on its way, not the sandbox
                failure = HostLost(f"{record.id} could not be recovered on {answer.host}: {error}")
                tried.add(answer.host)

    async def _made(self, record: Record, state: KeptState, name: str) -> Record:
        manager, host = self._manager, self._manager.fleet.host(name)
        await self._pushed(state, host)
        epochs = [state.epoch, *manager.fleet.copies(record.id).values()]
        fenced = manager.book.save(replace(record, state="paused", fence=fencing.raised(record.fence, epochs)))
        manager.book.passing(fenced, "resuming")
        try:
            await host.states.restore(state.id, fenced.fence)
        except (HostLost, OperationTimeout, OSError) as error:
            raise Busy(
                f"whether {name} has sandbox {record.id} is not known ({error}): ask again",
                error_code="node_unreachable",
                retry_after_s=_UNKNOWN_RETRY_S,
            ) from error
        except SandboxError:
            manager.book.save(record)  # it said that it does not have it: what was the sandbox is so again
            manager.book.passing(record, "resuming")
            raise
        lacking = "" if state.whole else "; what ran in it ended with the node"
        manager.book.log(
            record.id, "warn", f"recovered on {name} from its copy: {record.host or 'its node'} lost it{lacking}"
        )
        manager.count("recovered")
        return replace(fenced, host=name, replica="")

    async def _pushed(self, state: KeptState, host: Host) -> None:
        assert self.replicas is not None
        await self.replicas.push(state, host.states)

    async def snapshot(self, snapshot: SnapshotRecord) -> SnapshotRecord:
        """The snapshot where it can be had: on another host if its own is lost and there is a copy."""
        manager = self._manager
        async with self._snapshots.setdefault(snapshot.id, asyncio.Lock()):
            snapshot = manager.snapshots.get(snapshot.id, snapshot)
            node, state = manager.fleet.nodes.get(snapshot.host), self.kept(snapshot)
            if (node is not None and not node.lost) or state is None:
                return snapshot
            limits = snapshot.limits
            answer = manager.fleet.place(Request(snapshot.template, "", limits.memory_mib * asks.MIB, limits.cpus))
            if isinstance(answer, Deny):
                raise asks.denied(answer)
            host = manager.fleet.host(answer.host)
            await self._pushed(state, host)
            with contextlib.suppress(AlreadyExists):  # then an answer was lost
                await host.states.restore(state.id, 0)
            manager.count("snapshots_recovered")
            return self._put_snapshot(replace(snapshot, host=answer.host))

    def _put_snapshot(self, snapshot: SnapshotRecord) -> SnapshotRecord:
        self._manager.store.put_snapshot(snapshot)
        self._manager.snapshots[snapshot.id] = snapshot
        return snapshot
