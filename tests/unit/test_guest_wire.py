"""Frames and records survive being cut anywhere, and whatever an enemy sends ends in values or a ProtocolError."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.sandboxes.agent import wire
from venusrl.sandboxes.agent.api import Change, Entry, Exit

NONCE = b"n" * 16
GREETING = wire.frame(0, wire.HELLO, 0, wire.MAGIC + NONCE + wire.u32(1) + b"\0" + wire.u32(0) + wire.u32(0))
frames = st.builds(
    wire.Frame,
    st.integers(0, 2**32 - 1),
    st.sampled_from([wire.DATA, wire.ACK, wire.RESET, wire.STOP]),
    st.integers(0, 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=300),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def encoded(frame: wire.Frame) -> bytes:
    return wire.frame(frame.stream, frame.kind, frame.offset, frame.payload, frame.flags)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=200), st.lists(frames, max_size=6), st.lists(st.integers(0, 10**4), max_size=8))
def test_frames_come_whole_after_whatever_was_left_of_another(
    left: bytes, sent: list[wire.Frame], cuts: list[int]
) -> None:
    parser = wire.Parser(NONCE)
    data = left + GREETING + b"".join(map(encoded, sent))
    got = [frame for piece in pieces(data, cuts) for frame in parser.feed(piece)]
    assert got[0].kind == wire.HELLO
    assert got[1:] == sent


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=400), max_size=8))
def test_a_parser_keeps_little_of_what_it_cannot_use(rubbish: list[bytes]) -> None:
    """Before the greeting nothing is kept; after it no more than a frame."""
    parser = wire.Parser(NONCE)
    for piece in rubbish * 40:
        assert parser.feed(piece) == []
    assert len(parser._data) <= 100
    parser.feed(GREETING)
    try:
        for piece in rubbish * 3:
            parser.feed(piece)
    except wire.ProtocolError:
        return
    assert len(parser._data) <= wire.PAYLOAD + 24


@pytest.mark.parametrize(
    "bad",
    [
        wire.frame(1, 9),
        wire.frame(1, wire.DATA, flags=2),
        wire.frame(1, wire.DATA, payload=bytes(wire.PAYLOAD + 1)),
        wire.frame(1, wire.DATA, payload=b"abc")[:-1] + b"x",
    ],
)
def test_what_is_no_frame_ends_the_connection(bad: bytes) -> None:
    parser = wire.Parser(NONCE)
    parser.feed(GREETING)
    with pytest.raises(wire.ProtocolError):
        parser.feed(bad)


records = st.lists(st.tuples(st.integers(wire.STARTED, wire.USED), st.binary(max_size=200)), max_size=8)


@settings(max_examples=25, deadline=None)
@given(records, st.lists(st.integers(0, 10**4), max_size=8))
def test_records_come_whole(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    reader = wire.Records()
    data = b"".join(wire.u8(kind) + wire.text(payload) for kind, payload in sent)
    got = [record for piece in pieces(data, cuts) for record in reader.feed(piece)]
    assert [(kind, payload) for kind, payload, _ in got] == sent
    assert sum(size for _, _, size in got) == len(data)
    assert not reader.incomplete


@pytest.mark.parametrize("bad", [b"\0" + wire.u32(0), b"\x0d" + wire.u32(0), b"\x03" + wire.u32(wire.RECORD + 1)])
def test_what_is_no_record_is_refused(bad: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.Records().feed(bad)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([wire.failure, wire.ending, wire.entry, wire.change, wire.usage, wire.greeting]),
    st.binary(max_size=200),
)
def test_a_payload_is_understood_or_refused(parse: object, payload: bytes) -> None:
    with contextlib.suppress(wire.ProtocolError):
        parse(payload)  # type: ignore[operator]


def test_payloads_as_the_agent_writes_them() -> None:
    text, u8, u32, u64 = wire.text, wire.u8, wire.u32, wire.u64
    raw = text("/a/ü") + u8(3) + u64(7) + u32(0o777) + text("root") + text("g") + u64((1 << 64) - 5)
    entry = wire.entry(raw + u8(1) + text(b"/t\xff") + u32(1) + text("k") + text("v"))
    assert entry == Entry("/a/ü", "symlink", 7, 0o777, "root", "g", -5, "/t�", {"k": "v"})
    assert wire.change(u8(4) + text("x")) == Change("rename", "x")
    assert wire.ending(u32(0xFFFFFFFF) + u32(15)) == Exit(-1, 15)
    assert wire.ending(u32(3) + u32(0)) == Exit(3, None)
    assert wire.failure(u8(2) + b"gone") == ("not_found", "gone")
    with pytest.raises(wire.ProtocolError):
        wire.ending(u32(256) + u32(0))
    with pytest.raises(wire.ProtocolError):
        wire.failure(u8(77))
