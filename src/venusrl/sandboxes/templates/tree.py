"""A layer as a directory: what is in it, its digest, and what a stack of layers shows.

Owns: the form of a layer on disk (overlayfs: a deleted name is a character device 0:0, a directory that hides what is
below it has an "opaque" attribute), the canonical digest of such a tree, and the merged view of several.

Must not know: where layers are kept, archives, templates.

Guarantees: the digest depends on names, kinds, modes, owners, contents, link targets, modification times of files and
``user.*`` attributes, and on nothing else; equal digests are equal layers. Nothing is followed: a link is a link. The
merged view is what overlayfs shows of the same layers.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from venusrl.sandboxes.templates.errors import BadTemplate

Kind = Literal["file", "directory", "symlink", "fifo", "whiteout"]
_CHUNK = 1 << 20
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
"""The mark as root mounts read it, and as mounts in a user namespace (``userxattr``) do."""
_PRIVATE_ATTRIBUTES = ("user.overlay.",)
"""Attributes with a meaning to overlayfs: never taken from outside, never part of a digest."""


class Node(msgspec.Struct, frozen=True):
    """One name in a layer. ``opaque`` for directories; ``target`` for symbolic links; owners as seen inside."""

    kind: Kind
    mode: int
    uid: int
    gid: int
    size: int = 0
    mtime_ns: int = 0
    target: str = ""
    opaque: bool = False


class Found(msgspec.Struct, frozen=True):
    """A node and where it really is."""

    node: Node
    path: Path


class Measure(msgspec.Struct, frozen=True):
    """A layer's digest and size."""

    digest: str
    bytes: int
    entries: int


def privileged() -> bool:
    """Whether owners and the marks of root can be written; else all files are the caller's own and count as root's."""
    return os.geteuid() == 0


def mark_opaque(directory: int) -> None:
    """Hide what lower layers have in the open ``directory``."""
    os.setxattr(directory, _OPAQUE[0] if privileged() else _OPAQUE[1], b"y")


def make_whiteout(path: Path) -> None:
    """Hide the name ``path`` of lower layers."""
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def keeps(attribute: str) -> bool:
    """Whether an extended attribute is part of a layer."""
    return attribute.startswith("user.") and not attribute.startswith(_PRIVATE_ATTRIBUTES)


def read_node(path: Path) -> Node:
    """The node at ``path``. Raises BadTemplate for what a layer cannot hold."""
    status = os.lstat(path)
    mode, uid, gid = stat.S_IMODE(status.st_mode), *_owner(status)
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        return Node("file", mode, uid, gid, status.st_size, status.st_mtime_ns)
    if kind == stat.S_IFDIR:
        return Node("directory", mode, uid, gid, opaque=_is_opaque(path))
    if kind == stat.S_IFLNK:
        return Node("symlink", 0o777, uid, gid, target=os.readlink(path))
    if kind == stat.S_IFIFO:
        return Node("fifo", mode, uid, gid)
    if kind == stat.S_IFCHR and status.st_rdev == 0:
        return Node("whiteout", 0, 0, 0)
    raise BadTemplate(f"{path.name} is a device or a socket: a layer holds files, directories, links and pipes")


def walk(root: Path) -> Iterator[tuple[str, Node]]:
    """Every name below ``root`` (itself first, as ""), parents before children, in a fixed order."""
    yield "", read_node(root)
    stack = [""]
    while stack:
        folder = stack.pop()
        names = sorted(os.listdir(root / folder))
        below = []
        for name in names:
            path = f"{folder}/{name}" if folder else name
            node = read_node(root / path)
            yield path, node
            if node.kind == "directory":
                below.append(path)
        stack.extend(reversed(below))


def measure(root: Path) -> Measure:
    """Digest ``root``. Hard links count as the files they are."""
    total, entries = 0, 0
    whole = hashlib.sha256(b"venusrl layer 1\n")
    for path, node in walk(root):
        entries += 1
        total += node.size
        fields = [node.kind, f"{node.mode:o}", str(node.uid), str(node.gid), str(node.size), str(node.mtime_ns)]
        fields += [node.target, str(int(node.opaque)), path]
        for field in fields:
            whole.update(os.fsencode(field) + b"\0")
        if node.kind == "file":
            whole.update(_content_digest(root / path))
        if node.kind in ("file", "directory"):
            for name, value in sorted(attributes(root / path).items()):
                whole.update(os.fsencode(name) + b"=" + hashlib.sha256(value).digest())
        whole.update(b"\n")
    return Measure(whole.hexdigest(), total, entries)


def attributes(path: Path) -> dict[str, bytes]:
    """The extended attributes that belong to a layer."""
    found = {}
    with suppress(OSError):  # the file system has none
        for name in os.listxattr(path, follow_symlinks=False):
            if keeps(name):
                found[name] = os.getxattr(path, name, follow_symlinks=False)
    return found


class Merged:
    """What a stack of layers (lowest first) shows. Looks only where it is asked; nothing is mounted."""

    def __init__(self, layers: Sequence[Path]) -> None:
        self._layers = tuple(reversed(layers))

    def find(self, path: str) -> Found | None:
        """What is at ``path`` (relative, no ``..``), links on the way not followed."""
        stack: Sequence[Path] = self._layers
        found: Found | None = None
        for part in ("", *(p for p in path.split("/") if p)):
            if found is not None and found.node.kind != "directory":
                return None
            found, stack = _step(stack, part)
            if found is None:
                return None
        return found

    def resolve(self, path: str) -> str:
        """``path`` with every link on the way followed, as inside; the last name too when it is a link.

        What does not exist is kept as it is. Raises BadTemplate for a loop.
        """
        done: list[str] = []
        todo = [p for p in path.split("/") if p]
        for _ in range(40 + len(todo)):
            if not todo:
                return "/".join(done)
            part = todo.pop(0)
            if part == ".":
                continue
            if part == "..":
                done = done[:-1]
                continue
            found = self.find("/".join([*done, part]))
            if found is None or found.node.kind != "symlink":
                done.append(part)
                continue
            if found.node.target.startswith("/"):
                done = []
            todo = [p for p in found.node.target.split("/") if p] + todo
        raise BadTemplate(f"/{path} leads through too many links")

    def read(self, path: str, most: int = 1 << 20) -> bytes | None:
        """The first ``most`` bytes of a regular file, links followed; None when there is none."""
        found = self.find(self.resolve(path))
        if found is None or found.node.kind != "file":
            return None
        with found.path.open("rb") as file:
            return file.read(most)

    def walk(self) -> Iterator[tuple[str, Found]]:
        """Every name, parents before children."""
        stack: list[tuple[str, Sequence[Path]]] = [("", self._layers)]
        root = self.find("")
        if root is not None:
            yield "", root
        while stack:
            folder, layers = stack.pop()
            names = sorted({name for layer in layers for name in os.listdir(layer)})
            for name in names:
                found, below = _step(layers, name)
                if found is None:
                    continue
                path = f"{folder}/{name}" if folder else name
                yield path, found
                if found.node.kind == "directory":
                    stack.append((path, below))


def _step(stack: Sequence[Path], name: str) -> tuple[Found | None, Sequence[Path]]:
    """Go down one name through directories that are merged, uppermost first."""
    found: Found | None = None
    below: list[Path] = []
    for directory in stack:
        path = directory / name if name else directory
        try:
            node = read_node(path)
        except FileNotFoundError:
            continue
        if node.kind == "whiteout":
            break
        if found is None:
            found = Found(node, path)
            if node.kind != "directory":
                return found, ()
        elif node.kind != "directory":
            break
        below.append(path)
        if node.opaque:
            break
    return found, below


def _owner(status: os.stat_result) -> tuple[int, int]:
    return (status.st_uid, status.st_gid) if privileged() else (0, 0)


def _is_opaque(path: Path) -> bool:
    for name in _OPAQUE if privileged() else _OPAQUE[1:]:
        with suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False


def _content_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()
