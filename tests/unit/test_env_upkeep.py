"""What happens to sandboxes without being asked: time, deaths, restarts, pressure, lost and drained nodes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests import waiting
from tests.unit.environments import ADMIN, JOIN, environment, fake_hosts

from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import app
from venusrl.sandboxes.manager.asks import Ask
from venusrl.sandboxes.manager.errors import Conflict, ManagerError, TooMany
from venusrl.sandboxes.manager.gateway_listener import Listener
from venusrl.sandboxes.manager.store import StateLock
from venusrl.sandboxes.protocol import SandboxError
from venusrl.testing.clock import VirtualClock


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds; bounded by turns, not by time."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_a_timeout_kills_or_pauses(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        killed = await env.create(timeout=30)
        paused = await env.create(timeout=30, autoPause=True)
        files = await env.create(timeout=30, autoPause=True, autoPauseMemory=False)
        await env.clock.run_for(29)
        assert {killed, paused, files} <= set(env.book.records)
        await env.clock.run_for(2)
        await until(lambda: killed not in env.book.records and env.book.records[files].state == "paused")
        assert env.store.sandbox(killed).cause == "its time was up"  # type: ignore[union-attr]
        assert env.book.records[paused].paused_by == "timeout"
        assert env.hosts[0].sandboxes[files].memory_kept is False
        await env.clock.run_for(400)
        assert env.book.records[paused].state == "paused"


async def test_an_end_that_fails_is_tried_again_and_delays_no_other(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        first, second = await env.create(timeout=10), await env.create(timeout=11)
        env.hosts[0].fail("kill", SandboxError("stuck"))
        await env.clock.run_for(12)
        await until(lambda: second not in env.book.records)
        assert first in env.book.records
        await env.clock.run_for(11)
        await until(lambda: first not in env.book.records)


async def test_times_and_records_hold_over_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        short, long = await env.create(timeout=50), await env.create(timeout=500, metadata={"k": "v"})
        paused = await env.create()
        gone = await env.create()
        await env.call("POST", f"/sandboxes/{paused}/pause", {})
        snapshot = (await env.call("POST", f"/sandboxes/{long}/snapshots", {}))[1]["snapshotID"]
        token = env.service.secret.envd_token(long)
    del hosts[0].sandboxes[gone]
    clock.advance(60)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        assert env.service.secret.envd_token(long) == token
        assert env.book.records[long].metadata == {"k": "v"}
        assert env.book.records[paused].state == "paused"
        assert gone not in env.book.records
        assert "does not have it" in env.store.sandbox(gone).cause  # type: ignore[union-attr]
        assert snapshot in env.manager.snapshots
        await env.clock.run_for(1)
        await until(lambda: short not in env.book.records)
        assert short not in hosts[0].sandboxes
        await env.clock.run_for(450)
        await until(lambda: long not in env.book.records)


async def test_what_no_record_knows_is_ended_after_a_grace(tmp_path: Path) -> None:
    async with environment(tmp_path, grace_s=60.0, reconcile_s=5.0) as env:
        known = await env.create(timeout=5000)
        await env.hosts[0].create(Order(id="stray", template="base-id", runtime="namespace"))
        await env.hosts[0].snapshot(known, "stray-snapshot")
        await env.clock.run_for(40)
        assert "stray" in env.hosts[0].sandboxes
        await env.clock.run_for(40)
        assert set(env.hosts[0].sandboxes) == {known}
        assert env.hosts[0].snapshots == {}


async def test_a_death_is_recorded_with_its_cause(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        sandbox = await env.create()
        await until(lambda: bool(env.hosts[0]._events))
        env.hosts[0].die(sandbox, "out of memory")
        await until(lambda: sandbox not in env.book.records)
        assert (await env.call("GET", f"/sandboxes/{sandbox}"))[0] == 404
        _, answer, _ = await env.call("GET", f"/v2/sandboxes/{sandbox}/logs?level=error")
        assert [line["message"] for line in answer["logs"]] == ["sandbox died: out of memory"]


async def test_a_pause_for_memorys_sake_is_noticed_and_undone_by_traffic(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        sandbox = await env.create(timeout=300)
        ends = env.book.records[sandbox].ends
        await env.clock.run_for(2)
        env.hosts[0].pause_under_pressure(sandbox)
        await env.clock.run_for(20)
        record = env.book.records[sandbox]
        assert (record.state, record.paused_by, record.ends) == ("paused", "pressure", ends)
        await env.manager.wake(sandbox)
        record = env.book.records[sandbox]
        assert (record.state, record.ends) == ("running", ends)
        env.hosts[0].pause_under_pressure(sandbox)  # not noticed yet: traffic meets a refusal
        woken = await env.manager.wake(sandbox, host_says_paused=True)
        assert woken.state == "running"
        assert env.hosts[0].sandboxes[sandbox].state == "running"
        env.hosts[0].pause_under_pressure(sandbox)
        await env.clock.run_for(300)
        await until(lambda: sandbox not in env.book.records)


async def test_traffic_meets_what_really_is(tmp_path: Path) -> None:
    """Records can be behind their hosts: whoever comes through the gateway does not notice."""
    async with environment(tmp_path) as env:
        sandbox, dead = await env.create(), await env.create()

        async def health(which: str) -> tuple[int, object]:
            status, answer, _ = await env.call("GET", "/health", E2b_Sandbox_Id=which, E2b_Sandbox_Port="49983")
            return status, answer

        assert (await health(sandbox))[0] == 204
        env.hosts[0].pause_under_pressure(sandbox)
        assert (await health(sandbox))[0] == 204
        assert env.book.records[sandbox].state == "running"
        del env.hosts[0].sandboxes[dead]
        status, answer = await health(dead)
        assert status == 502
        assert "was not found" in str(answer)
        assert dead not in env.book.records

        env.hosts[0].gate = asyncio.Event()
        pausing = asyncio.create_task(env.call("POST", f"/sandboxes/{sandbox}/pause", {}))
        await waiting.until(lambda: env.book.records[sandbox].state == "pausing")
        parked = asyncio.create_task(health(sandbox))
        await waiting.until(lambda: env.service.gateway.parked == 1)
        env.hosts[0].gate.set()
        assert (await pausing)[0] == 204
        assert (await parked)[0] == 502  # paused now, and not to be woken by traffic
        assert (await health("nobody"))[0] == 502


async def test_only_who_may_is_woken_by_traffic(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        key, text = env.new_key("one", max_sandboxes=1)
        stubborn = await env.create()
        _, answer, _ = await env.call(
            "POST",
            "/v2/sandboxes",
            {"templateID": "base", "autoPause": True, "autoResume": {"enabled": True}},
            key=text,
        )
        willing = answer["sandboxID"]
        for sandbox, given in ((stubborn, env.text), (willing, text)):
            assert (await env.call("POST", f"/sandboxes/{sandbox}/pause", {}, key=given))[0] == 204
        with pytest.raises(Conflict):
            await env.manager.wake(stubborn)
        await env.call("POST", "/v2/sandboxes", {"templateID": "base"}, key=text)
        with pytest.raises(TooMany):
            await env.manager.wake(willing)
        assert env.book.running(key.id) == 1
        other = next(one.id for one in env.book.records.values() if one.key == key.id and one.id != willing)
        await env.call("DELETE", f"/sandboxes/{other}", key=text)
        calls = len(env.hosts[0].calls)
        await asyncio.gather(*(env.manager.wake(willing) for _ in range(5)))
        assert [call for call, _ in env.hosts[0].calls[calls:]].count("resume") == 1


async def test_a_lost_node_takes_its_running_sandboxes_and_keeps_its_paused_ones(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, grace_s=5.0, node_grace_s=15.0) as env:
        running, paused = await env.create(timeout=9000), await env.create(timeout=9000)
        await env.call("POST", f"/sandboxes/{paused}/pause", {})
        hosts[0].fail("status", HostLost("no answer"), times=40)
        await env.clock.run_for(20)
        await until(lambda: running not in env.book.records)
        assert "was lost" in env.store.sandbox(running).cause  # type: ignore[union-attr]
        status, answer, headers = await env.call("POST", f"/v2/sandboxes/{paused}/connect", {})
        assert (status, answer["error_code"]) == (503, "node_unreachable")
        assert "Retry-After" in headers
        elsewhere = await env.create()
        assert elsewhere in hosts[1].sandboxes
        await env.clock.run_for(60)  # it comes back, and what it held without a record is ended there
        assert (await env.call("POST", f"/v2/sandboxes/{paused}/connect", {}))[0] == 201
        await until(lambda: set(hosts[0].sandboxes) == {paused})


async def test_a_drained_node_gives_everything_away(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        made = [await env.create() for _ in range(3)]
        await env.call("POST", f"/sandboxes/{made[0]}/pause", {})
        hosts[0].fail("move", SandboxError("not this one"))
        assert (await env.call("POST", "/nodes/host-1", {"status": "draining"}))[0] == 401
        status, answer, _ = await env.call("POST", "/nodes/host-1", {"status": "draining"}, X_Admin_Token=ADMIN)
        assert status == 200
        assert len(answer["moved"]) == 2
        assert list(answer["stayed"].values()) == ["not this one"]
        stayed = next(iter(answer["stayed"]))
        assert set(hosts[1].sandboxes) == set(made) - {stayed}
        assert env.book.records[made[0]].state == ("paused")
        assert await env.create() in hosts[1].sandboxes
        _, seen, _ = await env.call("GET", "/nodes", X_Admin_Token=ADMIN)
        assert [node["status"] for node in seen] == ["draining", "ready"]


async def test_a_drained_node_stays_so_until_that_is_undone(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    far = fake_hosts(clock, 1)[0]
    far._name = "far"
    body = {"name": "far", "url": "http://10.0.0.2:3900", "key": "k"}
    async with environment(tmp_path, hosts=hosts, clock=clock, connect=lambda record: far) as env:
        await env.call("POST", "/nodes", body, X_Join_Key=JOIN)
        for name in ("host-1", "far"):
            assert (await env.call("POST", f"/nodes/{name}", {"status": "draining"}, X_Admin_Token=ADMIN))[0] == 200
    hosts[0].draining = far.draining = False  # both were started again meanwhile
    async with environment(tmp_path, hosts=hosts, clock=clock, connect=lambda record: far) as env:
        await env.call("POST", "/nodes", {**body, "url": "http://10.0.0.2:3901"}, X_Join_Key=JOIN)
        _, seen, _ = await env.call("GET", "/nodes", X_Admin_Token=ADMIN)
        assert {node["id"]: node["status"] for node in seen} == {
            "far": "draining",
            "host-1": "draining",
            "host-2": "ready",
        }
        assert (await env.call("POST", "/nodes", {**body, "name": "host-1"}, X_Join_Key=JOIN))[0] == 409
        assert await env.create() in hosts[1].sandboxes
        assert (await env.call("POST", "/nodes/host-1", {"status": "resting"}, X_Admin_Token=ADMIN))[0] == 400
        assert (await env.call("POST", "/nodes/host-1", {"status": "ready"}, X_Admin_Token=ADMIN))[0] == 200
        assert await env.create() in hosts[0].sandboxes
    async with environment(tmp_path, hosts=hosts, clock=clock, connect=lambda record: far) as env:
        _, seen, _ = await env.call("GET", "/nodes", X_Admin_Token=ADMIN)
        assert [node["status"] for node in seen] == ["draining", "ready", "ready"]


async def test_a_move_whose_end_was_not_noted_is_found(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        running, paused = await env.create(), await env.create()
        await env.call("POST", f"/sandboxes/{paused}/pause", {})
    for sandbox in (running, paused):  # as if the service was killed just then
        await hosts[0].move(sandbox, hosts[1])
    async with environment(tmp_path, hosts=hosts, clock=clock, grace_s=1.0) as env:
        assert {one.host for one in env.book.records.values()} == {"host-2"}
        assert env.book.records[paused].state == "paused"
        await env.clock.run_for(60)
        assert set(hosts[1].sandboxes) == {running, paused}


async def test_a_resume_without_room_at_home_goes_elsewhere(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        env.admission.most = 1
        first = await env.create()
        hosts[0].sandboxes[first].files["/x"] = b"1"
        await env.call("POST", f"/sandboxes/{first}/pause", {})
        await env.clock.run_for(2)
        assert await env.create() in hosts[0].sandboxes
        assert (await env.call("POST", f"/v2/sandboxes/{first}/connect", {}))[0] == 201
        assert hosts[1].sandboxes[first].files == {"/x": b"1"}
        assert env.book.records[first].host == "host-2"
        assert (await env.call("POST", "/v2/sandboxes", {"templateID": "base"}))[0] == 503


async def test_nodes_join_with_their_key_and_are_remembered(tmp_path: Path) -> None:
    body = {"name": "far", "url": "http://10.0.0.2:3900", "key": "k"}
    clock = VirtualClock()
    far = fake_hosts(clock, 1)[0]
    far._name = "far"
    async with environment(tmp_path, clock=clock, connect=lambda record: far) as env:
        assert (await env.call("POST", "/nodes", body, X_Join_Key="wrong"))[0] == 403
        assert (await env.call("POST", "/nodes", {**body, "url": "file:///x"}, X_Join_Key=JOIN))[0] == 400
        assert (await env.call("POST", "/nodes", {**body, "name": "host-1"}, X_Join_Key=JOIN))[0] == 409
        status, answer, _ = await env.call("POST", "/nodes", body, X_Join_Key=JOIN)
        assert (status, answer["again_s"]) == (200, 5.0)
        assert (await env.call("POST", "/nodes", body, X_Join_Key=JOIN))[0] == 200
        assert set(env.service.fleet.nodes) == {"host-1", "far"}
        env.hosts[0].draining = True
        await env.clock.run_for(2)
        assert await env.create() in far.sandboxes
        _, seen, _ = await env.call("GET", "/admin/overview", X_Admin_Token=ADMIN)
        assert [node["id"] for node in seen["nodes"]] == ["far", "host-1"]
        assert len(seen["sandboxes"]) == 1
        assert [one.name for one in env.store.nodes()] == ["far"]
        assert (await env.call("DELETE", "/nodes/far", X_Admin_Token=ADMIN))[0] == 409
    async with environment(tmp_path, clock=clock, connect=lambda record: far) as env:
        assert set(env.service.fleet.nodes) == {"host-1", "far"}


async def test_T36_a_create_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async with environment(tmp_path) as env:
        host = env.hosts[0]
        host.gate = asyncio.Event()
        task = asyncio.create_task(env.manager.create(env.key, Ask("base", 300.0)))
        await until(lambda: any(call == "create" for call, _ in host.calls))
        sandbox = next(iter(env.book.records))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert env.book.records == {}
        assert env.store.living() == []
        await until(lambda: ("kill", sandbox) in host.calls)  # should the host have made it all the same
        assert host.sandboxes == {}


async def test_T36_a_client_that_left_before_the_answer_leaves_nothing(tmp_path: Path) -> None:
    """On the listener of the real service, which lets a handler go on when its client leaves."""
    async with environment(tmp_path) as env:
        listener = Listener(app.build(env.service, admin_key=ADMIN, join_key=JOIN), env.service.gateway)
        port = await listener.start("127.0.0.1", 0)
        host = env.hosts[0]
        host.gate = asyncio.Event()
        body = msgspec.json.encode({"templateID": "base"})
        head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {env.text}\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        await waiting.until(lambda: any(call == "create" for call, _ in host.calls))
        writer.transport.abort()
        server = listener._runner.server
        assert server is not None
        await waiting.until(
            lambda: all(one.transport is None for one in server.connections), "the server's hearing of it"
        )
        host.gate.set()
        await waiting.until(lambda: env.manager.counters.get("ended") == 1)
        assert host.sandboxes == {}
        assert env.book.records == {}
        await listener.stop()


async def test_repeated_creates_are_answered_once(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock)
    body = {"templateID": "base"}
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        answers = await asyncio.gather(
            *(env.call("POST", "/v2/sandboxes", body, Idempotency_Key="once") for _ in range(4))
        )
        assert {status for status, _, _ in answers} == {201}
        assert len({answer["sandboxID"] for _, answer, _ in answers}) == 1
        assert len(hosts[0].sandboxes) == 1
        other = {"templateID": "base", "timeout": 9}
        assert (await env.call("POST", "/v2/sandboxes", other, Idempotency_Key="once"))[0] == 422
        assert (await env.call("POST", "/v2/sandboxes", body, Idempotency_Key="no good!"))[0] == 400
        _, second = env.new_key("second")
        assert (await env.call("POST", "/v2/sandboxes", body, key=second, Idempotency_Key="once"))[0] == 201
        env.admission.most = 0
        assert (await env.call("POST", "/v2/sandboxes", body, Idempotency_Key="later"))[0] == 503
        env.admission.most = None
        assert (await env.call("POST", "/v2/sandboxes", body, Idempotency_Key="later"))[0] == 201
        text = env.text
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        status, again, headers = await env.call("POST", "/v2/sandboxes", body, key=text, Idempotency_Key="once")
        assert status == 201
        assert headers["Idempotency-Replayed"] == "true"
        assert again["sandboxID"] == answers[0][1]["sandboxID"]


async def test_a_create_cut_short_by_a_crash_is_answered_to_who_asks_again(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock)
    async with environment(tmp_path, hosts=hosts, clock=clock) as env:
        answered = await env.create()
        record = env.book.records[answered]
        env.store.put(msgspec.structs.replace(record, state="creating"))
        body = msgspec.json.encode({"templateID": "base"})
        digest = hashlib.sha256(b"/v2/sandboxes\n" + body).hexdigest()
        env.store.remember(env.key.tenant, "once", digest, answered, clock.time())
        lone = await env.create()
        env.store.put(msgspec.structs.replace(env.book.records[lone], state="creating"))
        text = env.text
    async with environment(tmp_path, hosts=hosts, clock=clock, grace_s=5.0) as env:
        async with env.client.post(
            "/v2/sandboxes", data=body, headers={"X-API-Key": text, "Idempotency-Key": "once"}
        ) as response:
            assert (await response.json())["sandboxID"] == answered
        await env.clock.run_for(60)
        assert set(hosts[0].sandboxes) == {answered}


def test_a_second_service_on_one_state_directory_is_refused(tmp_path: Path) -> None:
    held = StateLock.acquire(tmp_path)
    with pytest.raises(ManagerError, match="in use by another service"):
        StateLock.acquire(tmp_path)
    held.release()
    StateLock.acquire(tmp_path).release()
