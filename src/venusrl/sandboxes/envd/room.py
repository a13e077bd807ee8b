"""What E2B's services remember of one sandbox between requests.

Owns: ``Room``: its polled watchers and its background tasks, with their bounds and their end.

Must not know: HTTP, what the tasks do.

Guarantees: bounded; nothing goes on after ``close``; a task that failed is logged under its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from secrets import token_hex
from typing import Any

from venusrl.sandboxes.agent.api import Change
from venusrl.sandboxes.envd.connect import Fault, fault_of
from venusrl.sandboxes.protocol import SandboxError

MAX_WATCHERS = 64
MAX_CHANGES = 10_000
MAX_TASKS = 1024
_log = logging.getLogger(__name__)


class Watcher:
    """Collects what happens in a directory until somebody asks for it."""

    def __init__(self, path: str, user: str, include_entry: bool) -> None:
        self.path = path
        self.user = user
        self.include_entry = include_entry
        self._changes: deque[Change] = deque()
        self._ended: Fault | None = None

    async def collect(self, changes: AsyncIterator[Change]) -> None:
        """Runs until the watch ends."""
        try:
            async for change in changes:
                if len(self._changes) >= MAX_CHANGES:
                    message = f"more than {MAX_CHANGES} events were not fetched: create the watcher again"
                    self._ended = Fault("resource_exhausted", message)
                    return
                self._changes.append(change)
            self._ended = Fault("unavailable", "the watch ended")
        except SandboxError as error:
            self._ended = fault_of(error)

    def take(self) -> list[Change]:
        """What happened since the last call. Raises Fault when the watch has ended and nothing is left."""
        if self._ended is not None and not self._changes:
            raise self._ended
        taken = list(self._changes)
        self._changes.clear()
        return taken


class Room:
    """One sandbox's memory here."""

    def __init__(self) -> None:
        self._watchers: dict[str, tuple[Watcher, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def empty(self) -> bool:
        return not self._watchers and not self._tasks

    def keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` for as long as the sandbox is here. Raises Fault when too much is kept."""
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            raise Fault("resource_exhausted", f"{MAX_TASKS} background tasks of this sandbox are running")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def add_watcher(self, watcher: Watcher, changes: AsyncIterator[Change]) -> tuple[str, asyncio.Task[None]]:
        """Start collecting; returns the watcher's id and the task that collects. Raises Fault."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Fault("resource_exhausted", f"{MAX_WATCHERS} watchers exist: remove one")
        name = "w" + token_hex(8)
        task = self.keep(watcher.collect(changes), f"watcher {name}")
        self._watchers[name] = (watcher, task)
        return name, task

    def watcher(self, name: str) -> Watcher:
        """Raises Fault."""
        found = self._watchers.get(name)
        if found is None:
            gone = "watchers end when a sandbox is paused or moves to another node: create it again"
            raise Fault("not_found", f"there is no watcher {name!r}; {gone}")
        return found[0]

    def remove_watcher(self, name: str) -> None:
        """Raises Fault."""
        self.watcher(name)
        self._watchers.pop(name)[1].cancel()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._watchers.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed: %r", task.get_name(), error, exc_info=error)
