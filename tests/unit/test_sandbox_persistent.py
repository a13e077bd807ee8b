"""The parts of the persistent namespace runtime that need no sandbox: kept files, rules, pages, accounting."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.local import assemble
from venusrl.sandboxes.protocol import HostDiskFull, Limits, RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.base import Footprint, Network
from venusrl.sandboxes.runtimes.namespace import archive, egress, merging, orders, pageout, pages, userns, wire
from venusrl.sandboxes.runtimes.namespace.blanks import Blanks
from venusrl.sandboxes.runtimes.namespace.egress import Egress, Link

NAMES = st.sampled_from(["a", "b", "ü", "x y", "c.work", "-d"])
CONTENT = st.one_of(st.binary(max_size=64), st.just(b"\0" * 9000 + b"end"), st.none())
"""A file's, None for a directory."""
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map(tuple), CONTENT, max_size=6)


def plant(root: Path, tree: dict[tuple[str, ...], bytes | None]) -> None:
    for parts, content in tree.items():
        path = root.joinpath(*parts)
        if any(parent.is_file() for parent in path.parents) or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
            path.chmod(0o640)
            os.utime(path, ns=(1_000_000_007, 1_000_000_007))


def seen(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        if path.relative_to(root).parts[0].endswith(".work"):
            continue
        attributes = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        times = attributes.st_mtime_ns
        found[str(path.relative_to(root))] = (content, stat.S_IMODE(attributes.st_mode), times, attributes.st_nlink)
    return found


def empty(place: Path) -> Path:
    (place / orders.UPPER).mkdir(parents=True)
    return place


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES)
def test_kept_files_come_back_as_they_were(
    tree: dict[tuple[str, ...], bytes | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("kept")
    source, target = empty(place / "source"), empty(place / "target")
    plant(source / orders.UPPER, tree)
    (source / orders.UPPER / "link").symlink_to("/etc/shadow")
    (source / orders.UPPER / "file").write_bytes(b"x")
    os.link(source / orders.UPPER / "file", source / orders.UPPER / "twin")
    archive.pack(source, place / "kept", os.getuid())
    archive.unpack(place / "kept", target, os.getuid())
    assert seen(target / orders.UPPER) == seen(source / orders.UPPER)


def test_holes_stay_holes(tmp_path: Path) -> None:
    source, target = empty(tmp_path / "source"), empty(tmp_path / "target")
    with (source / orders.UPPER / "sparse").open("wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
    size = archive.pack(source, tmp_path / "kept", os.getuid())
    assert size < 4096
    archive.unpack(tmp_path / "kept", target, os.getuid())
    copy = target / orders.UPPER / "sparse"
    assert copy.stat().st_size == (64 << 20) + 3
    assert copy.stat().st_blocks < 1024


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    source = empty(tmp_path / "source")
    for name in ("a", "b", "c"):
        (source / orders.UPPER / name).write_bytes(os.urandom(3000))
    archive.pack(source, tmp_path / "kept", os.getuid())
    whole = (tmp_path / "kept").read_bytes()
    for turn, cut in enumerate((0, 1, 9, len(whole) // 2, len(whole) - 4)):
        (tmp_path / "cut").write_bytes(whole[:cut])
        with pytest.raises(SandboxError):
            archive.unpack(tmp_path / "cut", empty(tmp_path / f"target{turn}"), os.getuid())
    with pytest.raises(SandboxError):
        archive.unpack(tmp_path / "none", empty(tmp_path / "target"), os.getuid())


def forged(place: Path, *entries: archive.Entry | archive.Piece) -> Path:
    out = b""
    for entry in (*entries, archive.End()):
        body = archive._encoder.encode(entry)
        out += len(body).to_bytes(4, "big") + body
    place.write_bytes(zstandard.compress(out))
    return place


def test_a_forged_archive_writes_nothing_outside(tmp_path: Path) -> None:
    regular, link, folder = stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777, stat.S_IFDIR | 0o755
    outside = tmp_path / "outside"
    outside.mkdir()
    evil = archive.Piece(0, b"evil")
    through = archive.Entry(b"link", link, 0, 0, 0, target=os.fsencode(outside))
    attempts: list[tuple[archive.Entry | archive.Piece, ...]] = [
        (archive.Entry(b"../evil", regular, 0, 0, 0), evil),
        (archive.Entry(os.fsencode(outside / "evil"), regular, 0, 0, 0), evil),
        (through, archive.Entry(b"link/evil", regular, 0, 0, 0), evil),
        (through, archive.Entry(b"link", regular, 0, 0, 0), evil),
        (archive.Entry(b"a", folder, 0, 0, 0), archive.Entry(b"a/../../evil", regular, 0, 0, 0), evil),
        (archive.Entry(b"disk", stat.S_IFCHR | 0o666, 0, 0, 0, device=os.makedev(1, 1)),),
        (evil,),
    ]
    for turn, attempt in enumerate(attempts):
        target = empty(tmp_path / f"target{turn}")
        with pytest.raises(SandboxError):
            archive.unpack(forged(tmp_path / "forged", *attempt), target, os.getuid())
        assert list(outside.iterdir()) == []
        assert not (tmp_path / "evil").exists()
        assert not (target / "evil").exists()


def test_rules_judge_the_machines_own_addresses_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "resolvers", lambda: ["192.0.2.53"])
    way = Egress(tmp_path)
    link = Link(3, "vs_3")
    open_rules = way._rules(link, Network(internet=True), ["10.1.0.0/16"], ["203.0.113.7/32"]).splitlines()
    order = ["ip saddr != 198.18.0.7 drop", "@never drop", "type local drop", "dport 53 accept", "10.1.0.0/16 accept"]
    order += ["203.0.113.7/32 drop", "@private drop", "vs_3 accept"]
    places = [next(n for n, line in enumerate(open_rules) if line.endswith(end)) for end in order]
    assert places == sorted(places)
    closed = way._rules(link, Network(), [], [])
    assert "accept" not in closed
    assert closed.splitlines()[-2].endswith("vs_3 drop")


async def test_names_that_are_no_names_never_reach_the_rules(tmp_path: Path) -> None:
    for name in ("a; accept", "1.2.3.4/33", "x\ny", "", "-x", "{ 1.1.1.1 }", "a" * 300):
        with pytest.raises(SandboxError):
            await egress._resolve((name,))
    assert await egress._resolve(("10.1.2.3/8", "10.0.0.0/8", "2001:db8::/32", "192.0.2.1")) == [
        "10.0.0.0/8",
        "192.0.2.1/32",
    ]
    (tmp_path / "resolv.conf").write_text(
        "nameserver 127.0.0.53\nnameserver 192.0.2.53\nnameserver ::1\n# nameserver 9"
    )
    assert egress.resolvers([str(tmp_path / "none"), str(tmp_path / "resolv.conf")]) == ["192.0.2.53"]


def test_swap_counts_as_it_is_kept(tmp_path: Path) -> None:
    held = Footprint(private=1, swap=1000)
    assert pageout.with_compressed_swap(held, tmp_path) == held
    (tmp_path / "zram0").mkdir()
    (tmp_path / "zram0/mm_stat").write_text("4000 900 1000 0 0 0 0 0 0\n")
    assert pageout.with_compressed_swap(held, tmp_path) == Footprint(private=1, swap=250)


def test_only_writable_private_ranges_are_paged_out() -> None:
    maps = (
        "00400000-00401000 r-xp 00000000 fe:00 1 /bin/x\n"
        "00500000-00503000 rw-p 00000000 00:00 0 [heap]\n"
        "00600000-00601000 rw-s 00000000 00:01 5 /dev/zero\n"
    )
    assert pageout._private_ranges(maps) == [(0x500000, 0x3000)]


def test_a_process_without_groups_has_a_footprint() -> None:
    assert pageout.footprint_of_tree(os.getpid()).private > 1 << 20
    with pytest.raises(FileNotFoundError):
        pageout.footprint_of_tree(2**22 + 1)


def test_no_more_is_read_beforehand_than_fits() -> None:
    files = [("/l/small.so", 1 << 20), ("/l/huge.so", 1 << 30), ("/l/notes", 1 << 20), ("/l/sh", 1 << 20)]
    assert list(pages.worth_touching((), files)) == ["/l/small.so", "/l/sh"]
    assert list(pages.worth_touching(("/l",), files)) == ["/l/small.so", "/l/notes", "/l/sh"]


def test_ids_of_adopted_sandboxes_are_taken() -> None:
    pool = userns.IdPool(range(100, 400, 100), 100)
    assert pool.claim(100) == pool.first()
    assert pool.take().base == 200
    pool.give_back(pool.slot(100))
    assert pool.take().base == 100


def test_orders_cross_whole() -> None:
    order = orders.Make(1, "a", ("/x",), Limits(), 5, 6, "user", None)
    frame = wire.encode(order)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert orders.decode_order(frame[4:]) == order
    assert orders.decode_answer(wire.encode(orders.Made(1, 7))[4:]) == orders.Made(1, 7)


def test_what_keeps_memory_from_being_merged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "Linux 6.7" in (merging.why_not(run, "6.8.0-cloud") or "")
    run.write_text("0\n")
    assert "echo 1 >" in (merging.why_not(run, "6.8.0-cloud") or "")
    run.write_text("1\n")
    assert merging.why_not(run, "6.8.0-cloud") is None
    assert "Linux 6.7" in (merging.why_not(run, "6.1.0-57-cloud-amd64") or "")


def test_disks_in_files_name_what_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeUnavailable, match="start as root, or say --disk memory"):
        Blanks(tmp_path / "disks").start()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(RuntimeUnavailable, match="install e2fsprogs"):
        Blanks(tmp_path / "disks").start()
    monkeypatch.undo()


async def test_a_blank_that_could_not_be_filled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostDiskFull, match="less room"):
        await Blanks(tmp_path).blank(1 << 40)


async def test_only_namespaces_have_disks_to_choose(tmp_path: Path) -> None:
    with pytest.raises(ManagerError, match="--disk file is for the namespace runtime"):
        await assemble(tmp_path, ("gvisor",), disk="file")
