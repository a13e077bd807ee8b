"""The sandboxes of one launcher: their ids, disks, groups and namespaces.

Owns: making and removing sandboxes, starting commands in them, their files. Undoes its own half-made work.

Must not know: the socket, the loop, deadlines.

Guarantees: commands never run as host uid 0. ``remove`` leaves nothing; ``close`` leaves nothing of any.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack
from pathlib import Path

from venusrl.sandboxes.protocol import (
    BadPath,
    HostDiskFull,
    Limits,
    Mount,
    RuntimeUnavailable,
    SandboxError,
    SandboxGone,
)
from venusrl.sandboxes.runtimes.namespace import bwrap, cgroup, disk, files, kernel, seccomp, spawn, stage, userns, wire
from venusrl.sandboxes.runtimes.namespace.command import Command
from venusrl.sandboxes.templates import roots as templates
from venusrl.sandboxes.templates.roots import Template

_RESERVED = frozenset({*templates.HOST_DIRECTORIES, *templates.WRITABLE, "dev", "etc", "proc", "sys"})
_END_TIMEOUT_S = 5.0


class Sandbox:
    """What one sandbox holds. ``host_uid`` None = commands keep the launcher's (unprivileged) uid."""

    def __init__(self, template: Template, limits: Limits) -> None:
        self.template = template
        self.limits = limits
        self.host_uid: int | None = None
        self.userns: int | None = None
        self.group: cgroup.SandboxGroup | None = None
        self.disk: disk.Disk | None = None
        self.oom_seen = 0
        self.running = 0
        self.condemned = False
        self.undo = ExitStack()


class Machine:
    """Everything a launcher has made on this machine."""

    def __init__(self, setup: wire.Setup) -> None:
        """Enter private namespaces and find the control groups. Raises RuntimeUnavailable."""
        self._privileged = os.geteuid() == 0
        self._title = spawn.title(setup.node_id)
        kernel.become_subreaper()
        self._seccomp = _seccomp_descriptor()
        self._pool = None
        if self._privileged:
            uid_map, gid_map = (Path(f"/proc/self/{name}").read_text() for name in ("uid_map", "gid_map"))
            self._pool = userns.choose_pool(setup.uid_base, uid_map, gid_map)
            os.umask(0o022)
        self._groups = cgroup.find(setup.node_id)
        try:
            if self._groups is None and setup.require_cgroup:
                raise RuntimeUnavailable(
                    "no control group with memory and pids is writable: start as root, or have a cgroup v2 subtree "
                    "delegated (systemd-run --user --scope -p Delegate=yes ...), or do not require control groups"
                )
            stage.enter_private_namespace(self._privileged)
            self._stage = stage.Stage(setup.bubblewrap)
        except BaseException:  # whatever it is, cancellation too: raised again below
            self._remove_groups()
            raise
        self._sandboxes: dict[str, Sandbox] = {}

    def report(self, request_id: int) -> wire.Report:
        """How this machine isolates and limits."""
        groups = self._groups
        return wire.Report(
            id=request_id,
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            privileged=self._privileged,
            cgroup_version=groups.version if groups else 0,
            cgroup_controllers=tuple(sorted(groups.controllers)) if groups else (),
            cgroup_directories=tuple(map(str, groups.directories.values())) if groups else (),
        )

    def create(self, request: wire.Create) -> None:
        """Make a sandbox. Leaves nothing when it raises."""
        sandbox = Sandbox(request.template, request.limits)
        with ExitStack() as undo:
            try:
                self._furnish(sandbox, request.sandbox, undo)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
                kind = HostDiskFull if full else SandboxError
                raise kind(f"a sandbox could not be made: {error}") from None
            sandbox.undo = undo.pop_all()
        self._sandboxes[request.sandbox] = sandbox

    def _furnish(self, sandbox: Sandbox, name: str, undo: ExitStack) -> None:
        owner = 0
        if self._pool is not None:
            slot = self._pool.take()
            undo.callback(self._pool.give_back, slot)
            sandbox.host_uid = owner = slot.base + sandbox.template.user
            sandbox.userns = userns.create(slot, sandbox.template.user)
            undo.callback(os.close, sandbox.userns)
        if self._groups is not None:
            sandbox.group = cgroup.SandboxGroup(self._groups, name, sandbox.limits)
            undo.callback(sandbox.group.remove)
        limits = sandbox.limits
        sandbox.disk = disk.create(self._stage, sandbox.template, limits.disk_mib, owner, sandbox.userns)
        undo.callback(sandbox.disk.close)

    def condemn(self, name: str) -> None:
        """Nothing new may happen in it."""
        if name in self._sandboxes:
            self._sandboxes[name].condemned = True

    def remove(self, name: str) -> None:
        """Remove a sandbox in which nothing runs. Unknown names are fine."""
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.undo.close()

    def start(self, request: wire.Run) -> Command:
        """Start a command. ``ended`` must be called once it has finished."""
        sandbox = self._get(request.sandbox)
        assert sandbox.disk is not None
        if request.mounts and sandbox.running:
            raise SandboxError("a command with mounts cannot run beside another one in the same sandbox")
        owner = sandbox.host_uid or 0
        if sandbox.disk.whole:
            sandbox.disk.restore(owner)
        _require_folder(sandbox.disk, request.cwd)
        binds = self._bind(sandbox.disk, str(request.id), request.mounts)
        try:
            command = self._spawn(sandbox, request, binds)
        except OSError as error:
            if request.mounts:
                self._stage.forget_mounts(str(request.id))
            raise SandboxError(f"the machine could not start a command: {error}") from None
        sandbox.running += 1
        return command

    def ended(self, request: wire.Run, command: Command) -> wire.Reply:
        """The reply for a finished command; forgets what was made for it."""
        if request.mounts:
            self._stage.forget_mounts(str(request.id))
        sandbox = self._sandboxes[request.sandbox]
        sandbox.running -= 1
        assert sandbox.disk is not None
        if sandbox.condemned:
            return wire.failure(request.id, SandboxGone(f"sandbox {request.sandbox} was killed while a command ran"))
        kills = sandbox.group.oom_kills() if sandbox.group is not None else 0
        out_of_memory, sandbox.oom_seen = kills > sandbox.oom_seen, kills
        try:
            return wire.Ran(request.id, command.result(out_of_memory, sandbox.disk.is_full()))
        except SandboxError as error:
            return wire.failure(request.id, error)

    def write(self, request: wire.Write) -> None:
        """Write files into a sandbox."""
        sandbox = self._get(request.sandbox)
        assert sandbox.disk is not None
        allowed = None if sandbox.disk.whole else templates.WRITABLE
        for path, content in request.files.items():
            files.write(sandbox.disk.root, files.normal(path, allowed), content, sandbox.host_uid or 0)

    def read(self, request: wire.Read) -> bytes:
        """Read one file of a sandbox."""
        sandbox = self._get(request.sandbox)
        assert sandbox.disk is not None
        return files.read(sandbox.disk.root, files.normal(request.path, None), request.max_bytes)

    def close(self) -> None:
        """End every process below this one, remove every sandbox and the groups."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self._sandboxes:
            self.remove(next(iter(self._sandboxes)))
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.001)
            except ChildProcessError:
                break
        self._remove_groups()

    def _remove_groups(self) -> None:
        for directory in self._groups.directories.values() if self._groups is not None else ():
            cgroup.remove_tree(directory)

    def _get(self, name: str) -> Sandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None or sandbox.condemned:
            raise SandboxGone(f"sandbox {name} does not exist (any more)")
        return sandbox

    def _bind(self, own: disk.Disk, run: str, mounts: tuple[Mount, ...]) -> tuple[bwrap.Bind, ...]:
        """Copies of what is to be mounted, and real mount points for them."""
        if not mounts:
            return ()
        for mount in mounts:
            if not mount.target.startswith("/") or os.path.normpath(mount.target) != mount.target:
                raise BadPath(f"{mount.target} is not a plain absolute path to mount at")
            if mount.target.split("/")[1] in _RESERVED | {""}:
                raise BadPath(f"nothing can be mounted at {mount.target}: choose a top-level directory of its own")
        binds = self._stage.copy_mounts(run, mounts)
        if own.whole:
            for bind in binds:
                files.make_mount_point(own.root, bind.target.lstrip("/"), os.path.isdir(bind.source))
        return binds

    def _spawn(self, sandbox: Sandbox, request: wire.Run, binds: tuple[bwrap.Bind, ...]) -> Command:
        assert sandbox.disk is not None
        with ExitStack() as ours, ExitStack() as theirs:
            output, output_end = _pipe(ours, theirs)
            status, status_end = _pipe(ours, theirs)
            rules = os.open(f"/proc/self/fd/{self._seccomp}", os.O_RDONLY | os.O_CLOEXEC)  # an offset of its own
            theirs.callback(os.close, rules)
            fds = bwrap.Descriptors(status_end, rules, sandbox.userns)
            user = sandbox.template.user
            told = bwrap.arguments(sandbox.disk.view, user, fds, request.env, binds, request.cwd)
            arguments = _memory_file(b"\0".join(os.fsencode(a) for a in told) + b"\0")
            theirs.callback(os.close, arguments)
            inherited = (status_end, rules, *(() if sandbox.userns is None else (sandbox.userns,)))
            job = spawn.Job(
                program=self._stage.bubblewrap,
                title=self._title,
                arguments=arguments,
                command=request.command.encode(errors="surrogateescape"),
                output=output_end,
                inherited=inherited,
                mounts=sandbox.disk.mounts,
                network=sandbox.disk.network,
                host_uid=sandbox.host_uid,
                group=sandbox.group,
                limits=sandbox.limits,
            )
            pid = spawn.start(job)
            command = Command(pid, output, status, sandbox.limits.output_bytes)
            ours.pop_all()
        return command


def start_time(pid: int) -> int:
    """When a process started, in ticks since boot: with the pid, its identity. Raises FileNotFoundError."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    ours.callback(os.close, read_end)
    theirs.callback(os.close, write_end)
    return read_end, write_end


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("arguments", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _seccomp_descriptor() -> int:
    machine = os.uname().machine
    if machine not in seccomp.ARCHES:
        raise RuntimeUnavailable(f"sandboxes need a system call filter, and there is none yet for {machine}")
    return _memory_file(seccomp.program(machine))


def _require_folder(own: disk.Disk, cwd: str) -> None:
    """Refuse a working directory that is not there, where it can be told without starting anything."""
    name = files.normal(cwd, None) or "."
    if not own.whole and name.split("/", 1)[0] not in templates.WRITABLE:
        return
    try:
        os.close(kernel.openat2(own.root, name, os.O_PATH | os.O_DIRECTORY, resolve=kernel.RESOLVE_IN_ROOT))
    except OSError as error:
        raise BadPath(f"{cwd} is not a directory in the sandbox: {error.strerror}") from None
