"""Layers on their way to another host.

Owns: a layer as one archive (OCI's form: tar with its whiteouts, zstd), and its arrival.

Must not know: hosts, HTTP.

Guarantees: what arrives is the layer that was asked for, by its digest, or nothing is kept.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol, cast

import msgspec
import zstandard

from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.store import Layer, Store
from venusrl.sandboxes.templates.unpack import Bounds, decompressed, unpack

_LEVEL = 3


class Target(Protocol):
    """What an archive is written to."""

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...


def send(store: Store, digest: str, target: Target) -> None:
    """Write a layer to ``target``. Raises TemplateNotFound. Blocks."""
    root = Path(store.layer(digest).path)
    with (
        zstandard.ZstdCompressor(level=_LEVEL).stream_writer(cast("IO[bytes]", target), closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive,
    ):
        twins: dict[tuple[int, int], str] = {}
        for path, node in tree.walk(root):
            for info in _members(root, path, node, twins):
                if node.kind == "file" and info.isreg():
                    with (root / path).open("rb") as file:
                        archive.addfile(info, file)
                else:
                    archive.addfile(info)


def receive(store: Store, digest: str, source: IO[bytes], magic: bytes, bounds: Bounds) -> Layer:
    """Keep what ``send`` wrote. ``magic`` are the first four bytes of ``source``, not consumed. Needs ``making()``.

    Raises BadTemplate when it is not the layer ``digest``. Blocks.
    """
    with store.staging() as scratch:
        root = scratch / "layer"
        root.mkdir()
        unpack(decompressed(source, magic), root, bounds, f"the layer {digest[:12]}")
        if tree.measure(root).digest != digest:
            raise BadTemplate(f"what arrived is not the layer {digest[:12]}: send it again")
        return store.add(root)


def missing(store: Store, digests: Sequence[str]) -> list[str]:
    """Which of the layers are not here."""
    here = {layer.digest for layer in store.layers()}
    return [digest for digest in digests if digest not in here]


def describe(store: Store, image: Image) -> tuple[Image, tuple[str, ...]]:
    """An image as another host can take it: without paths, and the digests of its layers."""
    return msgspec.structs.replace(image, layers=()), tuple(store.digest_of(path) for path in image.layers)


def place(store: Store, image: Image, digests: Sequence[str]) -> Image:
    """An image of another host, over layers that are all here. Needs ``making()``. Raises TemplateNotFound."""
    layers = tuple(store.layer(digest).path for digest in digests)
    placed = store.put_image(msgspec.structs.replace(image, layers=layers))
    if placed.id != image.id:
        raise BadTemplate(f"the image {image.id} is not what its layers say ({placed.id}): send it again")
    return placed


def _members(root: Path, path: str, node: tree.Node, twins: dict[tuple[int, int], str]) -> list[tarfile.TarInfo]:
    if node.kind == "whiteout":
        folder, _, name = path.rpartition("/")
        return [tarfile.TarInfo(f"{folder}/.wh.{name}" if folder else f".wh.{name}")]
    info = tarfile.TarInfo(path or ".")
    info.mode, info.uid, info.gid = node.mode, node.uid, node.gid
    # As text: a float, which is what TarInfo keeps, has no room for nanoseconds.
    info.pax_headers = {"mtime": f"{node.mtime_ns // 10**9}.{node.mtime_ns % 10**9:09d}"}
    place = root / path
    if node.kind in ("file", "directory"):
        for name, value in tree.attributes(place).items():
            info.pax_headers[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    match node.kind:
        case "directory":
            info.type = tarfile.DIRTYPE
            mark = [tarfile.TarInfo(f"{path}/.wh..wh..opq" if path else ".wh..wh..opq")] if node.opaque else []
            return [info, *mark]
        case "symlink":
            info.type, info.linkname = tarfile.SYMTYPE, node.target
        case "fifo":
            info.type = tarfile.FIFOTYPE
        case "file":
            status = place.lstat()
            key = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and key in twins:
                info.type, info.linkname = tarfile.LNKTYPE, twins[key]
            else:
                twins[key] = path
                info.size = node.size
    return [info]
