"""Reading and writing a sandbox's files from outside, safely.

Owns: resolution of a path as the sandbox sees it, from its root, with openat2: links, absolute ones too,
cannot lead out; devices, FIFOs and directories are refused without blocking on them.

Must not know: how the root came to be.

Guarantees: nothing outside ``root`` is ever opened. Files and directories made here belong to ``owner``.
Errors are BadPath, DiskFull, FileNotFoundError or SandboxError.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from venusrl.sandboxes.protocol import BadPath, DiskFull, SandboxError
from venusrl.sandboxes.runtimes.namespace import kernel

_RESOLVE = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_RETRIES = 100  # a rename inside the sandbox at the wrong moment makes one attempt fail


def normal(path: str, writable: tuple[str, ...] | None) -> str:
    """``path`` relative to the root, ``..`` taken literally. ``writable`` = the top-level names allowed."""
    if "\0" in path or not path:
        raise BadPath(f"{path!r} is not a path")
    clean = posixpath.normpath(posixpath.join("/work", path)).lstrip("/")
    if writable is not None and clean.split("/", 1)[0] not in writable:
        raise BadPath(
            f"{path} is not in a directory that the sandbox can write ({', '.join('/' + w for w in writable)})"
        )
    return clean


def write(root: int, path: str, content: bytes, owner: int) -> None:
    """Write one file (relative to ``root``), replacing its content if it exists."""
    with _translated(path):
        folder = posixpath.dirname(path)
        if folder:
            _make_folders(root, folder, owner)
        fd = _open(root, path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        try:
            _require_regular(fd, path)
            os.ftruncate(fd, 0)
            os.fchown(fd, owner, owner)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)


def read(root: int, path: str, max_bytes: int) -> bytes:
    """Read one file (relative to ``root``)."""
    with _translated(path):
        fd = _open(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _require_regular(fd, path)
            chunks, left = [], max_bytes + 1
            while left and (chunk := os.read(fd, left)):
                chunks.append(chunk)
                left -= len(chunk)
        finally:
            os.close(fd)
    if not left:
        raise SandboxError(f"/{path} has more than the {max_bytes} bytes that may be read")
    return b"".join(chunks)


def make_mount_point(root: int, target: str, directory: bool) -> None:
    """Make sure ``target`` is a real file or directory reached by no link, removing what is in the way.

    A command may have left a link there to make a later mount land elsewhere.
    """
    with _translated(target):
        parts = target.split("/")
        parent = os.dup(root)
        try:
            for part in parts[:-1]:
                parent = _descend(parent, part)
            if directory:
                parent = _descend(parent, parts[-1])
            else:
                _clear_unless(parent, parts[-1], stat.S_ISREG)
                os.close(os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent))
        finally:
            os.close(parent)


def _descend(parent: int, name: str) -> int:
    """Close ``parent``; return its real subdirectory ``name``, made if need be."""
    try:
        _clear_unless(parent, name, stat.S_ISDIR)
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)


def _make_folders(root: int, folder: str, owner: int) -> None:
    flags = os.O_PATH | os.O_DIRECTORY
    try:
        os.close(_open(root, folder, flags))
    except FileNotFoundError:
        outer, name = posixpath.split(folder)
        if outer:
            _make_folders(root, outer, owner)
        parent = _open(root, outer, flags) if outer else os.dup(root)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
            os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(parent)


def _open(root: int, path: str, flags: int, mode: int = 0) -> int:
    for _ in range(_RETRIES):
        try:
            return kernel.openat2(root, path, flags, mode, _RESOLVE)
        except BlockingIOError:
            continue
    raise SandboxError(f"/{path} could not be opened: the sandbox keeps renaming it")


def _require_regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BadPath(f"/{path} is not a regular file")


def _clear_unless(parent: int, name: str, wanted: Callable[[int], bool]) -> None:
    """Remove ``name`` if it exists and is not of the wanted type."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if wanted(mode):
        return
    if stat.S_ISDIR(mode):
        raise BadPath(f"{name} is a directory where a file is to be mounted")
    os.unlink(name, dir_fd=parent)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, "no such file in the sandbox", f"/{path}") from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(f"/{path} does not fit into the sandbox's disk limit") from None
        raise BadPath(f"/{path}: {error.strerror}") from None
