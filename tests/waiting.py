"""Owns: how a test waits for what another process or task does. Knows nothing of what is waited for.

A test names the condition it needs and waits for it. How long it may take says only when to give up, so it is generous.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 120.0
"""When to give up, in seconds: far more than a busy machine takes."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str = "what was waited for") -> None:
    """Ask again and again until ``condition`` holds; fails the test after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline, f"{what} did not come to pass within {PATIENCE_S:g} s"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], bool], what: str = "what was waited for") -> None:
    """``until`` for a test without a loop: other processes and threads go on meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to pass within {PATIENCE_S:g} s"
        time.sleep(0.05)
