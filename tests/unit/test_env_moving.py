"""Moves as the manager sees them: who serves when, what is answered, and moves whose last answer was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.environments import ADMIN, JOIN, environment, fake_hosts
from tests.waiting import until

from venusrl.cli.env_view import how_it_moved
from venusrl.sandboxes.host.api import ENVD_PORT, Host, Moved
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager.gateway_address import ID_HEADER, PORT_HEADER
from venusrl.sandboxes.protocol import SandboxError
from venusrl.testing.clock import VirtualClock
from venusrl.testing.env_host import FakeHost


class Steady(FakeHost):
    """Its moves serve until ``stop`` is set, then stand still until ``done`` is."""

    stop: asyncio.Event
    done: asyncio.Event

    async def move(self, sandbox: str, to: Host) -> Moved:
        await self.stop.wait()
        self.sandboxes[sandbox].state = "paused"
        await self.done.wait()
        self.sandboxes[sandbox].state = "running"
        await super().move(sandbox, to)
        return Moved("live", outage_s=0.08)


def steady(clock: VirtualClock) -> tuple[Steady, FakeHost]:
    origin = Steady("host-1", clock=clock, templates=("base-id", "host"))
    origin.stop, origin.done = asyncio.Event(), asyncio.Event()
    other = fake_hosts(clock, 2)[1]
    return origin, other


async def test_requests_wait_only_while_it_stands_still(tmp_path: Path) -> None:
    clock = VirtualClock()
    origin, other = steady(clock)
    async with environment(tmp_path, hosts=[origin, other], clock=clock) as env:
        sandbox = await env.create(timeout=9000)
        headers = {ID_HEADER: sandbox, PORT_HEADER: str(ENVD_PORT)}

        async def health() -> int:
            async with env.client.get("/health", headers=headers) as answer:
                return answer.status

        path = f"/admin/sandboxes/{sandbox}/move"
        moving = asyncio.create_task(env.call("POST", path, {"to": "host-2"}, X_Admin_Token=ADMIN))
        await until(lambda: sandbox in env.manager.moving)
        assert await health() == 204
        assert env.book.records[sandbox].state == "running"
        origin.stop.set()
        await until(lambda: origin.sandboxes[sandbox].state == "paused")
        waiting = asyncio.create_task(health())
        await until(lambda: env.service.gateway.parked == 1)
        assert env.book.records[sandbox].state == "moving"
        origin.done.set()
        assert await waiting == 204
        status, answer, _ = await moving
        assert (status, answer) == (200, {"node": "host-2", "how": "live", "why": "", "outage_s": 0.08})
        assert [one for one, _ in other.calls].count("forward") == 1
        assert env.manager.counters["moved_live"] == 1
        logged = [line for line in env.book.logs(env.key.tenant, sandbox) if "moved" in line.message]
        assert logged[0].fields == {"how": "live", "outage_ms": "80"}


async def test_a_node_that_is_not_there_or_has_it_already_is_named(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with environment(tmp_path, hosts=fake_hosts(clock, 2), clock=clock) as env:
        sandbox = await env.create()
        path = f"/admin/sandboxes/{sandbox}/move"
        for node, status, told in (
            ("nowhere", 404, "no node 'nowhere'"),
            (env.book.records[sandbox].host, 409, "is on host-1 already"),
        ):
            found, answer, _ = await env.call("POST", path, {"to": node}, X_Admin_Token=ADMIN)
            assert found == status
            assert told in answer["message"]


async def test_a_move_that_fails_is_served_where_it_was(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        sandbox = await env.create(timeout=9000)
        hosts[0].fail("move", SandboxError("not now"))
        path = f"/admin/sandboxes/{sandbox}/move"
        assert (await env.call("POST", path, {"to": "host-2"}, X_Admin_Token=ADMIN))[0] == 500
        record = env.book.records[sandbox]
        assert (record.host, record.state, env.manager.moving) == ("host-1", "running", set())


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_gift_whose_answer_was_lost_is_settled(tmp_path: Path, arrived: bool) -> None:
    """Requests wait until it is known which host has it; nobody has to move it again for that."""
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        sandbox = await env.create(timeout=9000)
        hosts[1].fail("has", HostLost("not yet"), times=1)
        given = hosts[0].sandboxes[sandbox]
        given.given_to, given.state = "host-2", "paused"
        if arrived:
            hosts[1].sandboxes[sandbox] = given_there = type(given)(given.order, given.limits, given.created, {})
            given_there.epoch = given.epoch + 1
        headers = {ID_HEADER: sandbox, PORT_HEADER: str(ENVD_PORT)}
        asking = asyncio.create_task(env.client.get("/health", headers=headers))
        await until(lambda: env.service.gateway.parked == 1)
        given.state = "running"
        for _ in range(4):
            await clock.run_for(15)
        async with await asking as answer:
            assert answer.status == 204
        where = "host-2" if arrived else "host-1"
        assert (env.book.records[sandbox].host, env.book.records[sandbox].state) == (where, "running")
        assert [host.name for host in hosts if sandbox in host.sandboxes] == [where]


async def test_what_was_given_to_a_node_that_is_forgotten_is_here_again(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts, far = fake_hosts(clock, 1), fake_hosts(clock, 1)[0]
    far._name = "far"
    body = {"name": "far", "url": "http://10.0.0.2:3900", "key": "k"}
    async with environment(tmp_path, hosts=hosts, clock=clock, connect=lambda record: far) as env:
        await env.call("POST", "/nodes", body, X_Join_Key=JOIN)
        sandbox = await env.create(timeout=9000)
        far.fail("status", HostLost("gone"), times=1000)
        far.fail("has", HostLost("gone"), times=1000)
        hosts[0].sandboxes[sandbox].given_to = "far"
        await clock.run_for(90)
        assert env.book.records[sandbox].host == "host-1"
        assert hosts[0].sandboxes[sandbox].given_to == "far"
        assert (await env.call("DELETE", "/nodes/far", X_Admin_Token=ADMIN))[0] == 204
        assert hosts[0].sandboxes[sandbox].given_to == ""
        assert env.manager.counters["moves_settled"] == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Moved("live", outage_s=0.0841), "it moved while it ran, and stood still for 84 ms"),
        (Moved("files", "namespaces end", 1.5), "its files moved, its processes ended, and stood still for 1500 ms"),
        (Moved("snapshot", "it is paused"), "it moved as a snapshot, its processes with it (not live: it is paused)"),
    ],
)
def test_a_line_says_how_it_moved(how: Moved, said: str) -> None:
    assert said in how_it_moved({"how": how.how, "why": how.why, "outage_s": how.outage_s})
