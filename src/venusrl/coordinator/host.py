"""Where the pure scheduler meets the running program.

Owns: the one place that calls ``Scheduler.handle``; the queue that makes it safe to report an event from
inside an action; the routing of actions to their executors; the periodic ``Tick``; the measurement of how
long the run waits on coordinator code.

Must not know: engines, sandboxes, the store. Executors are synchronous and short: what takes time they
start as a supervised task and answer later with an event.

Guarantees: events reach the scheduler one at a time, in the order they were reported, with a clock that
never goes back; the actions of an event are executed before the next event is handled; a fault of the
scheduler or of an executor ends the run with its original cause and is never lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from venusrl.scheduling.actions import Action, CancelTrajectory, Dispatch
from venusrl.scheduling.events import (
    Event,
    Tick,
    ToolFinished,
    ToolStarted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnDispatched,
    TurnFinished,
    TurnRequested,
    VerificationFinished,
    VerificationStarted,
)

Executor = Callable[[Any], None]


class SchedulerLike(Protocol):
    """What the host needs of a scheduler."""

    def handle(self, event: Event, now: float) -> list[Action]: ...

    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]: ...

    def restore(self, events: Iterable[Event], now: float) -> list[Action]: ...


class CriticalPath:
    """Seconds that trajectories and batches waited on coordinator code, pure.

    A trajectory is *ours* while it waits on nothing but this process: from an answer of its engine, its tool or its
    verifier to the next request for one (or its record on disk), and from the report that made the scheduler
    dispatch a turn until that turn left for the engine. A turn that the scheduler holds is not ours.

    ``busy_s`` is the union over all trajectories (an upper bound: with many in flight, one that waits rarely delays
    a step); ``take`` gives one trajectory's own sum, so that a step is charged with the trajectory that it waited for.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._busy_since = 0.0
        self.busy_s = 0.0

    def ours(self, trajectory: str, at: float) -> None:
        if not self._since:
            self._busy_since = at
        self._since.setdefault(trajectory, at)

    def theirs(self, trajectory: str, at: float) -> None:
        since = self._since.pop(trajectory, None)
        if since is None:
            return
        self._waited[trajectory] = self._waited.get(trajectory, 0.0) + at - since
        if not self._since:
            self.busy_s += at - self._busy_since

    def take(self, trajectory: str) -> float:
        """What the trajectory waited in all; it is forgotten."""
        return self._waited.pop(trajectory, 0.0)

    def forget(self, trajectory: str, at: float) -> None:
        """No step will wait for it."""
        self.theirs(trajectory, at)
        self.take(trajectory)


_OURS = (TurnFinished, ToolFinished, VerificationFinished)
_THEIRS = (
    TurnRequested,
    TurnDispatched,
    ToolStarted,
    VerificationStarted,
    TrajectoryFinished,
)


class HostStats(msgspec.Struct, frozen=True):
    """Cumulative figures of the coordinator itself, for one look at its cost."""

    events: int
    handle_s: float
    cpu_s: float
    busy_s: float
    loop_lag_mean_s: float
    loop_lag_max_s: float


class SchedulerHost:
    """Feeds events to the scheduler and its actions to their executors (see the module's guarantees)."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        *,
        now: Callable[[], float] = time.monotonic,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.scheduler = scheduler
        self.critical = CriticalPath()
        self.now = now
        self._on_failure = on_failure
        self._executors: dict[type, Executor] = {}
        self._observers: list[Callable[[Event], None]] = []
        self._queue: deque[tuple[tuple[Event, ...], float]] = deque()
        self._handling = False
        self._closed = False
        self._events = 0
        self._handle_s = 0.0
        self._cpu_at_start = time.process_time()
        self._lags = (0, 0.0, 0.0)

    def route(self, kind: type, executor: Executor) -> None:
        """Execute actions of ``kind`` with ``executor``. An action without an executor is a fault."""
        self._executors[kind] = executor

    def tap(self, observer: Callable[[Event], None]) -> None:
        """Show every event to ``observer``, before the scheduler decides on it."""
        self._observers.append(observer)

    def notify(self, *events: Event) -> None:
        """Report what happened at one instant: one decision follows all of it. Returns after that and everything it
        set off was handled (unless nested)."""
        if self._closed:
            return
        self._queue.append((events, self.now()))
        if not self._handling:
            self._drain()

    def restore(self, events: Iterable[Event]) -> None:
        """Tell the scheduler what happened in an earlier session, then carry out what follows from it."""
        self._drain(lambda: self.scheduler.restore(events, self.now()))

    def _drain(self, first: Callable[[], list[Action]] | None = None) -> None:
        self._handling = True
        try:
            if first is not None:
                self._execute(first(), self.now())
            while self._queue and not self._closed:
                self._handle(*self._queue.popleft())
        except Exception as error:  # noqa: BLE001 - any fault here ends the run with this very cause
            self.close()
            self._on_failure(error)
        finally:
            self._handling = False

    def close(self) -> None:
        """Hand on no event any more: the run is over, what still arrives has no meaning."""
        self._closed = True
        self._queue.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    async def tick(self, every_s: float = 0.25) -> None:
        """Report time, and measure how late the event loop runs. Runs until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(every_s)
            lag = max(0.0, time.monotonic() - before - every_s)
            count, total, worst = self._lags
            self._lags = (count + 1, total + lag, max(worst, lag))
            self.notify(Tick())

    def stats(self) -> HostStats:
        count, total, worst = self._lags
        return HostStats(
            events=self._events,
            handle_s=self._handle_s,
            cpu_s=time.process_time() - self._cpu_at_start,
            busy_s=self.critical.busy_s,
            loop_lag_mean_s=total / count if count else 0.0,
            loop_lag_max_s=worst,
        )

    def _handle(self, events: tuple[Event, ...], reported_at: float) -> None:
        for event in events:
            self._clock(event, reported_at)
            for observer in self._observers:
                observer(event)
        begun = time.perf_counter()
        now = self.now()
        one = len(events) == 1
        actions = self.scheduler.handle(events[0], now) if one else self.scheduler.handle_all(events, now)
        self._handle_s += time.perf_counter() - begun
        self._events += len(events)
        self._execute(actions, reported_at)

    def _clock(self, event: Event, reported_at: float) -> None:
        if isinstance(event, _OURS):
            self.critical.ours(event.trajectory, reported_at)
        elif isinstance(event, _THEIRS):
            self.critical.theirs(event.trajectory, reported_at)
        elif isinstance(event, TrajectoryFailed):
            self.critical.forget(event.trajectory, reported_at)

    def _execute(self, actions: list[Action], reported_at: float) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                self.critical.ours(action.trajectory, reported_at)
            elif isinstance(action, CancelTrajectory):
                self.critical.forget(action.trajectory, reported_at)
            executor = self._executors.get(type(action))
            if executor is None:
                raise LookupError(f"no executor for {type(action).__name__} ({action.reason})")
            executor(action)
