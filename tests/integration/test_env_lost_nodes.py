"""Nodes that die or fall silent, as processes with real namespaces: what was paused resumes elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.integration import test_env_node
from tests.integration.microvms import tiny_template
from tests.integration.test_env_node import COMMAND, Pair, Process, ended
from tests.waiting import wait_until

pytestmark = test_env_node.pytestmark
e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")
GRACE_S = "4"


class Trio(Pair):
    """The service, which keeps copies, and its nodes ``far`` and ``near``; new sandboxes go to ``far``."""

    of_service: tuple[str, ...] = ()

    def __init__(self, state: Path) -> None:
        super().__init__(state, "--replicas", str(state / "copies"), "--node-grace", GRACE_S, *self.of_service)
        self.near = self.join("near", "near")
        self.ask("POST", "/nodes/near", {"status": "draining"})

    def replica(self, sandbox: str) -> dict[str, Any]:
        told = {one["id"]: one["replica"] for one in self.ask("GET", "/admin/overview")["sandboxes"]}
        return dict(told[sandbox] or {})

    def paused(self, note: str) -> Any:
        """A paused sandbox on ``far`` with a file, copied."""
        sandbox = e2b.Sandbox.create("host", timeout=300, **self.options)
        sandbox.files.write("/tmp/note", note)
        sandbox.commands.run("echo $((6 * 7)) > /home/user/answer")
        sandbox.pause()
        wait_until(lambda: self.replica(sandbox.sandbox_id)["state"] == "kept")
        return sandbox

    def processes(self) -> tuple[Process, ...]:
        return self.node, self.near, self.service

    def lose(self) -> None:
        wait_until(lambda: self.status() == "lost")
        undo = [*COMMAND, "drain", "near", "--undo", "--state", str(self.state / "service")]
        subprocess.run(undo, check=True, timeout=60, capture_output=True)


_Trio = TypeVar("_Trio", bound=Trio)


@contextmanager
def buried(trio: _Trio) -> Iterator[_Trio]:
    """``ended``, with what its killed nodes left."""
    try:
        with ended(trio):
            yield trio
    finally:
        for pid in of_the_dead(trio.state):
            os.kill(pid, signal.SIGKILL)


def of_the_dead(state: Path) -> Iterator[int]:
    """What a killed node leaves for the next one to adopt or to end, and none comes here: a machine started ahead."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str((entry / "fd" / "2").readlink()).startswith(f"{state}/"):
                yield int(entry.name)


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Trio]:
    with buried(Trio(tmp_path)) as trio:
        yield trio


def test_what_was_paused_on_a_node_that_died_resumes_elsewhere(trio: Trio) -> None:
    sandbox = trio.paused("before")
    running = e2b.Sandbox.create("host", timeout=300, **trio.options)
    trio.node.end(signal.SIGKILL)
    trio.lose()
    assert running.sandbox_id not in trio.sandboxes(), "what ran there is over"
    again = sandbox.connect(timeout=300)
    assert again.sandbox_id == sandbox.sandbox_id
    assert trio.sandboxes() == {sandbox.sandbox_id: "near"}
    assert again.files.read("/tmp/note") == "before"
    assert again.commands.run("cat /home/user/answer; hostname").stdout.splitlines()[0] == "42"
    again.files.write("/tmp/note", "after")

    trio.node = trio.join()  # with what it had on its disk
    wait_until(lambda: trio.status() == "ready")
    wait_until(lambda: trio.ask("GET", "/nodes/far")["sandboxCount"] == 0)
    assert trio.sandboxes() == {sandbox.sandbox_id: "near"}
    assert again.files.read("/tmp/note") == "after"


def test_a_node_that_was_silent_lets_go_of_what_was_recovered(trio: Trio) -> None:
    sandbox = trio.paused("before")
    running = e2b.Sandbox.create("host", timeout=300, **trio.options)
    trio.node.process.send_signal(signal.SIGSTOP)
    try:
        trio.lose()
        again = sandbox.connect(timeout=300)
        again.files.write("/tmp/note", "after")
    finally:
        trio.node.process.send_signal(signal.SIGCONT)
    wait_until(lambda: trio.status() == "ready")
    wait_until(lambda: trio.ask("GET", "/nodes/far")["sandboxCount"] == 0)
    assert trio.sandboxes() == {sandbox.sandbox_id: "near"}
    assert running.sandbox_id not in trio.sandboxes()
    assert again.files.read("/tmp/note") == "after"


def test_what_has_no_copy_is_told_of_as_lost(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "--node-grace", GRACE_S)
    try:
        sandbox = e2b.Sandbox.create("host", timeout=300, **pair.options)
        sandbox.files.write("/tmp/note", "here")
        sandbox.pause()
        pair.node.end(signal.SIGKILL)
        wait_until(lambda: pair.status() == "lost")
        (seen,) = pair.ask("GET", "/admin/overview")["sandboxes"]
        assert "without --replicas" in seen["lost"]
        with pytest.raises(Exception, match="waits for that node"):
            sandbox.connect(timeout=300)
        pair.node = pair.join()
        wait_until(lambda: pair.status() == "ready")
        assert sandbox.connect(timeout=300).files.read("/tmp/note") == "here"
    finally:
        for sandbox_id in pair.sandboxes():
            pair.ask("DELETE", f"/admin/sandboxes/{sandbox_id}")
        pair.node.end()
        pair.service.end()


# Virtual machines: their memory comes back too

MACHINES = ("--runtime", "microvm")


class Machines(Trio):
    """The same with virtual machines; each node makes its own template memory."""

    of_nodes = MACHINES
    of_service = MACHINES


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    tiny_template(tmp_path, COMMAND, ("service", "node", "near"))
    with buried(Machines(tmp_path)) as machines:
        yield machines


def test_a_virtual_machine_of_a_dead_node_comes_back_with_its_memory(machines: Machines) -> None:
    sandbox = e2b.Sandbox.create("tiny", timeout=600, request_timeout=240, **machines.options)
    assert machines.sandboxes() == {sandbox.sandbox_id: "far"}
    started = sandbox.commands.run("sleep 5000", background=True, user="root")
    said = sandbox.commands.run(
        "mkdir /m; mount -t tmpfs none /m; dd if=/dev/urandom of=/m/x bs=1M count=8 2>/dev/null; "
        "dd if=/dev/urandom of=/root/y bs=1M count=2 2>/dev/null; md5sum /m/x /root/y",
        user="root",
    ).stdout
    sandbox.pause(request_timeout=240)
    wait_until(lambda: machines.replica(sandbox.sandbox_id)["state"] == "kept")
    assert machines.replica(sandbox.sandbox_id)["memory"]
    machines.node.end(signal.SIGKILL)
    machines.lose()
    again = sandbox.connect(timeout=600, request_timeout=240)
    assert machines.sandboxes() == {sandbox.sandbox_id: "near"}
    assert again.commands.run("md5sum /m/x /root/y", user="root").stdout == said
    assert started.pid in {one.pid for one in again.commands.list()}, "what ran runs on"
