"""The living sandboxes: one record each, one change at a time.

Owns: the records in memory and their copy on disk, the deadlines, the turns (who may change a sandbox now), the logs.

Must not know: hosts, HTTP, what a change means.

Guarantees: what ``save`` wrote survives a kill of the process; a sandbox of another tenant is as good as none; changes
of one sandbox never overlap, and whoever waits for a turn longer than ``turn_s`` is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.manager import lifecycle
from venusrl.sandboxes.manager.deadlines import Deadlines
from venusrl.sandboxes.manager.errors import Conflict, NotFound
from venusrl.sandboxes.manager.gauges import Gauges
from venusrl.sandboxes.manager.records import Level, LogLine, Record, State
from venusrl.sandboxes.manager.store import Store

_MESSAGE_CHARS = 2000


class Book:
    """Records by id. ``due`` is set whenever a deadline came nearer."""

    def __init__(self, store: Store, clock: Clock, *, turn_s: float = 60.0) -> None:
        self._store = store
        self._clock = clock
        self._turn_s = turn_s
        self._turns: dict[str, asyncio.Lock] = {}
        self._last_created = 0.0
        self.records: dict[str, Record] = {one.id: one for one in store.living()}
        self.deadlines = Deadlines()
        self.gauges = Gauges()
        self.touched: dict[str, float] = {}
        """When each record last changed (monotonic): what a host said before that is old."""
        self.due = asyncio.Event()
        self.changed: dict[str, asyncio.Event] = {}
        for record in self.records.values():
            self._last_created = max(self._last_created, record.created)
            self._time(record)

    # Looking

    def get(self, tenant: str, sandbox: str) -> Record:
        """A living sandbox of this tenant. Raises NotFound."""
        record = self.records.get(sandbox)
        if record is None or record.tenant != tenant:
            raise NotFound(f"sandbox {sandbox!r} was not found")
        return record

    def of_tenant(self, tenant: str) -> Iterable[Record]:
        return (one for one in self.records.values() if one.tenant == tenant)

    def on_host(self, host: str) -> list[Record]:
        return [one for one in self.records.values() if one.host == host]

    def running(self, key: str) -> int:
        """How many a key has running. Those being created or resumed are counted by their reservation."""
        return sum(
            one.key == key
            and (
                one.state in ("running", "pausing", "moving") or (one.state == "paused" and one.paused_by == "pressure")
            )
            for one in self.records.values()
        )

    def history(self, tenant: str, sandbox: str) -> Record:
        """Living or ended lately. Raises NotFound."""
        record = self.records.get(sandbox) or self._store.sandbox(sandbox)
        if record is None or record.tenant != tenant:
            raise NotFound(f"sandbox {sandbox!r} was not found")
        return record

    # Changing

    def created_now(self) -> float:
        """A time of creation that no other sandbox has: lists are ordered by it."""
        self._last_created = max(self._clock.time(), self._last_created + 1e-6)
        return self._last_created

    def save(self, record: Record) -> Record:
        self._store.put(record)
        self.records[record.id] = record
        self.touched[record.id] = self._clock.monotonic()
        self._time(record)
        self._tell(record.id)
        return record

    def passing(self, record: Record, state: State) -> Record:
        """A state on the way to another: in memory alone, for whoever looks meanwhile."""
        self.records[record.id] = msgspec.structs.replace(record, state=state)
        self._tell(record.id)
        return self.records[record.id]

    def end(self, record: Record, cause: str) -> None:
        """It is over. Idempotent."""
        if self.records.pop(record.id, None) is None:
            return
        self._store.put(lifecycle.ended(record, self._clock.time(), cause))
        self.deadlines.remove(record.id)
        self.gauges.forget(record.id)
        self._turns.pop(record.id, None)
        self.touched.pop(record.id, None)
        self._tell(record.id)
        self.log(record.id, "info", f"sandbox ended: {cause}")

    def drop(self, record: Record) -> None:
        """It never was."""
        self.records.pop(record.id, None)
        self._store.forget(record.id)
        self.touched.pop(record.id, None)
        self.deadlines.remove(record.id)
        self._turns.pop(record.id, None)

    @asynccontextmanager
    async def turn(self, sandbox: str) -> AsyncIterator[Record]:
        """The right to change a sandbox; its record as it is now. Raises NotFound, Conflict."""
        lock = self._turns.setdefault(sandbox, asyncio.Lock())
        try:
            async with asyncio.timeout(self._turn_s):
                await lock.acquire()
        except TimeoutError:
            raise Conflict(
                f"sandbox {sandbox!r} is still transitioning. Try again in a moment.", retry_after_s=5.0
            ) from None
        try:
            record = self.records.get(sandbox)
            if record is None:
                raise NotFound(f"sandbox {sandbox!r} was not found")
            yield record
        finally:
            lock.release()
            if sandbox not in self.records and not lock.locked():
                self._turns.pop(sandbox, None)

    def busy(self, sandbox: str) -> bool:
        """Whether somebody is changing it."""
        lock = self._turns.get(sandbox)
        return lock is not None and lock.locked()

    async def settled(self, sandbox: str, within_s: float) -> Record | None:
        """Wait until its state is a lasting one (or it is gone: None). Raises Conflict after ``within_s``."""
        try:
            async with asyncio.timeout(within_s):
                while (record := self.records.get(sandbox)) is not None:
                    if record.state in ("running", "paused"):
                        return record
                    await self.changed.setdefault(sandbox, asyncio.Event()).wait()
        except TimeoutError:
            raise Conflict(f"sandbox {sandbox!r} is still transitioning. Try again in a moment.") from None
        return None

    # Logs

    def log(self, sandbox: str, level: Level, message: str, **fields: str) -> None:
        self._store.log(sandbox, LogLine(self._clock.time(), level, message[:_MESSAGE_CHARS], fields))

    def logs(self, tenant: str, sandbox: str) -> list[LogLine]:
        self.history(tenant, sandbox)
        return self._store.logs(sandbox)

    def _time(self, record: Record) -> None:
        if record.ends >= lifecycle.FOREVER or record.state == "creating":
            self.deadlines.remove(record.id)
        elif self.deadlines.set(record.id, record.ends):
            self.due.set()

    def _tell(self, sandbox: str) -> None:
        event = self.changed.pop(sandbox, None)
        if event is not None:
            event.set()
