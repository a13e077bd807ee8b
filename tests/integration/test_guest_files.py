"""The agent's files, ports and watches, for real; as the asking user, within bounds."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.integration.guests import ME, Guest, gone, guest
from tests.waiting import PATIENCE_S, until

from venusrl.sandboxes.agent.api import AgentError, Change, Settings

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Guest]:
    async with guest(tmp_path) as made:
        yield made


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(inside: Guest, path: Path | str, user: str = ME) -> bytes:
    return b"".join([piece async for piece in inside.client.read(str(path), user)])


async def test_a_file_goes_in_and_comes_out(inside: Guest, tmp_path: Path) -> None:
    where, body = tmp_path / "new" / "deep" / "file", os.urandom(1_000_001)
    entry = await inside.client.write(str(where), ME, pieces(body[:10], body[10:]), {"kind": "test", "other": "ä"})
    assert (entry.path, entry.kind, entry.size, entry.mode, entry.owner) == (str(where), "file", 1_000_001, 0o644, ME)
    assert entry.attributes == {"kind": "test", "other": "ä"}
    assert await content(inside, where) == body
    shorter = await inside.client.write(str(where), ME, pieces(b"short"), {"kind": "again"})
    assert (shorter.size, shorter.attributes) == (5, {"kind": "again"})
    assert await inside.client.stat(str(where), ME) == shorter


async def test_an_empty_file_and_names_of_all_kinds(inside: Guest, tmp_path: Path) -> None:
    for name in ("empty", "with space", "ümläut-日本", "new\nline", "-rf"):
        assert (await inside.client.write(str(tmp_path / name), ME, pieces())).size == 0
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff\xfe", os.O_CREAT))
    names = [os.path.basename(entry.path) for entry in await inside.client.list(str(tmp_path), ME)]
    assert set(names) >= {"empty", "with space", "ümläut-日本", "new\nline", "-rf", "��"}


async def test_a_link_shows_where_it_leads(inside: Guest, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "broken").symlink_to("nowhere/at/all")
    link = await inside.client.stat(str(tmp_path / "link"), ME)
    assert (link.kind, link.target) == ("symlink", str(tmp_path / "real"))
    assert (await inside.client.stat(str(tmp_path / "broken"), ME)).target == "nowhere/at/all"
    assert await content(inside, tmp_path / "link") == b"x"


async def test_listing_goes_as_deep_as_asked(inside: Guest, tmp_path: Path) -> None:
    (tmp_path / "d" / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "f").write_text("")

    async def names(depth: int) -> list[str]:
        found = await inside.client.list(str(tmp_path / "d"), ME, depth)
        return [entry.path.removeprefix(f"{tmp_path}/d/") for entry in found]

    assert await names(1) == ["a", "f", "loop"]
    assert await names(2) == ["a", "a/b", "f", "loop"]
    assert await names(9) == ["a", "a/b", "a/b/c", "f", "loop"]


async def test_a_large_listing(inside: Guest, tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:06d}").touch()
    assert len(await inside.client.list(str(tmp_path), ME)) >= 3000


async def test_directories_are_made_moved_and_removed(inside: Guest, tmp_path: Path) -> None:
    made = await inside.client.make_directory(str(tmp_path / "a" / "b"), ME)
    assert made.kind == "directory"
    (tmp_path / "a" / "b" / "f").write_text("here")
    moved = await inside.client.move(str(tmp_path / "a"), str(tmp_path / "x" / "y"), ME)
    assert moved.path == str(tmp_path / "x" / "y")
    assert (tmp_path / "x" / "y" / "b" / "f").read_text() == "here"
    await inside.client.remove(str(tmp_path / "x"), ME)
    assert not (tmp_path / "x").exists()


async def test_a_tree_deeper_than_any_path_is_removed(inside: Guest, tmp_path: Path) -> None:
    name = "d" * 12

    def dig() -> None:
        here = os.open(tmp_path, os.O_RDONLY)
        for _ in range(450):
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)

    await asyncio.to_thread(dig)
    (tmp_path / "outside").write_text("kept")
    (tmp_path / name / "link").symlink_to(tmp_path / "outside")
    await inside.client.remove(str(tmp_path / name), ME)
    assert sorted(os.listdir(tmp_path)) == ["agent.sock", "outside"]


Asked = Callable[[Guest, str], object]


@pytest.mark.parametrize(
    ("asked", "name", "code"),
    [
        (lambda g, p: g.client.stat(p, ME), "none", "not_found"),
        (lambda g, p: g.client.stat(p, "no-such-user"), "none", "unauthenticated"),
        (lambda g, p: g.client.list(p, ME), "none", "not_found"),
        (lambda g, p: g.client.list(p, ME), "file", "invalid_argument"),
        (lambda g, p: g.client.list(p, ME, 0), "dir", "invalid_argument"),
        (lambda g, p: g.client.remove(p, ME), "none", "not_found"),
        (lambda g, p: g.client.remove("/", ME), "", "invalid_argument"),
        (lambda g, p: g.client.make_directory(p, ME), "dir", "already_exists"),
        (lambda g, p: g.client.make_directory(p, ME), "file/below", "invalid_argument"),
        (lambda g, p: g.client.move(p, p + "2", ME), "none", "not_found"),
        (lambda g, p: content(g, p), "none", "not_found"),
        (lambda g, p: content(g, p), "dir", "invalid_argument"),
        (lambda g, p: content(g, p), "fifo", "invalid_argument"),
        (lambda g, p: content(g, p), "loop", "invalid_argument"),
        (lambda g, p: content(g, "/dev/zero"), "", "invalid_argument"),
        (lambda g, p: g.client.write(p, ME, pieces(b"x")), "dir", "invalid_argument"),
        (lambda g, p: g.client.write(p, ME, pieces(b"x")), "fifo", "invalid_argument"),
        (lambda g, p: g.client.write(p, ME, pieces(b"x")), "file/below", "invalid_argument"),
        (lambda g, p: g.client.write("/dev/null", ME, pieces(b"x")), "", "invalid_argument"),
        (lambda g, p: g.client.write(p, ME, pieces(b"x")), "x" * 300, "invalid_argument"),
        (lambda g, p: g.client.write("/proc/self/x", ME, pieces(b"x")), "", "not_found"),
        (lambda g, p: g.client.stat("a\0b", ME), "", "invalid_argument"),
        (lambda g, p: g.client.stat("\ud800", ME), "", "invalid_argument"),
        (lambda g, p: g.client.connect(1), "", "unavailable"),
        (lambda g, p: g.client.connect(0), "", "invalid_argument"),
    ],
)
async def test_what_cannot_be_done_says_why(inside: Guest, tmp_path: Path, asked: Asked, name: str, code: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(AgentError) as raised:
        await asked(inside, str(tmp_path / name))  # type: ignore[misc]
    assert raised.value.code == code


@as_root
async def test_the_users_own_permissions_hold(inside: Guest, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    for asked in (
        content(inside, tmp_path / "secret", "nobody"),
        inside.client.write(str(tmp_path / "new"), "nobody", pieces(b"x")),
        inside.client.remove(str(tmp_path / "secret"), "nobody"),
        inside.client.make_directory(str(tmp_path / "d"), "nobody"),
    ):
        with pytest.raises(AgentError) as raised:
            await asked
        assert raised.value.code == "permission_denied"
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    entry = await inside.client.write(str(tmp_path / "theirs" / "d" / "f"), "nobody", pieces(b"x"))
    assert (entry.owner, entry.group) == ("nobody", "nogroup")


@as_root
async def test_a_full_disk_says_so(inside: Guest, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = await asyncio.create_subprocess_exec("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small)
    assert await mount.wait() == 0
    try:
        with pytest.raises(AgentError) as raised:
            await inside.client.write(str(small / "f"), ME, pieces(*[b"x" * 65536] * 100))
        assert raised.value.code == "resource_exhausted"
        assert (await inside.client.move(str(small / "f"), str(tmp_path / "f"), ME)).size == 1 << 20
    finally:
        assert await (await asyncio.create_subprocess_exec("umount", "--lazy", small)).wait() == 0


async def test_a_reader_that_stops_early_ends_the_work(inside: Guest, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    reading = inside.client.read(str(tmp_path / "huge"), ME)
    got = 0
    async for piece in reading:
        got += len(piece)
        if got > 1_000_000:
            break
    await reading.aclose()  # type: ignore[attr-defined]
    await until(lambda: childless(inside))


async def childless(inside: Guest) -> bool:
    children = await asyncio.to_thread(Path(f"/proc/{inside.pid}/task/{inside.pid}/children").read_text)
    return all([await gone(int(pid)) for pid in children.split()])


async def watched(inside: Guest, path: Path, recursive: bool, seen: list[Change]) -> asyncio.Task[None]:
    ready = asyncio.Event()

    async def collect() -> None:
        async for change in inside.client.watch(str(path), ME, recursive, ready):
            seen.append(change)  # noqa: PERF401 - as they come

    task = asyncio.create_task(collect())
    await asyncio.wait_for(ready.wait(), PATIENCE_S)
    return task


async def test_a_new_file_is_three_changes(inside: Guest, tmp_path: Path) -> None:
    seen: list[Change] = []
    task = await watched(inside, tmp_path, False, seen)
    await inside.client.write(str(tmp_path / "f"), ME, pieces(b"content"))
    (tmp_path / "f").rename(tmp_path / "g")
    (tmp_path / "g").unlink()

    async def all_seen() -> bool:
        return len(seen) >= 6

    await until(all_seen)
    told = [(change.kind, change.name) for change in seen]
    assert told[:3] == [("create", "f"), ("chmod", "f"), ("write", "f")]
    assert told[3:6] == [("rename", "f"), ("create", "g"), ("remove", "g")]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: childless(inside))


async def test_a_recursive_watch_covers_new_directories(inside: Guest, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    seen: list[Change] = []
    task = await watched(inside, tmp_path, True, seen)
    for number in range(20):
        (tmp_path / "old" / f"n{number}" / "deep").mkdir(parents=True)
        (tmp_path / "old" / f"n{number}" / "deep" / "f").write_text("x")

    async def all_seen() -> bool:
        return sum(change.kind == "create" for change in seen) >= 60

    await until(all_seen)
    created = [change.name for change in seen if change.kind == "create"]
    assert sorted(created) == sorted(
        name for n in range(20) for name in (f"old/n{n}", f"old/n{n}/deep", f"old/n{n}/deep/f")
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_watch_ends_with_its_directory_and_refuses_files(inside: Guest, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    seen: list[Change] = []
    task = await watched(inside, tmp_path / "d", False, seen)
    (tmp_path / "d").rmdir()
    await asyncio.wait_for(task, PATIENCE_S)
    (tmp_path / "f").write_text("")
    with pytest.raises(AgentError) as raised:
        await anext(inside.client.watch(str(tmp_path / "f"), ME))
    assert raised.value.code == "invalid_argument"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_a_port_inside_is_reached_both_ways(inside: Guest, family: socket.AddressFamily) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b"-end")
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1" if family == socket.AF_INET else "::1", 0)
    stream = await inside.client.connect(server.sockets[0].getsockname()[1])
    body = os.urandom(1_000_000)

    async def send() -> None:
        await stream.write(body)
        await stream.write_eof()

    sending = asyncio.create_task(send())
    got = b""
    while data := await stream.read():
        got += data
    assert got == body + b"-end"
    await sending
    await stream.close()
    server.close()


async def test_usage_and_settings(inside: Guest) -> None:
    usage = await inside.client.usage()
    assert usage.cpus >= 1
    assert 0 < usage.memory_used < usage.memory_total
    assert 0 < usage.disk_used < usage.disk_total
    await inside.client.settle(Settings(sandbox="x", hostname=socket.gethostname(), entropy=os.urandom(64), user=ME))
    assert (await inside.client.stat("/", "")).kind == "directory"
    await inside.client.quiesce()
