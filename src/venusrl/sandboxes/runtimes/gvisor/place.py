"""What a gVisor sandbox has on the host: a directory, two mounts, a control group, runsc's processes.

Owns: making and removing all of it.

Must not know: agents, snapshots' meaning, pausing.

Guarantees: the sandbox's own files lie on a file system of their own, limited in bytes and files. ``remove`` leaves no
process, mount, group or file, whatever is left of the sandbox, and may be called again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Spec
from venusrl.sandboxes.runtimes.gvisor import bundle
from venusrl.sandboxes.runtimes.namespace import archive, kernel
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups, SandboxGroup
from venusrl.sandboxes.runtimes.namespace.groups import PersistentGroup
from venusrl.sandboxes.runtimes.namespace.orders import UPPER

_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_FILES_PER_MIB = 256
_RUNSC_S = 60.0
_OVERHEAD_MIB = 96
_OVERHEAD_PIDS = 160
"""runsc's own: its kernel and its file server are processes with threads of the host, charged to the sandbox."""
_UMOUNT_TRIES = 50


class Runsc:
    """The program, with what it is always told."""

    def __init__(self, program: str, root: Path) -> None:
        self._program = program
        self._root = root

    def command(self, *words: str, log: Path | None = None) -> list[str]:
        flags = ["--root", str(self._root), "--network", "none", "--host-uds", "create", "--ignore-cgroups"]
        if log is not None:
            flags += ["--log", str(log)]
        return [self._program, *flags, *words]

    def call(self, *words: str, timeout_s: float = _RUNSC_S) -> str:
        """Raises SandboxError with its last words."""
        return run(self.command(*words), timeout_s)

    def forget(self, container: str) -> None:
        """Remove what runsc wrote down of a sandbox whose processes are gone. Its own ``delete`` takes two seconds to
        see that they are, and there is nothing else to undo: groups and mounts are ours."""
        for left in self._root.glob(f"{container}_sandbox:{container}.*"):
            left.unlink(missing_ok=True)


class Place:
    """One sandbox's, below ``state``."""

    def __init__(self, state: Path, runsc: Runsc, node: NodeGroups | None, sandbox: str) -> None:
        self.folder = state / "sandboxes" / sandbox
        self._runsc = runsc
        self._node = node
        self._sandbox = sandbox
        # runsc's control sockets are abstract: their names are the whole machine's, whatever its --root says.
        self.container = f"v{os.stat(state).st_ino:x}-{sandbox}"
        self._layers = self.folder / "layers"

    @property
    def socket(self) -> Path:
        return self.folder / "s" / bundle.SOCKET

    @property
    def socket_below(self) -> str:
        """The socket's path below the directory of all sandboxes."""
        return f"{self._sandbox}/s/{bundle.SOCKET}"

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def files(self) -> Path:
        """Where its files are kept while nothing of it runs."""
        return self.folder / "files"

    def group(self) -> PersistentGroup | None:
        return None if self._node is None else PersistentGroup(self._node, self._sandbox)

    def make(self, spec: Spec, agent: Path, kept: Path | None) -> int:
        """Mount, limit, start; the sandbox's process on the host. Raises SandboxError; then ``remove`` is due."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("s", "disk", "root"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        self._mount(spec, kept)
        root, socket = self.folder / "root", self.folder / "s"
        settings = bundle.config(spec, root, agent, socket, own_tmp=_provide_tmp(root / "tmp"))
        (self.folder / "config.json").write_text(json.dumps(settings))
        pid = self.folder / "pid"
        words = ("run", "--bundle", str(self.folder), "--detach", "--pid-file", str(pid), self.container)
        run(self._entering(spec.limits, self._runsc.command(*words, log=self.folder / "log")), _RUNSC_S)
        return int(pid.read_text())

    def stop(self) -> None:
        """End its processes and unmount; its directory stays. Idempotent."""
        group = self.group()
        if group is None:
            with suppress(SandboxError):  # it may never have been known to runsc, or be gone
                self._runsc.call("delete", "--force", self.container)
        else:
            group.end()
            self._runsc.forget(self.container)
        for name in ("root", "disk"):
            _unmount(self.folder / name)
        self.socket.unlink(missing_ok=True)

    def remove(self) -> None:
        """Everything. Idempotent."""
        self.stop()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _mount(self, spec: Spec, kept: Path | None) -> None:
        size = spec.limits.disk_mib
        options = f"mode=0700,size={size}m,nr_inodes={max(512, size * _FILES_PER_MIB)}"
        kernel.mount("venusrl", str(self.disk), "tmpfs", _FLAGS, options)
        upper = self.disk / UPPER
        upper.mkdir()
        work = self.disk / f"{UPPER}.work"
        work.mkdir()
        if kept is not None:
            archive.unpack(kept, self.disk, 0)
        fds: list[int] = []
        try:
            for layer in reversed(spec.image.layers):
                fds += [os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
            if kept is None:
                shutil.copymode(spec.image.layers[-1], upper)
            # Descriptors: many layers' own paths are longer than what mount(2) takes.
            lower = ":".join(f"/proc/self/fd/{fd}" for fd in fds)
            options = f"lowerdir={lower},upperdir={upper},workdir={work}"
            kernel.mount("venusrl", str(self.folder / "root"), "overlay", _FLAGS, options)
        except OSError as error:
            raise TemplateNotFound(f"the template {spec.image.name} cannot be overlaid: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)

    def _entering(self, limits: Limits, command: list[str]) -> list[str]:
        """The command, begun in the sandbox's control group so that whatever it starts is in it."""
        if self._node is None:
            return command
        own = Limits(
            memory_mib=limits.memory_mib + _OVERHEAD_MIB,
            pids=2 * limits.pids + _OVERHEAD_PIDS,
            cpus=limits.cpus,
            disk_mib=limits.disk_mib,
        )
        SandboxGroup(self._node, self._sandbox, own, swap=True)
        groups = sorted({str(path / self._sandbox) for path in self._node.directories.values()})
        enter = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ >"$1/cgroup.procs" || exit 71; shift; n=$((n-1)); done'
        return ["/bin/sh", "-c", f'{enter}; exec "$@"', "sh", str(len(groups)), *groups, *command]


def _provide_tmp(tmp: Path) -> bool:
    """Whether there is a directory /tmp (now); a link stays one."""
    if not os.path.lexists(tmp):
        tmp.mkdir()
        tmp.chmod(0o1777)
    return tmp.is_dir() and not tmp.is_symlink()


def find(root: Path) -> Runsc:
    """Raises RuntimeUnavailable."""
    program = shutil.which("runsc")
    if program is None:
        raise RuntimeUnavailable("gVisor is not installed: apt-get install runsc, or use another runtime")
    if os.geteuid() != 0:
        raise RuntimeUnavailable("the gvisor runtime mounts file systems: start as root, or use another runtime")
    return Runsc(program, root)


def run(command: list[str], timeout_s: float) -> str:
    """Raises SandboxError with the command's last words."""
    try:
        # Output goes to a file: what runsc starts keeps a pipe open for as long as the sandbox lives.
        with open(os.memfd_create("words"), "w+", errors="replace") as words:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                timeout=timeout_s,
                check=False,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                cwd="/",
                start_new_session=True,
            )
            words.seek(0)
            said = words.read(4096).strip()
    except subprocess.TimeoutExpired:
        raise SandboxError(f"runsc did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise SandboxError(f"runsc failed ({done.returncode}): {said[-500:] or 'it said nothing'}")
    return said


def _unmount(target: Path) -> None:
    """Processes that were just killed may hold it for an instant more."""
    for _ in range(_UMOUNT_TRIES):
        if not os.path.ismount(target):
            return
        done = subprocess.run(["umount", str(target)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            continue
        time.sleep(0.02)
    raise SandboxError(f"{target} cannot be unmounted: something holds it")
