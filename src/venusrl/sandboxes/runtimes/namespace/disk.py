"""Where a sandbox keeps its files: a size-limited memory file system in a mount namespace of its own.

Owns: the making of that namespace, of the network namespace beside it (nothing but loopback), and of the
overlay over a template.

Must not know: bubblewrap's arguments, processes, limits other than the disk's.

Guarantees: bytes and files are both limited. A sandbox's mounts burden no other sandbox's, and they go with the
last descriptor on its namespaces. Paths that show inside say nothing of the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import files, holder, kernel
from venusrl.sandboxes.runtimes.namespace.bwrap import Bind, View
from venusrl.sandboxes.runtimes.namespace.stage import Stage
from venusrl.sandboxes.templates import roots as templates
from venusrl.sandboxes.templates.roots import Template

_FILES_PER_MIB = 256
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV


class Disk(msgspec.Struct, frozen=True):
    """The files of one sandbox, by descriptors. ``whole`` = its root is its own, not only some directories."""

    view: View
    whole: bool
    root: int
    """O_PATH, on what the sandbox sees as its root (of a sandbox that is not whole, only the writable part)."""
    mounts: int
    network: int

    def close(self) -> None:
        """Let it all go. The memory is free once nothing uses it."""
        for fd in (self.root, self.mounts, self.network):
            os.close(fd)

    def is_full(self) -> bool:
        """Whether no further block or file fits."""
        space = os.fstatvfs(self.root)
        return space.f_bavail == 0 or space.f_favail == 0

    def restore(self, owner: int) -> None:
        """Put back the directories every command needs: in a whole root one can remove or replace them."""
        _furnish(self.root, self.whole, owner)


def create(stage: Stage, template: Template, disk_mib: int, owner: int, userns: int | None) -> Disk:
    """Make the disk of a sandbox whose user has host uid ``owner``. Leaves nothing when it raises SandboxError.

    ``userns`` is the namespace whose view of owners the template's files get; None = as they are.
    """
    disk, root = stage.folder / "disk", stage.folder / "root"
    whole = template.directory is not None
    seen = root if whole else disk

    def make() -> None:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
        kernel.bring_up_loopback()
        options = f"mode=0755,size={disk_mib}m,nr_inodes={max(512, disk_mib * _FILES_PER_MIB)}"
        kernel.mount("sandbox", str(disk), "tmpfs", _FLAGS, options)
        if template.directory is not None:
            _overlay(template.directory, stage, disk, root, userns)
        fd = os.open(seen, os.O_PATH | os.O_DIRECTORY)
        _furnish(fd, whole, owner)

    def take(child: int) -> Disk:
        return Disk(
            view=View((Bind(str(root), "/", writable=True),), whole=True) if whole else _host_view(stage, disk),
            whole=whole,
            root=os.open(f"/proc/{child}/root{seen}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC),
            mounts=os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC),
            network=os.open(f"/proc/{child}/ns/net", os.O_RDONLY | os.O_CLOEXEC),
        )

    return holder.hold(make, take)


def _host_view(stage: Stage, disk: Path) -> View:
    binds = tuple(Bind(str(disk / name), f"/{name}", writable=True) for name in templates.WRITABLE)
    return View(stage.host_view.binds + binds, stage.host_view.symlinks, extra_path=stage.host_view.extra_path)


def _overlay(template: str, stage: Stage, disk: Path, root: Path, userns: int | None) -> None:
    lower = stage.folder / "lower"
    try:
        kernel.clone_tree_read_only(template, str(lower), userns)
    except OSError as error:
        raise TemplateNotFound(
            f"the template {template} cannot be shown to sandboxes ({error}): put it on a file system that "
            "supports id-mapped mounts (ext4, xfs, btrfs, tmpfs)"
        ) from None
    upper, work = disk / "upper", disk / "overlay"
    upper.mkdir()
    work.mkdir()
    attributes = os.stat(lower)
    os.chown(upper, attributes.st_uid, attributes.st_gid)
    upper.chmod(attributes.st_mode & 0o7777)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}" + ("" if userns is not None else ",userxattr")
    try:
        kernel.mount("sandbox", str(root), "overlay", _FLAGS, options)
    except OSError as error:
        raise TemplateNotFound(
            f"the template {template} cannot be overlaid ({error}): directories as templates need a kernel with "
            'overlayfs, 6.6 or newer when not root; use template "host"'
        ) from None


def _furnish(root: int, whole: bool, owner: int) -> None:
    for name in (*(("dev", "proc") if whole else ()), *templates.WRITABLE):
        files.make_mount_point(root, name, directory=True)
    for name in templates.WRITABLE:
        os.chown(name, owner, owner, dir_fd=root, follow_symlinks=False)
        os.chmod(name, 0o1777 if name == "tmp" else 0o755, dir_fd=root)
