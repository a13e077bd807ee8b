"""Work of a host that nobody awaits, none of it lost from sight.

Owns: ``Background``: loops that run until the host closes, and operations that outlive their caller.

Must not know: sandboxes.

Guarantees: an error that a loop did not expect is logged and counted, and the loop goes on after a pause; ``close``
ends every loop and waits for every operation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from venusrl.clock import Clock

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_AFTER_AN_ERROR_S = 1.0


class Background:
    """``errors`` counts what loops did not expect, by the loop's name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loops: set[asyncio.Task[None]] = set()
        self._operations: set[asyncio.Task[Any]] = set()
        self.errors: dict[str, int] = {}

    def loop(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Await ``step`` again and again; it does its own waiting."""
        task = asyncio.create_task(self._again(name, step), name=name)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)

    def operation(self, name: str, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """A task that its caller's cancellation does not touch. Whoever awaits it gets its error; else it is logged."""
        task = asyncio.create_task(work, name=name)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return task

    def watch(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the host at the latest, and whose error is logged."""
        task = asyncio.create_task(self._logged(name, work), name=name)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)
        return task

    async def close(self) -> None:
        ended = list(self._loops)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        while self._operations:
            await asyncio.wait(set(self._operations))

    async def _again(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception:  # noqa: BLE001 - a loop must outlive what it did not expect: it guards everybody's memory
                self.errors[name] = self.errors.get(name, 0) + 1
                _log.exception("%s failed; it goes on", name)
                await self._clock.sleep(_AFTER_AN_ERROR_S)

    async def _logged(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - nobody awaits it
            self.errors[name] = self.errors.get(name, 0) + 1
            _log.exception("%s failed", name)
