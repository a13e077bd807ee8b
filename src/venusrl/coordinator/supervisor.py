"""Background tasks that cannot die unseen.

Owns: the named tasks of a run and what becomes of the run when one of them fails.

Must not know: what the tasks do.

Guarantees: a task that raises, ends though it never should, or cancels itself ends ``run`` with that very
cause; every task is cancelled and waited for before ``run`` returns, in bounded time; the caller's own
cancellation passes through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from venusrl.coordinator.errors import CoordinatorError, RunFailed, ShutdownTimeout

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Supervisor:
    """``await supervisor.run(main())``; ``main`` and its callees ``spawn`` what runs beside it."""

    def __init__(self, *, shutdown_s: float = 15.0) -> None:
        self._shutdown_s = shutdown_s
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._endless: set[asyncio.Task[Any]] = set()
        self._failure: tuple[str, BaseException] | None = None
        self._failed = asyncio.Event()
        self._closing = False

    @property
    def names(self) -> list[str]:
        """Of the tasks that run now, oldest first."""
        return list(self._tasks.values())

    def spawn(self, name: str, work: Coroutine[Any, Any, T], *, endless: bool = False) -> asyncio.Task[T]:
        """Run ``work`` beside the main task. Its exception fails the run; so does its end if it is ``endless``.

        Cancelling the returned task is allowed and no failure.
        """
        if self._closing:
            work.close()
            raise RuntimeError(f"{name} was spawned while the run shuts down")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = name
        if endless:
            self._endless.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Carry out ``main``; raise the first failure of anything, as it is or as the cause of a ``RunFailed``."""
        body = asyncio.get_running_loop().create_task(main, name="main")
        alarm = asyncio.get_running_loop().create_task(self._failed.wait(), name="alarm")
        try:
            await asyncio.wait({body, alarm}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise _as_failure(*self._failure)
            return body.result()
        except BaseException as error:  # whatever it was: stop the tasks, and pass it on
            await self._close([body, alarm], error)
            raise
        finally:
            if not self._closing:
                await self._close([body, alarm], None)

    async def close(self) -> None:
        """Cancel every task and wait for it. Raises ShutdownTimeout, naming those that go on. Idempotent."""
        await self._close([], None)

    async def _close(self, own: list[asyncio.Task[Any]], error: BaseException | None) -> None:
        self._closing = True
        waiting = [*own, *reversed(self._tasks)]
        for task in waiting:
            task.cancel()
        if not waiting:
            return
        _, left = await asyncio.wait(waiting, timeout=self._shutdown_s)
        for task in own:
            if task.done() and not task.cancelled() and (late := task.exception()) is not None and late is not error:
                _log.error("the main task failed while it shut down", exc_info=late)
        if left:
            names = ", ".join(sorted(task.get_name() for task in left))
            timeout = ShutdownTimeout(f"did not stop within {self._shutdown_s:g} s and were left behind: {names}")
            if error is None:
                raise timeout
            error.add_note(str(timeout))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        name = self._tasks.pop(task)
        endless = task in self._endless
        self._endless.discard(task)
        cause: BaseException | None = None
        if task.cancelled():
            if task.cancelling() == 0:
                cause = RunFailed(f"{name} was cancelled by something it awaited", "task_cancelled")
        elif (error := task.exception()) is not None:
            cause = error
        elif endless and not self._closing:
            cause = RunFailed(f"{name} ended, though the run still needs it", "task_ended")
        if cause is None:
            return
        if self._failure is None and not self._closing:
            self._failure = (name, cause)
            self._failed.set()
        else:
            _log.error("%s failed after the run had", name, exc_info=cause)


def _as_failure(name: str, cause: BaseException) -> BaseException:
    if isinstance(cause, CoordinatorError):
        return cause
    failure = RunFailed(f"{name} failed: {type(cause).__name__}: {cause}", getattr(cause, "reason", "task_failed"))
    failure.__cause__ = cause
    return failure
