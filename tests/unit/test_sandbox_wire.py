"""The messages between a node and its launcher."""

from __future__ import annotations

import pytest

from venusrl.sandboxes.protocol import CommandResult, DiskFull, Limits, Mount, SandboxDenied, SandboxError
from venusrl.sandboxes.runtimes.namespace import wire
from venusrl.sandboxes.templates.roots import Template

REQUESTS: list[wire.Request] = [
    wire.Create(1, "s", Template(None, 1000), Limits()),
    wire.Run(2, "s", "echo hi", 1.5, {"A": "b"}, (Mount("/a", "/b"),), "/work"),
    wire.Cancel(3, 2),
    wire.Write(4, "s", {"a": b"\x00\xff"}),
    wire.Read(5, "s", "a", 10),
    wire.Kill(6, "s"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive_the_passage(request_: wire.Request) -> None:
    frame = wire.encode(request_)
    header, body = frame[: wire.HEADER_BYTES], frame[wire.HEADER_BYTES :]
    assert wire.body_length(header) == len(body)
    assert wire.decode_request(body) == request_


def test_replies_survive_the_passage() -> None:
    result = CommandResult(137, "out", 0, 0.5, timed_out=True)
    for reply in (wire.Done(1), wire.Ran(2, result), wire.Content(3, b"x"), wire.Failed(4, "SandboxError", "m")):
        assert wire.decode_reply(wire.encode(reply)[wire.HEADER_BYTES :]) == reply


def test_errors_keep_their_class_and_text() -> None:
    error = wire.error_of(wire.failure(7, DiskFull("full")))
    assert type(error) is DiskFull
    assert str(error) == "full"
    missing = wire.error_of(wire.failure(8, FileNotFoundError(2, "no such file", "/work/x")))
    assert type(missing) is FileNotFoundError
    assert "/work/x" in str(missing)


def test_an_error_that_cannot_pass_becomes_the_general_one() -> None:
    error = wire.error_of(wire.failure(7, SandboxDenied("busy", 1.0)))
    assert type(error) is SandboxError
    assert str(error) == "busy"


def test_nonsense_on_the_socket_is_noticed() -> None:
    with pytest.raises(SandboxError, match="frame"):
        wire.body_length(b"\xff\xff\xff\xff")
