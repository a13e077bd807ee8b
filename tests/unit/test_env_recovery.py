"""What a lost node does not take with it: copies of paused sandboxes and snapshots; one owner whatever comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import waiting
from tests.unit.environments import ADMIN, Environment, environment, fake_hosts
from tests.waiting import until

from venusrl.cli.env_view import _state
from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import fencing
from venusrl.sandboxes.manager.asks import Settings
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.manager.serve import ServeConfig, Server
from venusrl.sandboxes.protocol import HostDiskFull, SandboxDenied, SandboxError
from venusrl.testing.clock import VirtualClock
from venusrl.testing.env_host import FakeHost


@contextmanager
def silent(host: FakeHost) -> Iterator[None]:
    """Every call fails meanwhile; its sandboxes are as they were."""
    called = host._called

    def refuse(call: str, subject: str) -> None:
        raise HostLost(f"{host.name} says nothing")

    host._called = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        host._called = called  # type: ignore[method-assign]


async def two(env: Environment, *, copied: bool = True) -> str:
    """A paused sandbox on the first of two hosts, with a file; copied elsewhere."""
    sandbox = await env.create(timeout=9000)
    env.hosts[0].sandboxes[sandbox].files["/kept"] = b"before"
    assert (await env.call("POST", f"/sandboxes/{sandbox}/pause", {}))[0] == 204
    if copied:
        await copied_now(env, sandbox)
    return sandbox


async def copied_now(env: Environment, sandbox: str) -> None:
    await passing(env, lambda: bool(env.book.records[sandbox].replica), 0.5, f"the copy of {sandbox}")


async def passing(env: Environment, condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Virtual time goes on until ``condition`` holds; threads that write copies take real time."""

    async def holds() -> bool:
        if condition():
            return True
        await env.clock.run_for(seconds)
        return condition()

    await until(holds, what)


async def look(env: Environment, sandbox: str) -> dict[str, object]:
    _, seen, _ = await env.call("GET", "/admin/overview", X_Admin_Token=ADMIN)
    found: dict[str, object] = next(one for one in seen["sandboxes"] if one["id"] == sandbox)
    return found


async def connect(env: Environment, sandbox: str) -> tuple[int, object]:
    status, answer, _ = await env.call("POST", f"/v2/sandboxes/{sandbox}/connect", {"timeout": 500})
    return status, answer


async def test_a_paused_sandbox_of_a_lost_node_resumes_elsewhere_under_its_id(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0, grace_s=5.0) as env:
        sandbox = await two(env)
        assert (await look(env, sandbox))["replica"] == {"state": "kept", "reason": "", "bytes": 6, "memory": True}
        running = await env.create(timeout=9000)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            assert running not in env.book.records
            assert "was lost" in env.store.sandbox(running).cause  # type: ignore[union-attr]
            assert hosts[0].hung_up == 1
            assert (await connect(env, sandbox))[0] == 201
            assert hosts[1].sandboxes[sandbox].files == {"/kept": b"before"}
            assert hosts[0].sandboxes[sandbox].state == "paused", "nobody may have run it there"
            hosts[1].sandboxes[sandbox].files["/kept"] = b"after"
        await env.clock.run_for(60)
        assert hosts[0].sandboxes == {}, "what came back of the lost node is not the sandbox"
        assert env.book.records[sandbox].host == "host-2"
        assert hosts[1].sandboxes[sandbox].files == {"/kept": b"after"}
        assert (await look(env, sandbox))["replica"] is None
        assert list((tmp_path / "replicas" / "states").iterdir()) == []


async def test_traffic_may_recover_what_it_may_resume(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
        willing = await env.create(autoPause=True, autoResume={"enabled": True})
        await env.call("POST", f"/sandboxes/{willing}/pause", {})
        await copied_now(env, willing)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            status, _, _ = await env.call("GET", "/health", E2b_Sandbox_Id=willing, E2b_Sandbox_Port="49983")
            assert status == 204
            assert env.book.records[willing].host == "host-2"


async def test_requests_wait_while_it_is_recovered(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
        sandbox = await two(env)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            hosts[1].gate = asyncio.Event()
            connecting = asyncio.create_task(connect(env, sandbox))
            await waiting.until(lambda: ("restore", sandbox) in hosts[1].calls)
            headers = {"E2b_Sandbox_Id": sandbox, "E2b_Sandbox_Port": "49983"}
            asking = asyncio.create_task(env.call("GET", "/health", **headers))
            await waiting.until(lambda: env.service.gateway.parked == 1)
            hosts[1].gate.set()
            assert (await connecting)[0] == 201
            assert (await asking)[0] == 204


async def test_without_a_copy_it_is_told_of_as_lost_and_comes_back_with_its_node(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, node_grace_s=15.0) as env:
        sandbox = await two(env, copied=False)
        assert (await look(env, sandbox))["replica"]["state"] == "off"  # type: ignore[index]
        with silent(hosts[0]):
            await env.clock.run_for(30)
            assert "no copy is kept elsewhere (the service was started without --replicas)" in str(
                (await look(env, sandbox))["lost"]
            )
            status, answer = await connect(env, sandbox)
            assert status == 503
            assert "waits for that node" in str(answer)
        await env.clock.run_for(3)
        assert (await connect(env, sandbox))[0] == 201
        assert env.book.records[sandbox].host == "host-1"


async def test_a_resume_makes_the_copy_stand_for_nothing(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
        sandbox = await two(env)
        hosts[0].fail("resume", SandboxDenied("full", 1.0))
        assert (await connect(env, sandbox))[0] == 503
        assert env.book.records[sandbox].replica, "it is paused as before, and so is its copy"
        assert (await connect(env, sandbox))[0] == 201
        assert env.book.records[sandbox].replica == ""
        hosts[0].sandboxes[sandbox].files["/kept"] = b"newer"
        await env.call("POST", f"/sandboxes/{sandbox}/pause", {})
        await copied_now(env, sandbox)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            assert (await connect(env, sandbox))[0] == 201
            assert hosts[1].sandboxes[sandbox].files == {"/kept": b"newer"}


async def test_the_copy_stands_for_nothing_before_its_host_may_have_more(tmp_path: Path) -> None:
    """So that a service killed in the middle of a resume never recovers what is older."""
    async with environment(tmp_path, copies=True) as env:
        sandbox = await two(env)
        env.hosts[0].gate = asyncio.Event()
        resuming = asyncio.create_task(connect(env, sandbox))
        await waiting.until(lambda: ("resume", sandbox) in env.hosts[0].calls)
        assert env.store.sandbox(sandbox).replica == ""  # type: ignore[union-attr]
        env.hosts[0].gate.set()
        assert (await resuming)[0] == 201


async def test_a_host_that_lost_it_is_replaced_by_the_copy(tmp_path: Path) -> None:
    """A node that came back with an empty disk."""
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True) as env:
        first, second = await two(env), await two(env)
        hosts[0].sandboxes.clear()
        assert (await connect(env, first))[0] == 201
        await env.clock.run_for(30)
        assert env.book.records[second].state == "paused"
        assert (await connect(env, second))[0] == 201


async def test_whether_it_came_to_be_is_not_guessed(tmp_path: Path) -> None:
    """The answer of the host that was to have it is lost, and then the node that was lost is there again."""
    clock = VirtualClock()
    hosts = fake_hosts(clock, 3)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
        sandbox = await two(env)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            hosts[1].fail("restored", HostLost("cut"))
            status, answer = await connect(env, sandbox)
            assert status == 503
            assert "is not known" in str(answer)
            assert env.book.records[sandbox].fence > 0
        await env.clock.run_for(40)
        assert env.book.records[sandbox].host == "host-2", "it came to be, and that is seen"
        assert hosts[0].sandboxes == {}
        assert hosts[1].sandboxes[sandbox].state == env.book.records[sandbox].state == "running"


async def test_a_refusal_takes_the_fence_back(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
        sandbox = await two(env)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            hosts[1].draining = True
            env.service.fleet.nodes["host-2"].status = await hosts[1].status()
            assert (await connect(env, sandbox))[0] == 503
            hosts[1].draining = False
            hosts[1].fail("restore", SandboxDenied("no", 1.0))
            await env.clock.run_for(2)
            assert (await connect(env, sandbox))[0] == 503
            assert env.book.records[sandbox].fence == 0
        await env.clock.run_for(3)
        assert (await connect(env, sandbox))[0] == 201
        assert env.book.records[sandbox].host == "host-1"


async def test_copies_and_fences_hold_over_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True) as env:
        sandbox = await two(env)
        text = env.text
    with silent(hosts[0]):
        async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
            env.text = text
            await env.clock.run_for(30)
            assert (await connect(env, sandbox))[0] == 201
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True) as env:
        await env.clock.run_for(20)
        assert env.book.records[sandbox].host == "host-2"
        assert hosts[0].sandboxes == {}


async def test_a_snapshot_of_a_lost_node_can_be_had_elsewhere(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0, grace_s=5.0) as env:
        sandbox = await env.create()
        hosts[0].sandboxes[sandbox].files["/s"] = b"snap"
        snapshot = (await env.call("POST", f"/sandboxes/{sandbox}/snapshots", {}))[1]["snapshotID"]
        await passing(env, lambda: bool(env.manager.snapshots[snapshot].replica), 1.0, "the copy of the snapshot")
        with silent(hosts[0]):
            await env.clock.run_for(30)
            made = await asyncio.gather(
                *(env.call("POST", "/v2/sandboxes", {"templateID": snapshot}) for _ in range(3))
            )
            assert [status for status, _, _ in made] == [201] * 3
            assert all(hosts[1].sandboxes[answer["sandboxID"]].files == {"/s": b"snap"} for _, answer, _ in made)
        await env.clock.run_for(60)
        assert hosts[0].snapshots == {}
        assert list(hosts[1].snapshots) == [snapshot]


async def test_a_snapshot_of_a_lost_node_can_be_removed(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0, grace_s=5.0) as env:
        sandbox = await env.create()
        snapshot = (await env.call("POST", f"/sandboxes/{sandbox}/snapshots", {}))[1]["snapshotID"]
        with silent(hosts[0]):
            await env.clock.run_for(30)
            assert (await env.call("DELETE", f"/templates/{snapshot}"))[0] == 204
            assert (await env.call("DELETE", f"/templates/{snapshot}"))[0] == 404
        await env.clock.run_for(60)
        assert hosts[0].snapshots == {}


async def test_a_node_that_is_given_up_keeps_what_has_a_copy(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True, node_grace_s=15.0) as env:
        sandbox = await two(env)
        uncopied = await two(env, copied=False)
        with silent(hosts[0]):
            await env.clock.run_for(30)
            env.book.save(msgspec.structs.replace(env.book.records[uncopied], replica=""))
            assert (await env.call("DELETE", "/nodes/host-1", X_Admin_Token=ADMIN))[0] == 204
            assert uncopied not in env.book.records
            assert "given up" in env.store.sandbox(uncopied).cause  # type: ignore[union-attr]
            assert (await connect(env, sandbox))[0] == 201


async def test_a_copy_that_cannot_be_kept_is_told_of_and_tried_again(tmp_path: Path) -> None:
    clock = VirtualClock()
    hosts = fake_hosts(clock, 2)
    async with environment(tmp_path, hosts=hosts, clock=clock, copies=True) as env:
        hosts[0].fail("take", SandboxError("its disk is odd"))
        sandbox = await two(env, copied=False)
        await env.clock.run_for(3)
        await waiting.until(lambda: env.manager.recovery.told(env.book.records[sandbox])["state"] == "failed")  # type: ignore[index]
        assert (await look(env, sandbox))["replica"]["reason"] == "its disk is odd"  # type: ignore[index]
        await env.clock.run_for(40)
        await copied_now(env, sandbox)


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        ({"state": "running", "pausedBy": "", "replica": None, "lost": ""}, "running"),
        ({"state": "paused", "pausedBy": "user", "replica": {"state": "kept"}, "lost": ""}, "paused (user, copied)"),
        ({"state": "paused", "pausedBy": "timeout", "replica": {"state": "failed"}}, "paused (timeout, copy: failed)"),
        ({"state": "paused", "pausedBy": "user", "replica": {"state": "off"}, "lost": ""}, "paused (user)"),
        ({"state": "paused", "pausedBy": "user", "replica": {"state": "off"}, "lost": "why"}, "lost with its node"),
    ],
)
def test_a_list_shows_what_would_be_lost(one: dict[str, object], shown: str) -> None:
    assert _state(one) == shown


@pytest.mark.parametrize("seconds", [0.0, 2.9, -1.0, 1e9, float("nan")])
async def test_a_grace_that_makes_no_sense_is_refused(tmp_path: Path, seconds: float) -> None:
    server = Server(ServeConfig(tmp_path / "state", settings=Settings(node_grace_s=seconds)))
    with pytest.raises(ManagerError, match="choose another --node-grace"):
        await server.start()


# The directory


async def test_pieces_are_kept_once_and_only_what_changed_is_copied(tmp_path: Path) -> None:
    host = fake_hosts(VirtualClock())[0]
    env = {"a": {"/x": b"same", "/y": b"one"}, "b": {"/x": b"same", "/z": b"two"}}
    await _filled(host, env)
    replicas = Replicas(tmp_path / "replicas")
    replicas.open()
    first, second = [await replicas.pull(host.states, "sandbox", name) for name in env]
    assert replicas.used == len(b"same") + len(b"one") + len(b"two") == replicas.sent
    with pytest.raises(ManagerError, match="in use by another service"):
        Replicas(tmp_path / "replicas").open()
    replicas.close()
    replicas = Replicas(tmp_path / "replicas")
    replicas.open()
    assert (replicas.get(first.id), replicas.get(second.id)) == (first, second)
    await replicas.keep_only(lambda state: state.id == second.id)
    assert replicas.used == len(b"same") + len(b"two")
    assert len(list((tmp_path / "replicas" / "pieces").glob("??/*"))) == 2
    await replicas.pull(host.states, "sandbox", "a")
    assert replicas.sent == len(b"one")
    replicas.close()


async def test_the_limit_of_the_directory_holds(tmp_path: Path) -> None:
    host = fake_hosts(VirtualClock())[0]
    await _filled(host, {"a": {"/x": b"x" * 600}, "b": {"/y": b"y" * 600}})
    replicas = Replicas(tmp_path / "replicas", 1000)
    replicas.open()
    await replicas.pull(host.states, "sandbox", "a")
    with pytest.raises(HostDiskFull, match="--replicas-mib"):
        await replicas.pull(host.states, "sandbox", "b")
    await replicas.keep_only(lambda state: False)
    await replicas.pull(host.states, "sandbox", "b")
    replicas.close()


async def test_a_damaged_piece_is_noticed(tmp_path: Path) -> None:
    host, other = fake_hosts(VirtualClock(), 2)
    await _filled(host, {"a": {"/x": b"x" * 600}})
    replicas = Replicas(tmp_path / "replicas")
    replicas.open()
    read = host.states.read

    async def lying(state: str, file: int, piece: int) -> bytes:
        return b"not it"

    host.states.read = lying  # type: ignore[method-assign]
    with pytest.raises(SandboxError, match="not the one that was announced"):
        await replicas.pull(host.states, "sandbox", "a")
    host.states.read = read  # type: ignore[method-assign]
    state = await replicas.pull(host.states, "sandbox", "a")
    next((tmp_path / "replicas" / "pieces").glob("??/*")).unlink()
    with pytest.raises(SandboxError, match="damaged"):
        await replicas.push(state, other.states)
    replicas.close()


async def _filled(host: FakeHost, files: dict[str, dict[str, bytes]]) -> None:
    """Paused sandboxes by name."""
    for name, contents in files.items():
        await host.create(Order(id=name, template="host", runtime="namespace"))
        host.sandboxes[name].files.update(contents)
        await host.pause(name)


# The rule, and any history


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)), st.sampled_from("abc"), st.integers(0, 5))
def test_at_most_one_copy_owns_and_none_below_the_fence(copies: dict[str, int], host: str, fence: int) -> None:
    chosen = fencing.owner(host, fence, copies)
    valid = {name for name, epoch in copies.items() if epoch >= fence}
    assert (chosen in valid) if valid else chosen == ""
    assert all(copies[chosen] >= copies[name] for name in valid)
    assert fencing.owner(host, fence, dict(reversed(copies.items()))) == chosen
    after = fencing.raised(fence, copies.values())
    assert fencing.owner(host, after, copies) == "", "what there was before the fence owns nothing after it"
    assert fencing.owner(host, after, {**copies, "b": after}) == "b"
