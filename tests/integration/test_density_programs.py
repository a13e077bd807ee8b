"""The programs of the density traces hold the memory that their model says, and fail when it is taken from them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, wait_until

from venusrl.sandboxes.admission.traces import Step, program

SEEN_S = 5.0
"""How long a step holds what is to be seen: longer than a machine stands still."""
SHELLS = [["/bin/sh"], ["busybox", "sh"]]


@pytest.fixture(params=SHELLS, ids=lambda shell: " ".join(shell))
def shell(request: pytest.FixtureRequest) -> list[str]:
    chosen: list[str] = request.param
    if shutil.which(chosen[0]) is None:
        pytest.skip("no busybox on this machine: apt install busybox-static")
    return chosen


def descendants(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [deeper for child in found for deeper in descendants(child)]


def holder(pid: int, wanted_kib: int) -> int:
    """The process below ``pid`` that has come to hold so much anonymous memory."""
    found: list[int] = []

    def look() -> bool:
        found.extend(child for child in descendants(pid) if holds_kib(child) >= wanted_kib)
        return bool(found)

    wait_until(look, f"some process below {pid} coming to hold {wanted_kib} KiB")
    return found[0]


def holds_kib(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def test_a_step_holds_its_memory_for_its_time(shell: list[str]) -> None:
    process = subprocess.Popen([*shell, "-c", program(Step(0.0, "test", 24.0, SEEN_S), 0)])
    held_by = holder(process.pid, 24 * 1024)
    assert process.wait(PATIENCE_S) == 0
    assert not Path(f"/proc/{held_by}").exists(), "and gives it back"


def test_a_step_whose_memory_is_taken_fails(shell: list[str]) -> None:
    process = subprocess.Popen([*shell, "-c", program(Step(0.0, "test", 24.0, SEEN_S), 0)])
    os.kill(holder(process.pid, 24 * 1024), signal.SIGKILL)
    assert process.wait(PATIENCE_S) != 0


def test_an_edit_leaves_its_files(shell: list[str], tmp_path: Path) -> None:
    command = program(Step(0.0, "edit", 0.0, 0.1, files_kib=16), 3).replace("/tmp/", f"{tmp_path}/")
    assert subprocess.run([*shell, "-c", command], timeout=PATIENCE_S, check=False).returncode == 0
    assert (tmp_path / "edit-3").stat().st_size == 16 * 1024
