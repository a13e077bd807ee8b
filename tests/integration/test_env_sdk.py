"""The official E2B SDK, synchronous and asynchronous, against the control plane over a fake host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")

from venusrl.sandboxes.manager.local import LocalParts  # noqa: E402 - after the check above
from venusrl.sandboxes.manager.serve import ServeConfig, Server  # noqa: E402
from venusrl.sandboxes.templates.api import Image  # noqa: E402
from venusrl.testing.env_host import FakeHost  # noqa: E402
from venusrl.testing.hosts import AdmitAll, FixedImages  # noqa: E402


class Running:
    """A service in a thread of its own, so that synchronous clients can talk to it."""

    def __init__(self, state: Path) -> None:
        self.host = FakeHost("local", templates=("base-id", "host"))
        self.admission = AdmitAll()
        local = LocalParts(self.host, self.admission, FixedImages(Image("base-id", "base")))
        self.server = Server(ServeConfig(state, listen="127.0.0.1:0"), local=local)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _run(self) -> None:
        async def main() -> None:
            await self.server.start()
            self._ready.set()
            await self._stop.wait()
            await self.server.stop()

        self.loop.run_until_complete(main())
        self.loop.close()

    @property
    def options(self) -> dict[str, Any]:
        server = self.server
        return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.sandbox_url}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path) as made:
        yield made


def test_the_synchronous_sdk(running: Running) -> None:
    options = running.options
    box = e2b.Sandbox.create("base", metadata={"odd key": "a&b=c"}, timeout=100, envs={"A": "1"}, **options)
    other = e2b.Sandbox.create("base", **options)
    try:
        info = box.get_info()
        assert (info.template_id, info.name, info.metadata) == ("base-id", "base", {"odd key": "a&b=c"})
        assert timedelta(0) < info.end_at - datetime.now(UTC) <= timedelta(seconds=100)
        box.set_timeout(500)
        assert box.get_info().end_at - datetime.now(UTC) > timedelta(seconds=400)
        assert e2b.Sandbox.connect(box.sandbox_id, timeout=10, **options).sandbox_id == box.sandbox_id
        assert box.get_info().end_at - datetime.now(UTC) > timedelta(seconds=400)

        query = e2b.SandboxQuery(metadata={"odd key": "a&b=c"})
        assert [one.sandbox_id for one in e2b.Sandbox.list(query=query, **options).next_items()] == [box.sandbox_id]
        pages = e2b.Sandbox.list(limit=1, **options)
        assert [one.sandbox_id for one in pages.next_items()] == [other.sandbox_id]
        assert pages.has_next
        assert [one.sandbox_id for one in pages.next_items()] == [box.sandbox_id]
        assert not pages.has_next

        assert box.is_running()
        assert box.pause() is True
        assert box.pause() is False
        assert not box.is_running()
        paused = e2b.Sandbox.list(query=e2b.SandboxQuery(state=[e2b.SandboxState.PAUSED]), **options).next_items()
        assert [one.sandbox_id for one in paused] == [box.sandbox_id]
        box.connect()
        assert box.is_running()
        assert box.get_metrics()[-1].mem_total == 512 << 20
    finally:
        assert box.kill() is True
    assert box.kill() is False
    assert not box.is_running()
    with pytest.raises(e2b.SandboxNotFoundException):
        box.set_timeout(5)
    assert other.kill()


async def test_the_asynchronous_sdk(running: Running) -> None:
    options = running.options
    box = await e2b.AsyncSandbox.create("base", network={"allow_public_traffic": False}, **options)
    running.host.sandboxes[box.sandbox_id].files["/x"] = b"kept"
    assert box.traffic_access_token
    snapshot = await box.create_snapshot(name="mine")
    assert snapshot.names == ["mine"]
    child = await e2b.AsyncSandbox.create(snapshot.snapshot_id, **options)
    assert running.host.sandboxes[child.sandbox_id].files == {"/x": b"kept"}
    found = await e2b.AsyncSandbox.list_snapshots(sandbox_id=box.sandbox_id, **options).next_items()
    assert [one.snapshot_id for one in found] == [snapshot.snapshot_id]
    assert await e2b.AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **options) is True
    assert await e2b.AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **options) is False
    forks = await box.fork(count=2)
    assert len({one.sandbox_id for one in forks} | {box.sandbox_id}) == 3
    await box.update_network({"deny_out": ["1.1.1.1"]})
    assert running.host.sandboxes[box.sandbox_id].network.deny == ("1.1.1.1",)
    killed = await asyncio.gather(*(one.kill() for one in (box, child, *forks)))
    assert killed == [True] * 4
    assert running.host.sandboxes == {}


def test_refusals_are_the_sdks_own_exceptions(running: Running) -> None:
    options = running.options
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create("base", **{**options, "api_key": "e2b_" + "0" * 40})
    with pytest.raises(e2b.SandboxException):
        e2b.Sandbox.create("nowhere", **options)
    running.admission.most = 0
    with pytest.raises(e2b.ServiceBusyException):
        e2b.Sandbox.create("base", request_timeout=5.0, **options)
    assert running.host.sandboxes == {}


def test_the_sdk_waits_for_room_as_it_is_told(running: Running) -> None:
    running.admission.most = 0
    timer = threading.Timer(0.5, setattr, (running.admission, "most", None))
    timer.start()
    box = e2b.Sandbox.create("base", **running.options)
    timer.join()
    assert box.kill()


def test_traffic_wakes_a_sandbox_that_wants_it(running: Running) -> None:
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    box = e2b.Sandbox.create("base", lifecycle=lifecycle, **running.options)
    box.pause()
    assert running.host.sandboxes[box.sandbox_id].state == "paused"
    assert box.is_running()
    assert running.host.sandboxes[box.sandbox_id].state == "running"
    assert box.kill()
