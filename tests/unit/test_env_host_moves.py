"""Sandboxes on their way between two hosts, over runtimes without a kernel: one owner at every instant."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.unit.environments import ADMIN, environment
from tests.unit.host_sides import Side

from venusrl.sandboxes.host import archive, arrivals, move_line
from venusrl.sandboxes.host.api import Address, Moving, Order
from venusrl.sandboxes.host.errors import HostLost, MoveUnsupported
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.protocol import SandboxDenied, SandboxError
from venusrl.sandboxes.templates.api import Image
from venusrl.testing.agents import MemoryAgent
from venusrl.testing.clock import VirtualClock
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor
from venusrl.testing.runtimes import FakeRuntime, Operation


def world_of(world: Path) -> FakeRuntime:
    return FakeRuntime(lambda spec: MemoryAgent(), world=world)


async def pair(root: Path) -> tuple[Side[FakeRuntime], Side[FakeRuntime]]:
    here, there = await Side(root, "here", world_of).begin(), await Side(root, "there", world_of).begin()
    await here.host.create(Order(id="a", template="host", runtime="fake"))
    return here, there


async def close(*sides: Side[FakeRuntime]) -> None:
    for side in sides:
        await side.host.close()


@pytest.mark.parametrize("paused", [False, True])
async def test_it_is_there_and_not_here(tmp_path: Path, paused: bool) -> None:
    here, there = await pair(tmp_path)
    if paused:
        await here.host.pause("a")
    await here.host.move("a", there.host)
    assert await here.held() == {}
    assert here.runtime.alive == []
    assert await there.held() == {"a": ("paused" if paused else "running", 1)}
    await there.again()
    assert await there.held() == {"a": ("paused" if paused else "running", 1)}
    await there.host.move("a", here.host)
    assert (await here.held())["a"][1] == 2
    assert not list((tmp_path / "here/host/moves").glob("*"))
    await close(here, there)


@pytest.mark.parametrize(("side", "operation"), [("here", "pause"), ("here", "snapshot"), ("there", "restore")])
async def test_a_step_that_fails_leaves_it_where_it_was(tmp_path: Path, side: str, operation: Operation) -> None:
    here, there = await pair(tmp_path)
    (here if side == "here" else there).runtime.fail_next(operation, SandboxError("no"))
    with pytest.raises(SandboxError, match="no"):
        await here.host.move("a", there.host)
    assert await here.held() == {"a": ("running", 2)}
    assert await there.held() == {}
    assert there.runtime.alive == []
    await here.host.move("a", there.host)
    assert await there.held() == {"a": ("running", 3)}
    await close(here, there)


async def test_a_host_that_admits_no_more_is_told_of_and_nothing_changes(tmp_path: Path) -> None:
    here, there = await pair(tmp_path)
    await there.host.drain()
    with pytest.raises(SandboxDenied):
        await here.host.move("a", there.host)
    with pytest.raises(MoveUnsupported):
        await here.host.move("a", here.host)
    assert await here.held() == {"a": ("running", 0)}
    await close(here, there)


def silent(_: str) -> Awaitable[bool]:
    """A host that does not say whether it has a sandbox."""
    raise HostLost("it does not answer")


@pytest.mark.parametrize("arrived", [False, True])
async def test_an_answer_that_is_lost_is_found_out(
    tmp_path: Path, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin's service ends while its record says that it gave the sandbox away."""
    here, there = await pair(tmp_path)
    hear = move_line.hear

    async def cut(reader: asyncio.StreamReader, *wanted: str, seconds: float = 30.0) -> move_line.Word:
        if wanted == ("taken" if arrived else "go",):
            if arrived:
                await hear(reader, *wanted, seconds=seconds)
            raise HostLost("cut")
        return await hear(reader, *wanted, seconds=seconds)

    with monkeypatch.context() as broken:
        broken.setattr(move_line if arrived else arrivals, "hear", cut)
        broken.setattr(there.host, "has", silent)
        with pytest.raises(HostLost, match="does not say whether it has it"):
            await here.host.move("a", there.host)
        await here.again()
        assert (await here.host.status()).held[0].given_to == "there"
        with pytest.raises(HostLost):
            await here.host.settle("a", there.host)
    assert await here.host.settle("a", there.host) is arrived
    assert (list(await here.held()), list(await there.held())) == (([], ["a"]) if arrived else (["a"], []))
    assert here.runtime.alive + there.runtime.alive == ["a"]
    if not arrived:
        assert await here.host.settle("a", there.host) is False  # nothing is open any more
        assert (await here.host.status()).held[0].given_to == ""
        await here.host.move("a", there.host)
        assert list(await there.held()) == ["a"]
    await close(here, there)


async def test_a_host_that_will_not_come_back_gives_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = await pair(tmp_path)
    monkeypatch.setattr(arrivals, "hear", lost_at("go"))
    monkeypatch.setattr(there.host, "has", silent)
    with pytest.raises(HostLost):
        await here.host.move("a", there.host)
    assert await here.host.settle("a", None) is False
    assert (await here.held())["a"][0] == "running"
    assert here.runtime.alive == ["a"]
    await close(here, there)


def lost_at(word: str) -> Callable[..., Awaitable[move_line.Word]]:
    """Hears everything but that."""
    hear = move_line.hear

    async def cut(reader: asyncio.StreamReader, *wanted: str, seconds: float = 30.0) -> move_line.Word:
        if wanted == (word,):
            raise HostLost("cut")
        return await hear(reader, *wanted, seconds=seconds)

    return cut


async def test_a_stranger_gets_nothing(tmp_path: Path) -> None:
    here, there = await pair(tmp_path)
    address: list[Address] = []
    offer = there.host.offer

    async def listened(move: Moving) -> Address:
        true = await offer(move)
        address.append(true)
        return Address(true.host, true.port, "0" * 64)

    there.host.offer = listened  # type: ignore[method-assign]
    with pytest.raises(SandboxError):
        await here.host.move("a", there.host)
    assert await here.held() == {"a": ("running", 2)}
    assert await there.held() == {}
    await close(here, there)


@pytest.mark.parametrize("kind", ["up", "link", "absolute"])
def test_an_archive_stays_in_its_bounds(tmp_path: Path, kind: str) -> None:
    with tarfile.open(tmp_path / "tar", "x") as made:
        info = tarfile.TarInfo({"up": "../x", "link": "x", "absolute": str(tmp_path / "x")}[kind])
        if kind == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
        made.addfile(info, io.BytesIO())
    with pytest.raises(SandboxError, match="archive"):
        archive.unpack(tmp_path / "tar", tmp_path / "out", 1 << 20)
    assert not (tmp_path / "x").exists()


async def test_a_drained_node_hands_its_sandboxes_to_the_other(tmp_path: Path) -> None:
    """The whole way: the manager's API over two real hosts."""
    sides = []
    for name in ("host-1", "host-2"):
        runtime = FakeRuntime(lambda spec: MemoryAgent(), name="namespace", world=tmp_path / name / "world")
        images = FixedImages(Image("base-id", "base"))
        config = HostConfig(name=name, guard_s=60.0)
        host = LocalHost(tmp_path / name, {"namespace": runtime}, images, AdmitAll(), PlainDoor(), config)
        await host.start()
        sides.append(host)
    async with environment(tmp_path, hosts=sides, clock=VirtualClock()) as env:  # type: ignore[arg-type]
        made = {await env.create() for _ in range(2)}
        status, answer, _ = await env.call("POST", "/nodes/host-1", {"status": "draining"}, X_Admin_Token=ADMIN)
        assert (status, answer["stayed"]) == (200, {})
        assert {record.host for record in env.book.records.values()} == {"host-2"}
        assert {one.id for one in (await sides[1].status()).held} == made
        assert (await sides[0].status()).held == ()
    for host in sides:
        await host.close()
