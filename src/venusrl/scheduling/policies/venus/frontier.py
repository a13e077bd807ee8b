"""Which groups the trainer waits for, and in which order the others follow.

Owns: the level and the place of every open group. Must not know: turns, workers, how long trajectories are (it is
told what each group still needs).

The frontier is the best admissible batch under the expected finish of groups: its unfinished groups are critical,
those the quota forces first of all. Behind it groups stand by age of their start, then by what they still need, those
not yet started last: the next frontier forms of them. A group of the frontier stays in it unless another is better by
a margin: a frontier that changed with every estimate would start everything and finish nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from venusrl.scheduling.policies import View
from venusrl.scheduling.window import Group

DEADLINE_LEVEL, FRONTIER_LEVEL, BACKGROUND_LEVEL = 0, 1, 2
_STAY = 0.5
"""A group of the frontier counts with this share of what it needs."""


class Frontier:
    """See the module. Valid after the first ``refresh``; groups it does not know are background, last."""

    def __init__(self, *, by_batch: bool = True) -> None:
        self._by_batch = by_batch
        self._levels: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._cohorts: dict[str, float] = {}
        self.changes = 0
        """Grows with each new order."""

    def level(self, group: str) -> int:
        return self._levels.get(group, BACKGROUND_LEVEL)

    def cohort(self, group: str) -> float:
        """What trajectories of a level are ordered by before their own length: behind the frontier the version that
        their group started with, for that bounds when it trains (one not started has all the time). The frontier is
        one cohort. Without batches, the group's age."""
        return self._cohorts.get(group, math.inf)

    def knows(self, group: str) -> bool:
        return group in self._places

    def place(self, group: str) -> int:
        """Its position among all open groups."""
        return self._places.get(group, 1 << 30)

    def refresh(self, view: View, needs: Callable[[Group], float]) -> bool:
        """Order anew. ``needs``: what the group still needs, in seconds of work. True if anything changed."""
        levels = self._select(view, needs) if self._by_batch else dict.fromkeys(view.window.open, FRONTIER_LEVEL)
        groups = sorted(view.window.open.values(), key=lambda g: self._key(g, levels, needs))
        self._cohorts = {group.name: self._cohort(group, levels) for group in groups}
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

    def _cohort(self, group: Group, levels: dict[str, int]) -> float:
        if not self._by_batch:
            return group.ordinal
        if group.name in levels:
            return 0
        return math.inf if group.start is None else group.start

    def _key(self, group: Group, levels: dict[str, int], needs: Callable[[Group], float]) -> tuple[float, ...]:
        if not self._by_batch:
            return (group.ordinal,)
        level = levels.get(group.name, BACKGROUND_LEVEL)
        unstarted = group.start is None
        start = 0 if group.start is None else group.start
        return (level, unstarted, start, needs(group), group.ordinal)
