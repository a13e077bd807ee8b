"""Virtual time: timers fire in order, each at its own time, with and without an event loop."""

from __future__ import annotations

import asyncio

import pytest

from venusrl.clock import Clock, SystemClock
from venusrl.testing.clock import VirtualClock


def test_timers_fire_in_order_at_their_own_time() -> None:
    clock = VirtualClock(start=10.0)
    log: list[tuple[str, float]] = []

    def note(name: str) -> None:
        log.append((name, clock.monotonic()))

    clock.call_at(12.0, lambda: note("b"))
    clock.call_at(11.0, lambda: note("a"))
    clock.call_at(12.0, lambda: note("c"))
    clock.call_at(11.0, lambda: clock.call_at(11.5, lambda: note("made on the way")))
    clock.call_at(1.0, lambda: note("late"))
    pending = [clock.next_timer]
    clock.advance(2.0)
    pending.append(clock.next_timer)
    assert pending == [10.0, None]
    assert log == [("late", 10.0), ("a", 11.0), ("made on the way", 11.5), ("b", 12.0), ("c", 12.0)]
    assert clock.monotonic() == 12.0
    assert clock.time() == 1_700_000_002.0
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)


async def test_sleepers_wake_in_virtual_time() -> None:
    clock = VirtualClock()
    log: list[tuple[str, float]] = []

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await clock.sleep(nap)
            log.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sleeper("a", 1.0, 1.0, 0.0))
        tasks.create_task(sleeper("b", 1.5))
        cancelled = tasks.create_task(sleeper("c", 1.0))
        await clock.run_for(0.5)
        cancelled.cancel()
        await clock.run_for(3.0)
    assert log == [("a", 1.0), ("b", 1.5), ("a", 2.0), ("a", 2.0)]


async def test_the_real_clock_is_a_clock_too() -> None:
    clock: Clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(-1)
    assert clock.monotonic() >= before
    assert clock.time() > 1_700_000_000
