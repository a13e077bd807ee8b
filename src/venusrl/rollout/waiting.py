"""Two ways of waiting that rollouts need: up to a time, and to the end although cancelled.

Owns: nothing. Must not know: what is waited for.

Guarantees: neither loses a cancellation; neither leaves a task behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from venusrl.clock import Clock

T = TypeVar("T")


async def done_within(future: asyncio.Future[Any], clock: Clock, seconds: float) -> bool:
    """Wait until ``future`` is done or ``seconds`` of ``clock`` passed; never cancels or raises from it."""
    if future.done():
        return True
    timer = asyncio.create_task(clock.sleep(seconds))
    try:
        await asyncio.wait({future, timer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
    return future.done()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` (itself bounded in time) to its end even if cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Looked at, so that it is not reported as lost: the cancellation comes first.
        raise cancelled
    return task.result()
