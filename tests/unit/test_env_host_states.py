"""States of paused sandboxes and of snapshots, copied from one host and made again on another."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.unit.test_env_host_moves import close, pair

from venusrl.sandboxes.host.api import PIECE, Host, KeptState, Order, StateFile
from venusrl.sandboxes.host.errors import AlreadyExists
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.host.states import FORGET_S, listed
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.protocol import SandboxDenied, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.runtimes.moving import Base
from venusrl.testing.agents import MemoryAgent
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor
from venusrl.testing.runtimes import FakeRuntime


async def carry(state: KeptState, origin: Host, target: Host) -> None:
    await target.states.begin(state)
    for number, file in enumerate(state.files):
        for piece in range(len(file.pieces)):
            await target.states.write(state.id, number, piece, await origin.states.read(state.id, number, piece))


async def test_a_paused_sandbox_is_made_again_elsewhere(tmp_path: Path) -> None:
    here, there = await pair(tmp_path)
    with pytest.raises(SandboxError, match="only of a paused one"):
        await here.host.states.take("sandbox", "a")
    await here.host.pause("a")
    state = await here.host.states.take("sandbox", "a")
    assert (state.subject, state.epoch, state.whole, state.memory) == ("a", 0, True, True)
    await carry(state, here.host, there.host)
    await here.host.states.drop(state.id)
    assert await here.held() == {"a": ("paused", 0)}, "a copy changes nothing"
    await there.host.states.restore(state.id, 7)
    assert await there.held() == {"a": ("running", 7)}
    await there.again()
    assert await there.held() == {"a": ("running", 7)}
    again = await here.host.states.take("sandbox", "a")
    await carry(again, here.host, there.host)
    with pytest.raises(AlreadyExists):
        await there.host.states.restore(again.id, 7)
    await here.host.states.drop(again.id)
    await close(here, there)
    for side in (here, there):
        assert list((side.root / "host/states").glob("*")) == []


async def test_an_older_copy_gives_way(tmp_path: Path) -> None:
    here, there = await pair(tmp_path)
    await here.host.pause("a")
    state = await here.host.states.take("sandbox", "a")
    await carry(state, here.host, there.host)
    await there.host.states.restore(state.id, 5)
    await carry(state, here.host, there.host)
    await there.host.states.restore(state.id, 9)
    assert await there.held() == {"a": ("running", 9)}
    assert there.runtime.alive == ["a"]
    await close(here, there)


async def test_a_snapshot_is_kept_elsewhere_too(tmp_path: Path) -> None:
    here, there = await pair(tmp_path)
    await here.host.snapshot("a", "snap-1")
    state = await here.host.states.take("snapshot", "snap-1")
    await carry(state, here.host, there.host)
    await there.host.states.restore(state.id, 0)
    assert [one.id for one in (await there.host.status()).snapshots] == ["snap-1"]
    await there.host.create(Order(id="b", template="snap-1", runtime="fake"))
    await there.again()
    assert [one.id for one in (await there.host.status()).snapshots] == ["snap-1"]
    await close(here, there)


async def test_what_is_not_the_state_is_refused(tmp_path: Path) -> None:
    here, there = await pair(tmp_path)
    await here.host.pause("a")
    state = await here.host.states.take("sandbox", "a")
    states = there.host.states
    for path in ("../x", "/x", "a/../../x"):
        bad = msgspec.structs.replace(state, files=(msgspec.structs.replace(state.files[0], path=path),))
        with pytest.raises(SandboxError, match="out of bounds"):
            await states.begin(bad)
    with pytest.raises(SandboxError, match="fit together"):
        await states.begin(msgspec.structs.replace(state, files=(StateFile("x", PIECE + 1, ("0" * 64,)),)))
    await states.begin(state)
    with pytest.raises(SandboxError, match="damaged"):
        await states.write(state.id, 0, 0, b"x" * state.files[0].size)
    with pytest.raises(SandboxError, match="not whole"):
        await states.restore(state.id, 1)
    with pytest.raises(SandboxGone):
        await states.write("unknown", 0, 0, b"")
    await there.host.drain()
    await carry(state, here.host, there.host)
    with pytest.raises(SandboxDenied):
        await states.restore(state.id, 1)
    assert there.runtime.alive == []
    assert list((there.root / "host/states").glob("*")) == []
    await close(here, there)


async def test_what_nobody_asks_for_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = await pair(tmp_path)
    await here.host.pause("a")
    first = await here.host.states.take("sandbox", "a")
    now = here.host._clock.monotonic()
    monkeypatch.setattr(here.host._clock, "monotonic", lambda: now + FORGET_S + 1)
    await here.host.states.take("sandbox", "a")
    with pytest.raises(SandboxGone):
        await here.host.states.read(first.id, 0, 0)
    assert len(list((here.root / "host/states").glob("*"))) == 1
    await close(here, there)


def test_files_are_listed_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big").write_bytes(b"x" * PIECE + b"y")
    (tmp_path / "none").write_bytes(b"")
    big, none = listed(tmp_path)
    assert (big.path, big.size, len(big.pieces)) == ("in/big", PIECE + 1, 2)
    assert (none.size, none.pieces) == (0, ())
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(SandboxError, match="plain file"):
        listed(tmp_path)


class LeaningRuntime(FakeRuntime):
    """Every sandbox leans on one file, which is there from the start on the origin alone."""

    folder: Path
    name_of_base = "b" * 64

    def base(self, instance: Instance) -> Base:
        return Base(self.name_of_base, str(self.folder), ("memory",))

    async def has_base(self, spec: Spec, name: str) -> bool:
        return (self.folder / "memory").exists()

    async def bring(self, spec: Spec, name: str, directory: Path) -> None:
        assert name == self.name_of_base
        directory.rename(self.folder)  # noqa: ASYNC240 - a test


async def leaning(root: Path, name: str) -> tuple[LocalHost, LeaningRuntime]:
    runtime = LeaningRuntime(lambda spec: MemoryAgent(), world=root / name / "world")
    runtime.folder = root / name / "base"
    config = HostConfig(name=name, guard_s=60.0)
    host = LocalHost(root / name / "host", {"fake": runtime}, FixedImages(), AdmitAll(), PlainDoor(), config)
    await host.start()
    return host, runtime


async def test_what_a_sandbox_leans_on_is_kept_once_and_brought_along(tmp_path: Path) -> None:
    (here, origin), (there, target) = await leaning(tmp_path, "here"), await leaning(tmp_path, "there")
    origin.folder.mkdir()
    with (origin.folder / "memory").open("wb") as memory:
        memory.write(b"x" * PIECE)
        memory.truncate(64 * PIECE)  # the rest is a hole, which is neither kept nor sent
        memory.seek(70 * PIECE)
        memory.write(b"end")
    replicas = Replicas(tmp_path / "replicas")
    replicas.open()
    kept = []
    for name in ("a", "b"):
        await here.create(Order(id=name, template="host", runtime="fake"))
        await here.pause(name)
        kept.append(await replicas.pull(here.states, "sandbox", name))
    assert {state.base for state in kept} == {origin.name_of_base}
    assert PIECE < replicas.used < 2 * PIECE
    await here.close()
    await replicas.keep_only(lambda state: state.id == kept[0].id)
    for _ in range(2):  # again, as after an answer that was lost: the base is there now
        await replicas.push(kept[0], there.states)
    await there.states.restore(kept[0].id, 1)
    assert (target.folder / "memory").read_bytes() == (origin.folder / "memory").read_bytes()
    assert [one.id for one in (await there.status()).held] == ["a"]
    await replicas.keep_only(lambda state: False)
    assert replicas.used == 0
    replicas.close()
    await there.close()
