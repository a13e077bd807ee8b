"""The clock of a simulated run and the conversation with its scheduler.

Owns: virtual time, timers, the order in which events reach the scheduler and its answers are carried out. Must not
know: engines, trajectories, the trainer: they register for the actions they carry out.

Guarantees: timers fire in order of their time, ties in order of creation; events reach the scheduler in the order they
were reported, and everything that it answers to one is carried out before the next.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.scheduler import Scheduler

_STANDSTILL = 1_000_000
"""Timers at one instant beyond which time will never move again."""


Log = Callable[[float, ev.Event, Sequence[act.Action]], None]
"""Hears of every event and what the scheduler answered (to several at once: with the last), before that is carried
out."""


class Timer:
    """A call at a time to come. ``when``: that time."""

    __slots__ = ("args", "call", "when")

    def __init__(self, when: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.when = when
        self.call: Callable[..., None] | None = call
        self.args = args

    def cancel(self) -> None:
        """It will not be called (any more)."""
        self.call = None


class SimulationStuck(Exception):
    """Nothing can happen any more, or nothing comes of what happens; says what is held and why."""


class Core:
    """See the module. Components call ``later`` and ``report``, and put their handlers into ``carry_out``."""

    def __init__(self, scheduler: Scheduler, log: Log | None = None) -> None:
        self.scheduler = scheduler
        self._log = log
        self.now = 0.0
        self.worked_at = 0.0
        """When something last happened that was not mere housekeeping (a tick, a measurement, a death)."""
        self.popped = 0
        self.handled = 0
        self.ended: act.FinishRun | act.FailRun | None = None
        self.carry_out: dict[type, Callable[[Any], None]] = {}
        self.after_timer: list[Callable[[], None]] = []
        """Called when a timer and all that follows from it at once is done."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._pending: deque[tuple[ev.Event, ...]] = deque()
        self._busy = False
        self._next_tick: Timer | None = None

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        self._sequence += 1
        timer = Timer(when, call, args)
        heapq.heappush(self._timers, (when, self._sequence, timer))
        return timer

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        return self.at(self.now + seconds, call, *args)

    def worked(self) -> None:
        """A timer fired that moves the run on."""
        self.popped += 1
        self.worked_at = self.now

    def report(self, *events: ev.Event) -> None:
        """Tell the scheduler, now or when it is done with what it was told before. It decides on them together."""
        self._pending.append(events)
        if self._busy:
            return
        self._busy = True
        pending, handle, carry_out = self._pending, self.scheduler.handle_all, self.carry_out
        while pending and self.ended is None:
            together = pending.popleft()
            self.handled += len(together)
            answer = handle(together, self.now)
            if self._log is not None:
                for event in together[:-1]:
                    self._log(self.now, event, ())
                self._log(self.now, together[-1], answer)
            for action in answer:
                carry_out[type(action)](action)
        self._busy = False

    def run(self, until: float, patience_s: float) -> None:
        """Fire timers until the scheduler ends the run. Raises SimulationStuck beyond ``until``, when nothing moved for
        ``patience_s``, or without timers."""
        timers, still = self._timers, 0
        self._settle()
        while self.ended is None:
            if not timers or timers[0][0] > min(until, self.worked_at + patience_s):
                raise SimulationStuck(self._stuck())
            when, _, timer = heapq.heappop(timers)
            if timer.call is None:
                continue
            still = 0 if when > self.now else still + 1
            if still > _STANDSTILL:
                raise SimulationStuck(self._stuck())
            self.now = max(when, self.now)
            timer.call(*timer.args)
            self._settle()

    def end(self, action: act.FinishRun | act.FailRun) -> None:
        self.ended = action

    def _settle(self) -> None:
        for call in self.after_timer:
            call()
        wake = self.scheduler.wake_at
        if wake is None:
            return
        if self._next_tick is not None:
            if self._next_tick.when <= wake:
                return
            self._next_tick.cancel()
        self._next_tick = self.at(max(wake, self.now), self._tick)

    def _tick(self) -> None:
        self._next_tick = None
        wake = self.scheduler.wake_at
        if wake is not None and wake <= self.now:
            self.popped += 1
            self.report(ev.Tick())

    def _stuck(self) -> str:
        doings = Counter(live.doing for live in self.scheduler.live.values())
        holds = Counter(live.held for live in self.scheduler.live.values() if live.held is not None)
        return (
            f"stuck at {self.now:.1f} s under {self.scheduler.policy.name}: {self.scheduler.waiting_for()}; "
            f"trajectories {dict(doings)}, held for {dict(holds)}"
        )
