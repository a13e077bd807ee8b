"""Which groups the trainer waits for, and in which order the others follow.

Owns: the level, the place and the due time of every open group. Must not know: turns, workers, how long trajectories
are (it is told what each group still needs).

The frontier is the best admissible batch under the expected finish of groups: its unfinished groups are critical,
those the quota forces first of all. Behind it groups stand by age of their start, then by what they still need, those
not yet started last: the next frontier forms of them. A group of the frontier stays in it unless another is better by
a margin: a frontier that changed with every estimate would start everything and finish nothing.

A group is *due* when the batch begins that it may enter at last, with one training step after the other at the
interval of late. Only differences count, so the frontier is due at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from venusrl.scheduling.policies import View
from venusrl.scheduling.window import Group

DEADLINE_LEVEL, FRONTIER_LEVEL, BACKGROUND_LEVEL = 0, 1, 2
_STAY = 0.8
"""A group of the frontier counts with this share of what it needs."""
_FADE = 0.5
"""Weight of the latest interval in that between versions."""


class Frontier:
    """See the module. Valid after the first ``refresh``; groups it does not know are background, last."""

    def __init__(self, *, by_batch: bool = True) -> None:
        self._by_batch = by_batch
        self._levels: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._published: tuple[int, float] | None = None
        """The version of late, and when it was first seen."""
        self._interval_s: float | None = None
        self.changes = 0
        """Grows with each new order."""

    def level(self, group: str) -> int:
        return self._levels.get(group, BACKGROUND_LEVEL)

    def due(self, group: str) -> float:
        """In how many seconds its batch must begin, after the frontier's. Without batches, the group's age."""
        return self._due.get(group, math.inf)

    def knows(self, group: str) -> bool:
        return group in self._places

    def place(self, group: str) -> int:
        """Its position among all open groups."""
        return self._places.get(group, 1 << 30)

    def refresh(self, view: View, needs: Callable[[Group], float]) -> bool:
        """Order anew. ``needs``: what the group still needs, in seconds of work. True if anything changed."""
        self._note(view)
        levels = self._select(view, needs) if self._by_batch else dict.fromkeys(view.window.open, FRONTIER_LEVEL)
        groups = sorted(view.window.open.values(), key=lambda g: self._key(g, levels, needs))
        # Before the second version nobody knows: as long as the slowest group takes alone.
        step_s = max(map(needs, groups), default=0.0) if self._interval_s is None else self._interval_s
        self._due = {group.name: self._batches(group, levels, view) * step_s for group in groups}
        places = {group.name: place for place, group in enumerate(groups)}
        changed = levels != self._levels or places != self._places
        self._levels, self._places = levels, places
        self.changes += changed
        return changed

    def _select(self, view: View, needs: Callable[[Group], float]) -> dict[str, int]:
        def rank(group: Group) -> tuple[float, ...]:
            if group.completed is not None:
                return (0.0, group.completed)
            stays = self._levels.get(group.name, BACKGROUND_LEVEL) != BACKGROUND_LEVEL
            return (needs(group) * (_STAY if stays else 1.0), group.ordinal)

        selection = view.window.best_batch(rank)
        if selection is None:
            # Too few are open to make a batch: all of them are wanted.
            return dict.fromkeys(view.window.open, FRONTIER_LEVEL)
        levels = dict.fromkeys(selection.groups, FRONTIER_LEVEL)
        levels.update(dict.fromkeys(selection.mandatory, DEADLINE_LEVEL))
        return levels

    def _note(self, view: View) -> None:
        """How far apart versions are."""
        version = view.window.published
        if self._published is None:
            # The first, or that of a run that goes on: when it was published is not known.
            self._published = (version, view.now)
        elif version > self._published[0]:
            latest = (view.now - self._published[1]) / (version - self._published[0])
            before = latest if self._interval_s is None else self._interval_s
            self._interval_s = before + _FADE * (latest - before)
            self._published = (version, view.now)

    def _batches(self, group: Group, levels: dict[str, int], view: View) -> int:
        """How many batches after the frontier's it is due, at the latest. One not started could start now."""
        if not self._by_batch:
            return group.ordinal
        if group.name in levels:
            return 0
        last = view.window.last_admissible(group)
        if last is None:
            # It may start now, or later still.
            return view.config.max_staleness + 1
        return max(1, last - view.window.next_version)

    def _key(self, group: Group, levels: dict[str, int], needs: Callable[[Group], float]) -> tuple[float, ...]:
        if not self._by_batch:
            return (group.ordinal,)
        level = levels.get(group.name, BACKGROUND_LEVEL)
        unstarted = group.start is None
        start = 0 if group.start is None else group.start
        return (level, unstarted, start, needs(group), group.ordinal)
