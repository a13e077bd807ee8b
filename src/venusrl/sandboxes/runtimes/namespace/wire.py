"""What the node and its launcher say to each other.

Owns: the messages (msgpack structs), their framing on a stream socket, and the passage of errors across it.

Must not know: what either side does with them.

Guarantees: every request gets exactly one reply with its ``id``. An error raised by the launcher is raised as
the same class in the node.
"""

from __future__ import annotations

import struct

import msgspec

from venusrl.sandboxes import protocol
from venusrl.sandboxes.protocol import CommandResult, Limits, Mount, SandboxError
from venusrl.sandboxes.runtimes.namespace.bwrap import Bubblewrap
from venusrl.sandboxes.templates.roots import Template

MAX_FRAME = 1 << 30
_HEADER = struct.Struct("!I")


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First message: become a launcher for this node."""

    id: int
    node_id: str
    bubblewrap: Bubblewrap
    uid_base: int | None
    require_cgroup: bool


class Create(msgspec.Struct, frozen=True, tag=True):
    id: int
    sandbox: str
    template: Template
    limits: Limits


class Run(msgspec.Struct, frozen=True, tag=True):
    id: int
    sandbox: str
    command: str
    timeout_s: float
    env: dict[str, str]
    mounts: tuple[Mount, ...]
    cwd: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop the command of request ``target``; both requests are answered once its processes are gone."""

    id: int
    target: int


class Write(msgspec.Struct, frozen=True, tag=True):
    id: int
    sandbox: str
    files: dict[str, bytes]


class Read(msgspec.Struct, frozen=True, tag=True):
    id: int
    sandbox: str
    path: str
    max_bytes: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    id: int
    sandbox: str


Request = Setup | Create | Run | Cancel | Write | Read | Kill


class Report(msgspec.Struct, frozen=True, tag=True):
    """Answer to Setup: how this launcher isolates and limits."""

    id: int
    pid: int
    start_time: int
    privileged: bool
    cgroup_version: int
    """0 = none: rlimits stand in."""
    cgroup_controllers: tuple[str, ...]
    cgroup_directories: tuple[str, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    id: int


class Ran(msgspec.Struct, frozen=True, tag=True):
    id: int
    result: CommandResult


class Content(msgspec.Struct, frozen=True, tag=True):
    id: int
    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request failed with the named error class."""

    id: int
    error: str
    message: str


Reply = Report | Done | Ran | Content | Failed

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        protocol.BadPath,
        protocol.DiskFull,
        protocol.HostDiskFull,
        protocol.RuntimeUnavailable,
        protocol.SandboxGone,
        protocol.TemplateNotFound,
        SandboxError,
        FileNotFoundError,
    )
}
_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame; the forge's messages (``orders.py``) have the same."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    return _request.decode(body)


def decode_reply(body: bytes) -> Reply:
    return _reply.decode(body)


HEADER_BYTES = _HEADER.size


def body_length(header: bytes) -> int:
    """Length that a header announces. Raises SandboxError on nonsense."""
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME:
        raise SandboxError(f"a frame of {length} bytes on the launcher's socket")
    return int(length)


def failure(request_id: int, error: SandboxError | FileNotFoundError) -> Failed:
    """The reply that raises ``error`` on the other side."""
    name = type(error).__name__ if type(error).__name__ in _ERRORS else SandboxError.__name__
    message = error.filename if isinstance(error, FileNotFoundError) else str(error)
    return Failed(request_id, name, message or "")


def error_of(failed: Failed) -> Exception:
    """The error that the launcher raised."""
    return _ERRORS[failed.error](failed.message)
