"""Sandboxes of a simulated run: memory, set-up, pause and resume.

Owns: who has a sandbox and who waits for one in which order. Must not know: turns, engines, what runs in a sandbox.

A sandbox asked for is created when its memory and a set-up slot are free, by priority, then in the order asked; nobody
overtakes the first in that order. One that cannot begin at once is denied (the scheduler hears of it) and stays asked
for. A paused one needs its memory again, and waits for it in the same queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.simulation.core import Core
from venusrl.simulation.scenario import SandboxSpec


class PolicyFault(Exception):
    """The policy asked for what cannot be: it has a fault."""


class Sandbox:
    """One trajectory's. ``wanted``: asked to resume while it was being paused."""

    __slots__ = ("memory", "place", "priority", "setup_s", "state", "trajectory", "wanted")

    def __init__(self, trajectory: str, memory: float, setup_s: float) -> None:
        self.trajectory = trajectory
        self.memory = memory
        self.setup_s = setup_s
        self.priority = 0
        self.place: tuple[int, int] | None = None
        """Its place in the queue; entries of the queue with another one are void."""
        self.state: Literal["unasked", "queued", "starting", "ready", "pausing", "paused", "gone"] = "unasked"
        self.wanted = False


class Sandboxes:
    """See the module. ``on_ready`` is called after the scheduler heard of a sandbox that is ready (again)."""

    def __init__(self, core: Core, spec: SandboxSpec, on_ready: Callable[[str], None]) -> None:
        self.used = 0.0
        self._core = core
        self._spec = spec
        self._on_ready = on_ready
        self._all: dict[str, Sandbox] = {}
        self._queue: list[tuple[tuple[int, int], Sandbox]] = []
        self._asked = 0
        self._starting = 0
        core.carry_out[act.CreateSandbox] = self._create

    def expect(self, trajectory: str, memory: float, setup_s: float) -> None:
        """A trajectory opened that will need a sandbox."""
        if self._spec.memory is not None and memory > self._spec.memory:
            raise PolicyFault(f"the sandbox of {trajectory} needs {memory}, there is {self._spec.memory}")
        self._all[trajectory] = Sandbox(trajectory, memory, setup_s)

    def demand(self, trajectory: str) -> bool:
        """Its trajectory needs it now. False if it is not ready; then it will be, whether the policy asks or not."""
        box = self._all[trajectory]
        if box.state == "pausing":
            box.wanted = True
        elif box.state == "paused":
            self._enqueue(box)
            self._serve()
        return box.state == "ready"

    def pause(self, trajectory: str) -> bool:
        """Begin to pause it. False if the trajectory is over. Raises PolicyFault if it does not have one."""
        box = self._all.get(trajectory)
        if box is None:
            return False
        if box.state != "ready":
            raise PolicyFault(f"the sandbox of {trajectory} is to be paused, it is {box.state}")
        box.state = "pausing"
        self._core.later(self._spec.pause_s, self._paused, box)
        return True

    def release(self, trajectory: str) -> None:
        """The trajectory is over."""
        box = self._all.pop(trajectory, None)
        if box is None:
            return
        if box.state == "starting":
            self._starting -= 1
        if box.state in ("starting", "ready", "pausing"):
            self.used -= box.memory
        box.state, box.place = "gone", None
        self._serve()

    # --- inside -------------------------------------------------------------------------------------------
    def _create(self, action: act.CreateSandbox) -> None:
        box = self._all.get(action.trajectory)
        if box is None:
            return
        box.priority = action.priority
        if box.state == "pausing":
            box.wanted = True
        elif box.state in ("unasked", "queued", "paused"):
            first = box.state != "queued"
            self._enqueue(box)
            self._serve()
            if first and box.place is not None:
                self._core.report(ev.SandboxDenied(box.trajectory, self._spec.retry_after_s))

    def _enqueue(self, box: Sandbox) -> None:
        if box.place is None:
            # The set-up of a paused one is kept: it needs its memory again and time to resume.
            box.setup_s = self._spec.resume_s if box.state == "paused" else box.setup_s
            self._asked += 1
        elif box.place[0] == -box.priority:
            return
        box.place = (-box.priority, self._asked if box.place is None else box.place[1])
        box.state = "queued"
        heapq.heappush(self._queue, (box.place, box))

    def _serve(self) -> None:
        while self._queue:
            place, box = self._queue[0]
            if box.place == place:
                memory, slots = self._spec.memory, self._spec.setups_at_once
                short = memory is not None and self.used + box.memory > memory + 1e-9
                if short or (slots is not None and self._starting >= slots):
                    return
                box.state, box.place = "starting", None
                self.used += box.memory
                self._starting += 1
                self._core.later(box.setup_s, self._ready, box)
            heapq.heappop(self._queue)

    def _ready(self, box: Sandbox) -> None:
        if box.state != "starting":
            return
        self._core.worked()
        box.state = "ready"
        self._starting -= 1
        self._core.report(ev.SandboxReady(box.trajectory))
        if box.state == "ready":
            self._on_ready(box.trajectory)
        self._serve()

    def _paused(self, box: Sandbox) -> None:
        if box.state != "pausing":
            return
        self._core.worked()
        box.state = "paused"
        self.used -= box.memory
        self._core.report(ev.SandboxPaused(box.trajectory))
        if box.wanted and box.state == "paused":
            box.wanted = False
            self._enqueue(box)
        self._serve()
