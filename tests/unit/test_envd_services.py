"""E2B's services over an agent in memory: processes, files, watchers, as its clients see them on the wire."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.env_front import Front, front
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.agent.api import Change, Exit, Output
from venusrl.sandboxes.envd import files, process, room, streams
from venusrl.sandboxes.envd.about import About
from venusrl.sandboxes.envd.connect import STREAMING, end_frame, frame
from venusrl.sandboxes.envd.files import Bad, gunzipped, metadata, wants_gzip
from venusrl.sandboxes.protocol import SandboxGone, SandboxMoving
from venusrl.sandboxes.runtimes.base import Shortages
from venusrl.testing.agents import Call


def shell(line: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", line]}, "stdin": False, **more}


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [next(iter(message["event"])) for message in events if "event" in message]


async def test_a_command_from_start_to_end() -> None:
    async with front() as it:
        events = await it.collect("process.Process/Start", shell("echo hello"))
        assert kinds(events) == ["start", "data", "end"]
        assert base64.b64decode(events[1]["event"]["data"]["stdout"]) == b"hello\n"
        assert events[2]["event"]["end"] == {"exitCode": 0, "exited": True, "status": "exit status 0"}
        assert events[3] == {"end": {}}
        failed = await it.collect("process.Process/Start", shell("exit 3"))
        assert failed[-2]["event"]["end"]["exitCode"] == 3
        assert failed[-2]["event"]["end"]["error"] == "exit status 3"


async def test_a_command_without_a_directory_runs_in_the_template_s() -> None:
    async with front() as it:
        it.agent.nodes["/srv"] = msgspec.structs.replace(it.agent.nodes["/tmp"])
        it.host.about = About(workdir="/srv")
        for asked, cwd in ((None, "/srv"), ("/tmp", "/tmp")):
            message = {"process": {"cmd": "echo", **({"cwd": asked} if asked else {})}}
            await it.collect("process.Process/Start", message)
            assert list(it.agent.calls.values())[-1].spec.cwd == cwd


@pytest.mark.parametrize(
    ("line", "before", "after", "cause"),
    [
        ("exit 137", Shortages(1), Shortages(2), "out_of_memory"),
        ("exit 137", Shortages(2), Shortages(2), None),  # somebody else killed it
        ("exit 0", Shortages(1), Shortages(2), None),  # what was killed did not fail the command
        ("exit 1", Shortages(), Shortages(disk_full=True), "out_of_disk"),
        ("exit 0", Shortages(), Shortages(disk_full=True), None),
        ("exit 1", Shortages(1, disk_full=True), Shortages(2, disk_full=True), "out_of_memory"),
    ],
)
async def test_a_limit_that_ended_a_command_is_told(
    line: str, before: Shortages, after: Shortages, cause: str | None
) -> None:
    looks = iter((before, after))

    async def look(_disk: bool) -> Shortages:
        return next(looks)

    async with front() as it:
        it.host.about = About(shortages=look)
        end = (await it.collect("process.Process/Start", shell(line)))[-2]["event"]["end"]
        assert end.get("cause") == cause
        assert ("out of memory" in end.get("error", "")) == (cause == "out_of_memory")


async def test_a_sandbox_that_cannot_be_looked_at_gives_no_verdict() -> None:
    looks = iter((Shortages(),))

    async def look(_disk: bool) -> Shortages:
        for short in looks:
            return short
        raise SandboxGone("it ended")

    async with front() as it:
        it.host.about = About(shortages=look)
        assert "cause" not in (await it.collect("process.Process/Start", shell("exit 1")))[-2]["event"]["end"]


def test_an_ending_by_signal_is_named() -> None:
    assert process.end_event(Exit(-1, 9))["event"]["end"]["status"] == "signal: killed"
    assert process.end_event(Exit(-1, 40))["event"]["end"]["exited"] is False
    assert process.data_event(Output("pty", b"x"))["event"]["data"] == {"pty": "eA=="}


async def test_errors_of_a_stream_come_in_its_end() -> None:
    async with front() as it:
        for message, code in (
            (shell("no-such-program"), "not_found"),
            ({"process": {"cmd": "echo", "cwd": "/nowhere"}}, "invalid_argument"),
            ({}, "invalid_argument"),
            ({"process": {"cmd": "sleep"}, "pty": {"size": {"cols": 0}}}, "invalid_argument"),
        ):
            events = await it.collect("process.Process/Start", message)
            assert events[-1]["end"]["error"]["code"] == code


async def test_a_deadline_kills_the_process_and_says_so() -> None:
    async with front() as it:
        events = await it.collect("process.Process/Start", shell("sleep 100"), Connect_Timeout_Ms="50")
        assert events[-1]["end"]["error"]["code"] == "deadline_exceeded"
        (call,) = it.agent.calls.values()
        assert call.signals == [9]


async def test_a_client_that_leaves_kills_nothing_but_its_deadline_holds() -> None:
    async with front() as it:
        async with it.stream("process.Process/Start", shell("sleep 100")) as events:
            pid = (await anext(events))["event"]["start"]["pid"]
        async with it.stream("process.Process/Start", shell("sleep 100"), Connect_Timeout_Ms="80") as events:
            limited = (await anext(events))["event"]["start"]["pid"]
        async with asyncio.timeout(PATIENCE_S):
            task = it.agent.calls[limited].task
            assert task is not None
            await asyncio.wait([task])
        assert it.agent.calls[pid].exit is None
        listed = (await it.call("process.Process/List", {}))[1]["processes"]
        assert [(one["pid"], one["config"]["cmd"]) for one in listed] == [(pid, "/bin/bash")]


async def test_input_by_pid_tag_and_stream() -> None:
    async with front() as it:
        async with it.stream("process.Process/Start", shell("cat", stdin=True, tag="t")) as events:
            pid = (await anext(events))["event"]["start"]["pid"]
            hello = base64.b64encode(b"hello").decode()
            assert await it.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": hello}}) == (
                200,
                {},
            )
            sent = [{"start": {"process": {"tag": "t"}}}, {"keepalive": {}}, {"data": {"input": {"stdin": hello}}}]
            status, answer = await client_stream(it, sent)
            assert (status, answer) == (200, frame({}) + end_frame(None))
            assert (await it.call("process.Process/CloseStdin", {"process": {"tag": "t"}}))[0] == 200
            rest = [message async for message in events]
        said = b"".join(base64.b64decode(e["event"]["data"]["stdout"]) for e in rest if "data" in e.get("event", {}))
        assert said == b"hellohello"
        closed = await it.call("process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": hello}})
        assert (closed[0], closed[1]["code"]) == (400, "failed_precondition")


async def client_stream(it: Front, sent: list[Any]) -> tuple[int, bytes]:
    body = b"".join(frame(message) for message in sent)
    headers = it.headers(Content_Type=STREAMING)
    async with it.http.post(f"{it.url}/process.Process/StreamInput", data=body, headers=headers) as answer:
        return answer.status, await answer.read()


async def test_a_client_stream_that_is_out_of_order() -> None:
    async with front() as it:
        status, answer = await client_stream(it, [{"data": {"input": {"stdin": ""}}}])
        assert status == 200
        assert json.loads(answer[5:])["error"]["code"] == "invalid_argument"
        _, answer = await client_stream(it, [{"start": {"process": {"pid": 999}}}])
        assert json.loads(answer[5:])["error"]["code"] == "not_found"


async def test_signals_terminals_and_what_is_not_there() -> None:
    async with front() as it:
        pty = {"process": {"cmd": "cat"}, "pty": {"size": {"cols": 80, "rows": 24}}}
        async with it.stream("process.Process/Start", pty) as events:
            pid = (await anext(events))["event"]["start"]["pid"]
            resized = {"process": {"pid": pid}, "pty": {"size": {"cols": 100, "rows": 30}}}
            assert (await it.call("process.Process/Update", resized))[0] == 200
            assert it.agent.calls[pid].size is not None
            async with it.stream("process.Process/Connect", {"process": {"pid": pid}}) as other:
                assert (await anext(other))["event"]["start"] == {"pid": pid}
                signal = {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}
                assert (await it.call("process.Process/SendSignal", signal))[0] == 200
                assert [kinds([m]) for m in [e async for e in other] if "event" in m] == [["end"]]
            assert (await anext(events))["event"]["end"]["status"] == "signal: killed"
        gone = await it.call("process.Process/SendSignal", {"process": {"pid": 999999}, "signal": 9})
        assert (gone[0], gone[1]["code"]) == (404, "not_found")
        assert (await it.call("process.Process/Nothing", {}))[1]["code"] == "unimplemented"
        assert (await it.call("process.Process/SendInput", {"process": {}}))[1]["code"] == "invalid_argument"


async def test_keepalives_come_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "keepalive_s", lambda _request: 0.02)
    async with front() as it, it.stream("process.Process/Start", shell("sleep 100")) as events:
        assert kinds([await anext(events) for _ in range(3)]) == ["start", "keepalive", "keepalive"]


class Doomed:
    """A process whose sandbox is killed."""

    pid = 7
    span = None

    async def events(self) -> AsyncIterator[Output]:
        yield Output("stdout", b"x")
        raise SandboxGone("killed")

    async def detach(self) -> None:
        raise SandboxGone("killed")


async def test_a_sandbox_that_dies_breaks_the_stream_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def attach(pid: int, **_: object) -> Doomed:
        return Doomed()

    async with front() as it:
        monkeypatch.setattr(it.agent, "attach", attach)
        async with it.stream("process.Process/Connect", {"process": {"pid": 7}}) as events:
            assert kinds([await anext(events), await anext(events)]) == ["start", "data"]
            with pytest.raises((aiohttp.ClientError, asyncio.IncompleteReadError)):
                await anext(events)


async def test_files_and_directories() -> None:
    async with front() as it:
        made = await it.call("filesystem.Filesystem/MakeDir", {"path": "a/b"})
        assert (made[0], made[1]["entry"]["path"]) == (200, "/home/user/a/b")
        assert (await it.call("filesystem.Filesystem/MakeDir", {"path": "a"}))[0] == 409
        await upload(it, "a/z.txt", b"12345")
        await upload(it, "~/a/b/c.txt", b"")
        file = (await it.call("filesystem.Filesystem/Stat", {"path": "a/z.txt"}))[1]["entry"]
        assert (file["name"], file["type"], file["size"]) == ("z.txt", "FILE_TYPE_FILE", "5")
        assert (file["mode"], file["permissions"]) == (0o644, "-rw-r--r--")
        assert file["modifiedTime"].endswith("Z")
        listed = (await it.call("filesystem.Filesystem/ListDir", {"path": "a", "depth": 2}))[1]["entries"]
        assert [entry["path"][len("/home/user/a/") :] for entry in listed] == ["b", "b/c.txt", "z.txt"]
        assert (await it.call("filesystem.Filesystem/ListDir", {"path": "a/z.txt"}))[1]["code"] == "invalid_argument"
        moved = await it.call("filesystem.Filesystem/Move", {"source": "a/z.txt", "destination": "n/e/w"})
        assert moved[1]["entry"]["path"] == "/home/user/n/e/w"
        for _ in range(2):
            assert await it.call("filesystem.Filesystem/Remove", {"path": "a"}) == (200, {})
        assert (await it.call("filesystem.Filesystem/Stat", {"path": "a"}))[1]["code"] == "not_found"


async def test_a_file_in_the_way_of_a_directory() -> None:
    async with front() as it:
        await upload(it, "taken", b"x")
        status, answer = await it.call("filesystem.Filesystem/MakeDir", {"path": "taken"})
        assert (status, answer["code"]) == (400, "invalid_argument")


async def upload(it: Front, path: str, data: bytes, **headers: str) -> Any:
    sent = it.headers(Content_Type="application/octet-stream", **headers)
    async with it.http.post(f"{it.url}/files", params={"path": path}, data=data, headers=sent) as answer:
        return answer.status, await answer.json()


async def download(it: Front, path: str, **headers: str) -> tuple[int, bytes, str]:
    sent = it.headers(**headers)
    async with it.http.get(f"{it.url}/files", params={"path": path}, headers=sent) as answer:
        return answer.status, await answer.read(), answer.headers.get("Content-Encoding", "")


async def test_a_polled_watcher_sees_what_happened() -> None:
    async with front() as it:
        await it.call("filesystem.Filesystem/MakeDir", {"path": "d"})
        made = await it.call("filesystem.Filesystem/CreateWatcher", {"path": "d", "includeEntry": True})
        watcher = {"watcherId": made[1]["watcherId"]}
        await upload(it, "d/new", b"x")
        events = (await it.call("filesystem.Filesystem/GetWatcherEvents", watcher))[1]["events"]
        assert [event["type"] for event in events] == ["EVENT_TYPE_CREATE", "EVENT_TYPE_CHMOD", "EVENT_TYPE_WRITE"]
        assert events[-1]["entry"]["path"] == "/home/user/d/new"
        assert (await it.call("filesystem.Filesystem/GetWatcherEvents", watcher))[1] == {"events": []}
        assert await it.call("filesystem.Filesystem/RemoveWatcher", watcher) == (200, {})
        assert (await it.call("filesystem.Filesystem/GetWatcherEvents", watcher))[1]["code"] == "not_found"
        for path, code in (("nowhere", "not_found"), ("d/new", "invalid_argument")):
            assert (await it.call("filesystem.Filesystem/CreateWatcher", {"path": path}))[1]["code"] == code


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_CHANGES", 2)
    monkeypatch.setattr(room, "MAX_WATCHERS", 1)
    async with front() as it:
        made = await it.call("filesystem.Filesystem/CreateWatcher", {"path": "."})
        assert (await it.call("filesystem.Filesystem/CreateWatcher", {"path": "."}))[1]["code"] == "resource_exhausted"
        await upload(it, "new", b"x")
        ask = ("filesystem.Filesystem/GetWatcherEvents", made[1])
        assert len((await it.call(*ask))[1]["events"]) == 2
        assert (await it.call(*ask))[1]["code"] == "resource_exhausted"


async def test_a_streamed_watch() -> None:
    async with front() as it:
        async with it.stream("filesystem.Filesystem/WatchDir", {"path": ".", "recursive": True}) as events:
            assert await anext(events) == {"start": {}}
            await upload(it, "x/y", b"1")
            names = [(await anext(events))["filesystem"]["name"] for _ in range(4)]
            assert names == ["x", "x/y", "x/y", "x/y"]
        ended = await it.collect("filesystem.Filesystem/WatchDir", {"path": "."}, Connect_Timeout_Ms="30")
        assert ended[-1]["end"]["error"]["code"] == "deadline_exceeded"


async def test_a_watch_that_a_move_ends_says_that_events_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(path: str, user: str, recursive: bool, ready: asyncio.Event) -> AsyncIterator[Change]:
        ready.set()
        yield Change("create", "x")
        raise SandboxMoving("it goes on on another host")

    async with front() as it:
        await upload(it, "x", b"1")
        monkeypatch.setattr(it.agent, "watch", watch)
        events = await it.collect("filesystem.Filesystem/WatchDir", {"path": "."})
        assert events[0] == {"start": {}}
        assert events[1]["filesystem"]["name"] == "x"
        error = events[-1]["end"]["error"]
        assert error["code"] == "unavailable"
        assert "may have been missed" in error["message"]


async def test_uploads_and_downloads() -> None:
    async with front() as it:
        data = bytes(range(256)) * 1000
        status, answer = await upload(it, "f.bin", data, X_Metadata_Author="me")
        assert status == 200
        assert answer == [{"path": "/home/user/f.bin", "name": "f.bin", "type": "file", "metadata": {"author": "me"}}]
        assert await download(it, "f.bin", Accept_Encoding="identity") == (200, data, "")
        status, packed, coding = await download(it, "f.bin", Accept_Encoding="gzip")
        assert (gzip.decompress(packed), coding) == (data, "gzip")
        await upload(it, "g.bin", gzip.compress(data), Content_Encoding="gzip")
        assert (await download(it, "g.bin"))[1] == data
        assert (await upload(it, "h.bin", b"no gzip", Content_Encoding="gzip"))[0] == 400
        assert (await download(it, "nothing"))[0] == 404
        assert (await download(it, "/home"))[0] == 400


async def test_several_files_in_one_form() -> None:
    async with front() as it:
        form = aiohttp.FormData(quote_fields=False)
        form.add_field("file", b"one", filename="a/1.txt")
        form.add_field("other", b"ignored")
        form.add_field("file", b"two", filename="/tmp/2.txt")
        async with it.http.post(f"{it.url}/files", data=form, headers=it.headers()) as answer:
            assert [one["path"] for one in await answer.json()] == ["/home/user/a/1.txt", "/tmp/2.txt"]
        assert (await download(it, "/tmp/2.txt"))[1] == b"two"


async def test_files_put_together() -> None:
    async with front() as it:
        await upload(it, "1", b"a")
        await upload(it, "2", b"b")
        ask = {"source_paths": ["1", "2"], "destination": "1"}
        async with it.http.post(f"{it.url}/files/compose", json=ask, headers=it.headers()) as answer:
            assert (await answer.json())["path"] == "/home/user/1"
        assert (await download(it, "1"))[1] == b"ab"
        assert (await download(it, "2"))[0] == 404


def test_metadata_is_checked() -> None:
    assert metadata({"X-Metadata-Ab": "1", "x-metadata-ab": "2", "Other": "3"}) == {"ab": "1"}
    for bad in ({"X-Metadata-": "x"}, {"X-Metadata-a": "\x7f"}, {"X-Metadata-" + "k" * 300: "x"}):
        with pytest.raises(Bad):
            metadata(bad)
    with pytest.raises(Bad, match="4096"):
        metadata({f"X-Metadata-{number}": "v" * 1000 for number in range(5)})


def test_who_gets_gzip() -> None:
    for header, packed in ((None, False), ("gzip", True), ("gzip, deflate, br", False), ("gzip, identity;q=0.5", True)):
        assert wants_gzip(header) is packed
    assert wants_gzip("gzip, br, identity;q=0") is True
    with pytest.raises(Bad):
        wants_gzip("br, identity;q=0")


async def test_a_bomb_expands_in_small_pieces() -> None:
    async def packed() -> Any:
        yield gzip.compress(bytes(8 << 20))

    sizes = [len(piece) async for piece in gunzipped(packed())]
    assert sum(sizes) == 8 << 20
    assert max(sizes) <= files.PIECE


async def test_the_small_services() -> None:
    async with front() as it:
        async with it.http.get(f"{it.url}/health", headers=it.headers()) as answer:
            assert answer.status == 204
        async with it.http.get(f"{it.url}/metrics", headers=it.headers()) as answer:
            assert (await answer.json())["mem_total_mib"] == 512

        async def env(call: Call) -> int:
            call.write("A=b=c\0D=\0")
            return 0

        it.agent.programs["env"] = env
        async with it.http.get(f"{it.url}/envs", headers=it.headers()) as answer:
            assert await answer.json() == {"A": "b=c", "D": ""}
        for method, path in (("GET", "/nothing"), ("POST", "/init"), ("PUT", "/health")):
            async with it.http.request(method, it.url + path, headers=it.headers()) as answer:
                assert answer.status == 404


async def test_whose_user() -> None:
    async with front() as it:
        basic = "Basic " + base64.b64encode(b"root:").decode()
        await it.call("filesystem.Filesystem/MakeDir", {"path": "x"}, Authorization=basic)
        assert "/root/x" in it.agent.nodes
        for bad in ("Basic ###", "Basic " + base64.b64encode(b"../x:").decode()):
            status, answer = await it.call("filesystem.Filesystem/MakeDir", {"path": "x"}, Authorization=bad)
            assert (status, answer["code"]) == (401, "unauthenticated")
        ghost = "Basic " + base64.b64encode(b"ghost:").decode()
        status, answer = await it.call("filesystem.Filesystem/Stat", {"path": "x"}, Authorization=ghost)
        assert (status, answer["code"], answer["message"]) == (401, "unauthenticated", "invalid username: 'ghost'")
