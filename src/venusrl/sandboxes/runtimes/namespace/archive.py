"""A sandbox's own files in one compressed file, and back.

Owns: the format: zstd over msgpack values, one ``Entry`` for each file, parents first, data in pieces with their
offsets so that holes stay holes.

Must not know: mounts, namespaces, who wants it.

Guarantees: nothing outside the given directory is read or written (no link is ever followed). Owners are kept as the
sandbox numbers them. What overlayfs needs to know is kept (whiteouts, opaque and redirected directories), what only
fits the old place is not (origins, file capabilities, access control lists).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from venusrl.sandboxes.protocol import DiskFull, HostDiskFull, SandboxError
from venusrl.sandboxes.runtimes.namespace import kernel
from venusrl.sandboxes.runtimes.namespace.orders import UPPER

_WORK = ".work"
_CHUNK = 1 << 18
_KEPT_OVERLAY = frozenset(f"trusted.overlay.{name}" for name in ("opaque", "redirect", "whiteout", "whiteouts"))
_LEVEL = 1
_FRAME_LIMIT = 1 << 20


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """One file, by its path below the archive's root. ``twin``: the path of the same file met before (hard link)."""

    path: bytes
    mode: int
    uid: int
    gid: int
    modified_ns: int
    size: int = 0
    target: bytes = b""
    twin: bytes = b""
    device: int = 0
    attributes: dict[str, bytes] = {}


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Bytes of the last file."""

    offset: int
    data: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Nothing follows: an archive without it was cut short."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry | Piece | End)


def pack(source: Path, target: Path, base: int) -> int:
    """Write ``source``'s files to ``target``, which is there once it is whole and on disk; return its size.

    Raises HostDiskFull, leaving nothing.
    """
    part = target.with_name(f"{target.name}.part")
    root = os.open(source / UPPER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with part.open("wb") as file:
            with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as out:
                for value in _whole(root, base):
                    body = _encoder.encode(value)
                    out.write(len(body).to_bytes(4, "big") + body)
            os.fsync(file.fileno())
        part.rename(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostDiskFull(f"no space left for a sandbox's files in {target.parent}: free some") from None
        raise SandboxError(f"a sandbox's files could not be kept in {target}: {error}") from None
    finally:
        os.close(root)
    return target.stat().st_size


def _whole(root: int, base: int) -> Iterator[Entry | Piece | End]:
    yield from _walk(root, base)
    yield End()


def _walk(root: int, base: int) -> Iterator[Entry | Piece]:
    seen: dict[tuple[int, int], bytes] = {}
    pending = [b"."]
    while pending:
        folder = pending.pop()
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            yield _entry(folder, os.fstat(fd), base, _attributes(fd))
            for name in sorted(map(os.fsencode, os.listdir(fd))):
                if folder == b"." and name.endswith(_WORK.encode()):
                    continue
                path = name if folder == b"." else folder + b"/" + name
                attributes = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(attributes.st_mode):
                    pending.append(path)
                    continue
                identity = (attributes.st_dev, attributes.st_ino)
                if attributes.st_nlink > 1 and identity in seen:
                    yield _entry(path, attributes, base, {}, twin=seen[identity])
                    continue
                seen[identity] = path
                yield from _file(fd, name, path, attributes, base)
        finally:
            os.close(fd)


def _file(folder: int, name: bytes, path: bytes, attributes: os.stat_result, base: int) -> Iterator[Entry | Piece]:
    if stat.S_ISLNK(attributes.st_mode):
        yield _entry(path, attributes, base, {}, target=os.fsencode(os.readlink(name, dir_fd=folder)))
    elif stat.S_ISREG(attributes.st_mode):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            yield _entry(path, attributes, base, _attributes(fd))
            yield from _pieces(fd, attributes.st_size)
        finally:
            os.close(fd)
    else:  # whiteouts, pipes, sockets: no content
        yield _entry(path, attributes, base, {})


def _pieces(fd: int, size: int) -> Iterator[Piece]:
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
            raise
        end = os.lseek(fd, offset, os.SEEK_HOLE)
        while offset < end and (data := os.pread(fd, min(_CHUNK, end - offset), offset)):
            yield Piece(offset, data)
            offset += len(data)


def _entry(
    path: bytes,
    found: os.stat_result,
    base: int,
    attributes: dict[str, bytes],
    *,
    target: bytes = b"",
    twin: bytes = b"",
) -> Entry:
    return Entry(
        path=path,
        mode=found.st_mode,
        uid=max(0, found.st_uid - base),
        gid=max(0, found.st_gid - base),
        modified_ns=found.st_mtime_ns,
        size=found.st_size,
        target=target,
        twin=twin,
        device=found.st_rdev,
        attributes=attributes,
    )


def _attributes(fd: int) -> dict[str, bytes]:
    kept = {}
    for name in os.listxattr(fd):
        if name in _KEPT_OVERLAY or name.startswith("user."):
            kept[name] = os.getxattr(fd, name)
    return kept


def unpack(source: Path, target: Path, base: int) -> None:
    """Fill ``target``'s (empty) directory from an archive. Raises DiskFull, SandboxError."""
    root = os.open(target / UPPER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    folders: list[Entry] = []
    current: tuple[int, Entry] | None = None
    try:
        for value in _read(source):
            if isinstance(value, Piece):
                if current is None:
                    raise SandboxError(f"the archive {source} is damaged: data without a file")
                os.pwrite(current[0], value.data, value.offset)
                continue
            _finish(current)
            current = None
            if stat.S_ISDIR(value.mode):
                folders.append(value)
            fd = _restore(root, value, base)
            current = None if fd is None else (fd, value)
        _finish(current)
        current = None
        for folder in reversed(folders):  # last, for writing into a directory changes its time
            times = (folder.modified_ns, folder.modified_ns)
            os.utime(folder.path, ns=times, dir_fd=root, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("a sandbox's kept files do not fit into its disk limit: give it the limit it had") from None
        raise SandboxError(f"a sandbox's kept files could not be restored: {error}") from None
    finally:
        if current is not None:
            os.close(current[0])
        os.close(root)


def _finish(file: tuple[int, Entry] | None) -> None:
    """A file is whole: its time, last."""
    if file is not None:
        fd, entry = file
        os.utime(fd, ns=(entry.modified_ns, entry.modified_ns))
        os.close(fd)


def _read(source: Path) -> Iterator[Entry | Piece]:
    try:
        with source.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            while header := stream.read(4):
                length = int.from_bytes(header, "big")
                if len(header) < 4 or length > _FRAME_LIMIT:
                    raise SandboxError(f"the archive {source} is damaged")
                body = stream.read(length)
                if len(body) < length:
                    raise SandboxError(f"the archive {source} is cut short")
                value = _decoder.decode(body)
                if isinstance(value, End):
                    return
                yield value
            raise SandboxError(f"the archive {source} is cut short")
    except (zstandard.ZstdError, msgspec.MsgspecError, FileNotFoundError) as error:
        raise SandboxError(f"the archive {source} cannot be read: {error}") from None


def _restore(root: int, entry: Entry, base: int) -> int | None:
    """Make one file; a descriptor when data may follow."""
    if entry.path == b".":
        return _finish_entry(root, b".", entry, base)
    parent, name = _parent(root, entry.path)
    try:
        if entry.twin:
            other, twin = _parent(root, entry.twin)
            try:
                os.link(twin, name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(other)
            return None
        return _finish_entry(parent, name, entry, base)
    finally:
        os.close(parent)


def _parent(root: int, path: bytes) -> tuple[int, bytes]:
    """The real directory that a path names its file in: no link on the way, nothing above the root."""
    folder, _, name = path.rpartition(b"/")
    if name in (b"", b".", b"..") or path.startswith(b"/"):
        raise SandboxError(f"the archive is damaged: {path!r} is not a file's path")
    resolve = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS
    flags = os.O_PATH | os.O_DIRECTORY
    return kernel.openat2(root, os.fsdecode(folder or b"."), flags, resolve=resolve), name


def _finish_entry(parent: int, name: bytes, entry: Entry, base: int) -> int | None:
    kind, fd = stat.S_IFMT(entry.mode), None
    if kind == stat.S_IFDIR:
        if name != b".":
            os.mkdir(name, 0o700, dir_fd=parent)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    elif kind == stat.S_IFREG:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        os.ftruncate(fd, entry.size)
    elif kind == stat.S_IFLNK:
        os.symlink(entry.target, name, dir_fd=parent)
    elif kind == stat.S_IFCHR and entry.device:
        raise SandboxError("the archive is damaged: it holds a device")
    else:
        os.mknod(name, entry.mode, 0, dir_fd=parent)
    os.chown(name, base + entry.uid, base + entry.gid, dir_fd=parent, follow_symlinks=False)
    if kind != stat.S_IFLNK:
        os.chmod(name, stat.S_IMODE(entry.mode), dir_fd=parent)
    if fd is None:
        os.utime(name, ns=(entry.modified_ns, entry.modified_ns), dir_fd=parent, follow_symlinks=False)
        return None
    for attribute, value in entry.attributes.items():
        os.setxattr(fd, attribute, value)
    if kind == stat.S_IFREG:
        return fd
    os.close(fd)
    return None
