"""A sandbox of real processes moves between two hosts: its files, id and metadata follow it."""

from __future__ import annotations

from pathlib import Path

from tests.integration.persistent import output, running

from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.protocol import Limits
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
