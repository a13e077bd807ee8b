"""The programs of the density traces hold the memory that their model says, and fail when it is taken from them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from venusrl.sandboxes.admission.traces import Step, program

WAIT_S = 20.0
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
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for child in descendants(pid):
            try:
                status = Path(f"/proc/{child}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            held = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")]
            if held and held[0] >= wanted_kib:
                return child
        time.sleep(0.01)
    raise AssertionError(f"nothing below {pid} came to hold {wanted_kib} KiB")


def test_a_step_holds_its_memory_for_its_time(shell: list[str]) -> None:
    process = subprocess.Popen([*shell, "-c", program(Step(0.0, "test", 24.0, 1.0), 0)])
    held_by = holder(process.pid, 24 * 1024)
    assert process.wait(WAIT_S) == 0
    assert not Path(f"/proc/{held_by}").exists(), "and gives it back"


def test_a_step_whose_memory_is_taken_fails(shell: list[str]) -> None:
    process = subprocess.Popen([*shell, "-c", program(Step(0.0, "test", 24.0, 1.0), 0)])
    os.kill(holder(process.pid, 24 * 1024), signal.SIGKILL)
    assert process.wait(WAIT_S) != 0


def test_an_edit_leaves_its_files(shell: list[str], tmp_path: Path) -> None:
    command = program(Step(0.0, "edit", 0.0, 0.1, files_kib=16), 3).replace("/tmp/", f"{tmp_path}/")
    assert subprocess.run([*shell, "-c", command], timeout=WAIT_S, check=False).returncode == 0
    assert (tmp_path / "edit-3").stat().st_size == 16 * 1024
