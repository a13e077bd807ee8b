"""Time as an argument: whoever measures or waits is given a ``Clock``.

Owns: the ``Clock`` protocol and the real clock. ``venusrl.testing.clock.VirtualClock`` is the other one.

Must not know: who waits for what.

Guarantees: ``monotonic`` never goes back and is the only source of durations; ``time`` is wall-clock time,
for people and for records alone.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, as floats."""

    def monotonic(self) -> float:
        """Never decreasing; only differences mean something."""
        ...

    def time(self) -> float:
        """Unix time; may jump."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait at least ``seconds`` of monotonic time."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
