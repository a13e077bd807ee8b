"""``venusrl env`` as a user runs it: processes, signals, restarts, real namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.serving import COMMAND, Serving
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of the service need root: run as root")
e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")


def env(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    left = Serving(tmp_path / "state", "--kill-on-exit")  # whatever a failed test left behind
    assert "were ended" in left.end(signal.SIGINT)


def test_sandboxes_outlive_their_service(state: Path) -> None:
    first = Serving(state)
    box = e2b.Sandbox.create("host", timeout=600, **first.options)
    short = e2b.Sandbox.create("host", timeout=3, **first.options)
    paused = e2b.Sandbox.create("host", **first.options)
    paused.files.write("/home/user/x", "kept")
    paused.pause()
    ticking = box.commands.run(
        "while :; do date +%s%N > /tmp/new; mv /tmp/new /tmp/tick; sleep 0.05; done", background=True
    )
    second = env("serve", "--state", str(state), "--listen", "127.0.0.1:0")
    assert second.returncode == 1
    assert f"in use by another service (process {first.process.pid})" in second.stderr
    first.end(signal.SIGKILL)

    again = Serving(state)
    assert again.options["api_key"] == first.options["api_key"]
    box = e2b.Sandbox.connect(box.sandbox_id, **again.options)
    assert [one.pid for one in box.commands.list()] == [ticking.pid]
    wait_until(lambda: box.files.exists("/tmp/tick"), "the process's first tick")
    before = box.files.read("/tmp/tick")
    wait_until(lambda: box.files.read("/tmp/tick") != before, "a tick after the restart")

    def ended() -> bool:
        listed = e2b.Sandbox.list(**again.options).next_items()
        return short.sandbox_id not in {one.sandbox_id for one in listed}

    wait_until(ended, "the end of a time to live that began before the restart")
    paused = e2b.Sandbox.connect(paused.sandbox_id, **again.options)
    assert paused.files.read("/home/user/x") == "kept"
    said = again.end(signal.SIGINT)
    assert "stopped; 2 sandboxes go on" in said

    last = Serving(state, "--kill-on-exit")
    assert len(e2b.Sandbox.list(**last.options).next_items()) == 2
    assert "2 sandboxes were ended" in last.end(signal.SIGTERM)


def test_input_goes_on_over_services_that_die(state: Path) -> None:
    """A process is attached to and sent to again and again, by services of which each was killed in the middle."""
    sent = []
    identity, pid = "", 0
    for number in range(4):
        service = Serving(state)
        if number:
            box = e2b.Sandbox.connect(identity, **service.options)
        else:
            box = e2b.Sandbox.create("host", timeout=600, **service.options)
            pid = box.commands.run("cat > /tmp/got", background=True, stdin=True).pid
            identity = box.sandbox_id
        following = box.commands.connect(pid)
        for step in range(30):
            sent.append(f"{number}.{step}")
            box.commands.send_stdin(pid, f"{sent[-1]}\n")
        following.disconnect()
        for step in range(30, 40):
            sent.append(f"{number}.{step}")
            box.commands.send_stdin(pid, f"{sent[-1]}\n")
        service.end(signal.SIGKILL)
    last = Serving(state)
    box = e2b.Sandbox.connect(identity, **last.options)
    following = box.commands.connect(pid)
    box.commands.close_stdin(pid)
    assert following.wait().exit_code == 0
    assert box.files.read("/tmp/got").split() == sent
    last.end(signal.SIGINT)


def test_the_command_line_looks_and_acts(state: Path) -> None:
    served = Serving(state)
    try:
        made = json.loads(
            env("key", "create", "--state", str(state), "--name", "ci", "--max-sandboxes", "1", "--json").stdout
        )
        options = {**served.options, "api_key": made["key"]}
        box = e2b.Sandbox.create("host", metadata={"venusrl.priority": "2"}, **options)
        with pytest.raises(e2b.RateLimitException):
            e2b.Sandbox.create("host", request_timeout=5.0, **options)
        seen = json.loads(env("top", "--state", str(state), "--json").stdout)
        assert [one["status"] for one in seen["nodes"]] == ["ready"]
        assert [(one["id"], one["priority"]) for one in seen["sandboxes"]] == [(box.sandbox_id, 2.0)]
        assert seen["nodes"][0]["memory"]["capacity"] > 0
        assert box.sandbox_id in env("list", "--state", str(state), "--json").stdout
        table = env("list", "--state", str(state)).stdout.splitlines()  # no terminal: a line each, whatever its width
        assert [line.split()[:4] for line in table[1:]] == [[box.sandbox_id, "host", "local", "namespace"]]
        assert env("kill", box.sandbox_id, "--state", str(state)).returncode == 0
        assert json.loads(env("list", "--state", str(state), "--json").stdout) == []
        unknown = env("kill", "nobody", "--state", str(state))
        assert unknown.returncode == 1
        assert "was not found" in unknown.stderr
        assert env("key", "revoke", made["id"], "--state", str(state)).returncode == 0
        with pytest.raises(e2b.AuthenticationException):
            e2b.Sandbox.create("host", **options)
        drained = env("drain", "nowhere", "--state", str(state))
        assert (drained.returncode, "there is no node" in drained.stderr) == (1, True)
    finally:
        served.end(signal.SIGINT)
    nobody = env("top", "--state", str(state), "--json")
    assert nobody.returncode == 1
    assert "venusrl env serve" in nobody.stderr
