"""Moves from node to node, neither of them the service's own host: three processes that share no directory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.microvms import tiny_template
from tests.integration.test_env_node import COMMAND, Pair, Process, ended
from tests.integration.test_escape_network import OTHER, PORT, SERVER, outside
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes are confined as root does: run as root")
e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")
__all__ = ["outside"]
RUNTIME = ("--runtime", "microvm")
LINES_S = 120.0


class Three(Pair):
    """The service, its nodes ``far`` and ``near``; the service's own host takes nothing."""

    def __init__(self, state: Path, *more: str) -> None:
        super().__init__(state, *more)
        self.near = self.join("near", "near")

    def processes(self) -> tuple[Process, ...]:
        return self.near, *super().processes()

    def move(self, sandbox: str, node: str) -> dict[str, Any]:
        command = [*COMMAND, "move", sandbox, node, "--json", "--state", str(self.state / "service")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def other(self, sandbox: str) -> str:
        return "near" if self.sandboxes()[sandbox] == "far" else "far"


class Machines(Three):
    """All run virtual machines."""

    of_nodes = RUNTIME


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    state = tmp_path_factory.mktemp("three")
    tiny_template(state, COMMAND, ("service", "node", "near"))
    with ended(Machines(state, *RUNTIME)) as three:
        yield three


class Followed:
    """A command's stream, read by the SDK in a thread of its own."""

    def __init__(self, handle: Any) -> None:
        self.said = ""
        self.ended: Any = None
        self._handle = handle
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _hear(self, text: str) -> None:
        self.said += text

    def _follow(self) -> None:
        try:
            self.ended = self._handle.wait(on_stdout=self._hear)
        except Exception as error:  # noqa: BLE001 - told to the test
            self.ended = error

    def newest(self) -> int:
        lines = self.said.rpartition("\n")[0].split()
        return int(lines[-1]) if lines else 0

    def hears_more(self) -> None:
        """Until it said something that it had not said yet."""
        before, end = self.newest(), time.monotonic() + LINES_S
        while self.newest() <= before:
            assert self.ended is None, self.ended
            assert time.monotonic() < end, f"nothing came after {before}"
            time.sleep(0.1)

    def join(self) -> Any:
        self._thread.join(LINES_S)
        assert not self._thread.is_alive()
        return self.ended


COUNT = "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i; echo $i >> /root/count; sleep 0.05; done; exit 7"


def test_the_sdk_s_streams_go_on_from_node_to_node(three: Machines) -> None:
    """Of the call that started a command and of one that connected to it: each line once, in order, and the end."""
    sandbox = e2b.Sandbox.create("tiny", timeout=900, request_timeout=240, **three.options)
    started = Followed(sandbox.commands.run(COUNT, user="root", background=True, timeout=600))
    started.hears_more()
    pid = sandbox.commands.list()[0].pid
    connected = Followed(sandbox.commands.connect(pid, timeout=600))
    connected.hears_more()
    for _ in range(3):
        node = three.other(sandbox.sandbox_id)
        told = three.move(sandbox.sandbox_id, node)
        assert (told["node"], told["how"], told["why"]) == (node, "live", "")
        assert three.sandboxes()[sandbox.sandbox_id] == node
        started.hears_more()
        assert connected.newest() > 0
    sandbox.files.write("/tmp/end", "", user="root")
    for followed in (started, connected):
        assert isinstance(followed.join(), e2b.CommandExitException), followed.ended
        assert followed.ended.exit_code == 7
    written = [int(line) for line in sandbox.files.read("/root/count", user="root").split()]
    assert written == list(range(1, len(written) + 1))  # the heartbeat inside: none lost, none twice
    assert [int(line) for line in started.said.split()] == written
    heard = [int(line) for line in connected.said.split()]
    assert heard == list(range(heard[0], len(written) + 1))
    sandbox.kill()


def get(three: Machines, sandbox: str, port: int, path: str) -> str:
    """From a port inside, through the gateway."""
    headers = {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": str(port)}
    request = urllib.request.Request(f"{three.options['sandbox_url']}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def test_ports_inside_answer_from_either_node(three: Machines) -> None:
    sandbox = e2b.Sandbox.create("tiny", timeout=900, request_timeout=240, **three.options)
    sandbox.files.write("/root/page", "served inside", user="root")
    sandbox.commands.run("busybox httpd -p 127.0.0.1:8000 -h /root", user="root")
    assert get(three, sandbox.sandbox_id, 8000, "/page") == "served inside"
    three.move(sandbox.sandbox_id, three.other(sandbox.sandbox_id))
    assert get(three, sandbox.sandbox_id, 8000, "/page") == "served inside"
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(three, sandbox.sandbox_id, 8001, "/page")
    assert refused.value.code == 502
    sandbox.kill()


def answers(sandbox: Any, address: str) -> bool:
    told = sandbox.commands.run(f"busybox timeout 20 busybox nc -w 4 {address} {PORT} < /dev/null || true", user="root")
    return bool(told.stdout == "hello")


def test_what_it_may_reach_goes_with_it(three: Machines, outside: None) -> None:
    network = {"deny_out": [OTHER]}
    with contextlib.ExitStack() as stack:
        made = []
        for allowed in (True, False):
            options = {"allow_internet_access": allowed, "network": network if allowed else None, **three.options}
            sandbox = e2b.Sandbox.create("tiny", timeout=900, request_timeout=240, **options)
            stack.callback(sandbox.kill)
            made.append(sandbox)
        for _ in range(2):
            assert [[answers(each, address) for address in (SERVER, OTHER)] for each in made] == [
                [True, False],
                [False] * 2,
            ]
            assert three.move(made[0].sandbox_id, three.other(made[0].sandbox_id))["how"] == "live"


def test_a_deadline_holds_on_the_other_node(three: Machines) -> None:
    sandbox = e2b.Sandbox.create("tiny", timeout=900, request_timeout=240, **three.options)
    going = sandbox.commands.run("echo 1; sleep 1000", user="root", background=True, timeout=25)
    followed = Followed(going)
    followed.hears_more()
    three.move(sandbox.sandbox_id, three.other(sandbox.sandbox_id))
    assert isinstance(followed.join(), e2b.TimeoutException), followed.ended
    wait_until(lambda: going.pid not in {one.pid for one in sandbox.commands.list()})
    sandbox.kill()


def test_a_paused_machine_goes_from_node_to_node(three: Machines) -> None:
    sandbox = e2b.Sandbox.create("tiny", timeout=900, request_timeout=240, **three.options)
    going = sandbox.commands.run("sleep 1000", user="root", background=True, timeout=0)
    sandbox.pause()
    node = three.other(sandbox.sandbox_id)
    told = three.move(sandbox.sandbox_id, node)
    assert (told["node"], told["how"], told["why"]) == (node, "snapshot", "it is paused")
    sandbox.connect(timeout=600, request_timeout=240)
    assert going.pid in {one.pid for one in sandbox.commands.list()}
    sandbox.kill()


def test_a_namespace_s_files_go_from_node_to_node(tmp_path: Path) -> None:
    with ended(Three(tmp_path)) as three:
        sandbox = e2b.Sandbox.create("host", timeout=600, **three.options)
        for number in range(2):
            sandbox.files.write("/tmp/kept", f"kept {number}")
            node = three.other(sandbox.sandbox_id)
            told = three.move(sandbox.sandbox_id, node)
            assert (told["node"], told["how"]) == (node, "files")
            assert "namespace sandboxes cannot move while they run" in told["why"]
            assert three.sandboxes()[sandbox.sandbox_id] == node
            assert sandbox.files.read("/tmp/kept") == f"kept {number}"
            assert sandbox.commands.run("cat /tmp/kept").stdout == f"kept {number}"
        here, there = ("near", "node") if node == "near" else ("node", "near")
        assert list((tmp_path / here).rglob(f"*{sandbox.sandbox_id}*")) != []
        assert list((tmp_path / there).rglob(f"*{sandbox.sandbox_id}*")) == []
