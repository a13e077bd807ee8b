"""A service and a machine that joined it, as processes with real namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.integration.microvms import tiny_root
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of the service need root: run as root")
e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")
COMMAND = [sys.executable, "-m", "venusrl.cli.main", "env"]


class Process:
    """A command of ``venusrl env`` that announces itself in JSON."""

    def __init__(self, log: Path, *arguments: str) -> None:
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments, "--json"], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            assert line, log.read_text()
            text += line
        self.told: dict[str, Any] = json.loads(text)

    def end(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_S)


class Pair:
    """The service and its node ``far``; the service's own host takes nothing. ``more``: arguments of ``serve``."""

    of_nodes: tuple[str, ...] = ()
    """Arguments of ``node``."""

    def __init__(self, state: Path, *more: str) -> None:
        self.state = state
        where = ["--state", str(state / "service"), "--listen", _FREE]
        self.service = Process(state / "service.log", "serve", *where, *more)
        environment = self.service.told["environment"]
        self.url = environment["E2B_API_URL"]
        self.options = {
            "api_key": environment["E2B_API_KEY"],
            "api_url": self.url,
            "sandbox_url": environment["E2B_SANDBOX_URL"],
        }
        self.key = (state / "service" / "join-key").read_text().strip()
        self.node = self.join()
        self.ask("POST", "/nodes/local", {"status": "draining"})

    def join(self, name: str = "far", folder: str = "node") -> Process:
        where = ["--state", str(self.state / folder), "--listen", _FREE]
        log = self.state / f"{folder}.log"
        return Process(log, "node", "--join", self.url, "--key", self.key, "--name", name, *where, *self.of_nodes)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        admin = (self.state / "service" / "admin-key").read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-Admin-Token": admin, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def sandboxes(self) -> dict[str, str]:
        """By id: the node each is on."""
        return {one["id"]: one["node"] for one in self.ask("GET", "/admin/overview")["sandboxes"]}

    def counter(self, name: str) -> float:
        """Of the node, as it last told."""
        return float(self.ask("GET", "/nodes/far")["counters"].get(name, 0))

    def processes(self) -> tuple[Process, ...]:
        return self.node, self.service

    def status(self) -> str:
        return str({one["id"]: one["status"] for one in self.ask("GET", "/nodes")}["far"])


_FREE = "127.0.0.1:0"


_Pair = TypeVar("_Pair", bound=Pair)


@contextmanager
def ended(pair: _Pair) -> Iterator[_Pair]:
    """Its sandboxes and processes end with the test."""
    try:
        yield pair
    finally:
        for sandbox in pair.sandboxes():
            pair.ask("DELETE", f"/admin/sandboxes/{sandbox}")
        for process in pair.processes():
            if process.process.poll() is None:
                process.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ended(Pair(tmp_path)) as pair:
        yield pair


def test_sandboxes_on_a_node_that_joined(pair: Pair) -> None:
    sandbox = e2b.Sandbox.create("host", timeout=300, **pair.options)
    assert pair.sandboxes() == {sandbox.sandbox_id: "far"}
    assert sandbox.commands.run("echo $((6 * 7))").stdout == "42\n"
    sandbox.files.write("/tmp/kept", "before")
    going = sandbox.commands.run("sleep 1000", background=True)

    pair.node.end(signal.SIGKILL)
    pair.node = pair.join()
    wait_until(lambda: pair.status() == "ready")
    assert sandbox.files.read("/tmp/kept") == "before"
    assert going.pid in {one.pid for one in sandbox.commands.list()}, "a process ended with the node's service"

    drained = pair.ask("POST", "/nodes/far", {"status": "draining"})
    assert list(drained["stayed"]) == [sandbox.sandbox_id]
    with pytest.raises(Exception, match=r"(?i)drain|room|node"):
        e2b.Sandbox.create("host", timeout=60, **pair.options)
    assert sandbox.commands.run("echo still here").stdout == "still here\n"


def test_a_template_reaches_a_node_that_lacks_it(pair: Pair) -> None:
    root = tiny_root(pair.state / "root")
    (root / "bin" / "bash").write_text('#!/bin/sh\nexec /bin/sh -c "$3"\n')  # called as bash -l -c COMMAND
    (root / "bin" / "bash").chmod(0o755)
    build = [*COMMAND, "template", "build", str(root), "tiny", "--state", str(pair.state / "service")]
    subprocess.run(build, check=True, timeout=120, capture_output=True)
    sandbox = e2b.Sandbox.create("tiny", timeout=300, **pair.options)
    assert pair.sandboxes() == {sandbox.sandbox_id: "far"}
    assert sandbox.commands.run("ls /bin/busybox").stdout == "/bin/busybox\n"
    layers = len(list((pair.state / "node" / "templates" / "layers").iterdir()))
    assert layers > 0
    wait_until(lambda: pair.counter("template_layers_fetched") == layers)
    again = e2b.Sandbox.create("tiny", timeout=300, **pair.options)
    assert again.commands.run("hostname").exit_code == 0
    wait_until(lambda: pair.counter("created") == 2)
    assert pair.counter("template_layers_fetched") == layers


def test_files_move_between_a_node_and_the_service_s_own_host(pair: Pair) -> None:
    """By the command, both ways; what a namespace's move is like is said."""
    sandbox = e2b.Sandbox.create("host", timeout=300, **pair.options)
    sandbox.files.write("/tmp/kept", "kept")
    pair.ask("POST", "/nodes/local", {"status": "ready"})
    for node in ("local", "far"):
        move = [*COMMAND, "move", sandbox.sandbox_id, node, "--state", str(pair.state / "service")]
        done = subprocess.run(move, capture_output=True, text=True, timeout=120, check=True)
        assert f"{sandbox.sandbox_id} is on {node}: its files moved, its processes ended" in done.stdout
        assert "not live: namespace sandboxes cannot move while they run" in " ".join(done.stdout.split())
        assert pair.sandboxes() == {sandbox.sandbox_id: node}
        assert sandbox.files.read("/tmp/kept") == "kept"
        assert sandbox.commands.run("cat /tmp/kept").stdout == "kept"
