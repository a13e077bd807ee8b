"""Sandboxes move while they run: served until they stop, on one side at every instant, whatever fails and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import pytest
from aiohttp import web
from tests.unit.host_sides import Side
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.host import arrivals, move_line, server
from venusrl.sandboxes.host.api import Address, Host, Moving, Order, Peer
from venusrl.sandboxes.host.errors import HostLost, MoveUnsupported
from venusrl.sandboxes.host.remote import RemoteHost
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused
from venusrl.sandboxes.runtimes.moving import Objection
from venusrl.testing.agents import MemoryAgent
from venusrl.testing.movable import MovableRuntime, Step

Where = Literal["here", "there"]
KEY = "k" * 32


def world_of(world: Path) -> MovableRuntime:
    return MovableRuntime(lambda spec: MemoryAgent(), world=world)


async def pair(root: Path) -> dict[Where, Side[MovableRuntime]]:
    names: tuple[Where, ...] = ("here", "there")
    sides = {name: await Side(root, name, world_of).begin() for name in names}
    await sides["here"].host.create(Order(id="a", template="host", runtime="fake"))
    return sides


async def close(sides: dict[Where, Side[MovableRuntime]]) -> None:
    for side in sides.values():
        await side.host.close()


def running(sides: dict[Where, Side[MovableRuntime]]) -> list[str]:
    return [name for name, side in sides.items() if side.runtime.running()]


def failing(step: Step, error: Exception) -> Callable[[Step], Awaitable[None]]:
    async def at(reached: Step) -> None:
        if reached == step:
            raise error

    return at


async def test_it_moves_live_there_and_back_and_over_a_restart(tmp_path: Path) -> None:
    sides = await pair(tmp_path)
    here, there = sides["here"], sides["there"]
    for origin, target in ((here, there), (there, here), (here, there)):
        moved = await origin.host.move("a", target.host)
        assert (moved.how, moved.why) == ("live", "")
        assert origin.runtime.alive == []
        assert target.runtime.running() == ["a"]
    await there.again()
    assert [(one.state, one.epoch) for one in (await there.host.status()).held] == [("running", 3)]
    assert there.host.cells.counters["adopted"] == 1
    await close(sides)


async def test_it_is_served_until_it_stops(tmp_path: Path) -> None:
    sides = await pair(tmp_path)
    here, there = sides["here"].host, sides["there"].host
    seen: dict[Step, str] = {}

    async def look(step: Step) -> None:
        try:
            here.cells.running("a")
            seen[step] = "served"
        except SandboxPaused:
            seen[step] = "stopped"

    sides["here"].runtime.at = look
    await here.move("a", there)
    assert seen == {"dialled": "served", "copied": "served", "stopped": "stopped", "given": "stopped"}
    await close(sides)


@pytest.mark.parametrize(
    ("side", "step", "stays"),
    [
        ("here", "dialled", True),
        ("here", "copied", True),
        ("here", "stopped", True),
        ("here", "given", True),
        ("there", "accepted", True),
        ("there", "loaded", True),
        ("there", "run", True),
    ],
)
async def test_a_step_that_fails_leaves_it_running_where_it_was(
    tmp_path: Path, side: Where, step: Step, stays: bool
) -> None:
    sides = await pair(tmp_path)
    sides[side].runtime.at = failing(step, SandboxError("no"))
    with pytest.raises(SandboxError):
        await sides["here"].host.move("a", sides["there"].host)
    assert running(sides) == ["here"]
    assert sides["there"].runtime.alive == []
    sides["here"].host.cells.running("a")
    held = (await sides["here"].host.status()).held[0]
    assert (held.state, held.given_to) == ("running", "")
    sides[side].runtime.at = None
    assert (await sides["here"].host.move("a", sides["there"].host)).how == "live"
    assert running(sides) == ["there"]
    await close(sides)


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("step", ["copied", "stopped", "given", "loaded", "run"])
async def test_a_service_that_ends_in_a_move_loses_nothing(tmp_path: Path, side: Where, step: Step) -> None:
    """That side's work is cut off, its sandboxes are not; the record tells the next service what to ask."""
    sides = await pair(tmp_path)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(now: Step) -> None:
        if now == step:
            reached.set()
            await go_on.wait()

    origin: Where = "here" if step in ("copied", "stopped", "given") else "there"
    sides[origin].runtime.at = hold
    moving = asyncio.create_task(sides["here"].host.move("a", sides["there"].host))
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    for task in asyncio.all_tasks():
        if task.get_name() in (("move a",) if side == "here" else ("arrival of a", "create a")):
            task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(moving, return_exceptions=True)
    sides[side].runtime.at = sides[origin].runtime.at = None
    await sides[side].again()
    given = [one.given_to for one in (await sides["here"].host.status()).held]
    if given == ["there"]:
        await sides["here"].host.settle("a", sides["there"].host)
    assert len(running(sides)) == 1
    assert len(sides["here"].runtime.alive + sides["there"].runtime.alive) == 1
    await close(sides)


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_lost_answer_is_found_out_over_a_restart(
    tmp_path: Path, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the other host says whether it has it, it runs here no more."""
    sides = await pair(tmp_path)
    here, there = sides["here"], sides["there"]

    def silent(_: str) -> Awaitable[bool]:
        raise HostLost("it does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(there.host, "has", silent)
        (here if not arrived else there).runtime.at = failing("given", SandboxError("cut"))
        if arrived:
            hear = move_line.hear

            async def cut(reader: asyncio.StreamReader, *wanted: str, seconds: float = 30.0) -> move_line.Word:
                word = await hear(reader, *wanted, seconds=seconds)
                if "taken" in wanted:
                    raise HostLost("cut")
                return word

            broken.setattr(move_line, "hear", cut)
            broken.setattr(arrivals, "hear", hear)
        with pytest.raises(HostLost, match="does not say"):
            await here.host.move("a", there.host)
        here.runtime.at = None
        await here.again()
        assert here.runtime.running() == []
        with pytest.raises(SandboxPaused):
            here.host.cells.running("a")
    assert await here.host.settle("a", there.host) is arrived
    assert running(sides) == (["there"] if arrived else ["here"])
    await close(sides)


async def test_a_stranger_gets_no_stream(tmp_path: Path) -> None:
    """Not without the token, and none twice."""
    sides = await pair(tmp_path)
    here, there = sides["here"].host, sides["there"].host
    offer = there.offer
    refused: list[bytes] = []

    async def knock(address: Address, token: str, stream: str) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        await move_line.say(writer, move_line.Word("hello", token=token, stream=stream))
        refused.append(await asyncio.wait_for(reader.read(), PATIENCE_S))
        writer.close()

    async def watched(move: Moving) -> Address:
        address = await offer(move)
        await knock(address, "0" * 64, "memory")
        await knock(address, address.token, "")
        opened.append(address)
        return address

    async def again(step: Step) -> None:
        if step == "accepted":
            await knock(opened[0], opened[0].token, "memory")

    opened: list[Address] = []
    there.offer = watched  # type: ignore[method-assign]
    sides["there"].runtime.at = again
    assert (await here.move("a", there)).how == "live"
    assert refused == [b"", b"", b""]
    assert await there.has("a")
    with pytest.raises(ConnectionRefusedError):
        await knock(opened[0], opened[0].token, "disk")  # the listener was for one move
    await close(sides)


async def test_what_cannot_move_live_moves_as_a_snapshot_and_says_why(tmp_path: Path) -> None:
    sides = await pair(tmp_path)
    here, there = sides["here"], sides["there"]
    lent: list[Step] = []

    async def note(step: Step) -> None:
        lent.append(step)

    here.runtime.at = there.runtime.at = note
    there.runtime.objects = Objection(live="QEMU 8.2 corrupts")
    moved = await here.host.move("a", there.host)
    assert (moved.how, moved.why) == ("snapshot", "QEMU 8.2 corrupts")
    assert lent == ["lent", "borrowed", "parted"]
    await there.host.pause("a")
    moved = await there.host.move("a", here.host)
    assert (moved.how, moved.why, moved.outage_s) == ("snapshot", "it is paused", 0.0)
    assert (await here.host.status()).held[0].state == "paused"
    await close(sides)


async def test_memory_that_would_not_run_there_stays(tmp_path: Path) -> None:
    sides = await pair(tmp_path)
    sides["there"].runtime.objects = Objection("the older QEMU", "the older QEMU")
    with pytest.raises(MoveUnsupported, match="cannot come to there: the older QEMU"):
        await sides["here"].host.move("a", sides["there"].host)
    assert running(sides) == ["here"]
    assert [(one.state, one.epoch) for one in (await sides["here"].host.status()).held] == [("running", 0)]
    await close(sides)


async def test_a_kill_ends_it_on_both_sides(tmp_path: Path) -> None:
    sides = await pair(tmp_path)
    killing: list[asyncio.Task[None]] = []

    async def kill(step: Step) -> None:
        if step == "stopped":
            killing.append(asyncio.create_task(sides["here"].host.kill("a")))
            await asyncio.sleep(0)

    sides["here"].runtime.at = kill
    with pytest.raises(SandboxGone):
        await sides["here"].host.move("a", sides["there"].host)
    await asyncio.gather(*killing)
    await sides["there"].host.has("a")  # whatever was open there is over
    assert sides["here"].runtime.alive + sides["there"].runtime.alive == []
    await close(sides)


async def test_over_http_to_a_node_and_to_the_manager_s_own_host(tmp_path: Path) -> None:
    """``here`` is the manager's: other hosts may ask it for moves alone."""
    sides = await pair(tmp_path)
    here, there = sides["here"].host, sides["there"].host

    def connect(peer: Peer) -> Host:
        return RemoteHost(peer.name, peer.url or f"{base}/host", peer.key)

    manager = web.Application()
    here.peer = Peer("here", "", "p" * 32)
    manager.add_subapp("/host", server.for_peers(here, here.peer.key))
    served = [web.AppRunner(manager), server.runner(server.application(there, KEY, connect))]
    for runner in served:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    base, node = (f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in served)
    remote = RemoteHost("there", node, KEY)
    stranger, own = RemoteHost("here", f"{base}/host", "x" * 32), RemoteHost("here", f"{base}/host", "p" * 32)
    try:
        assert (await here.move("a", remote)).how == "live"
        assert running(sides) == ["there"]
        with pytest.raises(HostLost, match="401"):
            await stranger.has("a")
        with pytest.raises(HostLost, match="404"):
            await own.kill("a")
        moved = await remote.move("a", here)
        assert (moved.how, running(sides)) == ("live", ["here"])
    finally:
        for client in (remote, stranger, own):
            await client.close()
        for runner in served:
            await runner.cleanup()
        await close(sides)
