"""Any history of pauses, moves, silences, lost answers and restarts: never two owners, never silently lost."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.environments import ADMIN, Environment, environment, fake_hosts
from tests.unit.test_env_recovery import connect, silent

from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import fencing
from venusrl.testing.clock import VirtualClock
from venusrl.testing.env_host import FakeHost

HOSTS = 3
STEPS = (
    "create", "pause", "connect", "move", "wait", "silence", "return", "restart", "lose answer", "forget",
)  # fmt: skip
Step = tuple[str, int]
"""What happens, and which sandbox or host it happens to."""


class Story:
    """One service, its hosts, and what was promised: by sandbox, the number of its last write."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.clock = VirtualClock()
        self.hosts: list[FakeHost] = fake_hosts(self.clock, HOSTS)
        self.quiet: dict[int, AsyncExitStack] = {}
        self.wrote: dict[str, int] = {}
        self.paused: set[str] = set()
        self.writes = 0
        self.text = ""
        self.env: Environment
        self._service = AsyncExitStack()

    async def begin(self) -> None:
        known = environment(
            self.state, hosts=self.hosts, clock=self.clock, copies=True, node_grace_s=15.0, grace_s=5.0, reconcile_s=5.0
        )
        self.env = await self._service.enter_async_context(known)
        self.env.text = self.text or self.env.text
        self.text = self.env.text

    async def end(self) -> None:
        await self._service.aclose()

    def some(self, number: int) -> str | None:
        ids = sorted(self.env.book.records)
        return ids[number % len(ids)] if ids else None

    def owner(self, sandbox: str) -> FakeHost:
        return next(host for host in self.hosts if host.name == self.env.book.records[sandbox].host)

    async def wait(self, seconds: float) -> None:
        """Threads that write copies get their time too."""
        for _ in range(4):
            await self.env.clock.run_for(seconds / 4)
            await asyncio.sleep(0.003)

    async def happen(self, what: str, number: int) -> None:
        env, sandbox, host = self.env, self.some(number), self.hosts[number % HOSTS]
        if what == "create":
            status, answer, _ = await env.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 80000})
            if status == 201:
                self.write(answer["sandboxID"])
        elif what == "silence" and host.name not in {self.hosts[one].name for one in self.quiet}:
            self.quiet[number % HOSTS] = AsyncExitStack()
            self.quiet[number % HOSTS].enter_context(silent(host))
        elif what == "return" and number % HOSTS in self.quiet:
            await self.quiet.pop(number % HOSTS).aclose()
        elif what == "restart":
            await self._service.aclose()
            self._service = AsyncExitStack()
            await self.begin()
        elif what == "lose answer":
            host.fail("restored", HostLost("cut"))
        elif what == "forget":
            await env.call("DELETE", f"/nodes/{host.name}", X_Admin_Token=ADMIN)
        elif what == "wait":
            await self.wait(20.0)
        elif sandbox is not None:
            await self.change(what, sandbox, host)

    async def change(self, what: str, sandbox: str, host: FakeHost) -> None:
        env = self.env
        if what == "pause" and (await env.call("POST", f"/sandboxes/{sandbox}/pause", {}))[0] == 204:
            self.paused.add(sandbox)
        elif what == "connect" and (await connect(env, sandbox))[0] in (200, 201):
            self.check_contents(sandbox)
            self.write(sandbox)
        elif what == "move":
            await env.call("POST", f"/admin/sandboxes/{sandbox}/move", {"to": host.name}, X_Admin_Token=ADMIN)

    def write(self, sandbox: str) -> None:
        """Somebody uses it, where it is said to be."""
        self.writes += 1
        self.paused.discard(sandbox)
        self.wrote[sandbox] = self.writes
        self.owner(sandbox).sandboxes[sandbox].files["/n"] = str(self.writes).encode()

    def check_contents(self, sandbox: str) -> None:
        assert self.owner(sandbox).sandboxes[sandbox].files["/n"] == str(self.wrote[sandbox]).encode()

    def check(self) -> None:
        """What holds at every instant between two changes."""
        book = self.env.book
        for sandbox in self.wrote:
            record = book.records.get(sandbox)
            if record is None:
                ended = self.env.store.sandbox(sandbox)
                assert ended is not None, "it was forgotten"
                assert ended.cause, "it ended without a word"
                assert sandbox not in self.paused or "given up" in ended.cause, ended.cause
                continue
            copies = {host.name: host.sandboxes[sandbox].epoch for host in self.hosts if sandbox in host.sandboxes}
            owner = fencing.owner(record.host, record.fence, copies)
            assert record.state != "running" or owner in (record.host, "")
            assert self.running(sandbox) <= 1, "two run it"

    def running(self, sandbox: str) -> int:
        """On how many hosts that answer it runs."""
        answering = [host for number, host in enumerate(self.hosts) if number not in self.quiet]
        return sum(one.state == "running" for host in answering if (one := host.sandboxes.get(sandbox)) is not None)

    async def all_back(self) -> None:
        """Every host answers again, and in the end each sandbox is in one place, as it was left."""
        for number in list(self.quiet):
            await self.quiet.pop(number).aclose()
        for host in self.hosts:
            host._failures.clear()
        for _ in range(6):
            await self.wait(20.0)
        self.check()
        for sandbox, record in list(self.env.book.records.items()):
            if record.host not in self.env.service.fleet.nodes and self.env.manager.recovery.kept(record) is None:
                continue  # its node was given up
            status, answer = await connect(self.env, sandbox)
            assert status in (200, 201), answer
            self.check_contents(sandbox)
        await self.wait(20.0)
        known = [host for host in self.hosts if host.name in self.env.service.fleet.nodes]
        held = [sandbox for host in known for sandbox in host.sandboxes]
        assert len(held) == len(set(held)), "in two places"
        assert set(held) <= set(self.env.book.records)


async def play(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder))
        await story.begin()
        try:
            for what, number in steps:
                await story.happen(what, number)
                await story.wait(2.0)  # hosts are asked once a second
                story.check()
            await story.all_back()
        finally:
            for stack in story.quiet.values():
                await stack.aclose()
            await story.end()


LOST = [("create", 0), ("pause", 0), ("wait", 0), ("silence", 0), ("wait", 0), ("wait", 0)]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=16))
@example([*LOST, ("connect", 0), ("return", 0), ("wait", 0), ("pause", 0)])
@example([*LOST, ("lose answer", 1), ("connect", 0), ("restart", 0), ("return", 0), ("connect", 0)])
@example([*LOST, ("lose answer", 1), ("connect", 0), ("silence", 1), ("connect", 0), ("return", 1), ("return", 0)])
@example([*LOST, ("connect", 0), ("pause", 0), ("wait", 0), ("silence", 1), ("wait", 0), ("wait", 0), ("connect", 0)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_never_two_owners_never_silently_lost(steps: list[Step]) -> None:
    asyncio.run(play(steps))
