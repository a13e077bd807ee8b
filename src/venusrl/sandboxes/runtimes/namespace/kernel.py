"""System calls the standard library does not offer.

Owns: thin, typed wrappers (mount, unshare, openat2, id-mapped mounts, process titles of /proc). Each either
succeeds or raises OSError with the call's name and subject.

Must not know: sandboxes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_BIND = 4096
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19

CAP_SYS_RESOURCE = 24

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x2008_0522
MADV_PAGEOUT = 21

# Numbers above 424 are the same on every architecture.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_CLOSE_RANGE = 436
_SYS_OPENAT2 = 437
_SYS_PROCESS_MADVISE = 440
_SYS_MOUNT_SETATTR = 442
_SYS_CACHESTAT = 451

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_CLOSE_RANGE_CLOEXEC = 4
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 0x01
_MOUNT_ATTR_NOSUID = 0x02
_MOUNT_ATTR_NODEV = 0x04
_MOUNT_ATTR_IDMAP = 0x0010_0000

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, call: str, subject: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}", subject)
    return result


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    encoded = kind.encode() if kind else None
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), os.fsencode(data) if data else None
    )
    _check(result, "mount", target)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare", hex(flags))


def setns(namespace: int, kind: int) -> None:
    """setns(2); ``kind`` is the CLONE_NEW flag that ``namespace`` must be of."""
    _check(_libc.setns(namespace, kind), "setns", hex(kind))


def has_capability(number: int) -> bool:
    """Whether this process has it now."""
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    _check(_libc.capget(ctypes.byref(header), ctypes.byref(data)), "capget", "")
    return bool(data[number // 32].effective >> number % 32 & 1)


def page_out(pidfd: int, ranges: list[tuple[int, int]]) -> None:
    """Have the kernel move these (start, length) ranges of another process to swap, as far as it likes."""
    vector = (_Range * len(ranges))(*(_Range(*each) for each in ranges))
    done = _libc.syscall(
        _SYS_PROCESS_MADVISE, pidfd, ctypes.byref(vector), ctypes.c_size_t(len(ranges)), MADV_PAGEOUT, ctypes.c_uint(0)
    )
    _check(done, "process_madvise", "PAGEOUT")


def cached_pages(fd: int) -> int | None:
    """How many pages of a file are in the page cache; None where the kernel (before 6.5) cannot say."""
    whole, found = _Range(0, 0), _CacheStat()
    result = _libc.syscall(_SYS_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), ctypes.c_uint(0))
    if result < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EOPNOTSUPP):
        return None
    _check(result, "cachestat", str(fd))
    return int(found.cache)


def bring_up_loopback() -> None:
    """Bring up ``lo`` in the current network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def set_parent_death_signal(signal: int) -> None:
    """Ask for ``signal`` when the parent thread dies."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl", "PDEATHSIG")


def become_subreaper(*, on: bool = True) -> None:
    """Orphaned descendants become children of this process, so that it can wait for them."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0), "prctl", "CHILD_SUBREAPER")


def close_on_exec_from(first: int) -> None:
    """Mark every descriptor from ``first`` on close-on-exec."""
    last = ctypes.c_uint(0xFFFF_FFFF)
    _check(_libc.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), last, _CLOSE_RANGE_CLOEXEC), "close_range", "")


def openat2(directory: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2); close-on-exec always."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    encoded = os.fsencode(path)
    return _check(
        _libc.syscall(_SYS_OPENAT2, directory, encoded, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))),
        "openat2",
        path,
    )


def clone_tree_read_only(source: str, target: str, userns: int | None) -> None:
    """Show the directory ``source`` read-only at ``target``.

    With ``userns`` its files' owners are mapped as that namespace maps them, so that host uid 0 looks like
    the namespace's root instead of nobody.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    tree = _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags), "open_tree", source)
    try:
        attr = _MountAttr(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, MS_PRIVATE, 0)
        _set_attr(tree, attr, source)
        if userns is not None:
            _set_attr(tree, _MountAttr(_MOUNT_ATTR_IDMAP, 0, 0, userns), source)
        moved = _libc.syscall(
            _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
        )
        _check(moved, "move_mount", target)
    finally:
        os.close(tree)


def _set_attr(tree: int, attr: _MountAttr, subject: str) -> None:
    flags = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    size = ctypes.c_size_t(ctypes.sizeof(attr))
    result = _libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(attr), size)
    _check(result, "mount_setattr", subject)
