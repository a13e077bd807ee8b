"""Records against hosts: what is recorded and not there, what is there and not recorded, what changed by itself.

Owns: the comparison, at the start and from then on; the loss of a node; its drain.

Must not know: HTTP.

Guarantees: nothing that is being changed is touched; what no record knows is ended, but only after ``grace_s`` during
which it stayed unknown (what is recorded as ended, at once); a copy that is not the sandbox any more is ended once the
one that is has been seen; a running sandbox that is gone is recorded as ended with the cause; a paused one is never
ended for its node's silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from msgspec.structs import replace

from venusrl.sandboxes.host.api import Held, HostStatus
from venusrl.sandboxes.manager import fencing, lifecycle
from venusrl.sandboxes.manager.errors import NotFound
from venusrl.sandboxes.manager.fleet import Node
from venusrl.sandboxes.manager.manager import Manager
from venusrl.sandboxes.manager.moving import Mover
from venusrl.sandboxes.manager.records import Record
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, TemplateNotFound

_log = logging.getLogger(__name__)
_MOVING_AT_ONCE = 2


class Drained(msgspec.Struct, frozen=True):
    """What became of a drained node's sandboxes; ``stayed`` says why each did."""

    moved: list[str]
    stayed: dict[str, str]


class Reconciler:
    """Works on one manager's records and hosts."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._unknown: dict[tuple[str, str], float] = {}
        self.mover = Mover(manager)

    async def run(self, *, starting: bool = False) -> None:
        """Once over all hosts that answer."""
        for name, node in list(self._manager.fleet.nodes.items()):
            if node.status is not None and not node.lost:
                await self.mover.settle(name, node)
                await self._compare(name, node, node.status, starting)
        if starting:
            self._never_answered()

    async def _compare(self, name: str, node: Node, status: HostStatus, starting: bool) -> None:
        manager = self._manager
        records = manager.book.records
        for record in [one for one in records.values() if one.host == name or one.id in node.held]:
            if manager.book.busy(record.id) or record.id in manager.making:
                continue
            copies = manager.fleet.copies(record.id)
            asked = [node.asked, *(manager.fleet.nodes[host].asked for host in copies)]
            if manager.book.touched.get(record.id, -1.0) >= min(asked):
                continue  # what the hosts said is older
            await self._settle(record, name, copies, starting)
        await self._end_unknown(name, node, {one for one in node.held if one not in records}, "sandbox", node.host.kill)
        strays = {one.id for one in status.snapshots if self._stray(one.id, name)}
        await self._end_unknown(name, node, strays, "snapshot", node.host.remove_snapshot)

    async def _settle(self, record: Record, name: str, copies: dict[str, int], starting: bool) -> None:
        manager = self._manager
        owner = fencing.owner(record.host, record.fence, copies)
        if not owner:
            if name == record.host and not any(node.health == "joining" for node in manager.fleet.nodes.values()):
                self._missing(record, starting)  # else it may be on the one that has not been heard yet
        elif owner != record.host:
            self._rehome(record, owner)
        elif name == owner:
            self._adjust(record, manager.fleet.nodes[owner].held[record.id])
        else:
            await self._end_copy(record, name, copies[name])

    def _stray(self, snapshot: str, host: str) -> bool:
        """Nobody's, or made again elsewhere while this host was lost."""
        known = self._manager.snapshots.get(snapshot)
        return known is None or known.host != host

    async def _end_copy(self, record: Record, host: str, epoch: int) -> None:
        """What this host has is not the sandbox any more."""
        manager = self._manager
        _log.warning("ending the older copy (epoch %d) of %s on %s: it is on %s", epoch, record.id, host, record.host)
        try:
            await manager.fleet.host(host).kill(record.id)
        except SandboxGone:
            pass
        except (SandboxError, OSError) as error:
            _log.warning("the older copy of %s on %s could not be ended: %s", record.id, host, error)
            return
        manager.fleet.removed(host, record.id)
        manager.count("copies_ended")

    def _adjust(self, record: Record, held: Held) -> None:
        """Take over what the host says."""
        book = self._manager.book
        if record.state == "creating":
            if any(sandbox == record.id for _, _, sandbox in self._manager.store.unanswered()):
                book.save(replace(record, state="running", limits=held.limits))  # its client will ask again
            else:
                book.drop(record)  # nobody was told its id: to be ended as unknown
            return
        if held.state == "paused" and record.state in ("running", "pausing"):
            book.save(lifecycle.paused(record, "pressure", True))
            book.log(record.id, "info", "sandbox paused by its host for memory's sake")
        elif held.state == "running" and record.state == "paused":
            book.save(lifecycle.woken(record, self._manager.clock.time(), record.host))

    def _rehome(self, record: Record, holder: str) -> None:
        """A move came through, and its end was not noted: the service ended meanwhile, or the answer was lost."""
        book = self._manager.book
        book.log(record.id, "warn", f"sandbox found on {holder} instead of {record.host}")
        self._adjust(book.save(replace(record, host=holder)), self._manager.fleet.nodes[holder].held[record.id])

    def _missing(self, record: Record, starting: bool) -> None:
        book = self._manager.book
        if record.state == "creating":
            book.drop(record)
            return
        if record.state == "paused" and self._manager.recovery.kept(record) is not None:
            if record.host:
                book.log(
                    record.id, "warn", f"its host {record.host} does not have it any more: its copy is what there is"
                )
                book.save(replace(record, host=""))
            return
        when = "when the service started" if starting else "any more"
        book.end(record, f"its host {record.host} does not have it {when}")
        self._manager.count("died")

    def _never_answered(self) -> None:
        """Creates that never got as far as a host, and requests whose sandbox is not there."""
        manager = self._manager
        for record in list(manager.book.records.values()):
            if record.state == "creating" and record.host not in manager.fleet.nodes:
                manager.book.drop(record)
        for tenant, key, sandbox in manager.store.unanswered():
            if sandbox not in manager.book.records:
                manager.store.forget_request(tenant, key)

    async def _end_unknown(
        self, name: str, node: Node, found: set[str], what: str, end: Callable[[str], Awaitable[None]]
    ) -> None:
        manager = self._manager
        now = manager.clock.monotonic()
        for kind, one in [key for key in self._unknown if key[0] == f"{what} {name}" and key[1] not in found]:
            del self._unknown[kind, one]
        for one in found:
            since = self._unknown.setdefault((f"{what} {name}", one), now)
            if one in node.placed or (now - since < manager.settings.grace_s and not self._over(what, one)):
                continue
            _log.warning("ending the %s %s on %s: no record knows it", what, one, name)
            try:
                await end(one)
            except (SandboxGone, TemplateNotFound):
                pass
            except SandboxError as error:
                _log.warning("the %s %s on %s could not be ended: %s", what, one, name, error)
                continue
            self._unknown.pop((f"{what} {name}", one), None)
            manager.count("unknown_ended")

    def _over(self, what: str, name: str) -> bool:
        """Whether it is no stranger, but one that was recorded as ended: its node was lost meanwhile, say."""
        record = self._manager.store.sandbox(name) if what == "sandbox" else None
        return record is not None and not record.alive

    # A node that is lost

    def lost(self, name: str) -> None:
        """Running sandboxes ended with it; paused ones are kept there, or come back from their copy when they are
        wanted. Idempotent: whoever was being changed is looked at in the next round."""
        manager = self._manager
        for record in manager.book.on_host(name):
            if record.state != "paused" and not manager.book.busy(record.id):
                manager.book.end(record, f"its node {name} was lost: it has not answered for a while")
                manager.count("died")

    def abandon(self, name: str) -> None:
        """A node that will not come back: what it had is over, but for paused sandboxes of which there is a copy."""
        manager = self._manager
        for record in manager.book.on_host(name):
            if record.state == "paused" and manager.recovery.kept(record) is not None:
                manager.book.log(record.id, "warn", f"its node {name} was given up: its copy is what there is")
            else:
                manager.book.end(record, f"its node {name} was given up")

    # Drain

    async def drain(self, name: str) -> Drained:
        """Admit no more there, and move what is there elsewhere. Raises NotFound, HostLost."""
        manager = self._manager
        node = manager.fleet.nodes.get(name)
        if node is None:
            raise NotFound(f"there is no node {name!r}")
        node.draining = True
        await manager.fleet.host(name).drain()
        room = asyncio.Semaphore(_MOVING_AT_ONCE)
        result = Drained([], {})

        async def one(sandbox: str) -> None:
            async with room:
                try:
                    await self.mover.move(sandbox, exclude=(name,))
                    result.moved.append(sandbox)
                except NotFound:
                    pass  # it ended by itself
                except (SandboxError, OSError) as error:
                    result.stayed[sandbox] = str(error) or type(error).__name__

        await asyncio.gather(*(one(record.id) for record in manager.book.on_host(name)))
        return result

    async def undrain(self, name: str) -> None:
        """Admit there again. Raises HostLost."""
        await self._manager.fleet.host(name).drain(False)
        self._manager.fleet.nodes[name].draining = False
        await self._manager.fleet.refresh(name)
