"""Where sandboxes keep their files: size-limited memory file systems that only the launcher sees.

Owns: the launcher's private mount namespace and its stage in it, the disk of each sandbox, the overlay over a
template, the copies of directories mounted for one command.

Must not know: bubblewrap's arguments, processes, limits other than the disk's.

Guarantees: all of it vanishes with the launcher's last process, however that ends; nothing is ever mounted
where the rest of the machine can see it. Bytes and files of a sandbox are both limited. Paths that show
inside a sandbox (mountinfo, overlay options) say nothing of the machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from venusrl.sandboxes import templates
from venusrl.sandboxes.protocol import BadPath, HostDiskFull, Mount, RuntimeUnavailable, TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import files, kernel, userns
from venusrl.sandboxes.runtimes.namespace.bwrap import Bind, Bubblewrap, View
from venusrl.sandboxes.templates import Template

_HIDDEN = "/run"
"""Mounted over in the private namespace: a place that exists everywhere, that no template needs, that tells nothing."""
_STAGE_MIB = 1024
_MOUNT_BYTES = 64 << 20
_FILES_PER_MIB = 256
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


class Disk(msgspec.Struct, frozen=True):
    """The files of one sandbox. ``root`` is an O_PATH descriptor on what it sees as its root."""

    view: View
    root: int
    filesystem: str
    mounted: tuple[str, ...]
    folders: tuple[str, ...]
    whole: bool


class Stage:
    """The launcher's own corner: bubblewrap's copy, a small /etc, and a folder a sandbox."""

    def __init__(self, bubblewrap: Bubblewrap) -> None:
        """Needs the private namespace. Raises RuntimeUnavailable."""
        options = f"mode=0755,size={_STAGE_MIB}m"
        try:
            kernel.mount("stage", _HIDDEN, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except OSError as error:
            raise RuntimeUnavailable(
                f"{_HIDDEN} cannot be mounted over ({error}): sandboxes need it to exist"
            ) from None
        self._folder = Path(_HIDDEN) / "venusrl"
        self._folder.mkdir()
        self.bubblewrap = self._copy_program(bubblewrap)
        self._host_view = self._make_host_view()

    def _copy_program(self, bubblewrap: Bubblewrap) -> str:
        # /proc/1/exe would otherwise tell where it is installed, and BASE may not be able to reach it there.
        home = self._folder / "bwrap" / "bin" / "bin"
        home.mkdir(parents=True)
        shutil.copy(bubblewrap.program, home / "bwrap")
        (home / "bwrap").chmod(0o755)
        if bubblewrap.libraries:
            libraries = home.parent.parent / Path(bubblewrap.libraries).name
            shutil.copytree(bubblewrap.libraries, libraries)
        return str(home / "bwrap")

    def _make_host_view(self) -> View:
        etc = self._folder / "etc"
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
        target = self._folder / "python"
        target.mkdir()
        kernel.clone_tree_read_only(str(prefix), str(target), None)
        return str(target)

    def create(self, sandbox: str, template: Template, disk_mib: int, owner: int, namespace: int | None) -> Disk:
        """Make the disk of a sandbox whose user has host uid ``owner``. Leaves nothing when it raises."""
        base = self._folder / "sandboxes" / sandbox
        lower = self._folder / "lower" / sandbox
        root = self._folder / "roots" / sandbox
        mounted: list[str] = []
        folders = [base] if template.directory is None else [base, lower, root]
        try:
            for folder in folders:
                folder.mkdir(parents=True)
            options = f"mode=0755,size={disk_mib}m,nr_inodes={max(512, disk_mib * _FILES_PER_MIB)}"
            kernel.mount("sandbox", str(base), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
            mounted.append(str(base))
            if template.directory is None:
                view, seen = self._writable_host_view(base), base
            else:
                self._overlay(template.directory, base, lower, root, namespace, mounted)
                view, seen = View((Bind(str(root), "/", writable=True),), whole=True), root
            fd = os.open(seen, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            disk = Disk(view, fd, str(base), tuple(mounted), tuple(map(str, folders)), template.directory is not None)
            restore(disk, owner)
        except BaseException as error:  # whatever it is, cancellation too: raised again below
            self._undo(mounted, [str(f) for f in folders])
            if isinstance(error, OSError):
                raise HostDiskFull(f"a sandbox's disk could not be made: {error}") from None
            raise
        return disk

    def _writable_host_view(self, base: Path) -> View:
        binds = tuple(Bind(str(base / name), f"/{name}", writable=True) for name in templates.WRITABLE)
        view = self._host_view
        return View(view.binds + binds, view.symlinks, extra_path=view.extra_path)

    def _overlay(
        self, template: str, base: Path, lower: Path, root: Path, namespace: int | None, mounted: list[str]
    ) -> None:
        try:
            kernel.clone_tree_read_only(template, str(lower), namespace)
        except OSError as error:
            raise TemplateNotFound(
                f"the template {template} cannot be shown to sandboxes ({error}): put it on a file system that "
                "supports id-mapped mounts (ext4, xfs, btrfs, tmpfs)"
            ) from None
        mounted.append(str(lower))
        upper, work = base / "upper", base / "work"
        upper.mkdir()
        work.mkdir()
        seen = os.stat(lower)
        os.chown(upper, seen.st_uid, seen.st_gid)
        upper.chmod(seen.st_mode & 0o7777)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}" + ("" if namespace is not None else ",userxattr")
        try:
            kernel.mount("sandbox", str(root), "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except OSError as error:
            raise TemplateNotFound(
                f"the template {template} cannot be overlaid ({error}): directories as templates need a kernel with "
                'overlayfs, 6.6 or newer when not root; use template "host"'
            ) from None
        mounted.append(str(root))

    def remove(self, disk: Disk) -> None:
        """Detach and forget. The memory is free once nothing uses it."""
        os.close(disk.root)
        self._undo(list(disk.mounted), list(disk.folders))

    def _undo(self, mounted: list[str], folders: list[str]) -> None:
        for target in reversed(mounted):
            kernel.unmount(target)
        for folder in reversed(folders):
            if os.path.isdir(folder):
                os.rmdir(folder)

    def copy_mounts(self, run: str, mounts: tuple[Mount, ...]) -> tuple[Bind, ...]:
        """Copy what a command gets mounted, so that its modes and owners, and its path, tell nothing.

        Raises BadPath. ``forget_mounts`` removes the copies.
        """
        folder = self._folder / "mounts" / run
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
        shutil.rmtree(self._folder / "mounts" / run)


def is_full(disk: Disk) -> bool:
    """Whether no further block or file fits."""
    space = os.statvfs(disk.filesystem)
    return space.f_bavail == 0 or space.f_favail == 0


def restore(disk: Disk, owner: int) -> None:
    """Make, or put back, the directories that every command needs: in a whole root one can remove or replace them."""
    for name in (*(("dev", "proc") if disk.whole else ()), *templates.WRITABLE):
        files.make_mount_point(disk.root, name, directory=True)
    _give(disk.root, owner)


def _give(root: int, owner: int) -> None:
    for name in templates.WRITABLE:
        os.chown(name, owner, owner, dir_fd=root, follow_symlinks=False)
        os.chmod(name, 0o1777 if name == "tmp" else 0o755, dir_fd=root)


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
