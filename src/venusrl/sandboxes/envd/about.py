"""What the services of a sandbox are told of it beside its agent.

Owns: ``About``; the verdict on a command that failed: was it the sandbox's memory or its disk.

Must not know: runtimes, which host, E2B's messages.

Guarantees: a command is said to be out of memory only if it failed and the kernel ended a process of its sandbox while
it ran (of several that fail meanwhile, all are), out of disk only if it failed and no further block or file fits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from venusrl.sandboxes.agent.api import Exit
from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Shortages

Verdict = Literal["", "out_of_memory", "out_of_disk"]


async def _never_short(_disk: bool) -> Shortages:
    return Shortages()


class About(msgspec.Struct, frozen=True):
    """``workdir``: where commands run that name no directory; "" = their user's home."""

    workdir: str = ""
    shortages: Callable[[bool], Awaitable[Shortages]] = _never_short
    """``runtimes.base.Instance.shortages``."""


NOTHING = About()


async def verdict(about: About, before: Shortages, end: Exit) -> Verdict:
    """Why a command failed, as far as the sandbox's limits are to blame; ``before`` was looked at when it began."""
    if end.code == 0:
        return ""
    try:
        now = await about.shortages(True)
    except SandboxError:
        return ""  # it ended or was paused meanwhile, which is told otherwise
    if now.memory_kills > before.memory_kills:
        return "out_of_memory"
    return "out_of_disk" if now.disk_full else ""
