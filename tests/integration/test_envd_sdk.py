"""The official E2B SDK against our service with real sandboxes: commands, terminals, files, watches, ports."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import h2.connection
import h2.events
import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    FilesystemEvent,
    FilesystemEventType,
    NotEnoughSpaceException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)
from tests.integration.env_server import DOMAIN, connection, served
from tests.waiting import PATIENCE_S, wait_until

from venusrl.sandboxes.manager.serve import Server

INSIDE = Path(__file__).with_name("env_inside.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("service") / "state") as running:
        yield running


@pytest.fixture
def sandbox(server: Server) -> Iterator[Sandbox]:
    made = Sandbox.create("base", timeout=600, **connection(server))
    yield made
    made.kill()


@pytest.fixture
async def async_sandbox(server: Server) -> AsyncIterator[AsyncSandbox]:
    made = await AsyncSandbox.create("base", timeout=600, **connection(server))
    yield made
    await made.kill()


def test_commands(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo out; echo err >&2; pwd", envs={"A": "b"})
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n/home/user\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("exit 7")
    assert failed.value.exit_code == 7
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 30", timeout=0.5)
    # The SDK's own clock may be first: the service's, which ends the process, follows at once.
    gone = "for n in $(seq 500); do pgrep -f '[s]leep 30' > /dev/null || exit 0; sleep 0.1; done; ps -ef; exit 1"
    assert sandbox.commands.run(gone, timeout=0).exit_code == 0
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"


def test_background_commands_and_their_input(sandbox: Sandbox) -> None:
    cat = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(cat.pid, "one ")
    sandbox.commands.stream_input(cat.pid, ["two ", b"three"])
    assert cat.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.close_stdin(cat.pid)
    assert cat.wait().stdout == "one two three"
    sleeper = sandbox.commands.run("sleep 100", background=True)
    sleeper.disconnect()
    again = sandbox.commands.connect(sleeper.pid)
    assert sandbox.commands.kill(sleeper.pid)
    with pytest.raises(CommandExitException):
        again.wait()
    assert not sandbox.commands.kill(sleeper.pid)


def test_much_output_arrives_whole(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("seq 200000")
    assert done.stdout.splitlines() == [str(number) for number in range(1, 200001)]


def test_a_terminal(sandbox: Sandbox) -> None:
    seen: list[bytes] = []
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24), envs={"X": "marked"})
    sandbox.pty.resize(terminal.pid, PtySize(cols=101, rows=24))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo $X; tty; exit\n")
    terminal.wait(on_pty=seen.append)
    said = b"".join(seen).decode()
    assert "24 101" in said
    assert "\nmarked" in said.replace("\r", "")
    assert "/dev/pts/" in said


def test_files(sandbox: Sandbox) -> None:
    files = sandbox.files
    assert files.write("a/b.txt", "hello", metadata={"author": "me"}).path == "/home/user/a/b.txt"
    data = bytes(range(256)) * 5000
    files.write("a/big", data, gzip=True)
    assert files.read("a/big", format="bytes", gzip=True) == data
    assert files.read("a/b.txt") == "hello"
    info = files.get_info("a/b.txt")
    assert (info.size, info.permissions, info.owner, info.metadata) == (5, "-rw-r--r--", "user", {"author": "me"})
    assert [entry.name for entry in files.list("a")] == ["b.txt", "big"]
    assert files.rename("a/b.txt", "c/d.txt").path == "/home/user/c/d.txt"
    assert not files.exists("a/b.txt")
    assert files.make_dir("a") is False
    files.remove("a")
    with pytest.raises(FileNotFoundException):
        files.read("a/big")
    written = files.write_files([{"path": f"many/{number}", "data": str(number)} for number in range(20)])
    assert len(written) == 20


def test_paths_lead_nowhere_outside(sandbox: Sandbox) -> None:
    marker = Path("/etc/hostname").read_text()
    sandbox.commands.run("ln -s /proc/1/root/etc/hostname trick; ln -s ../../../../../../etc/hostname up")
    for path in ("trick", "up", "/proc/1/root/etc/hostname", "../../../../etc/hostname"):
        try:
            assert sandbox.files.read(path) != marker
        except SandboxException:
            continue
    with pytest.raises(SandboxException):
        sandbox.files.read("/proc/1/environ")
    with pytest.raises(SandboxException):
        sandbox.files.write("/proc/sys/kernel/core_pattern", "|/tmp/x", user="root")
    sandbox.commands.run("mkfifo pipe")
    with pytest.raises(SandboxException):
        sandbox.files.read("pipe")


def test_each_has_a_boot_id_that_lasts_as_long_as_its_memory(sandbox: Sandbox) -> None:
    def boot_id() -> str:
        return sandbox.files.read("/proc/sys/kernel/random/boot_id")

    first = boot_id()
    assert first != Path("/proc/sys/kernel/random/boot_id").read_text()
    sandbox.pause()
    sandbox.connect()
    assert boot_id() == first
    sandbox.pause(keep_memory=False)
    sandbox.connect()
    assert boot_id() != first


def test_watches(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("watched/deep")
    watch = sandbox.files.watch_dir("watched", recursive=True, include_entry=True)
    sandbox.files.write("watched/deep/file", "x")
    events: list[FilesystemEvent] = []

    def written() -> bool:
        events.extend(watch.get_new_events())
        return any(event.type == FilesystemEventType.WRITE for event in events)

    wait_until(written, "the write's event")
    assert [(event.type, event.name) for event in events] == [
        (FilesystemEventType.CREATE, "deep/file"),
        (FilesystemEventType.CHMOD, "deep/file"),
        (FilesystemEventType.WRITE, "deep/file"),
    ]
    assert events[-1].entry is not None
    assert events[-1].entry.path == "/home/user/watched/deep/file"
    watch.stop()


def test_signed_urls(sandbox: Sandbox) -> None:
    sandbox.files.write("signed", "content")
    with urllib.request.urlopen(sandbox.download_url("signed", "user", 60)) as answer:
        assert answer.read() == b"content"
    upload = urllib.request.Request(sandbox.upload_url("put", "user"), data=b"new", method="POST")
    upload.add_header("Content-Type", "application/octet-stream")
    with urllib.request.urlopen(upload) as answer:
        assert json.load(answer)[0]["path"] == "/home/user/put"
    assert sandbox.files.read("put") == "new"
    for forged in (
        sandbox.download_url("signed", "user", -5),
        sandbox.download_url("signed", "user").replace("path=signed", "path=put"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(forged)
        assert refused.value.code == 401


def test_an_upload_that_does_not_fit(sandbox: Sandbox) -> None:
    sandbox.commands.run("head -c 420M /dev/zero > /tmp/most")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("bomb", bytes(100 << 20), gzip=True)
    # The service runs in this process: what it took in went out again piece by piece.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    sandbox.files.remove("/tmp/most")
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_a_sandbox_killed_in_the_middle(server: Server) -> None:
    made = Sandbox.create("base", timeout=600, **connection(server))
    running = made.commands.run("sleep 60", background=True)
    threading.Timer(0.3, made.kill).start()
    with pytest.raises(TimeoutException, match="killed or reached its end of life"):
        running.wait()
    assert not made.is_running()


async def start_inside(sandbox: AsyncSandbox, what: str, port: int) -> None:
    await sandbox.files.write("inside.py", INSIDE.read_text())
    ready = asyncio.Event()
    await sandbox.commands.run(
        f"python3 inside.py {what} {port}", background=True, on_stdout=lambda _: ready.set(), timeout=0
    )
    async with asyncio.timeout(PATIENCE_S):
        await ready.wait()


async def test_async_commands_files_and_watches(async_sandbox: AsyncSandbox) -> None:
    done = await asyncio.gather(*(async_sandbox.commands.run(f"echo {number}") for number in range(8)))
    assert [one.stdout for one in done] == [f"{number}\n" for number in range(8)]
    seen: asyncio.Queue[Any] = asyncio.Queue()
    await async_sandbox.files.make_dir("w")
    watch = await async_sandbox.files.watch_dir("w", on_event=seen.put_nowait)
    await async_sandbox.files.write("w/f", "1")
    async with asyncio.timeout(PATIENCE_S):
        assert (await seen.get()).name == "f"
    await watch.stop()  # type: ignore[no-untyped-call]
    assert await async_sandbox.files.read("w/f") == "1"
    cat = await async_sandbox.commands.run("cat", background=True, stdin=True)
    await cat.send_stdin("x")
    await cat.close_stdin()
    assert (await cat.wait()).stdout == "x"


async def test_websockets_reach_a_port(server: Server, async_sandbox: AsyncSandbox) -> None:
    await start_inside(async_sandbox, "websocket", 8765)
    headers = {"Host": async_sandbox.get_host(8765)}
    async with aiohttp.ClientSession() as http, http.ws_connect(server.sandbox_url, headers=headers) as ws:
        await ws.send_str("hello")
        assert await ws.receive_str() == "HELLO"


async def test_http2_reaches_a_port(server: Server, async_sandbox: AsyncSandbox) -> None:
    await start_inside(async_sandbox, "http2", 8766)
    where = urlsplit(server.sandbox_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    client = h2.connection.H2Connection()
    client.initiate_connection()
    fields = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", async_sandbox.get_host(8766))]
    client.send_headers(1, fields, end_stream=True)
    writer.write(client.data_to_send())
    body = b""
    async with asyncio.timeout(PATIENCE_S):
        while body != b"over http/2":
            for event in client.receive_data(await reader.read(1 << 16)):
                if isinstance(event, h2.events.DataReceived):
                    body += event.data or b""
    writer.close()


async def test_http_reaches_a_port_and_closed_ones_are_told(server: Server, async_sandbox: AsyncSandbox) -> None:
    await async_sandbox.files.write("www/index.html", "served inside")
    await async_sandbox.commands.run("python3 -m http.server 8767 --directory www", background=True, timeout=0)
    async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(server.sandbox_url, headers={"Host": async_sandbox.get_host(8767)}) as answer:
                text = await answer.text()
                if answer.status == 200:
                    break
                assert "port is not open" in text
            await asyncio.sleep(0.05)
        assert text == "served inside"
        async with http.get(server.sandbox_url, headers={"Host": f"8767-nosuchsandbox.{DOMAIN}"}) as answer:
            assert answer.status == 502
            assert "was not found" in await answer.text()
