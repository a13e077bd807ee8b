"""COPY: uploaded files become a layer.

Owns: what COPY's arguments mean (as in a Dockerfile: a directory's content, a file, a pattern's matches) and the making
of the layer from the archive that the client uploaded.

Must not know: where archives and layers are kept, runtimes, caching.

Guarantees: only what the source names is copied; nothing outside the new layer is written; links stay links.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import shutil
import stat
from pathlib import Path

import msgspec

from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.compose import Composer, find_account, find_group, own
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.unpack import Bounds, clean_name, decompressed, unpack

_MODE = re.compile(r"[0-7]{3,4}")
_PATTERN = re.compile(r"[*?\[]")


class Copy(msgspec.Struct, frozen=True):
    """One COPY. ``target`` is absolute; ``owner`` "user" or "user:group"; ``mode`` None = as they are."""

    source: str
    target: str
    owner: str
    mode: int | None = None


def parse(args: tuple[str, ...], workdir: str, user: str) -> Copy:
    """[source, target, owner?, mode?]. Raises BadTemplate."""
    if len(args) < 2 or not args[0] or not args[1]:
        raise BadTemplate("COPY needs a source and a target")
    owner = args[2] if len(args) > 2 else ""
    mode = args[3] if len(args) > 3 else ""
    if mode and _MODE.fullmatch(mode) is None:
        raise BadTemplate(f"COPY: {mode!r} is not a mode such as 0755")
    directory = args[1].endswith(("/", "/.")) or args[1] in (".", "..")
    target = posixpath.normpath(posixpath.join("/", workdir, args[1]))
    source = clean_name(args[0], "COPY")
    return Copy(source, target + ("/" if directory else ""), owner or user, int(mode, 8) if mode else None)


def make_layer(archive: Path, copy: Copy, below: tree.Merged, scratch: Path, bounds: Bounds) -> Path:
    """The layer's tree, in ``scratch`` (empty). Raises BadTemplate, HostDiskFull."""
    source = scratch / "source"
    source.mkdir()
    with archive.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        unpack(decompressed(raw, magic), source, bounds, "the uploaded files")
    layer = scratch / "layer"
    composer = Composer(layer, below)
    name, _, group = copy.owner.partition(":")
    account = find_account(below, name) if not name.isdigit() else None
    uid = account.uid if account else int(name)
    owner = (uid, find_group(below, group) if group else (account.gid if account else uid))
    target = copy.target.strip("/")
    matches = _matches(source, copy.source)
    many = copy.target.endswith("/") or len(matches) > 1 or _PATTERN.search(copy.source) is not None
    for match in matches:
        if _is_directory(match):
            folder = composer.folder(target, owner)
            for entry in sorted(match.iterdir()):
                _place(entry, folder / entry.name, owner, copy.mode)
        elif many or _is_below(below, target):
            _place(match, composer.folder(target, owner) / match.name, owner, copy.mode)
        else:
            real = below.resolve(target)
            folder = composer.folder(posixpath.dirname(real), owner)
            _place(match, folder / posixpath.basename(real), owner, copy.mode)
    return layer


def _matches(source: Path, wanted: str) -> list[Path]:
    """What ``wanted`` names in the uploaded tree."""
    found = [source]
    for part in (p for p in wanted.split("/") if p):
        if part == "**":
            found = [Path(d) for f in found if _is_directory(f) for d, _, _ in os.walk(f)]
            continue
        found = [
            f / name
            for f in found
            if _is_directory(f)
            for name in sorted(os.listdir(f))
            if name == part or (_PATTERN.search(part) and fnmatch.fnmatchcase(name, part))
        ]
    if not found:
        raise BadTemplate(f"COPY: the uploaded files hold no {wanted!r}: upload them again (force_upload)")
    return found


def _place(source: Path, target: Path, owner: tuple[int, int], mode: int | None) -> None:
    """Move a file or a tree to its place, over what an earlier match put there."""
    if _is_directory(source):
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            target.unlink()
        target.mkdir(exist_ok=True)
        for entry in sorted(source.iterdir()):
            _place(entry, target / entry.name, owner, mode)
        own(target, owner)
        target.chmod(mode if mode is not None else stat.S_IMODE(source.stat().st_mode))
        return
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    source.rename(target)
    own(target, owner)
    if not target.is_symlink() and mode is not None:
        target.chmod(mode)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_below(below: tree.Merged, target: str) -> bool:
    found = below.find(below.resolve(target))
    return found is not None and found.node.kind == "directory"
