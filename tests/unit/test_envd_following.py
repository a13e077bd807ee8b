"""A process's stream over moves of its sandbox, as a client sees it on the wire."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from tests.unit.env_front import Front, front

from venusrl.sandboxes.agent.api import Exit, Output
from venusrl.sandboxes.envd import following
from venusrl.sandboxes.envd.connect import STREAMING, end_frame, frame
from venusrl.sandboxes.manager.gateway import GatewayLimits
from venusrl.sandboxes.protocol import SandboxMoving

START = {"process": {"cmd": "/bin/program"}, "stdin": False}
CONNECT = {"process": {"pid": 7}}


class Saying:
    """A process that says ``said`` from ``begin`` on, and ends, or runs on (``runs``), or its sandbox moves."""

    pid = 7

    def __init__(self, begin: int, said: list[bytes], *, moves: bool = False, runs: bool = False) -> None:
        self._end = begin
        self._said = said
        self._moves = moves
        self._runs = runs
        self.span: tuple[int, int] | None = None
        self.signals: list[int] = []

    async def events(self) -> AsyncIterator[Output | Exit]:
        for data in self._said:
            self.span = (self._end, self._end + len(data))
            self._end += len(data)
            yield Output("stdout", data)
        if self._moves:
            raise SandboxMoving("it goes on on another host")
        if self._runs:
            await asyncio.Event().wait()
        yield Exit(0)

    async def signal(self, number: int) -> None:
        self.signals.append(number)

    async def detach(self) -> None:
        pass


class Hosts:
    """Where a sandbox is: its process is followed on one after the other, the last for as long as it is asked."""

    def __init__(self, it: Front, monkeypatch: pytest.MonkeyPatch, *turns: Saying) -> None:
        self._turns = list(turns)
        self._it = it
        monkeypatch.setattr(it.agent, "start", self.take)
        monkeypatch.setattr(it.agent, "attach", self.take)
        monkeypatch.setattr(it.register, "disputed", self.disputed)
        self.becomes = "running"

    async def take(self, *_: object, **__: object) -> Saying:
        return self._turns.pop(0) if len(self._turns) > 1 else self._turns[0]

    async def disputed(self, sandbox: str, error: Exception) -> None:
        assert isinstance(error, SandboxMoving)
        if self.becomes == "ended":
            del self._it.register.routes[sandbox]
        else:
            self._it.register.set(sandbox, state=self.becomes)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Without those that only keep the connection alive."""
    found = (next(iter(message["event"])) for message in events if "event" in message)
    return [kind for kind in found if kind != "keepalive"]


def said(events: list[dict[str, Any]]) -> bytes:
    found = (one["event"]["data"]["stdout"] for one in events if "data" in one.get("event", {}))
    return b"".join(base64.b64decode(each) for each in found)


@pytest.mark.parametrize(("call", "message"), [("Start", START), ("Connect", CONNECT)])
async def test_a_stream_goes_on_over_moves(call: str, message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One start, one end; what two hosts say is told once."""
    async with front() as it:
        turns = [Saying(0, [b"one", b"two"], moves=True), Saying(3, [b"two", b"3"], moves=True), Saying(7, [b"four"])]
        Hosts(it, monkeypatch, *turns)
        events = await it.collect(f"process.Process/{call}", message)
        assert said(events) == b"onetwo3four"
        assert kinds(events) == ["start", "data", "data", "data", "data", "end"]
        assert events[-1] == {"end": {}}
        assert it.gateway.counters["carried_on"] == 2


async def test_output_that_was_dropped_between_hosts_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as it:
        Hosts(it, monkeypatch, Saying(0, [b"one"], moves=True), Saying(5, [b"six"]))
        events = await it.collect("process.Process/Start", START)
        assert said(events) == b"one"
        assert events[-1]["end"]["error"]["code"] == "data_loss"
        assert "2 bytes" in events[-1]["end"]["error"]["message"]


async def test_a_deadline_holds_on_the_next_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as it:
        there = Saying(3, [], runs=True)
        Hosts(it, monkeypatch, Saying(0, [b"one"], moves=True), there)
        events = await it.collect("process.Process/Start", START, Connect_Timeout_Ms="300")
        assert events[-1]["end"]["error"]["code"] == "deadline_exceeded"
        assert there.signals == [9]


async def test_a_deadline_of_one_who_only_follows_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as it:
        there = Saying(3, [], runs=True)
        Hosts(it, monkeypatch, Saying(0, [b"one"], moves=True), there)
        events = await it.collect("process.Process/Connect", CONNECT, Connect_Timeout_Ms="300")
        assert events[-1]["end"]["error"]["code"] == "deadline_exceeded"
        assert there.signals == []


async def test_a_stream_that_cannot_go_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes then is kept for whoever connects again, so that it must be told from a death."""
    async with front(GatewayLimits(park_s=0.05)) as it:
        Hosts(it, monkeypatch, Saying(0, [b"one"], moves=True)).becomes = "moving"
        events = await it.collect("process.Process/Start", START)
        assert said(events) == b"one"
        assert events[-1]["end"]["error"]["code"] == "unavailable"


async def test_a_stream_whose_sandbox_ended_in_the_move_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as it:
        Hosts(it, monkeypatch, Saying(0, [b"one"], moves=True)).becomes = "ended"
        with pytest.raises((aiohttp.ClientError, asyncio.IncompleteReadError)):
            await it.collect("process.Process/Start", START)


async def test_a_sandbox_that_moves_for_ever_ends_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as it:
        Hosts(it, monkeypatch, Saying(0, [], moves=True))
        events = await it.collect("process.Process/Start", START)
        assert events[-1]["end"]["error"]["code"] == "unavailable"


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_turn_s_end_is_found_however_it_comes(size: int) -> None:
    """In pieces of ``size`` bytes."""
    request = make_mocked_request("POST", following.START, {"Content-Type": STREAMING})
    follow = following.begin(request)
    assert follow is not None
    told = frame({"event": {"start": {"pid": 7}}}) + frame({"event": {"data": {"stdout": "b25l" * 50}}})
    came = told + end_frame(following.Parted("it moves", following.Part(7, 12, ends=True)))
    assert b"".join(follow.passed(came[at : at + size]) for at in range(0, len(came), size)) == told
    assert follow.parted == following.Part(7, 12, ends=True)
    other = following.Follow(request)
    assert other.passed(told + end_frame(None)) == told + end_frame(None)
    assert other.parted is None


def test_only_streams_of_processes_are_held() -> None:
    for method, path, kind in (
        ("GET", following.START, STREAMING),
        ("POST", following.START, "application/json"),
        ("POST", "/filesystem.Filesystem/WatchDir", STREAMING),
    ):
        request = make_mocked_request(method, path, {"Content-Type": kind})
        assert following.begin(request) is None
        assert following.of(request) is None
