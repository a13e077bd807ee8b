"""A clock that moves only when told to.

Owns: virtual time and the timers waiting on it. Must not know: threads or the machine's clock.

Guarantees: timers fire in order of their time, ties in order of creation, each with ``monotonic()`` equal to
its own time; the same calls give the same run. ``advance`` and ``call_at`` need no event loop; only ``sleep``
and ``run_for`` do.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

_SETTLE_ROUNDS = 32
"""Turns of the event loop given to woken tasks between two timers; a chain of awaits longer than this settles
at the next timer instead."""


class VirtualClock:
    """Implements ``venusrl.clock.Clock``."""

    def __init__(self, start: float = 0.0, epoch: float = 1_700_000_000.0) -> None:
        self._now = start
        self._epoch = epoch - start
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._epoch + self._now

    @property
    def next_timer(self) -> float | None:
        """When the earliest pending timer fires; None when nothing waits."""
        return self._timers[0][0] if self._timers else None

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` when time reaches ``when`` (a past ``when`` fires on the next advance)."""
        heapq.heappush(self._timers, (max(when, self._now), self._sequence, callback))
        self._sequence += 1

    def advance(self, seconds: float) -> None:
        """Move time forward, firing every timer on the way, those that timers create included."""
        end = self._end(seconds)
        while self._fire_next(end):
            pass
        self._now = end

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_at(self._now + seconds, lambda: None if woken.done() else woken.set_result(None))
        await woken

    async def run_for(self, seconds: float) -> None:
        """Like ``advance``, letting the event loop's tasks run before the first timer and after each one."""
        end = self._end(seconds)
        await self._settle()
        while self._fire_next(end):
            await self._settle()
        self._now = end
        await self._settle()

    def _end(self, seconds: float) -> float:
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"time moves forward by a finite amount, not {seconds}")
        return self._now + seconds

    def _fire_next(self, end: float) -> bool:
        if not self._timers or self._timers[0][0] > end:
            return False
        when, _, callback = heapq.heappop(self._timers)
        self._now = when
        callback()
        return True

    async def _settle(self) -> None:
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)
