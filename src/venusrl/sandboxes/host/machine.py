"""The memory and processors of this machine, as far as sandboxes may use them.

Owns: reading them from /proc and the control groups (v1 and v2).

Must not know: sandboxes, admission.

Guarantees: ``total`` is the smaller of the machine's memory and every limit above this process, so that inside a
container or a test's control group the host plans with what is really there.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from venusrl.clock import Clock

_UNLIMITED = 1 << 60
_CGROUPS = Path("/sys/fs/cgroup")


class Reading(msgspec.Struct, frozen=True):
    """One look. Bytes; ``pressure`` is PSI memory "some" over 10 s in percent, None where the kernel has none."""

    available: int
    pressure: float | None
    cpu_used: float


def reserve_of(memory: int, given: int | None) -> int:
    """Bytes of ``memory`` that sandboxes never get: what was ``given``, else the larger of 512 MiB and a twentieth."""
    return max(512 << 20, memory // 20) if given is None else given


class Machine:
    """``total`` and ``cpus`` as of construction; ``read`` for what changes."""

    def __init__(self, clock: Clock, *, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> None:
        self._clock = clock
        self._proc = proc
        self._groups = _memory_groups(proc, cgroups)
        machine = _meminfo(proc)["MemTotal"]
        self.total = min([machine, *(limit for limit in map(_limit, self._groups) if limit is not None)])
        self.cpus = float(len(os.sched_getaffinity(0)))
        self._cpu_at = clock.monotonic()
        self._cpu_ticks = _busy_ticks(proc)
        self._cpu_used = 0.0

    def read(self) -> Reading:
        available = _meminfo(self._proc)["MemAvailable"]
        for group in self._groups:
            left = _left(group)
            if left is not None:
                available = min(available, left)
        return Reading(available, self._pressure(), self._processors())

    def _pressure(self) -> float | None:
        for place in [*(group / "memory.pressure" for group in self._groups), self._proc / "pressure/memory"]:
            try:
                first = place.read_text().splitlines()[0]
            except (OSError, IndexError):
                continue
            return float(first.split("avg10=")[1].split()[0])
        return None

    def _processors(self) -> float:
        """Cores in use over the last second or more."""
        now = self._clock.monotonic()
        if now - self._cpu_at >= 1.0:
            ticks = _busy_ticks(self._proc)
            self._cpu_used = (ticks - self._cpu_ticks) / os.sysconf("SC_CLK_TCK") / (now - self._cpu_at)
            self._cpu_at, self._cpu_ticks = now, ticks
        return self._cpu_used


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}


def _busy_ticks(proc: Path) -> int:
    user, nice, system, _, _, irq, softirq, *_ = map(int, (proc / "stat").read_text().split("\n")[0].split()[1:])
    return user + nice + system + irq + softirq


def _memory_groups(proc: Path, root: Path) -> list[Path]:
    """The control groups whose memory limits hold for this process, innermost first."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory" or (not controllers and not any(":memory:" in other for other in lines)):
            base = root / "memory" if controllers else root
            inner = base / path.lstrip("/")
            return [group for group in (inner, *inner.parents) if group.is_relative_to(base) and group.is_dir()]
    return []


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = _number(group / name)
        if value is not None and value < _UNLIMITED:
            return value
    return None


def _left(group: Path) -> int | None:
    """What may still be used below a group's limit: the limit, less what is used and cannot be dropped."""
    limit = _limit(group)
    if limit is None:
        return None
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    name = "total_inactive_file" if "total_inactive_file" in stat else "inactive_file"
    active = name.replace("inactive", "active")
    return max(0, limit - used + int(stat.get(name, 0)) + int(stat.get(active, 0)) // 2)
