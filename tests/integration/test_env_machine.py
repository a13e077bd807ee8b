"""The life of sandboxes in any order of requests, times and accidents, against a model of what E2B promises."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from tests.unit.environments import fake_hosts
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.manager import keys, lifecycle
from venusrl.sandboxes.manager.asks import Ask, Settings
from venusrl.sandboxes.manager.errors import Conflict, NotFound, Refused
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.manager.store import Store
from venusrl.sandboxes.manager.tokens import Secret
from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.templates.api import Image
from venusrl.testing.clock import VirtualClock
from venusrl.testing.hosts import AdmitAll, FixedImages

T = TypeVar("T")
SECONDS = st.integers(0, 120)
_MOST = 4


class Model:
    """One sandbox as its user understands it. ``ends`` None = paused: no end."""

    def __init__(self, ends: float | None, pauses: bool) -> None:
        self.state = "running"
        self.ends = ends
        self.pauses = pauses


class Lives(RuleBasedStateMachine):
    sandboxes = Bundle("sandboxes")

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = VirtualClock()
        self.hosts = fake_hosts(self.clock, 2)
        self.model: dict[str, Model] = {}
        self.key: Any = None
        self.start()

    def start(self) -> None:
        state = Path(self.folder.name)
        store = Store(state / "manager.db")
        if self.key is None:
            self.key, _ = keys.create(store, self.clock, "k", max_sandboxes=_MOST)
        self.service = Service(
            store,
            Secret.load(state / "secret"),
            AdmitAll(),
            FixedImages(Image("base-id", "base")),
            clock=self.clock,
            settings=Settings(grace_s=5.0, reconcile_s=2.0),
        )
        self.run(self.started())

    async def started(self) -> None:
        for host in self.hosts:
            self.service.add_host(host, feeds=True)
        await self.service.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def attempt(self, work: Coroutine[Any, Any, Any]) -> Exception | None:
        """What it raised, if anything."""
        try:
            self.run(work)
        except SandboxError as error:
            return error
        return None

    def running(self) -> int:
        return sum(one.state == "running" for one in self.model.values())

    def now(self) -> float:
        return self.clock.time()

    @rule(target=sandboxes, timeout=SECONDS, pauses=st.booleans())
    def create(self, timeout: int, pauses: bool) -> Any:
        ask = Ask("base", float(timeout), on_timeout="pause" if pauses else "kill")
        if self.running() >= _MOST:
            error = self.attempt(self.service.manager.create(self.key, ask))
            assert isinstance(error, Refused)
            assert error.status == 429
            return multiple()
        record = self.run(self.service.manager.create(self.key, ask))
        self.model[record.id] = Model(self.now() + timeout, pauses)
        return record.id

    @rule(sandbox=sandboxes)
    def pause(self, sandbox: str) -> None:
        error = self.attempt(self.service.manager.pause(self.key.tenant, sandbox))
        one = self.model.get(sandbox)
        if one is None:
            assert isinstance(error, NotFound)
        elif one.state == "paused":
            assert isinstance(error, Conflict)
        else:
            assert error is None
            one.state, one.ends = "paused", None

    @rule(sandbox=sandboxes, timeout=SECONDS)
    def connect(self, sandbox: str, timeout: int) -> None:
        one = self.model.get(sandbox)
        full = one is not None and one.state == "paused" and self.running() >= _MOST
        error = self.attempt(self.service.manager.connect(self.key, sandbox, float(timeout)))
        if one is None:
            assert isinstance(error, NotFound)
        elif full:
            assert isinstance(error, Refused)
            assert error.status == 429
        else:
            assert error is None
            # It is only ever extended.
            one.ends = max(one.ends if one.ends is not None else 0.0, self.now() + timeout)
            one.state = "running"

    @rule(sandbox=sandboxes, timeout=SECONDS)
    def set_timeout(self, sandbox: str, timeout: int) -> None:
        one = self.model.get(sandbox)
        try:
            self.service.manager.set_timeout(self.key.tenant, sandbox, float(timeout))
        except NotFound:
            assert one is None
            return
        assert one is not None
        if one.state == "running":
            one.ends = self.now() + timeout

    @rule(sandbox=sandboxes)
    def kill(self, sandbox: str) -> None:
        error = self.attempt(self.service.manager.kill(self.key.tenant, sandbox))
        assert (error is None) == (sandbox in self.model)
        self.model.pop(sandbox, None)

    @rule(sandbox=sandboxes)
    def die(self, sandbox: str) -> None:
        if sandbox in self.model and self.model[sandbox].state == "running":
            host = next(host for host in self.hosts if sandbox in host.sandboxes)
            host.die(sandbox)
            del self.model[sandbox]
            self.settle()

    @rule(sandbox=sandboxes)
    def move(self, sandbox: str) -> None:
        error = self.attempt(self.service.upkeep.reconciler.mover.move(sandbox))
        assert (error is None) == (sandbox in self.model)

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds: int) -> None:
        self.run(self.clock.run_for(seconds))
        self.settle()
        self.expire()

    @rule()
    def restart(self) -> None:
        self.run(self.service.manager.background.close())
        self.service.store.close()
        self.start()
        self.settle()
        self.expire()

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(60):
                await asyncio.sleep(0)

        self.run(turns())

    def expire(self) -> None:
        """What the time since then means to the user."""
        for sandbox, one in list(self.model.items()):
            if one.state == "running" and one.ends is not None and one.ends <= self.now():
                if one.pauses:
                    one.state, one.ends = "paused", None
                else:
                    del self.model[sandbox]

    @invariant()
    def records_and_hosts_agree_with_the_model(self) -> None:
        if not hasattr(self, "service"):
            return
        self.run(self.clock.run_for(0))
        self.settle()
        self.expire()
        records = self.service.manager.book.records
        assert set(records) == set(self.model)
        held = {name: one for host in self.hosts for name, one in host.sandboxes.items()}
        assert set(held) == set(self.model)
        assert sum(len(host.sandboxes) for host in self.hosts) == len(held)
        for sandbox, one in self.model.items():
            record = records[sandbox]
            assert (record.state, held[sandbox].state) == (one.state, one.state)
            assert sandbox in self.hosts[int(record.host[-1]) - 1].sandboxes
            if one.ends is None:
                assert record.ends == lifecycle.FOREVER
            else:
                assert abs(record.ends - one.ends) < 0.01
        stored = {record.id: record for record in self.service.store.living()}
        assert stored == records

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self.run(self.service.close())
            self.folder.cleanup()
            self.loop.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
