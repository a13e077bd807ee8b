"""The page cache that a template's sandboxes share: read beforehand, counted once.

Owns: which files of a template matter, reading them in a control group of the template's own (the first who reads a
page pays for it: no sandbox should), how much of them is in memory now.

Must not know: sandboxes, how layers came to be.

Guarantees: no more than ``_TOUCHED_MIB`` is read beforehand, and no more than ``_MOST_FILES`` files of a layer are
looked at. A layer that several templates have is counted once.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from venusrl.sandboxes.runtimes.namespace import cgroup, kernel
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups
from venusrl.sandboxes.templates.api import Image

PREFIX = "template."
"""Of the names of templates' groups: a sandbox's id has no dot."""
_MOST_FILES = 20_000
_TOUCHED_MIB = 192
_SMALLEST = 1 << 14
_TOUCH_S = 60.0
_LOOK_EVERY_S = 30.0
_HOST_PLACES = ("usr/bin", "bin", "usr/lib", "lib", "lib64")
_PROGRAMS = ("sh", "dash", "bash", "busybox", "python3", "cat", "ls", "grep", "sed", "env", "git")


def files_of(layers: tuple[str, ...]) -> list[tuple[str, int]]:
    """Path and size of a template's files worth counting; of ``host``, of its programs and libraries."""
    found: list[tuple[str, int]] = []
    seen: set[tuple[int, int]] = set()
    for root in layers or tuple(f"/{name}" for name in _HOST_PLACES):
        for folder, folders, names, fd in os.fwalk(root, follow_symlinks=False):
            if not layers and folder.count("/") > root.count("/") + 1:
                folders.clear()  # the machine's own libraries: two levels, not all of /usr/lib
            for name in names:
                with suppress(OSError):
                    attributes = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    identity = (attributes.st_dev, attributes.st_ino)
                    if stat.S_ISREG(attributes.st_mode) and attributes.st_size >= _SMALLEST and identity not in seen:
                        seen.add(identity)
                        found.append((f"{folder}/{name}", attributes.st_size))
            if len(found) >= _MOST_FILES:
                return found[:_MOST_FILES]
    return found


def resident(paths: list[str]) -> int:
    """Bytes of these files that are in memory. Zero where the kernel cannot say cheaply."""
    pages = 0
    for path in paths:
        with suppress(OSError):  # removed, or unreadable: not shared either
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC)
            try:
                found = kernel.cached_pages(fd)
            finally:
                os.close(fd)
            if found is None:
                return 0
            pages += found
    return pages * mmap.PAGESIZE


class Residency:
    """What of templates' layers is in memory. Looked at anew every so often: a template has thousands of files."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, list[str]]] = {}
        self._seen: dict[str, tuple[float, int]] = {}

    @property
    def known(self) -> set[str]:
        """The templates that were looked up."""
        return set(self._files)

    def know(self, image: Image) -> list[tuple[str, int]]:
        """Look a template's files up; path and size. Blocks on the disk."""
        layers = {layer: files_of((layer,)) for layer in image.layers} if image.layers else {"": files_of(())}
        self._files[image.id] = {layer: [path for path, _ in files] for layer, files in layers.items()}
        return [each for files in layers.values() for each in files]

    def forget(self, image: str) -> None:
        for layer in self._files.pop(image, {}):
            self._seen.pop(layer, None)

    async def shared(self, images: Sequence[str]) -> dict[str, int]:
        """``Runtime.shared``: a layer that several have counts for the first."""
        found: dict[str, int] = {}
        counted: set[str] = set()
        for image in images:
            new = {layer: paths for layer, paths in self._files.get(image, {}).items() if layer not in counted}
            counted |= new.keys()
            found[image] = sum([await self._resident(layer, paths) for layer, paths in new.items()])
        return found

    async def _resident(self, layer: str, paths: list[str]) -> int:
        now = time.monotonic()
        seen = self._seen.get(layer)
        if seen is None or now >= seen[0] + _LOOK_EVERY_S:
            seen = self._seen[layer] = (now, await asyncio.to_thread(resident, paths))
        return seen[1]


def worth_touching(layers: tuple[str, ...], files: list[tuple[str, int]]) -> Iterator[str]:
    """What a sandbox is likely to need at once: shells and usual programs, libraries, the dynamic linker."""
    left = _TOUCHED_MIB << 20
    for path, size in sorted(files, key=lambda each: each[1]):
        name = Path(path).name
        wanted = name in _PROGRAMS or name.startswith("python3") or ".so" in name
        if (layers or wanted) and size <= left:
            left -= size
            yield path


def touch(groups: NodeGroups | None, image: str, paths: list[str]) -> None:
    """Read files so that their pages are charged to the template's own group. Blocks; called in a thread."""
    listed = b"\0".join(map(os.fsencode, paths))
    subprocess.run(_toucher(groups, image), input=listed, env={"PATH": "/usr/bin:/bin"}, timeout=_TOUCH_S, check=False)


def _toucher(groups: NodeGroups | None, image: str) -> list[str]:
    enter = ""
    if groups is not None:
        for directory in set(groups.directories.values()):
            place = directory / f"{PREFIX}{image}"
            place.mkdir(exist_ok=True)
            tasks = place / ("tasks" if groups.version == 1 else "cgroup.procs")
            enter += f"echo 0 > '{tasks}' && "
    return ["/bin/sh", "-c", f"{enter}exec xargs -0 -r cat > /dev/null 2>&1"]


def forget(groups: NodeGroups | None, image: str) -> None:
    """Remove a template's group, its pages with it."""
    for directory in set(groups.directories.values()) if groups is not None else ():
        place = directory / f"{PREFIX}{image}"
        with suppress(OSError):
            (place / "memory.force_empty").write_text("0")
        cgroup.remove_tree(place)
