"""A short-lived child that makes something the kernel ties to a process, until the parent holds it.

Owns: the fork, the handshake, the passage of an error back.

Must not know: what is made.

Guarantees: the child is gone when ``hold`` returns or raises; what failed in it is raised in the parent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from venusrl.sandboxes.protocol import HostDiskFull, SandboxError
from venusrl.sandboxes.runtimes.namespace import wire

_T = TypeVar("_T")
_MADE = b"made"
_ANSWER = 4096


def hold(make: Callable[[], None], take: Callable[[int], _T]) -> _T:
    """Run ``make`` in a child and, while the child waits, ``take(its pid)`` here; return what that took.

    Needs a single-threaded process. Raises SandboxError.
    """
    answered, answer = os.pipe()
    wait, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answered)
        os.close(release)
        _make(make, answer, wait)
    try:
        os.close(answer)
        os.close(wait)
        said = os.read(answered, _ANSWER)
        if said != _MADE:
            raise _error(said)
        return take(child)
    finally:
        os.close(answered)
        os.close(release)
        os.waitpid(child, 0)


def _make(make: Callable[[], None], answer: int, wait: int) -> None:
    """Child: make it, say so, stay until the parent holds it. Does not return."""
    try:
        make()
        os.write(answer, _MADE)
        os.read(wait, 1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
        _tell(answer, (HostDiskFull if full else SandboxError)(f"a sandbox could not be made: {error}"))
    except SandboxError as error:
        _tell(answer, error)
    finally:
        os._exit(0)


def _tell(answer: int, error: SandboxError) -> None:
    os.write(answer, wire.encode(wire.failure(0, error))[wire.HEADER_BYTES :][:_ANSWER])


def _error(said: bytes) -> Exception:
    failed = wire.decode_reply(said) if said else None
    if isinstance(failed, wire.Failed):
        return wire.error_of(failed)
    return SandboxError("a sandbox could not be made: its maker died")
