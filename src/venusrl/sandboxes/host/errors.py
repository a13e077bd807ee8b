"""What can go wrong at a host beside a sandbox's own errors.

Owns: the errors and ``within``, the one way an operation's time is limited.

Must not know: which operations there are.

Guarantees: an operation has one limit, the host's; its end names the operation, the seconds and the setting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from venusrl.sandboxes.protocol import SandboxError


class OperationTimeout(SandboxError):
    """An operation took longer than the host allows. It was undone."""

    reason = "operation_timeout"


class HostLost(SandboxError):
    """The host does not answer. What it holds paused may come back with it."""

    reason = "host_lost"


class MoveUnsupported(SandboxError):
    """The two hosts have no way to hand a sandbox over. It is as before."""

    reason = "move_unsupported"


class AlreadyExists(SandboxError):
    """An id is in use."""

    reason = "already_exists"


@asynccontextmanager
async def within(seconds: float, operation: str, subject: str) -> AsyncIterator[None]:
    """Cancel the body after ``seconds``. Raises OperationTimeout."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise OperationTimeout(
            f"{operation} of {subject} took longer than {seconds:g} s and was undone (time limit {operation!r})"
        ) from None
