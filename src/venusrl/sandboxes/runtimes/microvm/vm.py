"""One QEMU process: started confined, found again, watched, ended.

Owns: its directory (control socket, agent socket, overlay, console log), its unprivileged uid, its control group, its
control channel. Must not know: sandboxes, templates, what state it runs.

Guarantees: it runs in a session of its own and outlives this process. ``kill`` leaves no process, group or file and is
idempotent. A process id is believed only together with its start time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable, SandboxGone
from venusrl.sandboxes.runtimes.microvm import machine
from venusrl.sandboxes.runtimes.microvm.machine import Shape
from venusrl.sandboxes.runtimes.microvm.qmp import QemuError, Qmp
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups, SandboxGroup
from venusrl.sandboxes.runtimes.namespace.groups import PersistentGroup

UID_BASE = 0x6F00_0000
"""Every QEMU has a uid of its own, below the ranges of namespaces: one that breaks out meets no other's process."""
QEMU_MIB = 96
"""What QEMU itself may take beyond the guest's memory before its group's limit ends it."""
_QEMU_TASKS = 64
_START_S = 30.0
_END_S = 10.0
_CANCEL_TRIES = 100
_LOG_BYTES = 2000
_CAPABILITIES = ("x-ignore-shared", "events", "pause-before-switchover")


class VmRecord(msgspec.Struct, frozen=True):
    """Where a QEMU is: its directory's name and its process."""

    directory: str
    pid: int
    started: int


class Parts(msgspec.Struct, frozen=True):
    """What a machine is started from, as paths on this host. ``overlay`` None: ``base`` is written to."""

    shape: Shape
    memory: Path
    base: Path
    overlay: Path | None
    boot: tuple[Path, Path] | None = None
    own_memory: bool = False
    """A cold start over an overlay: memory of its own instead of the template's."""


class Site(msgspec.Struct, frozen=True):
    """What every machine on this host shares."""

    directory: Path
    qemu: str
    jail: str
    groups: NodeGroups | None
    translation_mib: int = 16
    """TCG's cache of translated code. Busybox fills 16; at 8 the same commands took six times as long."""


def start_time(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def _opened(*paths: tuple[Path, int]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for path, flags in paths:
            fds.append(os.open(path, flags | os.O_CLOEXEC))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _listener(directory: int, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(f"/proc/self/fd/{directory}/{name}")  # a socket's address is short; a state directory's path may not be
    sock.listen(4)
    return sock


class Vm:
    """Use ``spawn`` or ``find``."""

    def __init__(self, site: Site, record: VmRecord, qmp: Qmp, directory: int) -> None:
        self._site = site
        self._directory = directory
        self._watched = os.pidfd_open(record.pid)
        self._over = asyncio.Event()
        self.record = record
        self.qmp = qmp
        asyncio.get_running_loop().add_reader(self._watched, self._on_end)

    @property
    def path(self) -> Path:
        return self._site.directory / self.record.directory

    @property
    def agent_socket(self) -> str:
        return f"/proc/self/fd/{self._directory}/agent"

    @property
    def overlay(self) -> Path:
        return self.path / "overlay.qcow2"

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    @classmethod
    async def spawn(cls, site: Site, parts: Parts, limits: Limits) -> Vm:
        """A machine that is stopped, or waits for a state. Raises RuntimeUnavailable with QEMU's words."""
        name = "v" + secrets.token_hex(6)
        path = site.directory / name
        task = asyncio.create_task(asyncio.to_thread(_launch, site, path, parts, limits))
        try:
            pid = await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(_erase, site, path)
            raise
        except OSError as error:
            await asyncio.to_thread(_erase, site, path)
            raise RuntimeUnavailable(f"QEMU could not be started: {error}") from error
        record = VmRecord(name, pid, start_time(pid) or 0)
        (path / "vm").write_bytes(msgspec.json.encode(record))
        try:
            vm = await asyncio.wait_for(cls._open(site, record), _START_S)
            wanted = [{"capability": name, "state": True} for name in _CAPABILITIES]
            await vm.qmp.ask("migrate-set-capabilities", {"capabilities": wanted})
        except BaseException as error:  # whatever it is, cancellation too: raised again below
            said = _said(path)
            await asyncio.to_thread(_erase, site, path)
            if isinstance(error, SandboxGone | QemuError | OSError | TimeoutError):
                raise RuntimeUnavailable(f"QEMU did not start: {said or error}") from error
            raise
        return vm

    @classmethod
    async def find(cls, site: Site, record: VmRecord) -> Vm | None:
        """An earlier process's machine; None when it is no more (whatever is left of it goes)."""
        path = site.directory / record.directory
        if record.started and start_time(record.pid) == record.started:
            with contextlib.suppress(SandboxGone, QemuError, OSError, TimeoutError):
                return await asyncio.wait_for(cls._open(site, record), _START_S)
        await asyncio.to_thread(_erase, site, path)
        return None

    @classmethod
    async def _open(cls, site: Site, record: VmRecord) -> Vm:
        directory = os.open(site.directory / record.directory, os.O_PATH | os.O_CLOEXEC)
        try:
            qmp = await Qmp.connect(Path(f"/proc/self/fd/{directory}/qmp"))
            return cls(site, record, qmp, directory)
        except BaseException:  # whatever it is, cancellation too: raised again below
            os.close(directory)
            raise

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.record.pid, os.WNOHANG)
        self._over.set()

    async def ended(self) -> str:
        """Wait for its end; why."""
        await self._over.wait()
        if self.group is not None and self.group.oom_kills():
            return "out of memory"
        return f"the virtual machine ended: {_said(self.path) or 'its kernel stopped or it was shut down'}"

    @property
    def group(self) -> PersistentGroup | None:
        if self._site.groups is None or not self.path.exists():
            return None
        return PersistentGroup(self._site.groups, self.record.directory)

    def kernel_memory(self) -> int:
        """Bytes that the kernel holds for its group. Blocking, cheap."""
        groups = self._site.groups
        if groups is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            if groups.version == 1:
                path = groups.directories["memory"] / self.record.directory / "memory.kmem.usage_in_bytes"
                return int(path.read_text())
            text = (groups.directories[""] / self.record.directory / "memory.stat").read_text()
            return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("kernel "))
        return 0

    async def console(self) -> str:
        """The last lines that its kernel said."""
        return str(await self.qmp.ask("ringbuf-read", {"device": "console", "size": 16384}))

    async def give(self, name: str, path: Path, flags: int = os.O_RDONLY) -> None:
        with _opened((path, flags)) as (fd,):
            await self.qmp.give(name, fd)

    async def load(self, state: Path) -> None:
        """Take a state in. The machine stays stopped."""
        await self.give("state", state)
        await self.qmp.ask("migrate-incoming", {"uri": "fd:state"})
        await self.qmp.migrated(timeout_s=120.0)

    async def give_up_moving(self) -> None:
        """End what a service that is no more had begun: a copy of the memory, of the disk."""
        await self.qmp.ask("migrate_cancel")
        for _ in range(_CANCEL_TRIES):
            moving = (await self.qmp.ask("query-migrate")).get("status") in ("active", "pre-switchover", "cancelling")
            jobs = await self.qmp.ask("query-block-jobs")
            for job in jobs:
                with contextlib.suppress(QemuError):  # it is ending
                    await self.qmp.ask("block-job-cancel", {"device": job["device"], "force": True})
            if not moving and not jobs:
                break
            await asyncio.sleep(0.05)
        with contextlib.suppress(QemuError):  # there is none
            await self.qmp.ask("blockdev-del", {"node-name": "target"})

    async def quit(self) -> None:
        """End it in order: its disk is flushed."""
        with contextlib.suppress(SandboxGone, QemuError):
            await self.qmp.ask("quit")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), _END_S)

    async def kill(self) -> None:
        """End it at once and remove everything of it."""
        if self.alive and self._directory >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)
            await asyncio.wait_for(self._over.wait(), _END_S)
        await self.let_go()
        await asyncio.to_thread(_erase, self._site, self.path)

    async def let_go(self) -> None:
        """Close what this process holds of it. It runs on."""
        await self.qmp.close()
        if self._directory >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
            os.close(self._watched)
            os.close(self._directory)
            self._directory = -1


def _said(path: Path) -> str:
    try:
        with (path / "log").open("rb") as file:
            return file.read(_LOG_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def _launch(site: Site, path: Path, parts: Parts, limits: Limits) -> int:
    """Blocking. The process id; whatever fails leaves ``path`` for ``_erase``."""
    path.mkdir(parents=True, mode=0o700)
    uid = UID_BASE + int(path.name[1:], 16) % 0x00F0_0000
    tasks = _group(site, path.name, limits)
    if parts.overlay is not None:
        copy_sparse(parts.overlay, path / "overlay.qcow2")
        parts = msgspec.structs.replace(parts, overlay=path / "overlay.qcow2")
    (path / "jail").mkdir()
    directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    sockets: list[socket.socket] = []
    try:
        sockets = [_listener(directory, "qmp"), _listener(directory, "agent")]
        disks = [(parts.base, os.O_RDWR if parts.overlay is None else os.O_RDONLY)]
        if parts.overlay is not None:
            disks.append((parts.overlay, os.O_RDWR))
        with _opened(*disks) as fds, (path / "log").open("wb") as log:
            files = machine.Files(
                "" if parts.own_memory else ("/wram" if parts.overlay is None else "/ram"),
                sockets[0].fileno(),
                sockets[1].fileno(),
                fds[0],
                fds[1] if parts.overlay is not None else None,
            )
            binds = [] if parts.own_memory else [str(parts.memory), files.memory[1:]]
            boot = None
            if parts.boot is not None:
                binds += [str(parts.boot[0]), "kernel", str(parts.boot[1]), "initramfs"]
                boot = ("/kernel", "/initramfs")
            if parts.overlay is None:
                os.chown(parts.memory, uid, uid)
            command = [
                site.jail,
                str(uid),
                str(path / "jail"),
                str(len(tasks)),
                *tasks,
                str(len(binds) // 2),
                *binds,
                "--",
            ]
            command += machine.arguments(site.qemu, parts.shape, files, boot, site.translation_mib)
            held = [*(sock.fileno() for sock in sockets), *fds]
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=log, pass_fds=held, env={}, cwd="/")
    finally:
        for sock in sockets:
            sock.close()
        os.close(directory)
    process.returncode = 0  # the pidfd watches and reaps it; Popen must not
    return process.pid


def _group(site: Site, name: str, limits: Limits) -> list[str]:
    """Make its control group; the files to enter it by."""
    if site.groups is None:
        return []
    wider = Limits(memory_mib=limits.memory_mib + QEMU_MIB, pids=_QEMU_TASKS, cpus=limits.cpus)
    SandboxGroup(site.groups, name, wider, swap=True)
    entry = "tasks" if site.groups.version == 1 else "cgroup.procs"
    return [str(directory / name / entry) for directory in site.groups.directories.values()]


def copy_sparse(source: Path, target: Path) -> None:
    """A copy that shares blocks where the file system can, and has the same holes."""
    with source.open("rb") as reader, target.open("xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        at = 0
        while at < size:
            try:
                at = os.lseek(reader.fileno(), at, os.SEEK_DATA)
            except OSError:
                break  # only a hole is left
            end = os.lseek(reader.fileno(), at, os.SEEK_HOLE)
            os.lseek(writer.fileno(), at, os.SEEK_SET)
            while at < end:
                done = os.copy_file_range(reader.fileno(), writer.fileno(), end - at, at, at)
                if done == 0:
                    break
                at += done
        os.ftruncate(writer.fileno(), size)


def _erase(site: Site, path: Path) -> None:
    """Kill what is left of a machine (by its record and its group) and remove its files. Blocking, idempotent."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode((path / "vm").read_bytes(), type=VmRecord)
        if record.started and start_time(record.pid) == record.started:
            os.kill(record.pid, signal.SIGKILL)
    if site.groups is not None:
        PersistentGroup(site.groups, path.name).end()
    shutil.rmtree(path, ignore_errors=True)


def erase(site: Site, name: str) -> None:
    """As ``kill``, for a machine that nobody in this process holds. Blocking."""
    _erase(site, site.directory / name)
