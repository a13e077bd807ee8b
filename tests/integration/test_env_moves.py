"""A sandbox of real processes moves between two hosts: its files, id and metadata follow it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest
from tests.integration import microvms
from tests.integration.persistent import output, running

from venusrl.sandboxes.agent.api import Output, ProcessSpec
from venusrl.sandboxes.host.api import Moved, Order
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.protocol import Limits, SandboxMoving
from venusrl.sandboxes.runtimes.microvm import setup
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor

LIMITS = Limits(memory_mib=192, pids=48, cpus=1.0, disk_mib=32)


async def host(root: Path, name: str, runtime: NamespaceRuntime) -> LocalHost:
    made = LocalHost(
        root / name, {"namespace": runtime}, FixedImages(), AdmitAll(), PlainDoor(), HostConfig(name=name, guard_s=60.0)
    )
    await made.start()
    return made


async def test_files_id_and_metadata_follow_it(tmp_path: Path) -> None:
    async with running(tmp_path / "ns-a") as first, running(tmp_path / "ns-b") as second:
        here, there = await host(tmp_path, "here", first), await host(tmp_path, "there", second)
        try:
            await here.create(Order("mover", "host", "namespace", LIMITS, env={"K": "v"}, tenant="t", group="g"))
            await output(here.cells.running("mover")[1], "echo kept > note; ln -s note link; sleep 1000 &")
            await here.move("mover", there)
            assert (await here.status()).held == ()
            held = (await there.status()).held[0]
            assert (held.id, held.state, held.tenant, held.group, held.epoch) == ("mover", "running", "t", "g", 1)
            assert await output(there.cells.running("mover")[1], "cat link; hostname") == "kept\nmover"
            await there.pause("mover")
            await there.move("mover", here)
            await here.resume("mover")
            assert await output(here.cells.running("mover")[1], "cat note") == "kept"
        finally:
            await here.close()
            await there.close()


async def test_who_follows_a_machine_that_moves_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a QEMU that moves none live: as a snapshot, which says so; no output is lost or told twice."""
    kernel = await asyncio.to_thread(microvms.guest_kernel)
    found = await setup.check_qemu()

    async def old() -> setup.Qemu:
        return msgspec.structs.replace(found, version=(8, 2))

    monkeypatch.setattr(setup, "check_qemu", old)
    image = microvms.image(microvms.tiny_root(tmp_path / "root"))
    hosts = []
    for name in ("here", "there"):
        runtime = await microvms.runtime(microvms.new_state(tmp_path / f"vm-{name}", kernel))
        config = HostConfig(name=name, guard_s=60.0)
        made = LocalHost(tmp_path / name, {"microvm": runtime}, FixedImages(image), AdmitAll(), PlainDoor(), config)
        await made.start()
        hosts.append(made)
    here, there = hosts
    try:
        await here.create(Order("mover", "tiny", "microvm", microvms.spec("mover", image).limits))
        loop = "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i; sleep 0.02; done"
        process = await here.cells.running("mover")[1].agent.start(ProcessSpec(("/bin/sh", "-c", loop), "root"))
        said, at = b"", 0
        moving: asyncio.Task[Moved] | None = None
        with contextlib.suppress(SandboxMoving):
            async for event in process.events():
                assert isinstance(event, Output), "it ended before the move did"
                assert process.span is not None
                said, at = said + event.data, process.span[1]
                moving = moving or asyncio.create_task(here.move("mover", there))
        assert moving is not None
        moved = await moving
        assert moved.how == "snapshot"
        assert "QEMU 8.2 corrupts busy guests that move live" in moved.why
        agent = there.cells.running("mover")[1].agent
        process = await agent.attach(process.pid, since=at)
        ending = asyncio.create_task(microvms.sh(there.cells.running("mover")[1], "touch /tmp/end"))
        async for event in process.events():
            if isinstance(event, Output) and process.span is not None and process.span[1] > at:
                assert process.span[0] == at
                said, at = said + event.data, process.span[1]
        await ending
        numbers = [int(line) for line in said.split()]
        assert numbers == list(range(1, len(numbers) + 1))
        await there.kill("mover")
    finally:
        await here.close()
        await there.close()
