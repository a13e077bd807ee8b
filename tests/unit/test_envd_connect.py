"""Connect's frames, codes and JSON, whatever a client sends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.sandboxes.agent.api import AgentError
from venusrl.sandboxes.envd import connect, messages
from venusrl.sandboxes.envd.connect import END_OF_STREAM, Fault, decode, end_frame, fault_of, frame, frames, whole
from venusrl.sandboxes.protocol import DiskFull, SandboxGone

FEW = settings(max_examples=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def body(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def read_all(data: bytes, limit: int = 1 << 20) -> list[bytes]:
    return [payload async for payload in frames(body(data), limit)]


@FEW
@given(st.lists(JSON, max_size=5))
def test_what_was_framed_is_read_again(values: list[Any]) -> None:
    async def run() -> list[bytes]:
        return await read_all(b"".join(frame(value) for value in values) + end_frame(None))

    assert [msgspec.json.decode(payload) for payload in asyncio.run(run())] == values


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_fault(data: bytes) -> None:
    async def run() -> None:
        with contextlib.suppress(Fault):
            await read_all(data, limit=1 << 10)

    asyncio.run(run())


async def test_a_large_message_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\x00\xff\xff\xff\xff")
    with pytest.raises(Fault) as caught:
        await anext(frames(reader))
    assert caught.value.code == "resource_exhausted"
    with pytest.raises(Fault, match="over the limit"):
        await whole(body(b"x" * 11), limit=10)


async def test_compressed_messages_are_refused_by_name() -> None:
    with pytest.raises(Fault, match="identity"):
        await read_all(b"\x01\x00\x00\x00\x00")


async def test_an_ending_in_the_middle_is_told_from_the_end() -> None:
    for cut in (b"\x00\x00", b"\x00\x00\x00\x00\x05abc"):
        with pytest.raises(Fault, match="ended inside"):
            await read_all(cut)
    with pytest.raises(Fault, match="no message"):
        await connect.one_frame(body(b""))


@FEW
@given(JSON | st.binary())
def test_any_body_is_a_message_or_a_fault(value: Any) -> None:
    payload = value if isinstance(value, bytes) else msgspec.json.encode(value)
    for kind in (messages.StartRequest, messages.SendInputRequest, messages.ListDirRequest):
        with contextlib.suppress(Fault):
            decode(payload, kind)


def test_proto3_json_is_read_as_protobuf_reads_it() -> None:
    asked = decode(b'{"path":"/x","depth":"3","unknown":{"a":1}}', messages.ListDirRequest)
    assert (asked.path, asked.depth) == ("/x", 3)
    assert decode(b'{"path":null,"recursive":true,"include_entry":true}', messages.WatchRequest).include_entry
    assert decode(b'{"includeEntry":true}', messages.WatchRequest).include_entry
    assert decode(b"", messages.ListRequest) == messages.ListRequest()
    assert decode(b'{"process":{"cmd":"x"}}', messages.StartRequest).stdin is True
    for signal in (b'"SIGNAL_SIGKILL"', b"9"):
        assert decode(b'{"signal":' + signal + b"}", messages.SendSignalRequest).number() == 9
    with pytest.raises(Fault, match="unknown signal"):
        decode(b'{"signal":"SIGNAL_SIGSTOP"}', messages.SendSignalRequest).number()


@FEW
@given(st.binary(max_size=64))
def test_input_is_base64_in_either_alphabet(data: bytes) -> None:
    for text in (base64.b64encode(data), base64.urlsafe_b64encode(data), base64.b64encode(data).rstrip(b"=")):
        assert messages.ProcessInput(stdin=text.decode()).data() == data
    with pytest.raises(Fault):
        messages.ProcessInput(stdin="*").data()
    with pytest.raises(Fault):
        messages.ProcessInput().data()


@FEW
@given(st.text(max_size=12))
def test_a_deadline_is_ten_digits_or_refused(text: str) -> None:
    digits = text.isascii() and text.isdigit() and len(text) <= 10
    try:
        assert connect.deadline_s({"Connect-Timeout-Ms": text}) == int(text) / 1000
        assert digits
    except Fault:
        assert not digits
    assert connect.deadline_s({}) is None


def test_failures_have_codes_and_codes_have_statuses() -> None:
    assert fault_of(AgentError("not_found", "no such file")).status == 404
    assert fault_of(DiskFull("full")).status == 429
    assert fault_of(SandboxGone("gone")).code == "unavailable"
    kind, length = end_frame(Fault("not_found", "x"))[0], end_frame(None)[1:5]
    assert (kind, length) == (END_OF_STREAM, b"\x00\x00\x00\x02")
