"""Archives become layers, safely; stacks of layers show what overlayfs would."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.templates import Member, archive, directory, entry, symlink

from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.unpack import Bounds, decompressed, unpack

SMALL = Bounds(bytes=1 << 20, entries=100)


def unpacked(root: Path, content: bytes, bounds: Bounds = SMALL) -> Path:
    root.mkdir(parents=True)
    unpack(decompressed(io.BytesIO(content), content[:4]), root, bounds, "the layer")
    return root


def test_files_links_modes_and_times_arrive(tmp_path: Path) -> None:
    root = unpacked(
        tmp_path / "r",
        archive(
            directory("a", mode=0o750),
            entry("a/f", b"content", mode=0o4755, mtime=1000, uid=0, gid=0),
            entry("a/g", kind=tarfile.LNKTYPE, linkname="a/f"),
            symlink("l", "/etc/passwd"),
        ),
    )
    assert (root / "a/f").read_bytes() == b"content"
    assert stat.S_IMODE((root / "a/f").stat().st_mode) == 0o4755
    assert (root / "a/f").stat().st_mtime == 1000
    assert (root / "a/g").stat().st_ino == (root / "a/f").stat().st_ino
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o750
    assert os.readlink(root / "l") == "/etc/passwd"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away: run as root")
def test_owners_are_kept(tmp_path: Path) -> None:
    root = unpacked(tmp_path / "r", archive(entry("f", b"", uid=1000, gid=33)))
    assert ((root / "f").stat().st_uid, (root / "f").stat().st_gid) == (1000, 33)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, lambda data: data])
def test_compressions_are_told_apart(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    assert (unpacked(tmp_path / "r", pack(archive(entry("f", b"x")))) / "f").read_bytes() == b"x"


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../f", b"x")],
        [entry("a/../../f", b"x")],
        [entry("a", kind=tarfile.LNKTYPE, linkname="../../etc/passwd")],
        [entry("a", kind=tarfile.LNKTYPE, linkname="missing")],
        [entry("sda", kind=tarfile.BLKTYPE, devmajor=8)],
        [entry("null", kind=tarfile.CHRTYPE)],
        [entry(".wh...", b"")],
        [entry("big", b"x" * ((1 << 20) + 1))],
        [entry(f"f{n}", b"") for n in range(101)],
        [entry("f", b"", uid=1 << 20)],
    ],
    ids=lambda entries: entries[0].name,
)
def test_what_is_refused(tmp_path: Path, entries: list[Member]) -> None:
    with pytest.raises(BadTemplate):
        unpacked(tmp_path / "in/r", archive(*entries))
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["r"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_links_on_the_way_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    content = archive(
        symlink("up", "../outside"), entry("up/f", b"x"), symlink("abs", str(tmp_path)), entry("abs/g", b"")
    )
    root = unpacked(tmp_path / "r", content)
    assert list((tmp_path / "outside").iterdir()) == []
    assert not (tmp_path / "g").exists()
    assert (root / "up/f").read_bytes() == b"x"  # the link led nowhere inside: the later entry won


def test_a_bomb_is_stopped_while_it_unpacks(tmp_path: Path) -> None:
    bomb = gzip.compress(archive(entry("zeros", bytes(8 << 20))))
    assert len(bomb) < 1 << 16
    with pytest.raises(BadTemplate, match="more than"):
        unpacked(tmp_path / "r", bomb)


def test_a_header_without_end_is_stopped(tmp_path: Path) -> None:
    endless = entry("f", b"")
    endless.pax_headers = {"comment": "x" * (3 << 20)}
    with pytest.raises(BadTemplate, match="header"):
        unpacked(tmp_path / "r", archive(endless), Bounds(bytes=64 << 20))


@pytest.mark.parametrize("cut", [700, 1100])
def test_damaged_archives_say_so(tmp_path: Path, cut: int) -> None:
    with pytest.raises(BadTemplate, match=r"damaged|ends within"):
        unpacked(tmp_path / "r", archive(entry("f", b"x" * 600), entry("g", b"y" * 600))[:cut])


def test_whiteouts_become_overlays(tmp_path: Path) -> None:
    root = unpacked(
        tmp_path / "r",
        archive(
            directory("d"), entry("d/.wh..wh..opq", b""), entry("e/.wh.gone", b""), entry(".wh.f", b""), entry("f", b"")
        ),
    )
    assert tree.read_node(root / "d").opaque
    assert tree.read_node(root / "e/gone").kind == "whiteout"
    assert tree.read_node(root / "f").kind == "file"


def test_the_digest_tells_trees_apart_and_copies_not(tmp_path: Path) -> None:
    def digest(name: str, *entries: Member) -> str:
        return tree.measure(unpacked(tmp_path / name, archive(*entries))).digest

    first = digest("a", directory("d"), entry("d/f", b"x"))
    assert first == digest("b", entry("d/f", b"x"))
    others = [
        digest("c", entry("d/f", b"y")),
        digest("d", entry("d/g", b"x")),
        digest("e", entry("d/f", b"x", mode=0o600)),
        digest("f", entry("d/f", b"x", mtime=5)),
        digest("g", entry("d/f", b"x"), entry("d/.wh..wh..opq", b"")),
        digest("h", symlink("d/f", "x")),
        digest("i", entry("d/f", b"x", pax_headers={"SCHILY.xattr.user.a": "b"})),
    ]
    assert len({first, *others}) == 8


def test_attributes_that_mean_something_to_overlayfs_are_dropped(tmp_path: Path) -> None:
    headers = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.trusted.overlay.redirect": "/etc"}
    root = unpacked(tmp_path / "r", archive(entry("f", b"", pax_headers=headers)))
    assert os.listxattr(root / "f") == []


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["file", "directory", "link", "remove"]), PATHS, st.binary(max_size=3)), max_size=6
)
Model = dict[str, tuple[str, bytes]]


def made(kind: str, path: str, content: bytes) -> Member:
    if kind == "directory":
        return directory(path)
    return entry(path, content) if kind == "file" else symlink(path, content.decode())


def apply(model: Model, changes: list[tuple[str, str, bytes]]) -> tuple[Model, bytes]:
    """What the changes make of the model, and the layer that records the difference."""
    new = dict(model)
    for kind, path, content in changes:
        parents = ["/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 1)]
        if kind == "remove" or new.get(path, (kind, b""))[0] != kind:
            new = {k: v for k, v in new.items() if k != path and not k.startswith(f"{path}/")}
        if kind == "remove" or any(new.get(p, ("directory", b""))[0] != "directory" for p in parents):
            continue
        for parent in parents:
            new.setdefault(parent, ("directory", b""))
        new[path] = (kind, b"" if kind == "directory" else content.hex().encode() or b"-")
    entries = []
    for path in sorted(set(model) | set(new)):
        folder, _, name = path.rpartition("/")
        if path not in new:
            if not folder or new.get(folder, ("", b""))[0] == "directory":
                entries.append(entry(f"{folder}/.wh.{name}" if folder else f".wh.{name}", b""))
        elif model.get(path) != new[path]:
            kind, content = new[path]
            if kind == "directory" and path in model:
                entries.append(entry(f"{folder}/.wh.{name}" if folder else f".wh.{name}", b""))
            entries.append(made(kind, path, content))
    return new, archive(*entries)


def shown(layers: list[Path]) -> Model:
    found: Model = {}
    for path, item in tree.Merged(layers).walk():
        if not path:
            continue
        kind = {"symlink": "link"}.get(item.node.kind, item.node.kind)
        content = item.path.read_bytes() if kind == "file" else item.node.target.encode()
        found[path] = (kind, content)
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stack=st.lists(CHANGES, min_size=1, max_size=4))
def test_any_stack_of_layers_shows_what_was_done(
    tmp_path_factory: pytest.TempPathFactory, stack: list[list[tuple[str, str, bytes]]]
) -> None:
    root = tmp_path_factory.mktemp("stack")
    model: Model = {}
    layers: list[Path] = []
    for number, changes in enumerate(stack):
        model, content = apply(model, changes)
        layers.append(unpacked(root / str(number), content))
    assert shown(layers) == model
    merged = tree.Merged(layers)
    for path, (kind, _) in model.items():
        found = merged.find(path)
        assert found is not None
        assert found.node.kind == {"link": "symlink"}.get(kind, kind)


def test_links_of_the_merged_view_are_followed_inside(tmp_path: Path) -> None:
    lower = unpacked(
        tmp_path / "a", archive(symlink("bin", "usr/bin"), entry("usr/bin/sh", b"shell"), symlink("x", "/x"))
    )
    upper = unpacked(tmp_path / "b", archive(symlink("usr/bin/bash", "../../../../bin/sh")))
    merged = tree.Merged([lower, upper])
    assert merged.resolve("bin/bash") == "usr/bin/sh"
    assert merged.read("bin/bash") == b"shell"
    with pytest.raises(BadTemplate, match="too many links"):
        merged.resolve("x")
