"""A sealed template arrives on another host as it was announced, once however many need it, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.microvm import carry, template
from venusrl.sandboxes.runtimes.microvm.carry import Control
from venusrl.sandboxes.runtimes.microvm.machine import Shape
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.runtimes.microvm.template import Made
from venusrl.sandboxes.templates.api import Image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a sealed template belongs to root: run as root")
IMAGE = Image("img-1", "tiny")
HOLE = 8 << 20


def made(root: Path) -> Made:
    """A template whose memory has a hole in the middle."""
    root.mkdir()
    for name in template.FILES:
        with (root / name).open("wb") as file:
            file.write(name.encode() * 300)
            file.truncate(HOLE)
            file.seek(HOLE)
            file.write(b"end" * 1000)
    digest = template.seal(root)
    found = Made(IMAGE, str(root), Shape(8, 1), digest)
    (root / "template.json").write_bytes(msgspec.json.encode(found))
    return found


@contextlib.asynccontextmanager
async def line(damage: bytes = b"") -> AsyncIterator[tuple[Control, Control]]:
    """Two ends of one connection. ``damage``: the first bytes like that arrive as others."""
    ends: asyncio.Queue[Control] = asyncio.Queue()

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.put(Control((reader, writer)))

    server = await asyncio.start_server(met, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    if damage:
        write = writer.write
        writer.write = lambda data: write(bytes(data).replace(damage, damage[::-1], 1))  # type: ignore[method-assign]
    here, there = Control((reader, writer)), await ends.get()
    try:
        yield here, there
    finally:
        for control in (here, there):
            control.writer.close()
        server.close()


async def carried(origin: Made, target: MicroVmRuntime, damage: bytes = b"") -> Made:
    async with line(damage) as (here, there):
        sending = asyncio.create_task(carry.offer(here, origin))
        try:
            return await carry.accept(target, IMAGE, there)
        finally:
            there.writer.close()
            await asyncio.gather(sending, return_exceptions=True)


async def test_it_arrives_as_it_was_holes_included(tmp_path: Path) -> None:
    origin, target = made(tmp_path / "origin"), MicroVmRuntime(tmp_path / "target")
    arrived = await carried(origin, target)
    assert (arrived.digest, arrived.shape) == (origin.digest, origin.shape)
    for name in template.FILES:
        kept, sent = arrived.directory / name, origin.directory / name
        assert kept.read_bytes() == sent.read_bytes()
        assert kept.stat().st_blocks <= sent.stat().st_blocks + 8
        assert kept.stat().st_mode & 0o777 == 0o444
    assert arrived.directory.parent == target.templates


async def test_several_that_need_it_bring_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, target = made(tmp_path / "origin"), MicroVmRuntime(tmp_path / "target")
    received: list[str] = []
    receive = carry._receive

    async def counted(root: Path, image: Image, control: Control, wanted: str) -> None:
        received.append(wanted)
        await receive(root, image, control, wanted)

    monkeypatch.setattr(carry, "_receive", counted)
    got = await asyncio.gather(*(carried(origin, target) for _ in range(3)))
    assert {one.place for one in got} == {got[0].place}
    assert received == [origin.digest]


@pytest.mark.parametrize("damage", [b"root.imgroot", b"memorymemory", b"statestate", b'"image":'])
async def test_what_was_damaged_is_not_kept(tmp_path: Path, damage: bytes) -> None:
    origin, target = made(tmp_path / "origin"), MicroVmRuntime(tmp_path / "target")
    with pytest.raises(SandboxError, match="damaged"):
        await carried(origin, target, damage)
    assert list(target.templates.iterdir()) == []
    assert (await carried(origin, target)).digest == origin.digest


@pytest.mark.parametrize("named", ["../../etc", "", "0" * 63, "G" * 64])
async def test_a_name_that_is_no_digest_is_refused(tmp_path: Path, named: str) -> None:
    target = MicroVmRuntime(tmp_path / "target")
    async with line() as (here, there):
        await here.say(template=named)
        with pytest.raises(SandboxError, match="no digest"):
            await carry.accept(target, IMAGE, there)


async def test_pieces_stay_within_their_file(tmp_path: Path) -> None:
    target = MicroVmRuntime(tmp_path / "target")
    async with line() as (here, there):
        accepting = asyncio.create_task(carry.accept(target, IMAGE, there))
        await here.say(template="0" * 64)
        assert await here.hear("want")
        await here.say(file="root.img")
        await here.say(size=10)
        await here.say(at=8, length=4)
        here.writer.write(b"more")
        with pytest.raises(SandboxError, match="no bounds"):
            await accepting
    assert list(target.templates.iterdir()) == []
