"""Sandboxes as virtual machines: real QEMU, real guests, emulated processors."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration import microvms
from tests.waiting import PATIENCE_S, until

from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused, TemplateNotFound
from venusrl.sandboxes.runtimes.microvm import migration, template
from venusrl.sandboxes.runtimes.microvm.instance import MicroVm
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.runtimes.microvm.vm import UID_BASE, start_time
from venusrl.sandboxes.runtimes.moving import Streams
from venusrl.sandboxes.templates.api import Image, Start

CLONES = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Image]]:
    """A state directory with a finished template, whose start command left a process running."""
    base = tmp_path_factory.mktemp("microvm")
    state = microvms.new_state(base / "one", microvms.guest_kernel())
    command = "echo $$ > /tmp/started; while true; do date > /tmp/beat; sleep 1; done"
    image = microvms.image(microvms.tiny_root(base / "root"), Start(command, "stat /tmp/beat"))

    async def prepare() -> None:
        made = await microvms.runtime(state)
        await made.prepare(image)
        await made.close()

    asyncio.run(prepare())
    yield state, image
    shutil.rmtree(base)


@pytest.fixture
async def runtime(prepared: tuple[Path, Image]) -> AsyncIterator[MicroVmRuntime]:
    made = await microvms.runtime(prepared[0])
    await made.prepare(prepared[1])
    yield made
    await made.close()
    again = await microvms.runtime(prepared[0])
    swept = await again.sweep(set())
    await again.close()
    assert swept == []
    assert groups_of(again) == []


def groups_of(runtime: MicroVmRuntime) -> list[Path]:
    """Control groups that are there still."""
    assert runtime._site is not None
    assert runtime._site.groups is not None
    return [directory for directory in runtime._site.groups.directories.values() if directory.exists()]


def memory_of(runtime: MicroVmRuntime, instance: MicroVm) -> tuple[str, str]:
    return template.digest(instance.made.memory), instance.made.digest


async def test_clones_are_not_twins(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    clones = [await runtime.create(microvms.spec(f"clone-{n}", prepared[1])) for n in range(CLONES)]
    try:
        ask = "cat /proc/sys/kernel/random/uuid /etc/machine-id; hostname; head -c 16 /dev/urandom | od -An -tx1"
        ask += "; date +%s"
        said = [(await microvms.sh(clone, ask)).split("\n") for clone in clones]
        for kind in range(4):
            assert len({lines[kind] for lines in said}) == CLONES, said
        assert all(abs(int(lines[4]) - time.time()) < 60 for lines in said)
        assert await microvms.sh(clones[0], "kill -0 $(cat /tmp/started) && echo alive") == "alive\n"
        found, sealed = memory_of(runtime, clones[0])
        assert found == sealed
    finally:
        for clone in clones:
            await clone.kill()


async def test_paused_forked_and_resumed_with_memory(
    runtime: MicroVmRuntime, prepared: tuple[Path, Image], tmp_path: Path
) -> None:
    parent = await runtime.create(microvms.spec("parent", prepared[1]))
    fork: MicroVm | None = None
    try:
        await microvms.sh(
            parent, "mkdir /m; mount -t tmpfs none /m; dd if=/dev/urandom of=/m/x bs=1M count=8 2>/dev/null"
        )
        await microvms.sh(
            parent, "dd if=/dev/urandom of=/root/y bs=1M count=2 2>/dev/null; sleep 1000 & echo $! > /root/pid"
        )
        before = await microvms.sh(parent, "md5sum /m/x /root/y")
        kept = await parent.snapshot(tmp_path / "snapshot")
        assert kept.memory
        assert kept.bytes < (microvms.MEMORY_MIB << 20) // 2  # what differs from the template, not all of it
        fork = await runtime.restore(microvms.spec("fork", prepared[1]), kept)
        await microvms.sh(parent, "echo parent > /root/y")
        ask = "md5sum /m/x /root/y; kill -0 $(cat /root/pid)"
        assert await microvms.sh(fork, ask) == before
        assert await microvms.sh(fork, "hostname") == "fork\n"
        await parent.pause()
        with pytest.raises(SandboxPaused):
            _ = parent.agent
        assert (await parent.footprint()).total == 0
        with pytest.raises(TimeoutError):  # a pause is no death, however its machine ends
            await asyncio.wait_for(parent.died(), 0.2)
        await parent.resume()
        assert await microvms.sh(parent, "cat /root/y; kill -0 $(cat /root/pid)") == "parent\n"
        assert (await microvms.sh(parent, "md5sum /m/x")) == before.split("\n")[0] + "\n"
        found, sealed = memory_of(runtime, parent)
        assert found == sealed
    finally:
        await parent.kill()
        if fork is not None:
            await fork.kill()


async def test_qemu_is_confined(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    instance = await runtime.create(microvms.spec("confined", prepared[1]))
    try:
        assert instance.vm is not None
        proc = Path(f"/proc/{instance.vm.record.pid}")
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
        assert {int(uid) >= UID_BASE for uid in status["Uid"].split()} == {True}
        assert status["Groups"].strip() == ""
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for kind in ("net", "mnt", "ipc", "uts"):
            assert os.readlink(proc / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")
        seen = set(os.listdir(proc / "root"))
        assert seen <= {"bin", "dev", "lib", "lib64", "ram", "usr"}
        assert not set(os.listdir(proc / "root" / "dev")) - {"null", "zero", "urandom", "kvm"}
        assert "venusrl." in (proc / "cgroup").read_text()
    finally:
        await instance.kill()


async def test_taken_up_by_another_process_and_swept(prepared: tuple[Path, Image]) -> None:
    first = await microvms.runtime(prepared[0], waiting=1)
    instance = await first.create(microvms.spec("kept", prepared[1]))
    orphan = await first.create(microvms.spec("orphan", prepared[1]))
    await microvms.sh(instance, "sleep 1000 & echo $! > /root/pid")
    record = instance.record()
    assert orphan.vm is not None
    pid = orphan.vm.record.pid
    await first.close()
    second = await microvms.runtime(prepared[0])
    adopted = await second.adopt(record)
    assert adopted is not None
    assert await microvms.sh(adopted, "kill -0 $(cat /root/pid); hostname") == "kept\n"
    swept = await second.sweep({"kept"})
    assert len(swept) == 1
    assert "orphan" in swept[0]
    assert start_time(pid) is None
    await adopted.kill()
    await adopted.kill()
    assert await second.adopt(record) is None
    assert os.listdir(prepared[0] / "vms") == []
    await second.close()


async def test_idle_processors_stop_and_wake(prepared: tuple[Path, Image]) -> None:
    made = await microvms.runtime(prepared[0], idle_s=0.2)
    instance = await made.create(microvms.spec("idle", prepared[1]))
    try:
        assert instance.vm is not None
        await microvms.sh(instance, "echo once")
        qmp = instance.vm.qmp

        async def stopped() -> bool:
            return not (await qmp.ask("query-status"))["running"]

        await until(stopped, "its processors' stop")
        assert abs(int(await microvms.sh(instance, "date +%s")) - time.time()) < 60
        assert (await microvms.sh(instance, "echo awake")) == "awake\n"
    finally:
        await instance.kill()
        await made.close()


async def test_a_guest_that_ends_is_told(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    instance = await runtime.create(microvms.spec("panics", prepared[1]))
    with pytest.raises(SandboxError):
        await microvms.sh(instance, "echo c > /proc/sysrq-trigger; sleep 30")
    assert "virtual machine ended" in await asyncio.wait_for(instance.died(), PATIENCE_S)
    with pytest.raises(SandboxGone):
        _ = instance.agent
    await instance.kill()


async def test_what_is_not_there_is_refused(runtime: MicroVmRuntime, prepared: tuple[Path, Image]) -> None:
    with pytest.raises(TemplateNotFound, match="venusrl env template build"):
        await runtime.create(microvms.spec("host", Image("host", "host")))


def nothing() -> None:
    """Nobody keeps a record of this move."""


async def test_moves_while_it_runs(runtime: MicroVmRuntime, prepared: tuple[Path, Image], tmp_path: Path) -> None:
    """There and back; the first time the other host lacks the template."""
    other = await microvms.runtime(microvms.new_state(tmp_path / "two", prepared[0]))
    spec = microvms.spec("mover", prepared[1])
    instance = await runtime.create(spec)
    try:
        await microvms.sh(
            instance, "mkdir /m; mount -t tmpfs none /m; dd if=/dev/urandom of=/m/x bs=1M count=16 2>/dev/null"
        )
        await microvms.sh(instance, "dd if=/dev/urandom of=/root/y bs=1M count=4 2>/dev/null")
        before = await microvms.sh(instance, "md5sum /m/x /root/y")
        count = "i=0; while true; do i=$((i+1)); echo $i >> /root/count; done & echo $! > /root/pid"
        await microvms.sh(instance, count + " ; exec >/dev/null 2>&1")
        for source, target in ((runtime, other), (other, runtime)):
            server, dial, accept = await microvms.joined()
            receiving = asyncio.create_task(migration.receive(target, spec, accept))
            left = instance
            moved = await migration.send(source, left, dial, nothing, nothing)
            instance = await receiving
            server.close()
            await left.kill()
            assert moved.shared > moved.sent  # most of an idle guest is the template's
            assert await microvms.sh(instance, "md5sum /m/x /root/y") == before
            first, last = (await microvms.sh(instance, "tail -n1 /root/count; sleep 1; tail -n1 /root/count")).split()
            assert int(last) > int(first)
            lines, newest = (await microvms.sh(instance, "wc -l < /root/count; tail -n1 /root/count")).split()
            assert abs(int(newest) - int(lines)) < 5000  # no line was lost or written twice
        assert os.listdir(tmp_path / "two" / "vms") == []
    finally:
        await instance.kill()
        await other.close()


async def test_a_move_that_fails_leaves_it_running(
    runtime: MicroVmRuntime, prepared: tuple[Path, Image], tmp_path: Path
) -> None:
    other = await microvms.runtime(microvms.new_state(tmp_path / "two", prepared[0]))
    spec = microvms.spec("stayer", prepared[1])
    instance = await runtime.create(spec)
    server, dial, accept = await microvms.joined()

    async def broken(name: str) -> Streams:
        reader, writer = await accept(name)
        if name == "memory":
            writer.close()
        return reader, writer

    receiving = asyncio.create_task(migration.receive(other, spec, broken))
    try:
        with pytest.raises(SandboxError):
            await asyncio.wait_for(migration.send(runtime, instance, dial, nothing, nothing), PATIENCE_S)
        with pytest.raises((SandboxError, OSError)):
            await asyncio.wait_for(receiving, PATIENCE_S)
        assert await microvms.sh(instance, "echo here") == "here\n"
        assert os.listdir(tmp_path / "two" / "vms") == []
    finally:
        server.close()
        await instance.kill()
        await other.close()


async def test_one_that_was_given_and_not_taken_runs_on_here(
    runtime: MicroVmRuntime, prepared: tuple[Path, Image], tmp_path: Path
) -> None:
    """All of it is there when the other host's service ends; a restart of this one in between changes nothing."""
    other = await microvms.runtime(microvms.new_state(tmp_path / "two", prepared[0]))
    spec = microvms.spec("returner", prepared[1])
    instance = await runtime.create(spec)
    again: MicroVm | None = None
    server, dial, accept = await microvms.joined()
    try:
        ask = "md5sum /m/x; kill -0 $(cat /root/pid); wc -c < /root/y"
        await microvms.sh(
            instance, "mkdir /m; mount -t tmpfs none /m; dd if=/dev/urandom of=/m/x bs=1M count=8 2>/dev/null"
        )
        await microvms.sh(instance, "sleep 1000 & echo $! > /root/pid; dd if=/dev/zero of=/root/y bs=1k count=300")
        before = await microvms.sh(instance, ask)
        receiving = asyncio.create_task(migration.receive(other, spec, accept))

        def give() -> None:
            receiving.cancel()

        with pytest.raises(SandboxError):
            await migration.send(runtime, instance, dial, nothing, give)
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert os.listdir(tmp_path / "two" / "vms") == []
        with pytest.raises(SandboxPaused, match="moving"):
            _ = instance.agent
        record = instance.record()
        await runtime.close()
        second = await microvms.runtime(prepared[0])
        again = await second.adopt(record)
        assert again is not None
        assert again.vm is not None
        assert not (await again.vm.qmp.ask("query-status"))["running"]  # it may run on the other host
        await second.stay(again)
        assert await microvms.sh(again, ask) == before
        await again.pause()
        await again.resume()
        assert await microvms.sh(again, ask) == before
    finally:
        server.close()
        await (again or instance).kill()
        await other.close()
