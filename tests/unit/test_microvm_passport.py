"""Where a virtual machine's memory may go."""

from __future__ import annotations

import pytest

from venusrl.sandboxes.runtimes.microvm.passport import Passport, objection

HERE = Passport((10, 0), "q35")
KVM = Passport((10, 0), "q35", "cpu-a")


@pytest.mark.parametrize(
    ("comes", "here", "memory", "live"),
    [
        (HERE, HERE, "", ""),
        (Passport((9, 0), "q35"), HERE, "", ""),
        (HERE, Passport((9, 2), "q35"), "older 9.2", "older 9.2"),
        (Passport((8, 2), "q35"), Passport((8, 2), "q35"), "", "QEMU 8.2 corrupts"),
        (Passport((8, 2), "q35"), HERE, "", "QEMU 8.2 corrupts"),
        (Passport((10, 0), "other"), HERE, "is a other", "is a other"),
        (KVM, KVM, "", ""),
        (KVM, HERE, "has no KVM", "has no KVM"),
        (KVM, Passport((10, 0), "q35", "cpu-b"), "another processor", "another processor"),
        (HERE, KVM, "", ""),
        (Passport((10, 0), "q35", memory=False), Passport((9, 0), "q35"), "", "paused"),
    ],
)
def test_memory_goes_where_it_runs(comes: Passport, here: Passport, memory: str, live: str) -> None:
    found = objection(comes, here)
    assert memory in found.memory
    assert bool(memory) == bool(found.memory)
    assert live in found.live
    assert bool(live) == bool(found.live)
