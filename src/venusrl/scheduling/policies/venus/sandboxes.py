"""Who gets a sandbox first, and who lends his memory to the frontier.

Owns: which trajectories have, wait for, or gave away their sandbox, as far as the scheduler hears of it. Must not
know: memory, nodes, how long a set-up takes.

All sandboxes are asked for when their trajectory opens, ahead of need, with the priority of its group; those that were
denied stay asked for and follow their group's priority. For a trajectory of the frontier that was denied one, a
background trajectory that waits for a model's turn (so nothing runs in its sandbox) is paused: the one that would go
last. It is asked for again at once and comes back behind those more urgent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import CreateSandbox, PauseSandbox
from venusrl.scheduling.events import Event
from venusrl.scheduling.policies import PendingTurn, View
from venusrl.scheduling.policies.venus import reasons
from venusrl.scheduling.policies.venus.frontier import BACKGROUND_LEVEL, Frontier

_LEVEL = 1_000_000_000
"""More than there are groups."""


class Sandboxes:
    """See the module."""

    def __init__(self, frontier: Frontier, *, pausing: bool) -> None:
        self._frontier = frontier
        self._pausing = pausing
        self._ready: set[str] = set()
        self._denied: dict[str, int] = {}
        """Asked for and not there, with the priority said last."""
        self._leaving: set[str] = set()
        """Being paused."""
        self._back: dict[str, None] = {}
        """Paused, to be asked for again."""
        self._changed = False

    def observe(self, event: Event) -> None:
        match event:
            case ev.SandboxReady(trajectory=name):
                self._ready.add(name)
                self._denied.pop(name, None)
                self._leaving.discard(name)
            case ev.SandboxDenied(trajectory=name):
                self._denied.setdefault(name, -_LEVEL)
                self._changed = True
            case ev.SandboxPaused(trajectory=name):
                self._ready.discard(name)
                self._leaving.discard(name)
                self._back[name] = None
            case _:
                pass

    def forget(self, trajectory: str) -> None:
        self._ready.discard(trajectory)
        self._leaving.discard(trajectory)
        self._denied.pop(trajectory, None)
        self._back.pop(trajectory, None)

    def away(self, trajectory: str) -> bool:
        """Whether it gave its sandbox away: its turn waits until it is back."""
        return trajectory in self._leaving or trajectory in self._back or trajectory in self._denied

    @property
    def due(self) -> bool:
        """Whether there may be something to decide."""
        return self._changed or bool(self._back)

    def reordered(self) -> None:
        """The frontier has changed."""
        self._changed = bool(self._denied)

    def opened(self, trajectory: str, view: View) -> CreateSandbox:
        """What to ask for when a trajectory opens."""
        return CreateSandbox(reasons.OPENED, trajectory, self._priority(trajectory, view))

    def decide(self, view: View, idlest: Iterable[PendingTurn]) -> Iterator[CreateSandbox | PauseSandbox]:
        """``idlest``: waiting turns that hold no KV, the last in order first."""
        back, self._back = self._back, {}
        for name in back:
            priority = self._denied[name] = self._priority(name, view)
            yield CreateSandbox(reasons.RESUMED, name, priority)
        if not self._changed:
            return
        self._changed = False
        urgent = 0
        for name, said in self._denied.items():
            priority = self._priority(name, view)
            urgent += priority > 0 and name not in back
            if priority != said:
                self._denied[name] = priority
                yield CreateSandbox(reasons.NEEDED, name, priority)
        if self._pausing:
            yield from self._pause(urgent - len(self._leaving), idlest)

    def _pause(self, count: int, idlest: Iterable[PendingTurn]) -> Iterator[PauseSandbox]:
        for turn in idlest:
            if count <= 0 or self._frontier.level(turn.group) != BACKGROUND_LEVEL:
                return
            if turn.trajectory in self._ready and turn.trajectory not in self._leaving:
                count -= 1
                self._leaving.add(turn.trajectory)
                yield PauseSandbox(reasons.YIELDS, turn.trajectory)

    def _priority(self, trajectory: str, view: View) -> int:
        """Above 0 for the frontier; behind it by the group's place, or by its task's where it has none yet."""
        group = view.group(trajectory)
        if group is None:
            return 0
        level = self._frontier.level(group.name)
        place = self._frontier.place(group.name)
        if not self._frontier.knows(group.name):
            return -_LEVEL // 2 - group.ordinal
        return (BACKGROUND_LEVEL - level) * _LEVEL - place
