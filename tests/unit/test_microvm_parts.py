"""The microVM runtime's parts that need no machine: arguments, initramfs, control channel, idle door."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.agent.api import ProcessSpec
from venusrl.sandboxes.protocol import SandboxGone, TemplateNotFound
from venusrl.sandboxes.runtimes.microvm import machine, setup, template
from venusrl.sandboxes.runtimes.microvm.idle import IdleAgent, IdlePolicy
from venusrl.sandboxes.runtimes.microvm.qmp import QemuError, Qmp
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.runtimes.microvm.vm import copy_sparse
from venusrl.sandboxes.templates.api import Image
from venusrl.testing.agents import MemoryAgent

SHAPE = machine.Shape(128, 1)
CLONE = machine.Files("/ram", 3, 4, 5, 6)


def devices(arguments: list[str]) -> list[str]:
    return [value for option, value in pairwise(arguments) if option == "-device"]


def test_a_clone_has_its_templates_devices_in_the_same_places() -> None:
    first = machine.arguments("qemu", SHAPE, machine.Files("/wram", 3, 4, 5), ("/kernel", "/initramfs"), 16)
    clone = machine.arguments("qemu", SHAPE, CLONE, None, 16)
    assert [device.replace("drive=base", "drive=disk") for device in devices(first)] == devices(clone)


def test_a_clones_memory_cannot_reach_the_template() -> None:
    line = " ".join(machine.arguments("qemu", SHAPE, CLONE, None, 16))
    assert "mem-path=/ram,share=off,readonly=on,rom=off" in line
    assert "balloon" not in line
    assert "spawn=deny" in line
    assert "-nodefaults" in line


async def test_a_template_is_derived_until_it_is_forgotten(tmp_path: Path) -> None:
    runtime = MicroVmRuntime(tmp_path)
    assert await runtime.derived() == set()
    for name in ("img-one.guest.10-0", "img-one.0123456789abcdef", "img-two-t-a.guest.10-0", ".making-x"):
        (runtime.templates / name).mkdir(parents=True)
    assert await runtime.derived() == {"img-one", "img-two-t-a"}
    await runtime.forget("img-one")
    assert await runtime.derived() == {"img-two-t-a"}


def test_an_initramfs_is_aligned_and_ends() -> None:
    packed = setup.cpio({"init": (b"abc", 0o755), "modules/x.ko": (b"12345", 0o644)})
    assert len(packed) % 4 == 0
    assert packed.startswith(b"070701")
    assert packed.index(b"modules\0") < packed.index(b"modules/x.ko\0")
    assert b"TRAILER!!!" in packed


def test_the_kernels_digest_is_of_content_not_of_extents(tmp_path: Path) -> None:
    sparse, full = tmp_path / "sparse", tmp_path / "full"
    with sparse.open("wb") as file:
        file.truncate(1 << 20)
        file.seek(300_000)
        file.write(b"here")
    full.write_bytes(sparse.read_bytes())
    assert template.digest(sparse) == template.digest(full)
    with full.open("r+b") as file:
        file.write(b"x")
    assert template.digest(sparse) != template.digest(full)
    copy_sparse(sparse, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == sparse.read_bytes()


def test_a_templates_id_is_a_files_name(tmp_path: Path) -> None:
    guest = setup.Guest(tmp_path, tmp_path, "g")
    with pytest.raises(TemplateNotFound):
        template.place(tmp_path, Image("../x", "x"), guest, (10, 0))
    assert template.place(tmp_path, Image("x", "x"), guest, (10, 0)).parent == tmp_path


async def qemu(path: Path, answer: Callable[[dict[str, object]], Awaitable[bytes]]) -> asyncio.Server:
    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"QMP": {}}\n')
        while line := await reader.readline():
            reply = await answer(json.loads(line))
            if not reply:
                break
            writer.write(reply)
        writer.close()

    return await asyncio.start_unix_server(on_client, path)


async def test_control_answers_refusals_events_and_the_end(tmp_path: Path) -> None:
    async def answer(question: dict[str, object]) -> bytes:
        if question["execute"] == "bad":
            return b'{"error": {"desc": "no such thing"}}\n'
        if question["execute"] == "quit":
            return b""
        return b'{"event": "MIGRATION", "data": {"status": "completed"}}\n{"return": {"running": true}}\n'

    async with await qemu(tmp_path / "qmp", answer):
        control = await Qmp.connect(tmp_path / "qmp")
        assert await control.ask("query-status") == {"running": True}
        await control.migrated(timeout_s=5)
        with pytest.raises(QemuError, match="no such thing"):
            await control.ask("bad")
        with pytest.raises(SandboxGone):
            await control.ask("quit")
        with pytest.raises(SandboxGone):
            await control.ask("query-status")
        await control.close()


async def test_control_hands_over_descriptors(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "qmp"))
        listener.listen(1)
        connecting = asyncio.create_task(Qmp.connect(tmp_path / "qmp"))
        listener.setblocking(False)
        peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        with peer:
            peer.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_recv(peer, 4096)
            await loop.sock_sendall(peer, b'{"return": {}}\n')
            control = await connecting
            giving = asyncio.create_task(control.give("name", listener.fileno()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            _, fds, _, _ = socket.recv_fds(peer, 4096, 4)
            await loop.sock_sendall(peer, b'{"return": {}}\n')
            await giving
            assert len(fds) == 1
            socket.socket(fileno=fds[0]).close()
            await control.close()


class Processors:
    """What an idle door did to the processors."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.changed = asyncio.Event()

    async def wake(self) -> None:
        self.steps.append("wake")

    async def sleep(self) -> None:
        self.steps.append("sleep")
        self.changed.set()


async def test_idle_processors_sleep_and_a_question_wakes_them() -> None:
    processors = Processors()
    door = IdleAgent(MemoryAgent(), IdlePolicy(after_s=0.01), processors.wake, processors.sleep)
    await asyncio.wait_for(processors.changed.wait(), PATIENCE_S)
    await door.usage()
    assert processors.steps[:2] == ["sleep", "wake"]
    await door.close()


async def test_what_comes_over_the_network_wakes_them() -> None:
    processors = Processors()
    carried = 7
    door = IdleAgent(
        MemoryAgent(), IdlePolicy(after_s=0.01), processors.wake, processors.sleep, traffic=lambda: carried
    )
    await asyncio.wait_for(processors.changed.wait(), PATIENCE_S)
    assert processors.steps == ["sleep"]
    processors.changed.clear()
    carried = 8
    await asyncio.wait_for(processors.changed.wait(), PATIENCE_S)
    assert processors.steps == ["sleep", "wake", "sleep"]
    await door.close()


async def test_processors_do_not_sleep_while_the_network_carries_something() -> None:
    processors = Processors()
    looks = itertools.count()
    many = asyncio.Event()

    def traffic() -> int:
        look = next(looks)
        if look == 5:
            many.set()
        return look

    door = IdleAgent(MemoryAgent(), IdlePolicy(after_s=0.01), processors.wake, processors.sleep, traffic=traffic)
    await asyncio.wait_for(many.wait(), PATIENCE_S)
    assert processors.steps == []
    await door.close()


async def test_processors_do_not_sleep_under_a_process() -> None:
    processors = Processors()
    door = IdleAgent(MemoryAgent(), IdlePolicy(after_s=0.01), processors.wake, processors.sleep)
    process = await door.start(ProcessSpec(("sleep", "1000"), "user"))
    processors.steps.clear()  # it may have slept before there was a process
    await asyncio.sleep(0.1)  # time in which it would sleep
    assert processors.steps == []
    await process.signal(9)
    await door.close()
