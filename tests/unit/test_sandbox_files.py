"""Files of a sandbox read and written from outside: nothing leads out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from venusrl.sandboxes.protocol import BadPath, SandboxError
from venusrl.sandboxes.runtimes.namespace import files

ME = os.getuid()


class Root:
    """A directory that plays a sandbox's root, beside a secret."""

    def __init__(self, base: Path) -> None:
        self.path = base / "root"
        (self.path / "work").mkdir(parents=True)
        self.secret = base / "secret"
        self.secret.write_text("secret")
        self.fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY)

    def write(self, path: str, content: bytes) -> None:
        files.write(self.fd, files.normal(path, ("work", "tmp")), content, ME)

    def read(self, path: str, limit: int = 1000) -> bytes:
        return files.read(self.fd, files.normal(path, None), limit)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    made = Root(tmp_path)
    yield made
    os.close(made.fd)


def test_written_files_come_back_and_parents_are_made(root: Root) -> None:
    root.write("a/b/c.txt", b"one")
    root.write("/work/a/b/c.txt", b"2")
    assert root.read("a/b/../b/c.txt") == b"2"
    assert (root.path / "work/a/b/c.txt").read_bytes() == b"2"


def test_missing_files_and_folders(root: Root) -> None:
    for path in ("none", "no/where", "/work/none"):
        with pytest.raises(FileNotFoundError):
            root.read(path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/x", "/workaround", "/", ""])
def test_writes_stay_in_what_is_writable(root: Root, path: str) -> None:
    with pytest.raises(BadPath):
        root.write(path, b"x")


def test_a_nul_is_no_path(root: Root) -> None:
    with pytest.raises(BadPath):
        root.write("a\0b", b"x")


def test_dots_cannot_climb_out(root: Root) -> None:
    with pytest.raises(FileNotFoundError):
        root.read("../../../../../../secret")


def test_links_resolve_as_they_do_inside(root: Root) -> None:
    work = root.path / "work"
    (work / "absolute").symlink_to(root.secret)
    (work / "relative").symlink_to("../../secret")
    (work / "up").symlink_to("../..")
    (root.path / "tmp").mkdir()
    (work / "inner").symlink_to("/tmp")
    for path in ("absolute", "relative", "up/secret"):
        with pytest.raises(FileNotFoundError):
            root.read(path)
    with pytest.raises((BadPath, FileNotFoundError)):
        root.write("absolute", b"overwritten")
    root.write("relative", b"inside")
    root.write("up/secret", b"inside")
    root.write("inner/x", b"in tmp")
    assert root.secret.read_text() == "secret"
    assert (root.path / "tmp/x").read_bytes() == b"in tmp"


def test_magic_links_and_loops_are_refused(root: Root) -> None:
    (root.path / "work/loop").symlink_to("loop")
    with pytest.raises(BadPath):
        root.read("loop")
    (root.path / "work/fd").symlink_to(f"/proc/self/fd/{root.fd}")
    with pytest.raises((BadPath, FileNotFoundError)):
        root.read("fd/../secret")


def test_only_regular_files(root: Root) -> None:
    os.mkfifo(root.path / "work/fifo")
    (root.path / "work/folder").mkdir()
    for path in ("fifo", "folder"):
        with pytest.raises(BadPath):
            root.read(path)
        with pytest.raises(BadPath):
            root.write(path, b"x")


def test_a_file_in_the_way_of_a_folder(root: Root) -> None:
    root.write("a", b"file")
    with pytest.raises(BadPath):
        root.write("a/b", b"x")
    with pytest.raises(BadPath):
        root.read("a/b")


def test_large_files_are_refused_whole(root: Root) -> None:
    root.write("big", b"x" * 1001)
    with pytest.raises(SandboxError, match="1000"):
        root.read("big")
    root.write("big", b"x" * 1000)
    assert len(root.read("big")) == 1000


def test_a_mount_point_cannot_be_a_link(root: Root, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root.path / "tests").symlink_to(elsewhere)
    files.make_mount_point(root.fd, "tests/unit", directory=True)
    assert not (root.path / "tests").is_symlink()
    assert (root.path / "tests/unit").is_dir()
    assert list(elsewhere.iterdir()) == []
    (root.path / "one").symlink_to(root.secret)
    files.make_mount_point(root.fd, "one", directory=False)
    assert (root.path / "one").read_bytes() == b""
    with pytest.raises(BadPath, match="directory"):
        files.make_mount_point(root.fd, "tests", directory=False)
