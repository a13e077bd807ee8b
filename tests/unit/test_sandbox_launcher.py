"""The order in which the launcher serves what waits for it, with a machine that only takes notes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from tests.waiting import PATIENCE_S

from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.namespace import wire
from venusrl.sandboxes.runtimes.namespace.launcher import Launcher
from venusrl.sandboxes.runtimes.namespace.machine import Machine
from venusrl.sandboxes.templates.roots import resolve


class Notes:
    """Stands in for the machine: what was done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def create(self, request: wire.Create) -> None:
        self.done.append(f"create {request.sandbox}")

    def remove(self, name: str) -> None:
        self.done.append(f"remove {name}")

    def close(self) -> None:
        self.done.append("close")


@contextmanager
def serving(notes: Notes, *waiting: wire.Request) -> Iterator[socket.socket]:
    """A launcher that finds ``waiting`` in its socket when it begins."""
    ours, theirs = socket.socketpair()
    ours.sendall(b"".join(map(wire.encode, waiting)))
    launcher = Launcher(theirs)
    launcher._machine = cast("Machine", notes)
    loop = threading.Thread(target=launcher.serve)
    loop.start()
    try:
        yield ours
    finally:
        ours.close()
        loop.join(PATIENCE_S)
        theirs.close()


def replies(connection: socket.socket, count: int) -> list[wire.Reply]:
    connection.settimeout(PATIENCE_S)
    with connection.makefile("rb") as stream:
        frames = [stream.read(wire.body_length(stream.read(wire.HEADER_BYTES))) for _ in range(count)]
    return [wire.decode_reply(frame) for frame in frames]


def create(number: int) -> wire.Create:
    return wire.Create(number, f"s{number}", resolve("host"), Limits())


def test_a_kill_overtakes_what_waits_and_takes_it_back() -> None:
    notes = Notes()
    with serving(notes, create(1), create(2), create(3), wire.Kill(4, "s2"), wire.Kill(5, "s3")) as connection:
        answers = replies(connection, 5)
    assert [(answer.id, type(answer)) for answer in answers] == [
        (2, wire.Failed),
        (4, wire.Done),
        (3, wire.Failed),
        (5, wire.Done),
        (1, wire.Done),
    ]
    assert [answer.error for answer in answers if isinstance(answer, wire.Failed)] == ["SandboxGone"] * 2
    assert notes.done == ["remove s2", "remove s3", "create s1", "close"]


def test_a_cancel_takes_back_a_command_before_its_turn() -> None:
    notes = Notes()
    command = wire.Run(2, "s1", "true", 5.0, {}, (), "/work")
    with serving(notes, create(1), command, wire.Cancel(3, 2)) as connection:
        answers = replies(connection, 3)
    assert [(answer.id, type(answer)) for answer in answers] == [(2, wire.Failed), (3, wire.Done), (1, wire.Done)]
