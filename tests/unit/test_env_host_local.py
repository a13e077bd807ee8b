"""This machine as a host, over a runtime without a kernel. Cases T35, T36, T38."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from venusrl.sandboxes.admission.api import Pause
from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.cells import TimeLimits
from venusrl.sandboxes.host.errors import AlreadyExists, MoveUnsupported, OperationTimeout
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.host.records import Records
from venusrl.sandboxes.protocol import (
    HostDiskFull,
    RuntimeUnavailable,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    SandboxPaused,
    TemplateNotFound,
)
from venusrl.testing.agents import MemoryAgent
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor
from venusrl.testing.runtimes import FakeRuntime


class Rig:
    """A host over a world on disk; ``again`` is the service after a crash."""

    def __init__(self, root: Path, **config: object) -> None:
        self.root = root
        self.admission = AdmitAll()
        self.gate: Callable[[str, str], Awaitable[None]] | None = None
        self.config = HostConfig(guard_s=0.01, **config)  # type: ignore[arg-type]
        self.hosts: list[LocalHost] = []

    async def begin(self) -> LocalHost:
        self.runtime = FakeRuntime(lambda spec: MemoryAgent(), world=self.root / "world", hook=self._hook)
        runtimes = {"fake": self.runtime}
        self.host = LocalHost(self.root / "host", runtimes, FixedImages(), self.admission, PlainDoor(), self.config)
        self.lost = await self.host.start()
        self.hosts.append(self.host)
        return self.host

    async def again(self) -> LocalHost:
        await self.host.close()
        return await self.begin()

    async def _hook(self, operation: str, sandbox: str) -> None:
        if self.gate is not None:
            await self.gate(operation, sandbox)


def order(sandbox: str, template: str = "host", **more: object) -> Order:
    return Order(id=sandbox, template=template, runtime="fake", **more)  # type: ignore[arg-type]


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    await made.begin()
    return made


async def states(host: LocalHost) -> dict[str, str]:
    return {held.id: held.state for held in (await host.status()).held}


async def test_a_life(rig: Rig) -> None:
    await rig.host.create(order("a"))
    assert (await rig.host.pause("a")).state == "paused"
    with pytest.raises(SandboxPaused):
        await rig.host.connect("a", 80)
    with pytest.raises(SandboxPaused):
        await rig.host.pause("a")
    assert (await rig.host.resume("a")).state == "running"
    assert (await rig.host.resume("a")).state == "running"
    await rig.host.kill("a")
    with pytest.raises(SandboxGone):
        await rig.host.kill("a")
    assert rig.runtime.alive == []
    assert rig.admission.gone == ["a"]
    await rig.host.close()


async def test_an_id_a_template_and_a_runtime_are_checked(rig: Rig) -> None:
    await rig.host.create(order("a"))
    with pytest.raises(AlreadyExists):
        await rig.host.create(order("a"))
    for wrong in ("../b", "", "a/b", "x" * 101):
        with pytest.raises(SandboxError):
            await rig.host.create(order(wrong))
    with pytest.raises(TemplateNotFound):
        await rig.host.create(order("b", template="nothing"))
    with pytest.raises(RuntimeUnavailable, match="fake"):
        await rig.host.create(Order(id="b", template="host", runtime="other"))
    assert rig.runtime.alive == ["a"]
    with pytest.raises(MoveUnsupported):
        await rig.host.move("a", rig.host)
    assert await states(rig.host) == {"a": "running"}
    await rig.host.close()


async def test_T36_a_create_that_is_cancelled_leaves_nothing(rig: Rig) -> None:
    reached = asyncio.Event()

    async def wait(operation: str, sandbox: str) -> None:
        if operation == "create":
            reached.set()
            await asyncio.Event().wait()

    rig.gate = wait
    creating = asyncio.create_task(rig.host.create(order("a")))
    await reached.wait()
    assert rig.runtime.alive == ["a"], "half-made"
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert rig.runtime.alive == []
    assert await states(rig.host) == {}
    rig.gate = None
    await rig.host.create(order("a"))
    await rig.host.close()


async def test_a_kill_ends_a_create(rig: Rig) -> None:
    reached = asyncio.Event()

    async def wait(operation: str, sandbox: str) -> None:
        if operation == "create":
            reached.set()
            await asyncio.Event().wait()

    rig.gate = wait
    creating = asyncio.create_task(rig.host.create(order("a")))
    await reached.wait()
    await rig.host.kill("a")
    with pytest.raises(SandboxGone):
        await creating
    assert rig.runtime.alive == []
    await rig.host.close()


async def test_T35_a_restarted_service_closes_what_it_adopted(rig: Rig) -> None:
    for sandbox in ("run", "sleep", "ended"):
        await rig.host.create(order(sandbox))
    await rig.host.pause("sleep")
    rig.runtime.world.remove("ended")
    (rig.root / "world" / "stray.json").write_bytes((rig.root / "world" / "run.json").read_bytes())
    host = await rig.again()
    assert [death.sandbox for death in rig.lost] == ["ended"]
    assert await states(host) == {"run": "running", "sleep": "paused"}
    assert rig.runtime.alive == ["run", "sleep"], "what nobody owns is swept"
    await host.resume("sleep")
    await host.kill("run")
    await host.kill("sleep")
    assert rig.runtime.alive == []
    assert list((rig.root / "host" / "sandboxes").glob("*.json")) == []
    await host.close()


async def test_T35_a_second_service_is_kept_off(rig: Rig) -> None:
    first = rig.host
    with pytest.raises(RuntimeUnavailable, match="another service"):
        await rig.begin()
    await first.close()


async def test_T38_a_time_limit_is_the_hosts_and_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path, time_limits=TimeLimits(create=0.02, pause=0.02))
    host = await rig.begin()
    assert (await host.status()).time_limits["create"] == 0.02
    await host.create(order("a"))

    async def wait(operation: str, sandbox: str) -> None:
        if operation in ("create", "pause"):
            await asyncio.Event().wait()

    rig.gate = wait
    with pytest.raises(OperationTimeout, match=r"create of sandbox b took longer than 0\.02 s"):
        await host.create(order("b"))
    with pytest.raises(OperationTimeout, match="pause"):
        await host.pause("a")
    assert await states(host) == {"a": "running"}
    assert rig.runtime.alive == ["a"]
    await host.close()


async def test_a_death_is_told_and_leaves_nothing(rig: Rig) -> None:
    await rig.host.create(order("a"))
    events = rig.host.events()
    rig.runtime.end("a", "out of memory")
    death = await anext(events)
    assert (death.sandbox, death.cause) == ("a", "out of memory")
    assert await states(rig.host) == {}
    await rig.host.close()


async def test_the_guard_pauses_whom_admission_names(rig: Rig) -> None:
    await rig.host.create(order("a"))
    await rig.host.create(order("b"))
    rig.admission.pauses = (Pause("a", "memory is short"), Pause("gone", "memory is short"))
    while (await states(rig.host))["a"] != "paused":  # noqa: ASYNC110 - a pause has no event
        await asyncio.sleep(0.005)
    assert await states(rig.host) == {"a": "paused", "b": "running"}
    await rig.host.close()


async def test_a_mandatory_one_displaces_and_the_rest_are_denied(rig: Rig) -> None:
    rig.admission.most = 2
    await rig.host.create(order("a"))
    rig.admission.displace = (Pause("a", "displaced"),)
    await rig.host.create(order("b", mandatory=True))
    assert await states(rig.host) == {"a": "paused", "b": "running"}
    await rig.host.create(order("c"))
    with pytest.raises(SandboxDenied) as denied:
        await rig.host.resume("a")
    assert denied.value.retry_after_s == 2.0
    await rig.host.drain()
    await rig.host.kill("c")
    with pytest.raises(SandboxDenied, match="drained"):
        await rig.host.create(order("d"))
    await rig.host.close()


async def test_a_snapshot_outlives_its_sandbox_and_the_service(rig: Rig) -> None:
    await rig.host.create(order("a"))
    info = await rig.host.snapshot("a", "s1")
    assert info.bytes > 0
    with pytest.raises(AlreadyExists):
        await rig.host.snapshot("a", "s1")
    await rig.host.kill("a")
    host = await rig.again()
    await host.create(order("child", template="s1"))
    await host.remove_snapshot("s1")
    with pytest.raises(TemplateNotFound):
        await host.create(order("other", template="s1"))
    assert list((rig.root / "host" / "snapshots").iterdir()) == []
    await host.close()


async def test_a_full_disk_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.host.create(order("a"))

    def full(self: Records, record: object, *, durable: bool = False) -> None:
        raise HostDiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Records, "put", full)
        with pytest.raises(HostDiskFull):
            await rig.host.create(order("b"))
        with pytest.raises(HostDiskFull):
            await rig.host.pause("a")
        rig.runtime.fail_next("snapshot", HostDiskFull("no space left"))
        with pytest.raises(HostDiskFull):
            await rig.host.snapshot("a", "s")
    assert rig.runtime.alive == ["a"]
    assert await states(rig.host) == {"a": "running"}
    assert list((rig.root / "host" / "snapshots").iterdir()) == []
    await rig.host.pause("a")
    assert await states(await rig.again()) == {"a": "paused"}
    await rig.host.close()
