"""The launcher's own corner of the file system, which nobody else sees.

Owns: the launcher's private mount namespace; in it bubblewrap's copy, the small /etc of ``host``, the copies of
directories mounted for one command.

Must not know: bubblewrap's arguments, processes, the sandboxes' own files.

Guarantees: all of it vanishes with the launcher's last process, however that ends; nothing is ever mounted
where the rest of the machine can see it. Its paths, which show inside sandboxes, say nothing of the machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from venusrl.sandboxes.protocol import BadPath, Mount, RuntimeUnavailable
from venusrl.sandboxes.runtimes.namespace import kernel, userns
from venusrl.sandboxes.runtimes.namespace.bwrap import Bind, Bubblewrap, View
from venusrl.sandboxes.templates import roots as templates

_HIDDEN = "/run"
"""Mounted over in the private namespace: a place that exists everywhere, that no template needs, that tells nothing."""
_STAGE_MIB = 1024
_MOUNT_BYTES = 64 << 20
_PYTHON = "/opt/python"


def enter_private_namespace(privileged: bool) -> None:
    """Give this (single-threaded) process mounts of its own; unprivileged, a user namespace to own them."""
    uid, gid = os.getuid(), os.getgid()
    try:
        kernel.unshare(kernel.CLONE_NEWNS | (0 if privileged else kernel.CLONE_NEWUSER))
        if not privileged:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1\n")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1\n")
        # Slave, not private: what the machine unmounts must not stay pinned here.
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_SLAVE)
    except OSError as error:
        mend = "start as root with CAP_SYS_ADMIN, or as an ordinary user" if privileged else userns.MEND
        raise RuntimeUnavailable(f"namespaces cannot be created ({error.strerror}): {mend}") from None


class Stage:
    """What every sandbox needs, made once a launcher."""

    def __init__(self, bubblewrap: Bubblewrap) -> None:
        """Needs the private namespace. Raises RuntimeUnavailable."""
        options = f"mode=0755,size={_STAGE_MIB}m"
        try:
            kernel.mount("stage", _HIDDEN, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except OSError as error:
            raise RuntimeUnavailable(
                f"{_HIDDEN} cannot be mounted over ({error}): sandboxes need it to exist"
            ) from None
        self.folder = Path(_HIDDEN) / "venusrl"
        for name in ("disk", "lower", "root"):  # where each sandbox, in its own namespace, mounts its own
            (self.folder / name).mkdir(parents=True)
        self.bubblewrap = self._copy_program(bubblewrap)
        self.host_view = self._make_host_view()

    def _copy_program(self, bubblewrap: Bubblewrap) -> str:
        # /proc/1/exe would otherwise tell where it is installed, and BASE may not be able to reach it there.
        home = self.folder / "bwrap" / "bin" / "bin"
        home.mkdir(parents=True)
        shutil.copy(bubblewrap.program, home / "bwrap")
        (home / "bwrap").chmod(0o755)
        if bubblewrap.libraries:
            libraries = home.parent.parent / Path(bubblewrap.libraries).name
            shutil.copytree(bubblewrap.libraries, libraries)
        return str(home / "bwrap")

    def _make_host_view(self) -> View:
        etc = self.folder / "etc"
        etc.mkdir()
        for entry in templates.host_etc():
            if entry.is_dir():
                shutil.copytree(entry, etc / entry.name, symlinks=True)
            else:
                shutil.copy(entry, etc / entry.name)
        user = templates.HOST_USER
        (etc / "passwd").write_text(f"root:x:0:0:root:/:/bin/sh\nagent:x:{user}:{user}:agent:/tmp:/bin/sh\n")
        (etc / "group").write_text(f"root:x:0:\nagent:x:{user}:\n")
        (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n")
        binds, links = [Bind(str(etc), "/etc")], []
        for name in templates.HOST_DIRECTORIES:
            path = Path("/", name)
            if path.is_symlink():
                links.append((os.readlink(path), str(path)))
            elif path.is_dir():
                binds.append(Bind(str(path), str(path)))
        python = templates.host_python()
        if python is not None:
            binds.append(Bind(self._show_python(python), _PYTHON))
        return View(tuple(binds), tuple(links), extra_path=f"{_PYTHON}/bin" if python else "")

    def _show_python(self, prefix: Path) -> str:
        target = self.folder / "python"
        target.mkdir()
        kernel.clone_tree_read_only(str(prefix), str(target), None)
        return str(target)

    def copy_mounts(self, run: str, mounts: tuple[Mount, ...]) -> tuple[Bind, ...]:
        """Copy what a command gets mounted, so that its modes and owners, and its path, tell nothing.

        Raises BadPath. ``forget_mounts`` removes the copies.
        """
        folder = self.folder / "mounts" / run
        folder.mkdir(parents=True)
        binds, left = [], _MOUNT_BYTES
        try:
            for index, mount in enumerate(mounts):
                source, target = Path(mount.source), folder / str(index)
                left -= _size(source)
                if left < 0:
                    raise BadPath(f"{mount.source}: more than {_MOUNT_BYTES >> 20} MiB to mount for one command")
                _copy_readable(source, target)
                binds.append(Bind(str(target), mount.target))
        except OSError as error:
            self.forget_mounts(run)
            raise BadPath(f"a directory to mount could not be copied: {error}") from None
        except BadPath:
            self.forget_mounts(run)
            raise
        return tuple(binds)

    def forget_mounts(self, run: str) -> None:
        """Remove the copies made for one command."""
        shutil.rmtree(self.folder / "mounts" / run)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        raise BadPath(f"{path} cannot be mounted: there is no such file or directory")
    return sum(entry.lstat().st_size for entry in path.rglob("*"))


def _copy_readable(source: Path, target: Path) -> None:
    """Copy files, directories and links (as links); everything readable by everybody, executables kept so."""
    if source.is_symlink() or not source.is_dir():
        shutil.copyfile(source, target)
        target.chmod(0o555 if os.access(source, os.X_OK) else 0o444)
        return
    target.mkdir()
    for entry in os.scandir(source):
        if entry.is_symlink():
            (target / entry.name).symlink_to(os.readlink(entry.path))
        elif entry.is_dir() or entry.is_file():
            _copy_readable(Path(entry.path), target / entry.name)
    target.chmod(0o755)
