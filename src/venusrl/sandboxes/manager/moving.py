"""Sandboxes on their way from one host to another, as the manager sees them.

Owns: ``Mover``: where one goes, what is recorded of it, finding out what became of a move whose last answer was lost.

Must not know: HTTP, how a host sends a sandbox.

Guarantees: it is somewhere at every instant: a move that failed leaves its record on the origin, where it goes on. Its
record says ``moving`` only once its host serves it no more, so that requests wait for no longer than it stands still.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from venusrl.sandboxes.admission.api import Deny
from venusrl.sandboxes.host.api import Held, Host, Moved
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import asks
from venusrl.sandboxes.manager.errors import Conflict, NotFound
from venusrl.sandboxes.manager.fleet import Node
from venusrl.sandboxes.manager.manager import Manager
from venusrl.sandboxes.manager.records import Record
from venusrl.sandboxes.protocol import SandboxError

_log = logging.getLogger(__name__)


class Mover:
    """Works on one manager's records and hosts."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def move(self, sandbox: str, *, exclude: tuple[str, ...] = (), to: str = "") -> tuple[Record, Moved]:
        """To another host, ``to`` or where there is room; how it went. Raises Refused, SandboxError; it stays where it
        was then."""
        manager = self._manager
        if to and to not in manager.fleet.nodes:
            raise NotFound(f"there is no node {to!r}: venusrl env top shows them")
        async with manager.book.turn(sandbox) as record:
            if to == record.host:
                raise Conflict(f"sandbox {sandbox} is on {to} already")
            held = manager.fleet.held(record.host, sandbox)
            private = held.footprint.total or None if held is not None else None
            answer = manager.fleet.place(
                asks.request(record, record.template, private),
                only=(to,) if to else None,
                exclude={record.host, *exclude},
            )
            if isinstance(answer, Deny):
                raise asks.denied(answer)
            origin, target = manager.fleet.host(record.host), manager.fleet.host(answer.host)
            manager.moving.add(sandbox)
            try:
                moved = await origin.move(sandbox, target)
            except BaseException:  # whatever it was: put back what was, and pass it on
                if sandbox in manager.book.records:
                    manager.book.save(record)
                raise
            finally:
                manager.moving.discard(sandbox)
            return manager.moved(record, answer.host, moved), moved

    async def settle(self, name: str, node: Node) -> None:
        """Of what that host says it gave away: find out whether the other one has it."""
        for held in list(node.held.values()):
            if held.given_to and not self._manager.book.busy(held.id):
                await self._settle(name, node.host, held)

    async def released(self, name: str) -> None:
        """The host ``name`` will not come back: what others gave to it is theirs again."""
        for origin, node in list(self._manager.fleet.nodes.items()):
            for held in list(node.held.values()):
                if held.given_to == name and origin != name:
                    await self._ask(origin, node.host, held, None)

    async def _settle(self, name: str, host: Host, held: Held) -> None:
        try:
            other = self._manager.fleet.host(held.given_to)
        except HostLost as error:
            _log.info("whether %s went from %s to %s is not known yet: %s", held.id, name, held.given_to, error)
            return
        await self._ask(name, host, held, other)

    async def _ask(self, name: str, host: Host, held: Held, other: Host | None) -> None:
        manager = self._manager
        try:
            there = await host.settle(held.id, other)
        except (SandboxError, OSError, TimeoutError) as error:
            _log.warning("whether %s went from %s to %s is not known yet: %s", held.id, name, held.given_to, error)
            return
        where = held.given_to if there else name
        _log.info("%s, which %s had given to %s, is on %s", held.id, name, held.given_to, where)
        manager.count("moves_settled")
        await manager.fleet.refresh(name)
        await manager.fleet.refresh(where)
        record = manager.book.records.get(held.id)
        if record is None or manager.book.busy(held.id):
            return
        if record.state == "moving":  # requests waited for this
            record = replace(record, state="running")
        if record.host != where:
            manager.moved(record, where, Moved("found"))
        else:
            manager.book.save(record)
