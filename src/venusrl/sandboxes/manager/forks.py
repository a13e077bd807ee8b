"""Snapshots, and the copies made from them.

Owns: taking, listing, removing snapshots; forks (a snapshot nobody keeps, and sandboxes made of it at once).

Must not know: HTTP, how a runtime keeps state.

Guarantees: of a fork each copy succeeds or fails by itself, and the snapshot behind it is gone afterwards; a snapshot
outlives its sandbox; a name belongs to the newest snapshot that asked for it.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from venusrl.sandboxes.host.api import SnapshotInfo
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import asks, tokens
from venusrl.sandboxes.manager.asks import Ask
from venusrl.sandboxes.manager.errors import Conflict, Invalid, NotFound
from venusrl.sandboxes.manager.manager import Manager
from venusrl.sandboxes.manager.records import Key, Record, SnapshotRecord
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, TemplateNotFound

_log = logging.getLogger(__name__)
MAX_FORKS = 20
_AT_ONCE = 8
FORK_PREFIX = "fork_"


class Forks:
    """Works on the sandboxes of one manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def snapshot(self, tenant: str, sandbox: str, name: str = "", *, memory: bool = True) -> SnapshotRecord:
        """Of a running or paused sandbox. Raises NotFound, Conflict."""
        manager = self._manager
        manager.book.get(tenant, sandbox)
        async with manager.book.turn(sandbox) as record:
            info = await self._take(record, tokens.new_id("snap"), memory)
        made = SnapshotRecord(
            id=info.id,
            tenant=tenant,
            sandbox=sandbox,
            template=self._learnt_as(record),
            host=record.host,
            runtime=record.runtime,
            limits=record.limits,
            memory=info.memory,
            bytes=info.bytes,
            created=manager.book.created_now(),
            names=(name,) if name else (),
        )
        unnamed = [
            replace(one, names=tuple(other for other in one.names if other != name))
            for one in manager.snapshots.values()
            if name and one.tenant == tenant and name in one.names
        ]
        manager.store.put_snapshots([*unnamed, made])
        for one in (*unnamed, made):
            manager.snapshots[one.id] = one
        manager.book.log(sandbox, "info", f"snapshot {made.id} taken", memory=str(memory).lower())
        manager.count("snapshots")
        return made

    def of(self, tenant: str, sandbox: str = "", name: str = "") -> list[SnapshotRecord]:
        return [
            one
            for one in self._manager.snapshots.values()
            if one.tenant == tenant and (not sandbox or one.sandbox == sandbox) and (not name or _named(one, name))
        ]

    async def remove(self, tenant: str, name: str) -> None:
        """By id or name. Raises NotFound. On a node that is lost it is removed when that one is back."""
        manager = self._manager
        found = manager.find_snapshot(tenant, name)
        if found is None:
            raise NotFound(f"snapshot {name!r} was not found")
        try:
            await manager.fleet.host(found.host).remove_snapshot(found.id)
        except (SandboxGone, TemplateNotFound, HostLost) as error:
            _log.info("removing %s: %s", found.id, error)
        manager.snapshots.pop(found.id, None)
        manager.store.remove_snapshot(found.id)

    async def fork(self, key: Key, sandbox: str, count: int, timeout_s: float) -> list[Record | SandboxError]:
        """``count`` copies of a running sandbox, each made or not. Raises NotFound, Conflict, Invalid, TooMany."""
        if not 1 <= count <= MAX_FORKS:
            raise Invalid(f"count is from 1 to {MAX_FORKS}")
        manager = self._manager
        manager.book.get(key.tenant, sandbox)
        with manager.keys.starting(key, manager.book.running(key.id), count):
            async with manager.book.turn(sandbox) as record:
                if record.state != "running":
                    raise Conflict(f"sandbox {sandbox!r} is not running: connect to it first")
                info = await self._take(record, tokens.new_id(FORK_PREFIX), memory=True)
            try:
                made = await self._copies(key, record, info, count, timeout_s)
            finally:
                # Nobody knows its name: it goes however this ends. The host is asked even when the client left.
                await asyncio.shield(manager.background.operation(f"drop {info.id}", self._drop(record.host, info.id)))
        manager.book.log(sandbox, "info", f"forked into {sum(isinstance(one, Record) for one in made)} sandboxes")
        return made

    async def _copies(
        self, key: Key, record: Record, info: SnapshotInfo, count: int, timeout_s: float
    ) -> list[Record | SandboxError]:
        learnt_as = self._learnt_as(record)
        source = asks.Source(info.id, record.alias, record.runtime, record.limits, (record.host,), learnt_as)
        ask = Ask(
            template=info.id,
            timeout_s=timeout_s,
            on_timeout=record.on_timeout,
            pause_memory=record.pause_memory,
            auto_resume=record.auto_resume,
            secure=record.secure,
            egress=record.egress,
            metadata=record.metadata,
            env=record.env,
        )
        room = asyncio.Semaphore(_AT_ONCE)

        async def one() -> Record | SandboxError:
            async with room:
                try:
                    draft = self._manager.draft(key, ask, source)
                    made = await self._manager.make(draft, source, timeout_s)
                except SandboxError as error:
                    return error
            # Its origin is a snapshot that will be gone: to its user it is of the template its parent is of.
            return self._manager.book.save(replace(made, template=record.template))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(count)]
        return [task.result() for task in tasks]

    async def _take(self, record: Record, snapshot: str, memory: bool) -> SnapshotInfo:
        return await self._manager.fleet.host(record.host).snapshot(record.id, snapshot, memory=memory)

    async def _drop(self, host: str, snapshot: str) -> None:
        try:
            await self._manager.fleet.host(host).remove_snapshot(snapshot)
        except SandboxError as error:  # reconciling removes what nobody knows
            _log.warning("the snapshot %s of a fork could not be removed: %s", snapshot, error)

    def _learnt_as(self, record: Record) -> str:
        snapshot = self._manager.snapshots.get(record.template)
        return snapshot.template if snapshot is not None else record.template


def _named(snapshot: SnapshotRecord, name: str) -> bool:
    return name == snapshot.id or name in snapshot.names or name.removesuffix(":default") in snapshot.names
