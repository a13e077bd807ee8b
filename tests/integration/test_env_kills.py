"""kill -9 of a host's service at random instants: no sandbox lost, none left behind. Case T35.

The service runs in a process of its own (``killed_host``) and is killed while it creates, pauses, resumes, snapshots
and kills. This process takes its orphans, so that what it leaves is seen whatever group it is in.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.integration.persistent import running
from tests.waiting import PATIENCE_S, wait_until

from venusrl.sandboxes.runtimes.namespace import kernel

PROGRAM = Path(__file__).with_name("killed_host.py")
ROUNDS = 10
"""At least: more where the instants chosen have not yet met each of ``INTERRUPTED``."""
INTERRUPTED = {"create", "pause", "resume"}


class Told:
    """What the service has promised so far."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.filled: set[str] = set()
        self.doing: dict[str, str] = {}
        self.snapshots: set[str] = set()
        self.interrupted: set[str] = set()

    def hear(self, line: dict[str, Any]) -> None:
        sandbox = line["id"]
        if "begin" in line:
            self.doing[sandbox] = line["begin"]
            return
        done = self.doing.pop(sandbox)
        if done == "fill":
            self.filled.add(sandbox)
        elif done == "snapshot":
            self.snapshots.add(line["snapshot"])
        elif done == "kill":
            del self.states[sandbox]
        else:
            self.states[sandbox] = "paused" if done == "pause" else "running"

    def compare(self, found: dict[str, Any]) -> None:
        """What a service that was started anew has must be what was promised; then it is what is so."""
        held: dict[str, str] = found["held"]
        assert found["lacking"] == []
        assert found["lost"] == {}, "nothing in them ends by itself"
        for sandbox, state in self.states.items():
            doing = self.doing.get(sandbox)
            if doing == "kill":
                continue
            assert sandbox in held, f"{sandbox} was {state} (in progress: {doing}) and is lost"
            if doing not in ("pause", "resume"):
                assert held[sandbox] == state, (sandbox, doing)
        for sandbox in held.keys() - self.states.keys():
            assert self.doing.get(sandbox) == "create", f"{sandbox} is back"
        assert self.snapshots <= set(found["snapshots"])
        self.interrupted |= set(self.doing.values())
        self.states = dict(held)
        self.doing.clear()


class Service:
    """One life of the service."""

    def __init__(self, state: Path, seed: int, *more: str) -> None:
        arguments = [sys.executable, str(PROGRAM), str(state), str(seed), *more]
        self.log = state / f"log-{seed}"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text.endswith("\n"), f"the service ended: {self.log.read_text()[-3000:]}"
        line: dict[str, Any] = json.loads(text)
        return line

    def close(self) -> None:
        """Its pipes; the service itself when it still runs."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> list[dict[str, Any]]:
        """Now; what it still had told."""
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGKILL)
        rest = self.process.stdout.read().splitlines(keepends=True)
        self.process.wait()
        self.close()
        return [json.loads(line) for line in rest if line.endswith("\n")]


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[list[Service]]:
    """Those that were started, ended whatever happens, with their sandboxes. Orphans become ours meanwhile."""
    async with running(tmp_path / "probe"):
        pass  # skipped where this machine has no persistent sandboxes
    started: list[Service] = []
    kernel.become_subreaper()
    yield started
    for service in started:
        service.close()
    async with running(tmp_path / "ns"):
        pass  # it sweeps as it closes
    descendants()
    kernel.become_subreaper(on=False)


def descendants() -> set[int]:
    """Processes below this one; those that ended are reaped first."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def groups_in(directories: list[str]) -> set[str]:
    """Sandboxes that have a control group in any hierarchy."""
    names = {entry.name for each in directories for entry in os.scandir(each) if entry.is_dir()}
    return {name for name in names if "." not in name and name != "probe"}


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder)}


def none_leaked(state: Path, found: dict[str, Any]) -> None:
    """What exists of sandboxes belongs to one that is held."""
    held = set(found["held"])
    running_now = {sandbox for sandbox, now in found["held"].items() if now == "running"}
    with_processes = groups_in(found["groups"])
    assert running_now <= with_processes <= held
    assert running_now <= names_in(state / "ns/sockets") <= held
    assert names_in(state / "ns/paused") <= held - running_now
    assert {name.removesuffix(".json") for name in names_in(state / "host/sandboxes")} - {"lock"} == held


def test_T35_killed_at_any_instant_it_loses_none_and_leaks_none(tmp_path: Path, services: list[Service]) -> None:
    before = descendants()
    chance = random.Random(39)
    told = Told()
    rounds = 0
    while rounds < ROUNDS or (rounds < 10 * ROUNDS and not told.interrupted >= INTERRUPTED):
        service = Service(tmp_path, rounds)
        rounds += 1
        services.append(service)
        found = service.line()
        told.compare(found)
        none_leaked(tmp_path, found)
        service.go_on()
        wrong = service.line()["wrong"]
        assert not wrong.keys() & told.filled, wrong
        for _ in range(chance.randrange(4, 40)):
            told.hear(service.line())
        time.sleep(chance.random() * 0.05)
        for line in service.kill():
            told.hear(line)
    service = Service(tmp_path, rounds, "end")
    services.append(service)
    found = service.line()
    told.compare(found)
    none_leaked(tmp_path, found)
    service.go_on()
    wrong = service.line()["wrong"]
    assert not wrong.keys() & told.filled, wrong
    assert service.line() == {"closed": True}
    assert service.process.wait(PATIENCE_S) == 0
    service.close()
    assert told.interrupted >= INTERRUPTED, "the instants chosen met too little"
    wait_until(lambda: not descendants() - before, "the end of all that was started")
    assert names_in(tmp_path / "ns/sockets") | names_in(tmp_path / "ns/paused") == set()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert [path for path in found["groups"] if Path(path).exists()] == []
