"""One environment service: the manager and everything around it that is not HTTP.

Owns: how the parts are put together, started and let go.

Must not know: HTTP, the command line.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from venusrl.clock import Clock, SystemClock
from venusrl.sandboxes.admission.api import Admission
from venusrl.sandboxes.host.api import Host
from venusrl.sandboxes.manager import wire
from venusrl.sandboxes.manager.asks import Catalogue, Settings
from venusrl.sandboxes.manager.directory import ManagerDirectory
from venusrl.sandboxes.manager.fleet import Fleet
from venusrl.sandboxes.manager.forks import Forks
from venusrl.sandboxes.manager.gateway import Gateway
from venusrl.sandboxes.manager.manager import Manager
from venusrl.sandboxes.manager.records import Record
from venusrl.sandboxes.manager.repeats import Repeats
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.manager.store import Store
from venusrl.sandboxes.manager.tokens import Secret
from venusrl.sandboxes.manager.upkeep import Upkeep
from venusrl.sandboxes.protocol import SandboxError

_log = logging.getLogger(__name__)
_CLOSE_S = 20.0
_ENDING_AT_ONCE = 16


class Service:
    """``await start()`` once its first hosts are added; ``await close()`` lets go, sandboxes go on."""

    def __init__(
        self,
        store: Store,
        secret: Secret,
        admission: Admission,
        catalogue: Catalogue,
        *,
        clock: Clock | None = None,
        settings: Settings | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.settings = settings or Settings()
        self.secret = secret
        self.store = store
        self.fleet = Fleet(admission, self.clock, grace_s=self.settings.node_grace_s)
        self.replicas = replicas
        self.manager = Manager(store, secret, self.fleet, catalogue, self.clock, self.settings, replicas)
        self.forks = Forks(self.manager)
        self.upkeep = Upkeep(self.manager)
        self.repeats = Repeats(store, self.clock, self._rebuild)
        self.gateway = Gateway(ManagerDirectory(self.manager))

    def add_host(self, host: Host, *, feeds: bool, draining: bool = False) -> None:
        """``feeds``: the host tells the admission policy of footprints itself (it shares the object)."""
        node = self.fleet.add(host, feeds=feeds, draining=draining)
        self.upkeep.follow(node)

    def use_domain(self, domain: str) -> None:
        """Once it is known which port was got."""
        self.settings = msgspec.structs.replace(self.settings, domain=domain)

    async def start(self) -> None:
        await self.upkeep.start()

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.manager.background.close()
        except TimeoutError:  # what was being changed is taken up as its host says, at the next start
            _log.warning("operations that did not end within %g s were left behind", _CLOSE_S)
        for node in list(self.fleet.nodes.values()):
            await node.host.close()
        if self.replicas is not None:
            self.replicas.close()
        self.store.close()

    async def kill_all(self) -> int:
        """End every sandbox; how many that were. One that cannot be ended is logged."""
        room = asyncio.Semaphore(_ENDING_AT_ONCE)

        async def end(sandbox: str) -> bool:
            async with room:
                try:
                    async with self.manager.book.turn(sandbox) as record:
                        await self.manager.kill_now(record, "the service ended, told to end its sandboxes")
                except SandboxError as error:
                    _log.warning("%s could not be ended: %s", sandbox, error)
                    return False
                return True

        return sum(await asyncio.gather(*(end(sandbox) for sandbox in list(self.manager.book.records))))

    def answer(self, record: Record) -> bytes:
        """What whoever created or connected to a sandbox is told."""
        body = wire.sandbox(
            record,
            self.settings.domain,
            self.secret.envd_token(record.id),
            self.secret.traffic_token(record.id),
        )
        return msgspec.json.encode(body)

    def _rebuild(self, sandbox: str) -> bytes | None:
        record = self.manager.book.records.get(sandbox)
        return self.answer(record) if record is not None and record.state != "creating" else None
