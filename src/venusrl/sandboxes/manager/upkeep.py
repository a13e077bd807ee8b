"""What happens without being asked: times that run out, deaths, samples, forgetting.

Owns: the manager's loops. ``reconcile.py`` compares what is recorded with what hosts hold.

Must not know: HTTP.

Guarantees: a sandbox whose time is up is ended or paused within about a second of it, after a restart too; one failure
delays that one sandbox alone; looking at sandboxes for metrics takes a bounded rate and wakes no idle one.
"""

from __future__ import annotations

import asyncio
import logging

from venusrl.sandboxes.host.api import Died
from venusrl.sandboxes.manager.fleet import Node
from venusrl.sandboxes.manager.manager import Manager
from venusrl.sandboxes.manager.reconcile import Reconciler
from venusrl.sandboxes.manager.records import Record
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused

_log = logging.getLogger(__name__)
_EXPIRING_AT_ONCE = 16
_EXPIRE_AGAIN_S = 10.0
_LONGEST_SLEEP_S = 5.0
_SAMPLES_A_SECOND = 20.0
_IDLE_S = 10.0
_PRUNE_EVERY_S = 600.0
_FOLLOW_AGAIN_S = 1.0


class Upkeep:
    """Starts with the manager and ends with it."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._room = asyncio.Semaphore(_EXPIRING_AT_ONCE)
        self._next_reconcile = 0.0
        self.reconciler = Reconciler(manager)

    async def start(self) -> None:
        """Compare with the hosts once, then go on by itself."""
        manager = self._manager
        await manager.fleet.refresh_all()
        await self.reconciler.run(starting=True)
        loops = manager.background.loop
        loops("end sandboxes whose time is up", self._expire_due)
        loops("watch the hosts", self._watch_hosts)
        loops("keep copies", manager.recovery.step)
        loops("sample sandboxes", self._sample)
        loops("forget old records", self._prune)

    def follow(self, node: Node) -> None:
        """Hear of deaths on a host for as long as it is one of ours."""
        self._manager.background.watch(f"deaths on {node.host.name}", self._follow(node))

    # Times

    async def _expire_due(self) -> None:
        book, clock = self._manager.book, self._manager.clock
        book.due.clear()
        for sandbox in book.deadlines.due(clock.time()):
            self._manager.background.operation(f"expire {sandbox}", self._expire(sandbox))
        nearest = book.deadlines.next
        wait = _LONGEST_SLEEP_S if nearest is None else min(_LONGEST_SLEEP_S, max(0.0, nearest - clock.time()))
        await self._sleep_unless_due(wait)

    async def _sleep_unless_due(self, seconds: float) -> None:
        sleeper = asyncio.create_task(self._sleep(seconds), name="until the next deadline")
        alarm = asyncio.create_task(self._manager.book.due.wait(), name="a nearer deadline")
        try:
            await asyncio.wait({sleeper, alarm}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeper.cancel()
            alarm.cancel()

    async def _sleep(self, seconds: float) -> None:
        await self._manager.clock.sleep(seconds)

    async def _expire(self, sandbox: str) -> None:
        manager = self._manager
        async with self._room:
            try:
                async with manager.book.turn(sandbox) as record:
                    await self._expire_now(record)
            except SandboxError as error:
                if sandbox in manager.book.records:
                    _log.warning("%s could not be ended at its time: %s", sandbox, error)
                    manager.book.log(sandbox, "error", f"its time is up, but: {error}")
                    manager.book.deadlines.set(sandbox, manager.clock.time() + _EXPIRE_AGAIN_S)
                    manager.book.due.set()

    async def _expire_now(self, record: Record) -> None:
        manager = self._manager
        if record.ends > manager.clock.time():
            manager.book.save(record)  # its time was extended meanwhile: note the new one
        elif record.on_timeout == "pause":
            if record.state == "running" or record.paused_by == "pressure":
                await manager.pause_now(record, memory=record.pause_memory, healthy=False, by="timeout")
        else:
            await manager.kill_now(record, "its time was up")
            manager.count("expired")

    # Hosts

    async def _watch_hosts(self) -> None:
        manager = self._manager
        lost, back = await manager.fleet.refresh_all()
        for name in lost:
            self.reconciler.lost(name)
        now = manager.clock.monotonic()
        if back or now >= self._next_reconcile:
            self._next_reconcile = now + manager.settings.reconcile_s
            await self.reconciler.run()
        await manager.clock.sleep(manager.settings.refresh_s)

    async def _follow(self, node: Node) -> None:
        fleet = self._manager.fleet
        told = ""
        while fleet.nodes.get(node.host.name) is node:
            try:
                async for died in node.host.events():
                    await self._died(node, died)
            except (SandboxError, OSError) as error:
                if (why := str(error)) != told:  # a node that is gone for hours is told of once
                    _log.info("events of %s: %s", node.host.name, why)
                told = why
            await self._manager.clock.sleep(_FOLLOW_AGAIN_S)

    async def _died(self, node: Node, died: Died) -> None:
        manager = self._manager
        record = manager.book.records.get(died.sandbox)
        manager.fleet.removed(node.host.name, died.sandbox)
        if record is not None and record.host == node.host.name:
            manager.book.log(record.id, "error", f"sandbox died: {died.cause}")
            manager.book.end(record, died.cause)
            manager.count("died")

    # Metrics

    async def _sample(self) -> None:
        """One round over those that do something; a bounded number of looks a second."""
        manager = self._manager
        began = manager.clock.monotonic()
        for record in list(manager.book.records.values()):
            held = manager.fleet.held(record.host, record.id)
            if record.state != "running" or held is None or not (held.idle_s is None or held.idle_s < _IDLE_S):
                continue
            await self.sample(record)
            await manager.clock.sleep(1.0 / _SAMPLES_A_SECOND)
        await manager.clock.sleep(max(0.5, manager.settings.sample_s - (manager.clock.monotonic() - began)))

    async def sample(self, record: Record) -> None:
        """Look at a sandbox now, if it can be looked at."""
        manager = self._manager
        try:
            async with asyncio.timeout(2.0):
                usage = await manager.fleet.host(record.host).usage(record.id)
        except (SandboxGone, SandboxPaused):
            return
        except (SandboxError, TimeoutError, OSError) as error:
            _log.debug("no sample of %s: %s", record.id, error)
            return
        if record.id in manager.book.records:
            manager.book.gauges.add(record.id, manager.clock.time(), usage)

    async def _prune(self) -> None:
        manager = self._manager
        manager.store.prune(manager.clock.time() - manager.settings.history_s)
        await manager.clock.sleep(_PRUNE_EVERY_S)
