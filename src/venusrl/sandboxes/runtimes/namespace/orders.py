"""What the namespace runtime and its forge say to each other.

Owns: the messages. Framing and errors are those of ``wire``.

Must not know: what either side does with them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.namespace.wire import Failed

Disk = Literal["memory", "file"]
"""Where sandboxes' files are: in memory that they are charged for, or in a file each of the host's disk."""
AGENT_LISTENER = 3
"""The descriptor of the agent's listening socket inside."""
SANDBOX_USER = 1000
FILES_PER_MIB = 256
"""So many files may be made for each MiB of a disk."""
UPPER = "upper"
"""The one directory of a sandbox's disk that is kept."""
HIDDEN = "dev/.files"
"""Where, inside, the file system with a sandbox's own files is mounted: a directory of mode 0700 that belongs
to a user who does not exist there, so that only the machine's root can enter it (through /proc/PID/root)."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """First message. ``group`` names the control groups; ``maker`` and ``agent`` are programs, ``arguments`` the
    latter's argv. ``base`` is a range of host ids to try the machine with; None = unprivileged."""

    id: int
    state: str
    group: str
    maker: str
    agent: str
    arguments: tuple[str, ...]
    base: int | None
    count: int


class Make(msgspec.Struct, frozen=True, tag=True):
    """Start a sandbox. ``layers`` lowest first, empty = ``host``. ``base`` None = unprivileged, one user only.

    ``archive``: the files it starts with, else none.
    """

    id: int
    sandbox: str
    layers: tuple[str, ...]
    limits: Limits
    base: int | None
    count: int
    user: str
    archive: str | None
    boot_id: str = ""
    """What the sandbox takes for its kernel's; "" = a new one."""
    merge: bool = False
    """Whether its memory may be merged with that of others that may."""
    blank: str = ""
    """The empty disk that its own is a copy of; "" = its files are kept in memory."""


Order = Prepare | Make


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Answer to Prepare. ``idmapped``: files of ``host`` show their owners."""

    id: int
    pid: int
    idmapped: bool


class Made(msgspec.Struct, frozen=True, tag=True):
    """Answer to Make: the sandbox's PID 1, as the machine numbers it."""

    id: int
    pid: int


Answer = Ready | Made | Failed

_order = msgspec.msgpack.Decoder(Order)
_answer = msgspec.msgpack.Decoder(Answer)


def decode_order(body: bytes) -> Order:
    return _order.decode(body)


def decode_answer(body: bytes) -> Answer:
    return _answer.decode(body)
