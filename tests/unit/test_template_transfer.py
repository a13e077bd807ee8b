"""A layer that travels arrives as it was, or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from tests.unit.templates import without_flushing  # noqa: F401

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.templates import transfer, tree
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.store import Layer, Store
from venusrl.sandboxes.templates.unpack import Bounds

pytestmark = pytest.mark.usefixtures("without_flushing")


def store(root: Path) -> Store:
    made = Store(root)
    made.prepare()
    return made


def layer(kept: Store) -> Layer:
    """Everything that a layer can hold."""
    with kept.making(), kept.staging() as scratch:
        root = scratch / "made"
        (root / "d/e").mkdir(parents=True)
        (root / "d/f").write_bytes(b"x" * 5000)
        (root / "d/f").chmod(0o4711)
        os.utime(root / "d/f", ns=(0, 1_700_000_000_123_456_789))
        os.link(root / "d/f", root / "twin")
        (root / "ü\udcff").symlink_to("/nowhere")
        os.mkfifo(root / "pipe", 0o640)
        tree.make_whiteout(root / "d/gone")
        fd = os.open(root / "d/e", os.O_RDONLY)
        tree.mark_opaque(fd)
        os.close(fd)
        os.setxattr(root / "d/f", "user.note", b"n\xff")
        (root / "d").chmod(0o1750)
        return kept.add(root)


def sent(kept: Store, digest: str) -> bytes:
    buffer = io.BytesIO()
    transfer.send(kept, digest, buffer)
    return buffer.getvalue()


def receive(kept: Store, digest: str, content: bytes) -> Layer:
    with kept.making():
        return transfer.receive(kept, digest, io.BytesIO(content), content[:4], Bounds(bytes=1 << 20, entries=100))


def test_a_layer_arrives_as_it_was(tmp_path: Path) -> None:
    here, there = store(tmp_path / "here"), store(tmp_path / "there")
    made = layer(here)
    assert transfer.missing(there, [made.digest]) == [made.digest]
    arrived = receive(there, made.digest, sent(here, made.digest))
    assert arrived.digest == made.digest
    assert transfer.missing(there, [made.digest]) == []
    assert there.damaged() == []
    assert (Path(arrived.path) / "twin").stat().st_nlink == 2


def test_what_is_not_the_layer_is_not_kept(tmp_path: Path) -> None:
    here, there = store(tmp_path / "here"), store(tmp_path / "there")
    content = sent(here, layer(here).digest)
    for digest, received in (("0" * 64, content), (layer(here).digest, content[: len(content) // 2])):
        with pytest.raises(BadTemplate):
            receive(there, digest, received)
    assert there.layers() == []
    assert list((there.root / "work").iterdir()) == []


def test_an_image_keeps_its_id_on_another_host(tmp_path: Path) -> None:
    here, there = store(tmp_path / "here"), store(tmp_path / "there")
    made = layer(here)
    with here.making():
        image = here.put_image(Image(id="", name="t", layers=(made.path,), env={"A": "1"}))
    bare, digests = transfer.describe(here, image)
    with there.making(), pytest.raises(TemplateNotFound):
        transfer.place(there, bare, digests)
    receive(there, made.digest, sent(here, made.digest))
    with there.making():
        placed = transfer.place(there, bare, digests)
        assert placed.id == image.id
        assert placed.layers != image.layers
        with pytest.raises(BadTemplate, match="not what its layers say"):
            transfer.place(there, Image(id=image.id, name="t", env={"A": "2"}), digests)
