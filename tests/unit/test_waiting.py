"""Waiting up to a time, and to the end although cancelled."""

from __future__ import annotations

import asyncio

import pytest

from venusrl.rollout.waiting import done_within, to_the_end
from venusrl.testing.clock import VirtualClock


async def test_waits_up_to_a_time_and_leaves_the_future_alone() -> None:
    clock = VirtualClock()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(done_within(future, clock, 5.0))
    await clock.run_for(4.9)
    assert not waiting.done()
    await clock.run_for(0.2)
    assert await waiting is False
    assert not future.done()
    future.set_exception(ValueError("its own matter"))
    assert await done_within(future, clock, 5.0) is True
    assert isinstance(future.exception(), ValueError)


async def test_work_runs_to_its_end_and_then_the_cancellation_goes_on() -> None:
    clock = VirtualClock()
    ended: list[str] = []

    async def work() -> None:
        await clock.sleep(5.0)
        ended.append("work")

    async def caller() -> None:
        await to_the_end(work())
        ended.append("caller")

    task = asyncio.create_task(caller())
    for _ in range(2):
        await clock.run_for(1.0)
        task.cancel()
    await clock.run_for(5.0)
    assert ended == ["work"]
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_a_cancellation_the_works_own_outcome_counts() -> None:
    async def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await to_the_end(failing())
