"""Who owns which sandbox on disk, and what is reaped of whom."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from venusrl.sandboxes import ownership
from venusrl.sandboxes.ownership import NodeRecord, Process, Registry, SandboxRecord
from venusrl.sandboxes.protocol import SandboxError


def me() -> Process:
    process = ownership.process_of(os.getpid())
    assert process is not None
    return process


def node(node_id: str, process: Process, boot: str = "", lease_s: float = 60.0) -> NodeRecord:
    return NodeRecord(node_id, "run", process, boot or ownership.boot_id(), ownership.pid_namespace(), lease_s)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    made = Registry(tmp_path / "sandboxes")
    made.prepare()
    return made


def ended_process() -> Process:
    child = subprocess.Popen(["sleep", "60"])
    process = ownership.process_of(child.pid)
    child.kill()
    child.wait()
    assert process is not None
    return process


def test_a_process_is_known_by_its_start_too() -> None:
    assert ownership.process_of(os.getpid()) == me()
    assert ownership.process_of(2**22 + 1) is None


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ownership.process_of(child.pid) is None
    child.wait()


def test_a_living_owner_is_never_dead_whatever_its_lease() -> None:
    assert not ownership.is_dead(node("n", me(), lease_s=1.0), renewed_at=0.0, now=1e9)


def test_a_dead_owner_is_dead_whatever_its_lease() -> None:
    reused = Process(os.getpid(), me().start_time + 1)
    assert ownership.is_dead(node("n", reused), renewed_at=100.0, now=100.0)
    assert ownership.is_dead(node("n", ended_process()), renewed_at=100.0, now=100.0)


def test_an_owner_that_cannot_be_seen_lives_until_its_lease_ends() -> None:
    far = node("n", me(), boot="another-machine", lease_s=60.0)
    assert not ownership.is_dead(far, renewed_at=100.0, now=159.0)
    assert ownership.is_dead(far, renewed_at=100.0, now=161.0)


def test_t35_only_orphans_of_dead_owners_are_reaped(registry: Registry) -> None:
    registry.put_node(node("alive", me()))
    registry.put_node(node("dead", ended_process()))
    for index in range(3):
        registry.put_sandbox(SandboxRecord(f"alive-{index}", "alive", "host", {"task": "t"}))
        registry.put_sandbox(SandboxRecord(f"dead-{index}", "dead", "host", {}))
    reaped = registry.reap()
    assert sorted(record.id for record in reaped) == ["dead-0", "dead-1", "dead-2"]
    assert sorted(record.id for record in registry.sandboxes()) == ["alive-0", "alive-1", "alive-2"]
    assert registry.reap() == []


def test_a_lease_is_renewed_by_touching_the_record(registry: Registry, tmp_path: Path) -> None:
    registry.put_node(node("far", me(), boot="another-machine", lease_s=60.0))
    registry.put_sandbox(SandboxRecord("far-0", "far", "host", {}))
    record = tmp_path / "sandboxes/nodes/far.json"
    os.utime(record, (time.time() - 120, time.time() - 120))
    registry.renew("far")
    assert registry.reap() == []
    os.utime(record, (time.time() - 120, time.time() - 120))
    assert [orphan.id for orphan in registry.reap()] == ["far-0"]


def test_records_are_private(registry: Registry, tmp_path: Path) -> None:
    assert (tmp_path / "sandboxes/nodes").stat().st_mode & 0o077 == 0


def test_a_damaged_record_names_itself(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "sandboxes/nodes/x.json").write_text("{")
    with pytest.raises(SandboxError, match=r"x\.json is damaged"):
        registry.reap()


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxError, match="cannot be kept"):
        Registry(tmp_path / "file" / "sandboxes").prepare()
