"""The control group of a sandbox that outlives its service.

Owns: freezing, what its memory is made of, its end without zombies.

Must not know: how processes get in, what they are.

Guarantees: ``end`` leaves no process, and on v1 no memory charged to a directory that is gone (the kernel would keep
the group for as long as a page of it is cached).
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import Limits, SandboxError
from venusrl.sandboxes.runtimes.namespace import cgroup, steps
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups, SandboxGroup

_FREEZE_TIMEOUT_S = 5.0
_FREEZE_AGAIN_S = 0.05
_FREEZER = "freezer"


def open_node(name: str) -> NodeGroups | None:
    """The groups of a service, whether or not an earlier process of it made them."""
    return cgroup.find(name, extra=(_FREEZER,), existing=True)


def sandboxes_in(node: NodeGroups) -> set[str]:
    """The sandboxes that have a group."""
    names: set[str] = set()
    for directory in node.directories.values():
        with suppress(FileNotFoundError):
            names |= {
                entry.name
                for entry in directory.iterdir()
                if entry.is_dir() and entry.name != "probe" and "." not in entry.name
            }
    return names


def close_node(node: NodeGroups) -> None:
    """Remove a service's groups, its templates' with them, unless a sandbox goes on in them."""
    if sandboxes_in(node):
        return
    for directory in set(node.directories.values()):
        with suppress(FileNotFoundError):
            for entry in [entry for entry in directory.iterdir() if entry.is_dir()]:
                with suppress(OSError):
                    (entry / "memory.force_empty").write_text("0")
                with suppress(OSError):  # one that is entered just now stays, and its parent with it
                    entry.rmdir()
        with suppress(OSError):
            directory.rmdir()


def steps_into(node: NodeGroups, name: str, limits: Limits) -> list[bytes]:
    """A maker's steps to make a sandbox's group, limit it and join it."""
    paths = {controller: directory / name for controller, directory in node.directories.items()}
    told = [steps.folder(str(path)) for path in paths.values()]
    for path, value, needed in cgroup.limiting(node.version, paths, limits, swap=True):
        told.append(steps.write(str(path), value, lenient=0 if needed else steps.MAY_BE_MISSING))
    told += [steps.write(str(cgroup.joining(node.version, path)), "0") for path in paths.values()]
    return told


class Memory(msgspec.Struct, frozen=True):
    """Bytes, as ``runtimes.base.Footprint`` means them (which is not imported: the forge stays small)."""

    private: int
    kernel: int
    files: int
    swap: int


class PersistentGroup(SandboxGroup):
    """One sandbox's group, which its maker made: see ``steps_into``."""

    def __init__(self, node: NodeGroups, name: str) -> None:
        super().__init__(node, name, None)

    def pids(self) -> list[int]:
        """Processes in it (zombies may be among them)."""
        path = self._paths["" if self._version == 2 else "memory"]
        return [int(pid) for pid in (path / "cgroup.procs").read_text().split()]

    def freeze(self) -> None:
        """Stop every process. Raises SandboxError when the kernel cannot."""
        self._set_frozen(True)
        now = time.monotonic()
        deadline, again = now + _FREEZE_TIMEOUT_S, now + _FREEZE_AGAIN_S
        while not self._is_frozen():
            now = time.monotonic()
            if now > deadline:
                self._set_frozen(False)
                raise SandboxError(f"the sandbox could not be frozen within {_FREEZE_TIMEOUT_S:.0f} s")
            if now > again:
                # v1 freezes one after the other: a parent that waits in vfork for a child already frozen never comes
                # to where it could be. Both go on for a moment, and it is tried again.
                self._set_frozen(False)
                time.sleep(0.002)
                self._set_frozen(True)
                again = now + _FREEZE_AGAIN_S
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let them go on."""
        self._set_frozen(False)

    def memory(self) -> Memory:
        """What it holds by itself: anonymous memory, kernel memory, memory files, swap."""
        found = dict.fromkeys(("rss", "anon", "shmem", "kernel", "swap"), 0)
        path = self._paths["" if self._version == 2 else "memory"]
        for line in (path / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in found:
                found[name] = int(value)
        if self._version == 2:
            swap = path / "memory.swap.current"
            swapped = int(swap.read_text()) if swap.exists() else 0
            return Memory(found["anon"], found["kernel"], found["shmem"], swapped)
        kernel = path / "memory.kmem.usage_in_bytes"
        kernel_bytes = int(kernel.read_text()) if kernel.exists() else 0
        return Memory(found["rss"], kernel_bytes, found["shmem"], found["swap"])

    def end(self) -> None:
        """Kill whatever is left in it and remove it."""
        with suppress(FileNotFoundError):
            if self.pids():
                self.thaw()  # what is frozen does not die (v1)
                cgroup.kill_all(self._paths["" if self._version == 2 else "memory"])
            if self._version == 1:
                _uncharge(self._paths["memory"])
        self.remove()

    def _set_frozen(self, frozen: bool) -> None:
        path = self._freezer()
        if path is None:
            if frozen:
                raise SandboxError("sandboxes cannot be frozen here: no cgroup v2 and no freezer controller of v1")
            return
        with suppress(FileNotFoundError):
            if self._version == 2:
                (path / "cgroup.freeze").write_text("1" if frozen else "0")
            else:
                (path / "freezer.state").write_text("FROZEN" if frozen else "THAWED")

    def _is_frozen(self) -> bool:
        path = self._freezer()
        assert path is not None
        if self._version == 2:
            return "frozen 1" in (path / "cgroup.events").read_text()
        return (path / "freezer.state").read_text().strip() == "FROZEN"

    def _freezer(self) -> Path | None:
        return self._paths.get("" if self._version == 2 else _FREEZER)


def _uncharge(memory: Path) -> None:
    """v1 keeps a removed group for as long as a page is charged to it: have the kernel drop what is cached.

    A limit of nothing does it in one pass (0.3 ms), memory.force_empty in sixteen (0.7 ms): it takes kernel memory,
    which goes by itself, for something left to do.
    """
    with suppress(OSError):  # it says busy while anything is left
        (memory / "memory.limit_in_bytes").write_text("0")
    kernel = memory / "memory.kmem.usage_in_bytes"
    used = int((memory / "memory.usage_in_bytes").read_text())
    if used > (int(kernel.read_text()) if kernel.exists() else 0):
        with suppress(OSError):  # busy with the last process: the removal waits for that
            (memory / "memory.force_empty").write_text("0")
