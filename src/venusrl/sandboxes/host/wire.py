"""How calls of ``Host`` cross HTTP: what each takes and gives, how errors are carried.

Owns: the table of calls, the headers, the coding of errors. ``server.py`` answers them, ``remote.py`` makes them.

Must not know: sockets, sandboxes.

Guarantees: an error arrives as the class it left as, by its stable ``reason``; one of an unknown reason arrives as a
``SandboxError`` that keeps its reason; a service inside a sandbox cannot make its answer look like a host's error (it
does not know the key that the mark is made of).
"""

from __future__ import annotations

import hmac
from typing import Any, get_args
from urllib.parse import quote, unquote

import msgspec

from venusrl.sandboxes.agent.api import AgentError, Code, Usage
from venusrl.sandboxes.host.api import (
    Address,
    Held,
    HostStatus,
    KeptState,
    Moved,
    Moving,
    Order,
    Peer,
    SnapshotInfo,
    StatePart,
)
from venusrl.sandboxes.host.errors import AlreadyExists, HostLost, MoveUnsupported, OperationTimeout
from venusrl.sandboxes.protocol import (
    BadPath,
    DiskFull,
    HostDiskFull,
    RuntimeUnavailable,
    SandboxDenied,
    SandboxError,
    SandboxGone,
    SandboxPaused,
    TemplateNotFound,
    Unsupported,
)
from venusrl.sandboxes.runtimes.base import Network
from venusrl.sandboxes.templates.errors import BadTemplate, TemplateBusy, TemplateTaken

KEY_HEADER = "X-Node-Key"
SANDBOX_HEADER = "X-Node-Sandbox"
PORT_HEADER = "X-Node-Port"
ERROR_HEADER = "X-Node-Error"
OURS = (KEY_HEADER, SANDBOX_HEADER, PORT_HEADER, ERROR_HEADER)
ERROR_STATUS = 599
"""Of an answer that carries a host's error. Nobody but another host's client sees it."""
HEARTBEAT_S = 5.0
MAX_MESSAGE = 64 << 20
_LONGEST = 2000
"""Characters of an error's message that are carried."""


class One(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of every call but ``create``, ``offer`` and those of states; what a call does not need keeps its
    default."""

    sandbox: str = ""
    snapshot: str = ""
    memory: bool = True
    network: Network = Network()
    priority: float = 0.0
    mandatory: bool = False
    to: Peer | None = None
    on: bool = True


class Fault(msgspec.Struct, frozen=True):
    """An error on its way."""

    reason: str
    message: str
    retry_after_s: float = 0.0
    code: str = ""


CALLS: dict[str, tuple[type, Any]] = {
    "status": (One, HostStatus),
    "create": (Order, Held),
    "kill": (One, None),
    "pause": (One, Held),
    "resume": (One, Held),
    "snapshot": (One, SnapshotInfo),
    "remove_snapshot": (One, None),
    "set_network": (One, None),
    "set_priority": (One, None),
    "move": (One, Moved),
    "settle": (One, bool),
    "has": (One, bool),
    "offer": (Moving, Address),
    "usage": (One, Usage),
    "drain": (One, None),
    "state_take": (StatePart, KeptState),
    "state_read": (StatePart, bytes),
    "state_begin": (KeptState, bool),
    "state_write": (StatePart, None),
    "state_restore": (StatePart, None),
    "state_drop": (StatePart, None),
}
"""By name: the type of the arguments and of the answer."""
OF_PEERS = frozenset({"offer", "has"})
"""What another host asks, of its own accord."""
_PLAIN: dict[str, type[SandboxError]] = {
    error.reason: error
    for error in (
        AlreadyExists,
        BadPath,
        BadTemplate,
        DiskFull,
        HostDiskFull,
        HostLost,
        MoveUnsupported,
        OperationTimeout,
        RuntimeUnavailable,
        SandboxGone,
        SandboxPaused,
        TemplateBusy,
        TemplateNotFound,
        TemplateTaken,
        Unsupported,
    )
}
_CODES = frozenset(get_args(Code))


def fault_of(error: SandboxError) -> Fault:
    """What is sent of an error."""
    message = str(error)[:_LONGEST]
    if isinstance(error, SandboxDenied):
        return Fault(error.reason, message, retry_after_s=error.retry_after_s)
    if isinstance(error, AgentError):
        return Fault(error.reason, message, code=error.code)
    return Fault(error.reason, message)


def error_of(fault: Fault) -> SandboxError:
    """The error that was sent."""
    if fault.reason == SandboxDenied.reason:
        return SandboxDenied(fault.message, fault.retry_after_s)
    if fault.reason == AgentError.reason:
        code: Any = fault.code if fault.code in _CODES else "internal"
        return AgentError(code, fault.message)
    known = _PLAIN.get(fault.reason)
    if known is not None:
        return known(fault.message)
    error = SandboxError(fault.message)
    error.reason = fault.reason
    return error


def mark(key: str) -> str:
    """What tells a host's own error from what a sandbox answers."""
    return hmac.digest(key.encode(), b"venusrl host error", "sha256").hex()


def error_header(key: str, error: SandboxError) -> str:
    """The value of ``ERROR_HEADER``."""
    return f"{mark(key)} {quote(msgspec.json.encode(fault_of(error)), safe='')}"


def error_in(key: str, header: str | None) -> SandboxError | None:
    """The error in a header's value; None when there is none of a host that knows the key."""
    given, _, text = (header or "").partition(" ")
    if not text or not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), mark(key).encode()):
        return None
    try:
        return error_of(msgspec.json.decode(unquote(text), type=Fault))
    except msgspec.DecodeError as error:
        return SandboxError(f"the host's error cannot be read: {error}")
