"""``venusrl env move``: a running virtual machine goes from a node to the service's own host and back, as processes
that share no directory, over TCP, by the command that a user types."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.microvms import tiny_template
from tests.integration.test_env_node import COMMAND, Pair, Process, ended
from tests.waiting import PATIENCE_S, wait_until

from venusrl.sandboxes.e2b import E2BSandboxes
from venusrl.sandboxes.protocol import Limits

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual machines are confined as root does: run as root")
e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")
RUNTIME = ("--runtime", "microvm")


class Machines(Pair):
    """Both run virtual machines."""

    of_nodes = RUNTIME

    def begin_move(self, sandbox: str, node: str) -> subprocess.Popen[str]:
        """Whether it comes through is not waited for."""
        command = [*COMMAND, "move", sandbox, node, "--state", str(self.state / "service")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill(self, victim: str) -> None:
        """End a process without its knowing, and start it again where it was."""
        if victim == "node":
            self.node.end(signal.SIGKILL)
            self.node = self.join()
            return
        port = self.url.rpartition(":")[2]
        self.service.end(signal.SIGKILL)
        where = ["--state", str(self.state / "service"), "--listen", f"127.0.0.1:{port}"]
        self.service = Process(self.state / "service.log", "serve", *where, *RUNTIME)


LOAD = (
    "mkdir /m; mount -t tmpfs none /m; dd if=/dev/urandom of=/m/x bs=1M count=16 2>/dev/null; "
    "dd if=/dev/urandom of=/root/y bs=1M count=4 2>/dev/null; md5sum /m/x /root/y"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    state = tmp_path_factory.mktemp("live")
    tiny_template(state, COMMAND, ("service", "node"))
    with ended(Machines(state, *RUNTIME)) as pair:
        yield pair


@pytest.fixture
def sandbox(pair: Machines) -> Iterator[Any]:
    """One on the node ``far``; the service's own host takes what is moved there."""
    pair.ask("POST", "/nodes/local", {"status": "draining"})
    made = e2b.Sandbox.create("tiny", timeout=600, request_timeout=240, **pair.options)
    assert pair.sandboxes()[made.sandbox_id] == "far"
    pair.ask("POST", "/nodes/local", {"status": "ready"})
    yield made
    made.kill()


def move(pair: Machines, sandbox: str, node: str) -> dict[str, Any]:
    command = [*COMMAND, "move", sandbox, node, "--json", "--state", str(pair.state / "service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


class Asking:
    """Somebody who asks the sandbox all the while; whatever goes wrong is kept."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox
        self._over = threading.Event()
        self.answers = 0
        self.failures: list[Exception] = []
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            try:
                assert self._sandbox.files.read("/root/kept", user="root") == "kept"
            except Exception as error:  # noqa: BLE001 - told to the test
                self.failures.append(error)
            self.answers += 1

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_it_runs_on_over_there_and_back(pair: Machines, sandbox: Any) -> None:
    before = sandbox.commands.run(LOAD, user="root").stdout
    sandbox.files.write("/root/kept", "kept", user="root")
    going = "i=0; while true; do i=$((i+1)); echo $i >> /root/count; sleep 0.05; done"
    sandbox.commands.run(f"({going}) >/dev/null 2>&1 & echo $! > /root/pid", user="root")
    for node in ("local", "far", "local"):
        if node == "far":
            time.sleep(4)  # nobody asks: its processors are stopped by now
        with Asking(sandbox) as asking:
            told = move(pair, sandbox.sandbox_id, node)
        assert (told["node"], told["how"], told["why"]) == (node, "live", "")
        assert told["outage_s"] > 0
        assert asking.failures == []
        assert asking.answers > 0
        assert pair.sandboxes()[sandbox.sandbox_id] == node
        assert sandbox.commands.run("md5sum /m/x /root/y; kill -0 $(cat /root/pid)", user="root").stdout == before
        first, last = sandbox.commands.run(
            "tail -n1 /root/count; sleep 1; tail -n1 /root/count", user="root"
        ).stdout.split()
        assert int(last) > int(first)
        lines, newest = sandbox.commands.run("wc -l < /root/count; tail -n1 /root/count", user="root").stdout.split()
        assert abs(int(newest) - int(lines)) <= 1  # no line was lost or written twice
    owners = [path.read_text() for path in (pair.state / "node" / "runtimes" / "microvm" / "vms").glob("*/owner")]
    assert sandbox.sandbox_id not in owners  # nothing of it is left where it was


def test_a_client_that_left_before_a_move_connects_after_it(pair: Machines, sandbox: Any) -> None:
    """The command ran on; from then on its output is heard."""
    loop = "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo line $i; sleep 0.1; done; exit 7"
    going = sandbox.commands.run(loop, user="root", background=True)
    going.disconnect()
    move(pair, sandbox.sandbox_id, "local")
    followed = sandbox.commands.connect(going.pid)
    sandbox.files.write("/tmp/end", "", user="root")
    with pytest.raises(e2b.CommandExitException) as ended:
        followed.wait()
    assert ended.value.exit_code == 7
    numbers = [int(line.split()[1]) for line in ended.value.stdout.splitlines()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_a_run_s_command_goes_on_over_moves(pair: Machines) -> None:
    """Through the client that training runs use: one command, two moves, every line, the exit code."""
    pair.ask("POST", "/nodes/local", {"status": "ready"})
    async with E2BSandboxes(
        pair.url, pair.options["api_key"], sandbox_url=pair.options["sandbox_url"], templates={"tiny": "tiny"}
    ) as sandboxes:
        made = await sandboxes.create("tiny", Limits(output_bytes=100_000, command_timeout_s=120.0), {})
        loop = "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i; sleep 0.1; done; exit 3"
        running = asyncio.create_task(sandboxes.run(made, loop))
        for _ in range(2):
            node = "local" if (await asyncio.to_thread(pair.sandboxes))[made] == "far" else "far"
            assert (await asyncio.to_thread(move, pair, made, node))["how"] == "live"
            await asyncio.sleep(1)
        await sandboxes.write(made, {"/tmp/end": b""})
        result = await running
        numbers = [int(word) for word in result.output.split()]
        assert result.exit_code == 3
        assert numbers == list(range(1, len(numbers) + 1))
        await sandboxes.kill(made)


async def test_watches_end_with_a_move_and_say_so(pair: Machines, sandbox: Any) -> None:
    polled = sandbox.files.watch_dir("/tmp", user="root")
    client = await e2b.AsyncSandbox.connect(sandbox.sandbox_id, **pair.options)
    over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def seen(_: Any) -> None:
        pass

    await client.files.watch_dir("/tmp", seen, on_exit=over.set_result, timeout=0, user="root")
    assert (await asyncio.to_thread(move, pair, sandbox.sandbox_id, "local"))["how"] == "live"
    error = await asyncio.wait_for(over, PATIENCE_S)
    assert "events may have been missed" in str(error)
    with pytest.raises(e2b.NotFoundException, match="create it again"):
        await asyncio.to_thread(polled.get_new_events)
    heard = asyncio.Event()

    async def hear(_: Any) -> None:
        heard.set()

    again = await client.files.watch_dir("/tmp", hear, timeout=0, user="root")
    await client.files.write("/tmp/new", "x", user="root")
    await asyncio.wait_for(heard.wait(), PATIENCE_S)
    await again.stop()


def test_a_paused_one_moves_with_its_memory(pair: Machines, sandbox: Any) -> None:
    sandbox.commands.run("sleep 1000 & echo $! > /root/pid", user="root")
    sandbox.pause()
    told = move(pair, sandbox.sandbox_id, "local")
    assert (told["how"], told["why"]) == ("snapshot", "it is paused")
    assert pair.sandboxes()[sandbox.sandbox_id] == "local"
    sandbox.connect(timeout=300)
    assert sandbox.commands.run("kill -0 $(cat /root/pid)", user="root").exit_code == 0


@pytest.mark.parametrize("victim", ["node", "service"])
def test_a_service_killed_in_a_move_loses_nothing(pair: Machines, sandbox: Any, victim: str) -> None:
    """At random instants; the sandbox is found running on one of the two, with its memory and processes."""
    before = sandbox.commands.run(LOAD, user="root").stdout
    sandbox.commands.run("sleep 1000 & echo $! > /root/pid", user="root")
    chance = random.Random(7)
    for _ in range(6):
        node = "local" if pair.sandboxes()[sandbox.sandbox_id] == "far" else "far"
        going = pair.begin_move(sandbox.sandbox_id, node)
        time.sleep(chance.uniform(0.4, 2.0))
        pair.kill(victim)
        going.communicate(timeout=120)
        wait_until(lambda: pair.status() == "ready")
        assert harmless(sandbox, "md5sum /m/x /root/y; kill -0 $(cat /root/pid)") == before
        wait_until(lambda: len(machines(pair, sandbox.sandbox_id)) == 1)
        assert machines(pair, sandbox.sandbox_id) == [pair.sandboxes()[sandbox.sandbox_id]]


def harmless(sandbox: Any, command: str) -> str:
    """What a command says that may be asked again, as one that the move cut before its answer has to be."""
    said: list[str] = []

    def answered() -> bool:
        try:
            said.append(sandbox.commands.run(command, user="root", request_timeout=90).stdout)
        except e2b.SandboxException as error:
            assert "ask again" in str(error)  # noqa: PT017 - any other is a failure
        return bool(said)

    wait_until(answered)
    return said[0]


def machines(pair: Machines, sandbox: str) -> list[str]:
    """Where there are virtual machines of it."""
    found = []
    for side, node in (("service", "local"), ("node", "far")):
        for path in (pair.state / side / "runtimes" / "microvm" / "vms").glob("*/owner"):
            with contextlib.suppress(FileNotFoundError):
                found += [node] if path.read_text() == sandbox else []
    return found


def test_a_node_that_is_not_there_is_named(pair: Machines, sandbox: Any) -> None:
    command = [*COMMAND, "move", sandbox.sandbox_id, "nowhere", "--state", str(pair.state / "service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "node" in done.stderr
    assert pair.sandboxes()[sandbox.sandbox_id] == "far"
