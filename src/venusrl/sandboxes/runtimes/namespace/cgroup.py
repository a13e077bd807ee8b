"""Memory, process and CPU limits by control group, v1 and v2.

Owns: finding where this process may make groups, one group a node, one below it a sandbox, their limits,
their out-of-memory counters, and their end (every process killed, directories gone).

Must not know: bubblewrap, templates, who owns what.

Guarantees: groups are made below the node's own group where that works, so that limits set on the whole run
still hold. ``remove`` leaves no process and no directory, or raises. Nothing outside directories named
``venusrl.*`` is ever written, moved or killed, but for turning on controllers for such a directory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import Limits, SandboxError

PREFIX = "venusrl."
_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_NODE_CPU_SHARES = 8192
_NODE_CPU_WEIGHT = 800
"""Eight times the default: the node's sandboxes together must not weigh as little as one process of the run."""
_HELPER_PIDS = 2  # bubblewrap's monitor and its PID 1 are counted too
_REMOVE_TIMEOUT_S = 5.0


class CgroupMount(msgspec.Struct, frozen=True):
    """One mounted hierarchy. ``controllers`` is empty for v2 (what it offers is read from its files)."""

    version: int
    path: Path
    root: str
    controllers: frozenset[str]


class NodeGroups(msgspec.Struct, frozen=True):
    """Where one node's sandboxes get their groups: controller to the node's directory (v2: key "")."""

    version: int
    directories: dict[str, Path]

    @property
    def controllers(self) -> frozenset[str]:
        """What can be limited: a subset of memory, pids, cpu."""
        if self.version == 1:
            return frozenset(self.directories)
        offered = (self.directories[""] / "cgroup.controllers").read_text().split()
        return frozenset(offered) & frozenset(_CONTROLLERS)


def parse_mounts(mountinfo: str) -> list[CgroupMount]:
    """The hierarchies in the text of /proc/self/mountinfo."""
    mounts = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split()[:3]
        if kind == "cgroup2":
            mounts.append(CgroupMount(2, Path(fields[4]), fields[3], frozenset()))
        elif kind == "cgroup":
            mounts.append(CgroupMount(1, Path(fields[4]), fields[3], frozenset(options.split(","))))
    return mounts


def candidates(mount: CgroupMount, own: str) -> list[Path]:
    """Directories of ``mount`` to try as parents, best first: our own group, its parent, the top.

    ``own`` is our path in the hierarchy as /proc/self/cgroup gives it.
    """
    prefix = "" if mount.root == "/" else mount.root
    inside = own[len(prefix) :] if own == prefix or own.startswith(prefix + "/") else "/"
    here = mount.path / inside.lstrip("/")
    found = [here, here.parent] if mount.version == 2 and here != mount.path else [here]
    return list(dict.fromkeys([*found, mount.path]))


def own_paths(proc_cgroup: str) -> dict[str, str]:
    """Controller (v2: "") to path, from the text of /proc/self/cgroup."""
    paths = {}
    for line in proc_cgroup.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    return paths


def find(node_id: str, *, extra: tuple[str, ...] = (), existing: bool = False) -> NodeGroups | None:
    """Make this node's groups where they can be made; None where memory or processes cannot be limited.

    ``extra``: further controllers of v1 to use where they are there. ``existing``: an earlier process may have made
    the groups already, and sandboxes may be in them.
    """
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    own = own_paths(Path("/proc/self/cgroup").read_text())
    name = PREFIX + node_id
    for mount in mounts:
        if mount.version == 2:
            directory = _first(candidates(mount, own.get("", "/")), name, _enable_v2, existing)
            if directory is not None:
                _write_if_there(directory / "cpu.weight", str(_NODE_CPU_WEIGHT))
                return NodeGroups(2, {"": directory})
    directories: dict[str, Path] = {}
    for controller in (*_CONTROLLERS, *extra):
        for mount in mounts:
            if controller in mount.controllers and controller not in directories:
                directory = _first(candidates(mount, own.get(controller, "/")), name, _always, existing)
                if directory is not None:
                    directories[controller] = directory
    if {"memory", "pids"} <= directories.keys():
        if "cpu" in directories:
            _write_if_there(directories["cpu"] / "cpu.shares", str(_NODE_CPU_SHARES))
        return NodeGroups(1, directories)
    for directory in directories.values():
        remove_tree(directory)
    return None


def _first(parents: list[Path], name: str, enable: Callable[[Path, Path], bool], existing: bool = False) -> Path | None:
    """Make ``name`` below the first parent that lets a process join a group in it."""
    if existing:  # where it is already, whatever our own group is now
        parents = sorted(parents, key=lambda parent: not (parent / name).is_dir())
    for parent in parents:
        directory = parent / name
        was_there = existing and directory.is_dir()
        try:
            directory.mkdir(exist_ok=was_there)
        except OSError:
            continue  # read-only or not ours: the next one may be
        if enable(parent, directory) and _can_join(directory):
            return directory
        if not was_there:
            remove_tree(directory)
    return None


def _always(_parent: Path, _directory: Path) -> bool:
    return True


def _enable_v2(parent: Path, directory: Path) -> bool:
    """Turn memory and pids (and cpu, if it is there) on for the sandboxes' groups."""
    for place in (parent, directory):
        for controller in _CONTROLLERS:
            try:
                (place / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError:
                continue  # busy or not delegated; what counts is what is on afterwards
    enabled = (directory / "cgroup.subtree_control").read_text().split()
    return {"memory", "pids"} <= set(enabled)


def _can_join(directory: Path) -> bool:
    """Whether a child of ours may enter a group here (delegation can allow mkdir and yet deny this)."""
    probe = directory / "probe"
    try:
        probe.mkdir(exist_ok=True)
    except OSError:
        return False
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _enter(probe)
            status = 0
        except OSError:
            status = 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    _rmdir(probe)
    return status == 0


def _enter(directory: Path) -> None:
    tasks = directory / "tasks"
    joining(1 if tasks.exists() else 2, directory).write_text("0")


class SandboxGroup:
    """The control group of one sandbox."""

    def __init__(self, node: NodeGroups, name: str, limits: Limits | None, *, swap: bool = False) -> None:
        """Make it and set its limits. Raises OSError, leaving nothing.

        ``limits`` None: it exists already. ``swap``: it may be paged out.
        """
        self._version = node.version
        self._paths = {controller: directory / name for controller, directory in node.directories.items()}
        if limits is None:
            return
        try:
            for path in self._paths.values():
                path.mkdir()
            self._limit(limits, swap)
        except OSError:
            self.remove()
            raise

    def enter(self) -> None:
        """Move the calling (single-threaded) process in."""
        for path in self._paths.values():
            _enter(path)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        if self._version == 2:
            text = (self._paths[""] / "memory.events").read_text()
        else:
            text = (self._paths["memory"] / "memory.oom_control").read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def refused_processes(self) -> int:
        """How many processes and threads there was no room for."""
        events = self._paths["" if self._version == 2 else "pids"] / "pids.events"
        text = events.read_text() if events.exists() else ""
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("max ")), 0)

    def remove(self) -> None:
        """Kill whatever runs here and remove the directories. Idempotent."""
        for path in self._paths.values():
            remove_tree(path)

    def _limit(self, limits: Limits, swap: bool) -> None:
        for path, value, needed in limiting(self._version, self._paths, limits, swap=swap):
            if needed or path.exists():
                path.write_text(value)


def limiting(version: int, paths: dict[str, Path], limits: Limits, *, swap: bool) -> list[tuple[Path, str, bool]]:
    """What to write where to limit a new group; whether the file must be there."""
    memory = str(limits.memory_mib << 20)
    pids = str(limits.pids + _HELPER_PIDS)
    quota = max(1000, int(limits.cpus * _CPU_PERIOD_US))
    if version == 2:
        here = paths[""]
        found = [(here / "memory.max", memory, True), (here / "pids.max", pids, True)]
        if not swap:
            found.append((here / "memory.swap.max", "0", False))
        return [*found, (here / "cpu.max", f"{quota} {_CPU_PERIOD_US}", False)]
    found = [(paths["memory"] / "memory.limit_in_bytes", memory, True), (paths["pids"] / "pids.max", pids, True)]
    if not swap:
        found.append((paths["memory"] / "memory.memsw.limit_in_bytes", memory, False))
    if "cpu" in paths:  # the period of a new group is _CPU_PERIOD_US
        found.append((paths["cpu"] / "cpu.cfs_quota_us", str(quota), False))
    return found


def joining(version: int, directory: Path) -> Path:
    """Where a single-threaded process writes "0" to be in a group."""
    # v1: a thread that moves itself needs no global lock, which the cgroup.procs file would take.
    return directory / ("cgroup.procs" if version == 2 else "tasks")


def _write_if_there(path: Path, value: str) -> None:
    if path.exists():
        path.write_text(value)


def remove_tree(directory: Path) -> None:
    """Kill every process in ``directory`` and below, then remove it. Only for directories of ours."""
    if not any(part.startswith(PREFIX) for part in directory.parts):
        raise SandboxError(f"refusing to clear the control group {directory}: it is not one of VenusRL's")
    if _rmdir(directory):
        return
    with os.scandir(directory) as entries:
        children = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for child in children:
        remove_tree(Path(child))
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while not _rmdir(directory):
        if time.monotonic() > deadline:
            raise SandboxError(f"the control group {directory} could not be emptied in {_REMOVE_TIMEOUT_S:.0f} s")
        kill_all(directory)
        time.sleep(0.001)


def _rmdir(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # busy: processes are left, or just leaving
    return True


def kill_all(directory: Path) -> None:
    """Send SIGKILL to every process in it."""
    kill = directory / "cgroup.kill"
    if kill.exists():
        kill.write_text("1")
        return
    _write_if_there(directory / "pids.max", "0")  # nothing forks faster than it is killed
    for pid in (directory / "cgroup.procs").read_text().split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
