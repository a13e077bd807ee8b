"""Whole runs as a user starts them: the command line in a process of its own, and a look at its descendants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from venusrl.coordinator.store import RunStore
from venusrl.sandboxes.runtimes.namespace.instance import start_time

# What tells each kind by its command line; a sandboxed command is bubblewrap with its arguments on a descriptor.
_KINDS = {
    "engine": "venusrl.rollout.engines.worker",
    "trainer": "venusrl.training.trainer",
    "sandbox": " --args ",
    "launcher": "venusrl.sandboxes.runtimes.namespace.launcher",
    "vllm server": "python -m vllm.entrypoints.openai.api_server",
    "vllm core": "VLLM::EngineCore",
}


def write_recipe(path: Path, model: Path, tasks: Path, held_out: Path, **changes: dict[str, Any]) -> Path:
    """A recipe of seconds; ``changes`` by section."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny"},
        "model": {"path": str(model)},
        "tasks": {"source": str(tasks), "held_out": str(held_out)},
        "rollout": {"kv_capacity_tokens": 8192, "slots": 16, "context_tokens": 512},
        "agent": {"system_prompt": "", "max_turns": 3, "max_turn_tokens": 3, "max_output_tokens": 12, "max_time_s": 30},
        "sandbox": {"memory_mib": 64, "pids": 16, "disk_mib": 8, "command_timeout_s": 5},
        "schedule": {"batch_groups": 2, "group_size": 4, "async_factor": 1},
        "training": {"steps": 3, "learning_rate": 0.003, "micro_batch_tokens": 4096},
        "evaluation": {"tasks": 4, "greedy": False, "slots": 8},
    }
    for section, values in changes.items():
        sections[section] |= values
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    path.write_text("\n".join(lines))
    return path


class TrainProcess:
    """One ``venusrl train`` of a run directory."""

    def __init__(self, recipe: Path, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "venusrl.cli.main", "train", str(recipe), "--run-dir", str(run_dir)]
        self.output = run_dir.parent / f"{run_dir.name}.out"
        with self.output.open("ab") as file:
            self.popen = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end within {timeout_s:g} s; it said:\n{self.said()}") from None

    def interrupt(self) -> None:
        self.popen.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        """For cleaning up after a test, whatever state it left."""
        if self.popen.poll() is None:
            self.kill()

    def descendants(self, kind: str) -> list[int]:
        """Pids of this run's processes of a kind: engine, trainer, sandbox or launcher."""
        return [pid for pid in descendants(self.pid) if _KINDS[kind] in _command(pid)]

    def until_descendant(self, kind: str, timeout_s: float) -> None:
        """Wait for a process of a kind to be there."""
        deadline = time.monotonic() + timeout_s
        while not self.descendants(kind):
            assert self.popen.poll() is None, f"the run ended before its {kind} began; it said:\n{self.said()}"
            assert time.monotonic() < deadline, f"no {kind} within {timeout_s:g} s; it said:\n{self.said()}"
            time.sleep(0.01)

    def until_event(self, kind: str, timeout_s: float, **fields: object) -> dict[str, Any]:
        """Wait for an event of the run's record."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in events(self.run_dir):
                if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            if self.popen.poll() is not None:
                raise AssertionError(f"the run ended before {kind}; it said:\n{self.said()}")
            time.sleep(0.05)
        raise AssertionError(f"no {kind} {fields} within {timeout_s:g} s; it said:\n{self.said()}")


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of the run's record."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # being written, or torn by a kill
    return found


def faults(run_dir: Path) -> list[str]:
    """What contradicts the store's invariants."""
    with RunStore.read(run_dir) as store:
        return store.check_invariants()


def sandboxes_left(run_dir: Path) -> list[str]:
    """Sandboxes on disk; a run that is over has none."""
    return [entry.name for name in ("nodes", "sandboxes") for entry in (run_dir / "sandboxes" / name).iterdir()]


def descendants(root: int) -> list[int]:
    """Every living process below ``root``."""
    found, waiting = [], [root]
    while waiting:
        below = [child for child in _children(waiting.pop()) if start_time(child) is not None]
        found += below
        waiting += below
    return found


def _children(pid: int) -> list[int]:
    """Asked of the process itself: reading all of a busy machine's processes takes longer than some of ours live."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:
        pass  # it ended
    return found


def all_gone(births: dict[int, int | None], timeout_s: float) -> bool:
    """Wait for processes, named by pid and ``start_time``, to end; False if one is still there."""
    deadline = time.monotonic() + timeout_s
    while any(birth is not None and start_time(pid) == birth for pid, birth in births.items()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
