"""The host's end against an agent that lies: it fails by itself, bounded, and tells everybody who waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from tests.waiting import until

from venusrl.sandboxes.agent import wire
from venusrl.sandboxes.agent.api import AgentError, Exit, Output, ProcessSpec
from venusrl.sandboxes.agent.client import AgentClient
from venusrl.sandboxes.protocol import SandboxError, SandboxGone

Answer = Callable[[int, bytes], bytes]


class Liar:
    """An agent whose answer to each stream's first bytes is the test's."""

    def __init__(self, answer: Answer, greeting: Callable[[bytes], bytes] | None = None) -> None:
        self.answer = answer
        self.greeting = greeting or (lambda nonce: greeted(nonce))
        self.heard: list[wire.Frame] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        self.tasks.append(asyncio.create_task(self._serve(*await asyncio.open_unix_connection(sock=far))))
        return await asyncio.open_unix_connection(sock=near)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await reader.readexactly(len(wire.PREAMBLE))
        try:
            while True:
                head = await reader.readexactly(wire.HEADER_BYTES)
                size = int.from_bytes(head[8:12], "little")
                body = (await reader.readexactly(size + 4))[:size]
                stream, kind = int.from_bytes(head[:4], "little"), head[4]
                self.heard.append(wire.Frame(stream, kind, head[5], int.from_bytes(head[12:20], "little"), body))
                if kind == wire.HELLO:
                    writer.write(self.greeting(body[29:45]))
                elif kind == wire.DATA:
                    writer.write(self.answer(stream, body))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    def client(self) -> AgentClient:
        return AgentClient(self.connect, patience_s=0.2, answer_s=5.0)


def greeted(nonce: bytes, resumed: bool = False, streams: bytes = wire.u32(0)) -> bytes:
    return wire.frame(0, wire.HELLO, 0, wire.MAGIC + nonce + wire.u32(1) + wire.u8(resumed) + wire.u32(0) + streams)


def record(kind: int, payload: bytes = b"") -> bytes:
    return wire.u8(kind) + wire.text(payload)


def said(stream: int, data: bytes, offset: int = 0, last: bool = True) -> bytes:
    return wire.frame(stream, wire.DATA, offset, data, int(last))


LIES: dict[str, Answer] = {
    "bytes that are missing": lambda s, _: said(s, record(wire.END), offset=1),
    "an acknowledgement of what was not sent": lambda s, _: wire.frame(s, wire.ACK, 10**6),
    "a stream that nobody opened": lambda s, _: said(s + 5, record(wire.END)),
    "a second greeting": lambda s, _: greeted(bytes(16)),
    "a frame without an end": lambda s, _: said(s, record(wire.END))[:-1] + b"?",
    "a record of no kind": lambda s, _: said(s, record(99)),
    "an endless record": lambda s, _: said(s, b"\x03" + wire.u32(1 << 30), last=False),
    "an end within a record": lambda s, _: said(s, record(wire.END)[:3]),
}


def acknowledged(liar: Liar) -> list[int]:
    return [frame.offset for frame in liar.heard if frame.kind == wire.ACK]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_breaking_the_protocol_ends_the_line(lie: Answer) -> None:
    client = Liar(lie).client()
    other = asyncio.create_task(client.processes())
    with pytest.raises(AgentError) as raised:
        await client.usage()
    assert raised.value.code == "internal"
    with pytest.raises(AgentError):
        await other
    with pytest.raises(AgentError):
        await client.usage()
    await client.close()


WRONG: dict[str, bytes] = {
    "the wrong kind of answer": record(wire.ENTRY) + record(wire.END),
    "an answer that cannot be read": record(wire.USED, b"short") + record(wire.END),
    "no answer": record(wire.END),
    "an early end": b"",
    "an error of no kind": record(wire.ERROR, b"\xff"),
    "two answers": record(wire.USED, bytes(48)) * 2 + record(wire.END),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_a_wrong_answer_fails_what_was_asked_and_nothing_else(wrong: bytes) -> None:
    answers = [wrong, record(wire.USED, wire.u32(1) + bytes(44)) + record(wire.END)]
    client = Liar(lambda s, _: said(s, answers.pop(0))).client()
    with pytest.raises(AgentError):
        await client.usage()
    assert (await client.usage()).cpus == 1
    await client.close()


@pytest.mark.parametrize(
    "greeting",
    [
        lambda nonce: wire.frame(0, wire.BYE, 0, wire.MAGIC + nonce),
        lambda nonce: greeted(nonce, streams=wire.u32(5000)),
        lambda nonce: greeted(nonce, streams=wire.u32(1) + wire.u32(1) + wire.u64(1 << 40)),
        lambda nonce: wire.frame(0, wire.HELLO, 0, wire.MAGIC + nonce + wire.u32(7)),
        lambda nonce: greeted(bytes(16)),
        lambda nonce: b"\0" * 100_000,
    ],
    ids=["bye", "too many streams", "more than was sent", "another version", "another's greeting", "silence"],
)
async def test_a_greeting_that_is_none_ends_the_line(
    greeting: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("venusrl.sandboxes.agent.link._HELLO_S", 0.05)
    client = Liar(lambda s, _: b"", greeting).client()
    with pytest.raises(SandboxError) as raised:
        await client.usage()
    assert isinstance(raised.value, SandboxGone) or raised.value.code == "internal"  # type: ignore[attr-defined]
    await client.close()


async def test_a_process_acknowledges_what_its_slowest_reader_took() -> None:
    def answer(stream: int, body: bytes) -> bytes:
        data = record(wire.STARTED, wire.u32(42)) + record(wire.STDOUT, b"one") + record(wire.STDERR, b"two")
        return said(stream, data + record(wire.EXIT, wire.u32(5) + wire.u32(0)))

    liar = Liar(answer)
    client = liar.client()
    process = await client.start(ProcessSpec(("x",), "user"))
    events = process.events()
    assert await anext(events) == Output("stdout", b"one")
    await until(lambda: acknowledged(liar)[-1:] == [5 + 4], "what was taken being acknowledged")
    assert [event async for event in events] == [Output("stderr", b"two"), Exit(5)]
    await until(lambda: acknowledged(liar)[-1:] == [9 + 8 + 8 + 13 + 1], "all being acknowledged")
    await client.close()


async def test_output_beyond_the_window_ends_the_line_instead_of_piling_up() -> None:
    def answer(stream: int, body: bytes) -> bytes:
        output = record(wire.STDOUT, bytes(16000))
        flood = (said(stream, output, offset=9 + n * len(output), last=False) for n in range(6))
        return said(stream, record(wire.STARTED, wire.u32(42)), last=False) + b"".join(flood)

    liar = Liar(answer)
    process = await liar.client().start(ProcessSpec(("x",), "user"))
    await until(lambda: liar.writers[0].is_closing(), "the end of the line")
    with pytest.raises(AgentError) as raised:
        _ = [event async for event in process.events()]
    assert raised.value.code == "internal"


async def test_a_process_that_says_what_it_may_not_fails_everybody_on_the_line() -> None:
    def answer(stream: int, body: bytes) -> bytes:
        wrong = record(wire.STDOUT, b"x") + record(wire.ENTRY) * 3
        begun = said(stream, record(wire.STARTED, wire.u32(40 + stream)), last=False)
        return begun if stream < 3 else begun + said(stream, wrong, offset=9)

    client = Liar(answer).client()
    processes = [await client.start(ProcessSpec(("x",), "user")) for _ in range(3)]
    for process in processes:
        with pytest.raises(AgentError) as raised:
            _ = [event async for event in process.events()]
        assert raised.value.code == "internal"


async def test_what_is_given_up_is_ended_inside_too() -> None:
    liar = Liar(lambda s, _: b"")
    client = liar.client()
    asked = asyncio.create_task(client.stat("/", "user"))
    await until(lambda: [frame.kind for frame in liar.heard] == [wire.HELLO, wire.DATA], "the question")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: [frame.kind for frame in liar.heard] == [wire.HELLO, wire.DATA, wire.RESET], "its end")
    await client.close()
