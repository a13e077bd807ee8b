"""An archive of unknown origin becomes a layer.

Owns: reading tar (plain, gzip, zstd) as a stream, with OCI's whiteouts turned into overlayfs's; the limits on it.

Must not know: where layers are kept, manifests, templates.

Guarantees: nothing outside ``root`` is touched, whatever names and links say (openat2, RESOLVE_IN_ROOT). Memory is
bounded by a constant; bytes and entries by ``Bounds``, whatever compression promises. Devices are refused (those of
/dev, which every runtime makes itself, are left out). Owners are kept when root; set-user-id bits are kept, so ``root``
must lie below a directory that only its owner can enter.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import posixpath
import shutil
import stat
import tarfile
import zlib
from pathlib import Path
from typing import IO, Protocol

import msgspec
import zstandard

from venusrl.sandboxes.protocol import HostDiskFull
from venusrl.sandboxes.runtimes.namespace import kernel
from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.errors import BadTemplate

_IN_ROOT = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_RESERVED = ".wh..wh."
_XATTR = "SCHILY.xattr."
_HEADER_BYTES = 2 << 20
"""How much an archive may say about one entry."""
_MAX_ID = 65535
_CHUNK = 1 << 20


class Bounds(msgspec.Struct, frozen=True):
    """How large a layer may be once unpacked."""

    bytes: int = 32 << 30
    entries: int = 2_000_000


class Unpacked(msgspec.Struct, frozen=True):
    """``diff`` is the SHA-256 of the uncompressed archive; ``left_out`` the devices of /dev that were not made."""

    diff: str
    left_out: int


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Hashing:
    """A reader that digests and counts what passes, and stops at ``most`` bytes."""

    def __init__(self, source: _Readable, most: int, what: str) -> None:
        self._source = source
        self._most = most
        self._what = what
        self._digest = hashlib.sha256()
        self.count = 0
        self._allowed: int | None = None

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size if size >= 0 else _CHUNK)
        self._digest.update(data)
        self.count += len(data)
        if self.count > self._most:
            raise BadTemplate(f"{self._what} is larger than {self._most} bytes: it is refused")
        if self._allowed is not None and self.count > self._allowed:
            raise BadTemplate(f"{self._what} has an entry with a header of more than {_HEADER_BYTES} bytes")
        return data

    def header_next(self) -> None:
        """From now until ``data_next`` only a header may be read."""
        self._allowed = self.count + _HEADER_BYTES

    def data_next(self) -> None:
        self._allowed = None

    def drain(self) -> str:
        """Read to the end; the digest of everything."""
        while self.read(_CHUNK):
            pass
        return self._digest.hexdigest()


def decompressed(source: IO[bytes] | Hashing, magic: bytes) -> _Readable:
    """A reader of what ``source`` holds; ``magic`` are its first bytes (already in it, not consumed)."""
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=source, mode="rb")  # type: ignore[arg-type, return-value, unused-ignore]
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return decompressor.stream_reader(source, read_across_frames=True)  # type: ignore[arg-type, unused-ignore]
    return source


def unpack(source: _Readable, root: Path, bounds: Bounds, what: str) -> Unpacked:
    """Unpack the (uncompressed) archive into the empty directory ``root``. Raises BadTemplate, HostDiskFull.

    ``what`` names it in messages. Padding and names count for themselves: an archive's bytes get some more.
    """
    reader = Hashing(source, bounds.bytes + bounds.entries * 2048, what)
    reader.header_next()  # opening reads the first one
    unpacker = _Unpacker(root, bounds, what)
    try:
        with tarfile.open(fileobj=reader, mode="r|", errors="surrogateescape") as archive:  # type: ignore[call-overload]
            while True:
                reader.header_next()
                member = archive.next()
                if member is None:
                    break
                archive.members = []  # it would remember every one
                reader.data_next()
                unpacker.add(archive, member)
        reader.data_next()
        diff = reader.drain()
        unpacker.finish()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise BadTemplate(f"{what} is damaged ({error}): fetch it again") from None
    except OSError as error:
        raise _translated(error, what, root) from None
    finally:
        unpacker.close()
    return Unpacked(diff, unpacker.left_out)


def _translated(error: OSError, what: str, root: Path) -> HostDiskFull | BadTemplate:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostDiskFull(f"no space left in {root.parent} for {what}: free some (venusrl env template gc)")
    return BadTemplate(f"{what} cannot be unpacked: {error}")


def clean_name(name: str, what: str) -> str:
    """A member's name relative to the root. Raises BadTemplate for one that climbs."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise BadTemplate(f"{what} has an entry {name!r} that leads out of it: it is refused")
    return "/".join(parts)


class _Unpacker:
    """The state of one unpacking."""

    def __init__(self, root: Path, bounds: Bounds, what: str) -> None:
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = root
        self._bounds = bounds
        self._what = what
        self._bytes = 0
        self._entries = 0
        self._folder: tuple[str, int] | None = None
        self._directories: dict[str, tuple[int, int, int, int]] = {}
        self._whiteouts: list[str] = []
        self._opaque: list[str] = []
        self._privileged = tree.privileged()
        self.left_out = 0

    def close(self) -> None:
        self._forget_folder()
        os.close(self._root)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._entries += 1
        self._bytes += member.size if member.isreg() else 0
        if self._entries > self._bounds.entries or self._bytes > self._bounds.bytes:
            raise BadTemplate(
                f"{self._what} unpacks to more than {self._bounds.bytes >> 20} MiB or {self._bounds.entries} entries"
            )
        path = clean_name(member.name, self._what)
        folder, name = posixpath.split(path)
        if name.startswith(_WHITEOUT):
            self._hide(folder, name)
        elif member.isdir():
            self._directory(path, member)
        elif not path:
            raise BadTemplate(f"{self._what}: its root is not a directory")
        elif member.isreg():
            self._file(folder, name, archive, member)
        elif member.issym():
            parent = self._clear(folder, name)
            os.symlink(member.linkname, name, dir_fd=parent)
            self._own(parent, name, member)
            os.utime(name, ns=(0, _ns(member)), dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            self._link(folder, name, member)
        elif member.isfifo():
            parent = self._clear(folder, name)
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._own(parent, name, member)
            os.chmod(name, member.mode & 0o7777, dir_fd=parent)
        elif path.startswith("dev/"):
            self.left_out += 1
        else:
            raise BadTemplate(f"{self._what} has a device node /{path}: it is refused")

    def finish(self) -> None:
        """What can only be done last: deletions, then directories' owners and modes, children first."""
        self._forget_folder()
        for path in self._whiteouts:
            self._apply_whiteout(path)
        for path in self._opaque:
            self._make_folders(path)
            with _Descriptor(self._open_folder(path, os.O_RDONLY)) as fd:
                tree.mark_opaque(fd)
        self._directories.setdefault("", (0o755, 0, 0, 0))
        for path in sorted(self._directories, key=lambda p: p.count("/") + bool(p), reverse=True):
            mode, uid, gid, mtime = self._directories[path]
            with _Descriptor(self._open_folder(path, os.O_RDONLY)) as fd:
                if self._privileged:
                    os.fchown(fd, uid, gid)
                os.fchmod(fd, mode)
                os.utime(fd, ns=(mtime, mtime))

    def _hide(self, folder: str, name: str) -> None:
        if name == _OPAQUE:
            self._opaque.append(folder)
        elif name.startswith(_RESERVED):
            return  # AUFS's own bookkeeping
        else:
            hidden = name[len(_WHITEOUT) :]
            if hidden in ("", ".", ".."):
                raise BadTemplate(f"{self._what} deletes {hidden!r}: it is refused")
            self._whiteouts.append(f"{folder}/{hidden}" if folder else hidden)

    def _apply_whiteout(self, path: str) -> None:
        """A name deleted and made again in one layer: only a directory still has something to hide."""
        folder, name = posixpath.split(path)
        self._make_folders(folder)
        with _Descriptor(self._open_folder(folder)) as parent:
            try:
                mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            except FileNotFoundError:
                os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
                return
        if stat.S_ISDIR(mode):
            self._opaque.append(path)

    def _directory(self, path: str, member: tarfile.TarInfo) -> None:
        if path:
            folder, name = posixpath.split(path)
            parent = self._parent(folder)
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    self._forget_folder()
                    parent = self._parent(folder)
                    os.unlink(name, dir_fd=parent)
                    os.mkdir(name, 0o700, dir_fd=parent)
        self._directories[self._real(path)] = (member.mode & 0o7777, *self._ids(member), _ns(member))

    def _file(self, folder: str, name: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parent = self._clear(folder, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _Descriptor(os.open(name, flags, 0o600, dir_fd=parent)) as fd:
            source = archive.extractfile(member)
            if source is None:
                raise BadTemplate(f"{self._what}: {member.name} has no content")
            left = member.size
            while chunk := source.read(min(_CHUNK, left) or 1):
                left -= len(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            if left:
                raise BadTemplate(f"{self._what} ends within {member.name}: fetch it again")
            if self._privileged:
                os.fchown(fd, *self._ids(member))
            os.fchmod(fd, member.mode & 0o7777)
            for key, value in member.pax_headers.items():
                attribute = key.removeprefix(_XATTR)
                if key.startswith(_XATTR) and tree.keeps(attribute):
                    os.setxattr(fd, attribute, value.encode("utf-8", "surrogateescape"))
            os.utime(fd, ns=(0, _ns(member)))

    def _link(self, folder: str, name: str, member: tarfile.TarInfo) -> None:
        target = clean_name(member.linkname, self._what)
        target_folder, target_name = posixpath.split(target)
        if target == (f"{folder}/{name}" if folder else name):
            return
        parent = self._clear(folder, name)
        try:
            with _Descriptor(self._open_folder(target_folder)) as source:
                os.link(target_name, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise BadTemplate(f"{self._what}: {member.name} is a hard link to {target!r}, which is not there") from None

    def _clear(self, folder: str, name: str) -> int:
        """The directory ``folder``, with nothing named ``name`` in it."""
        parent = self._parent(folder)
        try:
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return parent
        if stat.S_ISDIR(mode):
            path = self._real(f"{folder}/{name}" if folder else name)
            shutil.rmtree(self._path / path)
            for known in [k for k in self._directories if k == path or k.startswith(f"{path}/")]:
                del self._directories[known]
        else:
            os.unlink(name, dir_fd=parent)
        self._forget_folder()
        return self._parent(folder)

    def _parent(self, folder: str) -> int:
        """A descriptor on ``folder``, made if need be; valid until the next call."""
        if self._folder is not None and self._folder[0] == folder:
            return self._folder[1]
        self._forget_folder()
        self._make_folders(folder)
        self._folder = (folder, self._open_folder(folder))
        return self._folder[1]

    def _forget_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder[1])
            self._folder = None

    def _make_folders(self, folder: str) -> None:
        if not folder:
            return
        try:
            os.close(self._open_folder(folder))
        except (FileNotFoundError, NotADirectoryError):
            outer, name = posixpath.split(folder)
            self._make_folders(outer)
            with _Descriptor(self._open_folder(outer)) as parent:
                try:
                    os.mkdir(name, 0o700, dir_fd=parent)
                except FileExistsError:  # a file, or a link that leads nowhere: the later entry wins
                    os.unlink(name, dir_fd=parent)
                    os.mkdir(name, 0o700, dir_fd=parent)
            self._directories.setdefault(self._real(folder), (0o755, 0, 0, 0))

    def _open_folder(self, folder: str, flags: int = os.O_PATH) -> int:
        return kernel.openat2(self._root, folder or ".", flags | os.O_DIRECTORY, resolve=_IN_ROOT)

    def _real(self, path: str) -> str:
        """The path of a directory with links on the way followed."""
        with _Descriptor(self._open_folder(path)) as fd:
            real = os.readlink(f"/proc/self/fd/{fd}")
        base = os.readlink(f"/proc/self/fd/{self._root}")
        return real.removeprefix(base).lstrip("/")

    def _own(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        if self._privileged:
            os.chown(name, *self._ids(member), dir_fd=parent, follow_symlinks=False)

    def _ids(self, member: tarfile.TarInfo) -> tuple[int, int]:
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise BadTemplate(
                f"{self._what}: {member.name} belongs to {member.uid}:{member.gid}; sandboxes have ids up to {_MAX_ID}"
            )
        return member.uid, member.gid


def _ns(member: tarfile.TarInfo) -> int:
    """The modification time, exactly: as text it has nanoseconds, which the float made of it loses."""
    whole, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if whole.isascii() and whole.isdigit() and (not fraction or (fraction.isascii() and fraction.isdigit())):
        found = int(whole[:12]) * 10**9 + int(fraction[:9].ljust(9, "0") or "0")
    else:
        found = int(member.mtime * 10**9)
    return max(0, min(found, 2**62))


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
