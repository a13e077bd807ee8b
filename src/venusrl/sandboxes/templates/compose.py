"""A layer made by hand on top of others: directories, files, a user.

Owns: ``Composer``, which writes into a new layer what is to be seen over a stack of layers; COPY and the making of a
template's user are built on it.

Must not know: archives of images, where layers are kept, runtimes.

Guarantees: nothing outside the new layer is written: paths are resolved as inside, over the merged view. A directory
that exists below keeps its owner and mode (overlayfs shows those of the uppermost layer).
"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

import msgspec

from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.api import DEFAULT_USER
from venusrl.sandboxes.templates.errors import BadTemplate

_USER = 1000
_SHELLS = ("bin/bash", "bin/sh")


class Account(msgspec.Struct, frozen=True):
    """A user of the image."""

    name: str
    uid: int
    gid: int
    home: str


class Composer:
    """``layer`` is the (empty or begun) tree of the new layer, ``below`` the layers it will lie on."""

    def __init__(self, layer: Path, below: tree.Merged) -> None:
        self._layer = layer
        self._below = below
        if not layer.exists():
            layer.mkdir()
        self._like_below("", layer)

    def folder(self, path: str, owner: tuple[int, int] = (0, 0), mode: int = 0o755) -> Path:
        """The directory ``path`` in the new layer; what did not exist before gets ``owner`` and ``mode``."""
        real = self._below.resolve(path)
        place = self._layer
        done = ""
        for part in (p for p in real.split("/") if p):
            done = f"{done}/{part}" if done else part
            place = place / part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise BadTemplate(f"/{done} is a file or a link where a directory is needed")
            if not place.exists():
                found = self._below.find(done)
                if found is not None and found.node.kind != "directory":
                    raise BadTemplate(f"/{done} is a file in the template where a directory is needed")
                place.mkdir(mode=0o700)
                if found is None:
                    own(place, owner)
                    place.chmod(mode)
                else:
                    self._like_below(done, place)
        return place

    def file(self, path: str, content: bytes, owner: tuple[int, int] = (0, 0), mode: int = 0o644) -> None:
        """A regular file, in place of whatever was there."""
        real = self._below.resolve(path)
        place = self.folder(posixpath.dirname(real)) / posixpath.basename(real)
        place.write_bytes(content)
        own(place, owner)
        place.chmod(mode)
        os.utime(place, ns=(0, 0))  # the same content makes the same layer

    def provide_user(self) -> bool:
        """Root and the default user exist, with homes; whether anything had to be added."""
        changed = False
        passwd = (self._below.read("etc/passwd") or b"").decode(errors="surrogateescape")
        group = (self._below.read("etc/group") or b"").decode(errors="surrogateescape")
        shell = next((f"/{s}" for s in _SHELLS if self._below.find(self._below.resolve(s)) is not None), "/bin/sh")
        users = {line.split(":")[0]: line.split(":") for line in passwd.splitlines() if line.count(":") >= 5}
        taken = {fields[2] for fields in users.values()} | {g.split(":")[2] for g in group.splitlines() if ":" in g[2:]}
        if "root" not in users:
            passwd, changed = f"root:x:0:0:root:/root:{shell}\n{passwd}", True
            group = group if group.startswith("root:") else f"root:x:0:\n{group}"
        if DEFAULT_USER not in users:
            number = next(n for n in range(_USER, 60000) if str(n) not in taken)
            home = f"/home/{DEFAULT_USER}"
            passwd = f"{_ended(passwd)}{DEFAULT_USER}:x:{number}:{number}::{home}:{shell}\n"
            group = f"{_ended(group)}{DEFAULT_USER}:x:{number}:\n"
            self.folder(home, (number, number))
            changed = True
        if changed:
            self.file("etc/passwd", passwd.encode(errors="surrogateescape"))
            self.file("etc/group", group.encode(errors="surrogateescape"))
        if self._below.find("tmp") is None:
            self.folder("tmp", mode=0o1777)
            changed = True
        return changed

    def _like_below(self, path: str, place: Path) -> None:
        found = self._below.find(path)
        if found is not None and found.node.kind == "directory":
            own(place, (found.node.uid, found.node.gid))
            place.chmod(found.node.mode)
        else:
            place.chmod(0o755)


def find_account(merged: tree.Merged, name: str) -> Account:
    """Look a user up. Raises BadTemplate."""
    text = (merged.read("etc/passwd") or b"").decode(errors="surrogateescape")
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) >= 6 and fields[0] == name and fields[2].isdigit() and fields[3].isdigit():
            return Account(name, int(fields[2]), int(fields[3]), fields[5])
    raise BadTemplate(f"the template has no user {name!r}: add it in a step before (RUN useradd ... as root)")


def find_group(merged: tree.Merged, name: str) -> int:
    """A group's number, by name or as it is. Raises BadTemplate."""
    if name.isdigit():
        return int(name)
    text = (merged.read("etc/group") or b"").decode(errors="surrogateescape")
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) >= 3 and fields[0] == name and fields[2].isdigit():
            return int(fields[2])
    raise BadTemplate(f"the template has no group {name!r}: add it in a step before")


def own(path: Path, owner: tuple[int, int]) -> None:
    """Set the owner where that is possible; else all files count as root's."""
    if tree.privileged():
        os.chown(path, *owner, follow_symlinks=False)


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
