"""Moving a frozen sandbox's memory to swap, and what memory a sandbox holds.

Owns: process_madvise over its processes, the compressed size of what zram holds, a footprint without control groups.

Must not know: how it was frozen, sandboxes' ids.

Guarantees: best effort: without swap nothing is freed and nothing fails.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from venusrl.sandboxes.runtimes.base import Footprint
from venusrl.sandboxes.runtimes.namespace import kernel

_RANGES_A_CALL = 512


def has_swap() -> bool:
    """Whether anything can be paged out."""
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


def page_out(pids: list[int]) -> bool:
    """Ask the kernel to page these processes out; False when there is nowhere to."""
    if not has_swap():
        return False
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):
            _page_out(pid)
    return True


def _page_out(pid: int) -> None:
    ranges = list(_private_ranges(Path(f"/proc/{pid}/maps").read_text()))
    pidfd = os.pidfd_open(pid)
    try:
        for first in range(0, len(ranges), _RANGES_A_CALL):
            with suppress(OSError):  # a range that vanished or cannot be paged: the others still can
                kernel.page_out(pidfd, ranges[first : first + _RANGES_A_CALL])
    finally:
        os.close(pidfd)


def _private_ranges(maps: str) -> list[tuple[int, int]]:
    found = []
    for line in maps.splitlines():
        where, flags, *_ = line.split(maxsplit=2)
        if flags[3] == "p" and "w" in flags:
            start, end = (int(part, 16) for part in where.split("-"))
            found.append((start, end - start))
    return found


def with_compressed_swap(footprint: Footprint, block: Path = Path("/sys/block")) -> Footprint:
    """Swap as it is kept: where all of it is zram, its compressed size."""
    if not footprint.swap:
        return footprint
    original = kept = 0
    for stat in block.glob("zram*/mm_stat"):
        fields = stat.read_text().split()
        original, kept = original + int(fields[0]), kept + int(fields[2])
    if not original:
        return footprint
    return msgspec.structs.replace(footprint, swap=int(footprint.swap * min(1.0, kept / original)))


def footprint_of_tree(pid: int) -> Footprint:
    """Private memory and swap of a process and its descendants: without control groups. Raises FileNotFoundError."""
    private = swap = 0
    pending = [pid]
    while pending:
        each = pending.pop()
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
            for task in Path(f"/proc/{each}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            if each == pid:
                raise FileNotFoundError(f"process {pid} ended") from None
            continue
        for line in text.splitlines():
            if line.startswith("Private_Dirty:"):
                private += int(line.split()[1]) << 10
            elif line.startswith("Swap:"):
                swap += int(line.split()[1]) << 10
    return Footprint(private=private, swap=swap)
