"""The forge's own corner of the file system: what every sandbox starts from, made once a forge.

Owns: the forge's stage (a memory file system over an empty directory of its state, in its private mount namespace):
the tree of ``host``, mount points for a sandbox being made.

Must not know: processes, limits, a sandbox's own files.

Guarantees: nothing is mounted where the rest of the machine can see it; a sandbox that was made keeps what it needs
of it after the forge's end. Paths that show inside are relative to the stage and say nothing of the machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from venusrl.sandboxes.protocol import RuntimeUnavailable, TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import holder, kernel
from venusrl.sandboxes.templates import roots as templates

_T = TypeVar("_T")
MAX_LAYERS = 120
HOST, ETC, ROOT, DISK, LOWER = "host", "etc", "root", "disk", "lower"
HOST_OWN = ("home", "root", "work", "tmp", "logs", "var", "run")
"""Top-level directories of ``host`` that are the sandbox's own."""
_EMPTY = ("dev", "proc", "sys", "etc", "mnt", "media", "srv", "opt")
_STAGE_MIB = 64
_PYTHON = "opt/python"
_PASSWD = """root:x:0:0:root:/root:/bin/sh
user:x:{user}:{user}:user:/home/user:{shell}
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\ntty:x:5:\nshadow:x:42:\nuser:x:{user}:\nnogroup:x:65534:\n"


def enter(stage: str, user: int) -> None:
    """Mount the stage (in the caller's private namespace) and make it the working directory. ``user`` is the number of
    the user inside that is called so: 0 where there is one user only."""
    try:
        kernel.mount("stage", stage, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode=0755,size={_STAGE_MIB}m")
    except OSError as error:
        raise RuntimeUnavailable(f"the sandboxes' stage {stage} cannot be mounted: {error}") from None
    os.chdir(stage)
    for name in (HOST, ETC, ROOT, DISK, *(f"{LOWER}/{n}" for n in range(MAX_LAYERS))):
        Path(name).mkdir(parents=True)
    _fill_etc(Path(ETC), user)
    _fill_host(Path(HOST))


def _fill_etc(etc: Path, user: int) -> None:
    for entry in templates.host_etc():
        if entry.is_dir():
            shutil.copytree(entry, etc / entry.name, symlinks=True)
        else:
            shutil.copy(entry, etc / entry.name)
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    (etc / "passwd").write_text(_PASSWD.format(user=user, shell=shell))
    (etc / "group").write_text(_GROUP.format(user=user))
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    if Path("/etc/ssl/certs").is_dir():
        shutil.copytree("/etc/ssl/certs", etc / "ssl/certs", symlinks=True, ignore_dangling_symlinks=True)


def _fill_host(host: Path) -> None:
    for name in (*_EMPTY, *HOST_OWN):
        (host / name).mkdir()
    for name in templates.HOST_DIRECTORIES:
        path = Path("/", name)
        if path.is_symlink():
            (host / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (host / name).mkdir()
            kernel.clone_tree_read_only(str(path), str(host / name), None)
    python = templates.host_python()
    if python is not None:
        (host / _PYTHON).mkdir()
        kernel.clone_tree_read_only(str(python), str(host / _PYTHON), None)


def look(layers: tuple[str, ...], into: Callable[[int], _T]) -> _T:
    """``into(an O_PATH descriptor of the image's root)``, its layers one over the other as a sandbox finds them.

    Raises TemplateNotFound.
    """
    if len(layers) > MAX_LAYERS:
        raise TemplateNotFound(f"the template has {len(layers)} layers; {MAX_LAYERS} can be overlaid: squash it")
    for layer in layers:
        if not os.path.isdir(layer):
            raise TemplateNotFound(f"the template lacks its layer {layer}: build it again")

    def make() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        for index, layer in enumerate(layers):
            kernel.clone_tree_read_only(layer, ROOT if len(layers) == 1 else f"{LOWER}/{index}", None)
        if len(layers) > 1:
            lower = ":".join(f"{LOWER}/{index}" for index in reversed(range(len(layers))))
            kernel.mount("look", ROOT, "overlay", kernel.MS_RDONLY, f"lowerdir={lower}")

    def take(child: int) -> _T:
        root = os.open(f"/proc/{child}/cwd/{ROOT}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return into(root)
        finally:
            os.close(root)

    return holder.hold(make, take)


def can_map_owners(userns: int) -> bool:
    """Whether the tree of ``host`` can be shown with its owners mapped (needs ext4, xfs, btrfs... below it).

    In a mount namespace that is then thrown away.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.clone_tree_read_only(HOST, ROOT, userns)
            code = 0
        except OSError:
            code = 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
