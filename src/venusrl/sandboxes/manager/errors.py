"""What the control plane refuses, and how that looks on E2B's wire.

Owns: ``Refused`` and its kinds, the mapping of every ``SandboxError`` to one, and the JSON body of an error.

Must not know: requests, records.

Guarantees: every failure has a status that E2B's clients know, and a message that names the mend; a client is told to
try again only where trying again can help.
"""

from __future__ import annotations

import math
from typing import Any

from venusrl.sandboxes.agent.api import AgentError
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
)

_AGENT_STATUS = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "failed_precondition": 409,
    "resource_exhausted": 507,
    "unavailable": 503,
    "unimplemented": 501,
    "internal": 500,
    "unauthenticated": 401,
}
_BY_REASON = {
    "host_lost": (503, "node_unreachable", 5.0),
    "operation_timeout": (504, "operation_timeout", None),
    "already_exists": (409, None, None),
    "unsupported": (409, None, None),
    "move_unsupported": (409, None, None),
    "bad_template": (400, None, None),
    "template_taken": (403, None, None),
    "template_busy": (409, None, None),
    "build_failed": (500, None, None),
}
"""Errors of hosts and templates, by their stable reason: status, E2B's finer code, when to try again."""


class ManagerError(SandboxError):
    """The service itself cannot work (state directory in use, damaged...); the message names the mend."""

    reason = "manager_error"


class Refused(SandboxError):
    """A request that is answered with an error. ``error_code`` is E2B's finer code, where it has one."""

    reason = "refused"
    status = 500

    def __init__(self, message: str, *, error_code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class Invalid(Refused):
    """The request makes no sense, or asks for what is not supported."""

    reason = "invalid_request"
    status = 400


class Unauthorized(Refused):
    """No key, or none that is known."""

    reason = "unauthorized"
    status = 401


class Forbidden(Refused):
    """The key may not do this."""

    reason = "forbidden"
    status = 403


class NotFound(Refused):
    """There is no such thing for this key: what belongs to another tenant looks the same."""

    reason = "not_found"
    status = 404


class Conflict(Refused):
    """The sandbox is in a state that does not allow it."""

    reason = "conflict"
    status = 409


class Unprocessable(Refused):
    """An Idempotency-Key that was used for another request."""

    reason = "idempotency_mismatch"
    status = 422


class TooMany(Refused):
    """A quota of the key is used up."""

    reason = "quota"
    status = 429


class Busy(Refused):
    """No room now; ``retry_after_s`` says when to ask again (None = asking again does not help)."""

    reason = "no_capacity"
    status = 503


class Other(Refused):
    """Any other status."""

    def __init__(
        self, status: int, message: str, error_code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, error_code=error_code, retry_after_s=retry_after_s)
        self.status = status


def refused(error: SandboxError) -> Refused:
    """The answer to a request that ended with ``error``."""
    text = str(error) or type(error).__name__
    match error:
        case Refused():
            return error
        case SandboxDenied():
            return Busy(text, error_code="sandbox_capacity_unavailable", retry_after_s=error.retry_after_s)
        case HostDiskFull():
            return Busy(text, error_code="host_disk_full", retry_after_s=30.0)
        case RuntimeUnavailable():
            return Busy(text, error_code="runtime_unavailable")
        case TemplateNotFound() | SandboxGone():
            return NotFound(text)
        case SandboxPaused():
            return Conflict(text)
        case BadPath():
            return Invalid(text)
        case DiskFull():
            return Other(507, text)
        case AgentError():
            return Other(_AGENT_STATUS[error.code], text)
        case _ if error.reason in _BY_REASON:
            status, code, retry_after_s = _BY_REASON[error.reason]
            return Other(status, text, code, retry_after_s)
        case _:
            return Refused(text)


def body(error: Refused) -> dict[str, Any]:
    """E2B's error body."""
    made: dict[str, Any] = {"code": error.status, "message": str(error)}
    if error.error_code:
        made["error_code"] = error.error_code
    return made


def headers(error: Refused) -> dict[str, str]:
    """Whether and when to try again. Without these E2B's clients repeat every 429 and 503 at once."""
    if error.retry_after_s is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s))), "Should-Retry": "true"}
    return {"Should-Retry": "false"} if error.status >= 429 else {}
