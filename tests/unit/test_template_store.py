"""Layers and images by content: kept once, never changed, gone when nobody needs them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from tests.unit.templates import archive, directory, entry, layout, store, without_flushing  # noqa: F401

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.templates import oci
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.errors import BadTemplate, TemplateBusy
from venusrl.sandboxes.templates.store import CacheEntry, Layer, Store
from venusrl.sandboxes.templates.unpack import Bounds

pytestmark = pytest.mark.usefixtures("without_flushing")
BOUNDS = Bounds(bytes=1 << 20, entries=100)


def add(kept: Store, content: str) -> Layer:
    with kept.making(), kept.staging() as scratch:
        (scratch / "made").mkdir()
        (scratch / "made/f").write_text(content)
        os.utime(scratch / "made/f", ns=(0, 0))
        return kept.add(scratch / "made")


def image(kept: Store, *layers: Layer, name: str = "t") -> Image:
    with kept.making():
        return kept.put_image(Image(id="", name=name, layers=tuple(layer.path for layer in layers)))


def test_the_same_content_is_kept_once(tmp_path: Path) -> None:
    kept = store(tmp_path)
    first, again, other = add(kept, "x"), add(kept, "x"), add(kept, "y")
    assert first == again
    assert other.digest != first.digest
    assert [layer.digest for layer in kept.layers()] == sorted([first.digest, other.digest])
    assert list((kept.root / "work").iterdir()) == []
    assert kept.damaged() == []
    (Path(first.path) / "f").write_text("changed")
    assert kept.damaged() == [first.digest]


def test_an_image_is_its_content_not_its_name(tmp_path: Path) -> None:
    kept = store(tmp_path)
    layer = add(kept, "x")
    assert image(kept, layer, name="a").id == image(kept, layer, name="b").id
    assert image(kept, layer, add(kept, "y")).id != image(kept, layer).id
    with pytest.raises(TemplateNotFound):
        kept.image("img-none")


def test_what_is_needed_is_not_collected(tmp_path: Path) -> None:
    kept = store(tmp_path)
    layers = [add(kept, text) for text in "abcd"]
    named, used, unused = image(kept, layers[0]), image(kept, layers[0], layers[1]), image(kept, layers[2])
    with kept.making():
        kept.remember("key", CacheEntry((layers[3].digest,)))
    done = kept.collect([named.id, used.id], cache_age_s=1000)
    assert (done.layers, done.images, done.kept_layers) == (1, (unused.id,), 3)
    done = kept.collect([named.id], cache_age_s=-1)
    assert [layer.digest for layer in kept.layers()] == [layers[0].digest]
    assert kept.recall("key") is None


def test_nothing_is_collected_while_something_is_made(tmp_path: Path) -> None:
    kept = store(tmp_path)
    layer = add(kept, "x")
    with Store(kept.root).making(), pytest.raises(TemplateBusy):
        kept.collect([], cache_age_s=-1)
    assert Path(layer.path).exists()


def test_what_a_crash_left_is_removed_what_is_being_made_not(tmp_path: Path) -> None:
    kept = store(tmp_path)
    left = kept.root / "work" / "left"
    (left / "closed").mkdir(parents=True, mode=0)
    with kept.staging() as busy:
        Store(kept.root).prepare()
        assert busy.exists()
    assert not left.exists()


def test_an_image_layout_is_read_and_its_layers_shared(tmp_path: Path) -> None:
    kept = store(tmp_path)
    base, top = archive(directory("etc"), entry("etc/f", b"1")), archive(entry("etc/.wh.f", b""))
    one = layout(tmp_path / "one", [base, top], Env=["A=1", "B=x=y"], WorkingDir="/app")
    two = layout(tmp_path / "two", [base], packed=[gzip.compress(base)])
    with kept.making(), kept.staging() as scratch:
        (scratch / "1").mkdir()
        (scratch / "2").mkdir()
        first = oci.read(kept, one, scratch / "1", BOUNDS)
        second = oci.read(kept, two, scratch / "2", BOUNDS)
    assert first.layers[:1] == second.layers
    assert (first.env, first.workdir) == ({"A": "1", "B": "x=y"}, "/app")
    assert len(kept.layers()) == 2


def read(tmp_path: Path, folder: Path) -> None:
    kept = store(tmp_path)
    with kept.making(), kept.staging() as scratch:
        oci.read(kept, folder, scratch, BOUNDS)


def test_a_blob_that_is_not_its_digest_is_refused(tmp_path: Path) -> None:
    content = archive(entry("f", b"unique-1"))
    folder = layout(tmp_path / "i", [content])
    for blob in (folder / "blobs/sha256").iterdir():
        if blob.read_bytes() == content:
            blob.write_bytes(content.replace(b"unique-1", b"unique-2"))
    with pytest.raises(BadTemplate, match="digest"):
        read(tmp_path, folder)
    assert store(tmp_path).layers() == []


def test_a_layer_that_is_not_the_configurations_is_refused(tmp_path: Path) -> None:
    folder = layout(tmp_path / "i", [archive(entry("f", b"1"))], packed=[archive(entry("f", b"2"))])
    with pytest.raises(BadTemplate, match="not the image's"):
        read(tmp_path, folder)


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "sha256:../../../etc/passwd"},
        {"digest": "sha256:" + "0" * 64},
        {"size": 1},
    ],
    ids=str,
)
def test_descriptors_that_lie_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    folder = layout(tmp_path / "i", [archive(entry("f", b"1"))])
    index = json.loads((folder / "index.json").read_text())
    index["manifests"][0] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadTemplate):
        read(tmp_path, folder)


@pytest.mark.parametrize("name", ["dir:/etc", "docker-archive:/x", "../x", "a b", "-x", "http://h/x", "x@sha256:1", ""])
def test_only_images_of_registries_are_pulled(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadTemplate, match="not the name"):
        oci.pull(store(tmp_path), name, tmp_path, BOUNDS)
