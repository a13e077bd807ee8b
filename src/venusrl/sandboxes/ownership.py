"""Who owns which sandbox, on disk.

Owns: one record a node and one a sandbox below the node's root, the lease, and the reaping of what dead
owners left.

Must not know: asyncio, how sandboxes are made.

Guarantees: nothing of a living owner is touched. An owner on this machine is dead when its process is (pid and
start time); one that cannot be seen from here (another machine, another PID namespace) when its lease has
run out. Two nodes never reap at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from venusrl.sandboxes.protocol import HostDiskFull, SandboxError
from venusrl.sandboxes.runtimes.namespace import cgroup, spawn

_T = TypeVar("_T")
_LAUNCHER_GRACE_S = 10.0


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that cannot be mistaken for a later one with its number."""

    pid: int
    start_time: int


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node and the process that owns it. The file's modification time is the lease's last renewal."""

    node_id: str
    owner: str
    process: Process
    boot_id: str
    pid_namespace: str
    lease_s: float
    launcher: Process | None = None
    cgroups: tuple[str, ...] = ()


class SandboxRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sandbox and the node it belongs to."""

    id: str
    node_id: str
    template: str
    metadata: dict[str, str]


def process_of(pid: int) -> Process | None:
    """The living process with this pid, if any."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def is_dead(record: NodeRecord, renewed_at: float, now: float) -> bool:
    """Whether the owner of ``record`` is gone for sure."""
    if record.boot_id == boot_id() and record.pid_namespace == pid_namespace():
        return process_of(record.process.pid) != record.process
    return now > renewed_at + record.lease_s


class Registry:
    """The records below one root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._nodes = root / "nodes"
        self._sandboxes = root / "sandboxes"

    def prepare(self) -> None:
        """Make the directories. Raises HostDiskFull or SandboxError."""
        with _disk(self._root):
            for folder in (self._root, self._nodes, self._sandboxes):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put_node(self, record: NodeRecord) -> None:
        self._put(self._nodes / f"{record.node_id}.json", msgspec.json.encode(record))

    def renew(self, node_id: str) -> None:
        """Extend the lease."""
        with _disk(self._root):
            os.utime(self._nodes / f"{node_id}.json")

    def remove_node(self, node_id: str) -> None:
        (self._nodes / f"{node_id}.json").unlink(missing_ok=True)
        self.log(node_id).unlink(missing_ok=True)

    def log(self, node_id: str) -> Path:
        """Where a node's launcher says why it failed."""
        return self._nodes / f"{node_id}.log"

    def put_sandbox(self, record: SandboxRecord) -> None:
        self._put(self._sandboxes / f"{record.id}.json", msgspec.json.encode(record))

    def remove_sandbox(self, sandbox: str) -> None:
        (self._sandboxes / f"{sandbox}.json").unlink(missing_ok=True)

    def sandboxes(self) -> list[SandboxRecord]:
        """Every record, of every node."""
        return [record for _, record in self._read(self._sandboxes, SandboxRecord)]

    def reap(self) -> list[SandboxRecord]:
        """End and forget everything of dead owners; what it was. Blocks for a few seconds at most."""
        with self._alone():
            dead = []
            for path, node in self._read(self._nodes, NodeRecord):
                if is_dead(node, path.stat().st_mtime, time.time()):
                    _end(node)
                    dead.append(node.node_id)
            orphans = [record for record in self.sandboxes() if record.node_id in dead]
            for orphan in orphans:
                self.remove_sandbox(orphan.id)
            for node_id in dead:
                self.remove_node(node_id)
            return orphans

    def _put(self, path: Path, content: bytes) -> None:
        with _disk(self._root):
            part = path.with_suffix(".part")
            part.write_bytes(content)
            part.rename(path)

    def _read(self, folder: Path, kind: type[_T]) -> Iterator[tuple[Path, _T]]:
        for path in sorted(folder.glob("*.json")):
            try:
                yield path, msgspec.json.decode(path.read_bytes(), type=kind)
            except FileNotFoundError:
                continue  # removed meanwhile
            except msgspec.MsgspecError as error:
                raise SandboxError(f"the sandbox record {path} is damaged ({error}): remove it") from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def _disk(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostDiskFull(f"no space left for sandbox records in {root}: free some, or use another disk") from None
        raise SandboxError(f"sandbox records cannot be kept in {root}: {error}") from None


def _end(node: NodeRecord) -> None:
    """End a dead owner's launcher, which ends its sandboxes, and clear its control groups."""
    if node.boot_id != boot_id() or node.pid_namespace != pid_namespace():
        return  # its processes died with its machine or are not ours to see
    if node.launcher is not None:
        deadline = time.monotonic() + _LAUNCHER_GRACE_S
        while process_of(node.launcher.pid) == node.launcher:
            if time.monotonic() > deadline:
                os.kill(node.launcher.pid, signal.SIGKILL)
            time.sleep(0.01)
    end_processes(node.node_id, node.cgroups)


def end_processes(node_id: str, cgroups: tuple[str, ...]) -> None:
    """After a launcher's death: kill what it may have left and remove its control groups.

    Its commands die with it, but for one that bubblewrap was just then beginning: that one waits for ever.
    """
    wanted = spawn.title(node_id).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().split(b"\0", 1)[0] == wanted:
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or not ours
    for directory in cgroups:
        cgroup.remove_tree(Path(directory))
