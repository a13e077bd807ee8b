"""What the gateway asks of the manager.

Owns: ``ManagerDirectory``, the gateway's ``Directory`` over the records.

Must not know: HTTP.

Guarantees: a sandbox that ended, or is still being made, cannot be found; a dispute between record and host is settled
in the host's favour.
"""

from __future__ import annotations

from collections.abc import Iterable

from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import lifecycle
from venusrl.sandboxes.manager.errors import NotFound
from venusrl.sandboxes.manager.gateway import Route
from venusrl.sandboxes.manager.manager import Manager
from venusrl.sandboxes.protocol import SandboxGone, SandboxPaused

_SETTLE_S = 600.0
"""The gateway has its own, shorter limit; this one ends what it forgot."""


class ManagerDirectory:
    """Implements ``gateway.Directory``."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def find(self, sandbox: str) -> Route | None:
        manager = self._manager
        record = manager.book.records.get(sandbox)
        if record is None or record.state == "creating" or record.state == "ended":
            return None
        try:
            host = manager.fleet.host(record.host)
        except HostLost:
            host = None
        return Route(
            sandbox=sandbox,
            state=record.state,
            host=host if record.state == "running" else None,
            envd_token=manager.secret.envd_token(sandbox) if record.secure else "",
            traffic_token="" if record.egress.public else manager.secret.traffic_token(sandbox),
            wakes=lifecycle.wakes_on_traffic(record),
            mask_host=record.egress.mask_host,
        )

    def secured(self) -> Iterable[tuple[str, str]]:
        manager = self._manager
        return (
            (one.id, manager.secret.envd_token(one.id))
            for one in list(manager.book.records.values())
            if one.secure and one.state != "creating"
        )

    async def settled(self, sandbox: str) -> None:
        record = await self._manager.book.settled(sandbox, _SETTLE_S)
        if record is not None and record.state == "running":
            await self._answering(record.host)

    async def wake(self, sandbox: str) -> None:
        try:
            await self._manager.wake(sandbox)
        except NotFound as error:
            raise SandboxGone(str(error)) from None

    async def disputed(self, sandbox: str, error: SandboxGone | SandboxPaused) -> None:
        manager = self._manager
        if sandbox in manager.moving:
            record = manager.book.records.get(sandbox)
            if record is not None and record.state == "running":
                manager.book.passing(record, "moving")  # its host has stopped it: from now on requests wait
            return
        try:
            async with manager.book.turn(sandbox) as record:
                if record.state != "running":
                    return
                if isinstance(error, SandboxPaused):
                    held = await manager.ask(record)
                    if held is not None and held.given_to:
                        manager.book.passing(record, "moving")  # until it is known which host has it
                        return
                    manager.book.save(lifecycle.paused(record, "pressure", True))
                    return
                if await manager.ask(record) is None and await manager.fleet.refresh(record.host):
                    manager.fleet.removed(record.host, sandbox)
                    manager.book.end(record, str(error))
                    manager.count("died")
        except NotFound:
            return

    async def _answering(self, host: str) -> None:
        """Wait for a node that does not answer; it comes back, or its sandboxes are recovered or ended."""
        manager = self._manager
        while (node := manager.fleet.nodes.get(host)) is not None and node.lost:
            await manager.clock.sleep(0.2)
