"""Which groups are open, how old they are, and which batch may form of them.

Owns: the outstanding groups and their members, the versions (published, held by the trainer, next to train), the
async window, the start of groups, and the formation of batches under ``quota``'s rule. Must not know: workers,
turns, time, why a group is opened or given up.

Guarantees: counts are exact and cheap (N_j from at most S + 1 buckets, whatever the number of groups); a batch
holds complete groups only, keeps the quota, and none of its groups is older than S; with the scheduler's discipline
(groups opened while ``room`` > 0, started while ``may_start``) the theorem in ``quota`` holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from venusrl.scheduling import quota
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.quota import Candidate, Rank, Selection


class EventError(Exception):
    """An event contradicts those before it: whoever reports events has a fault."""


@dataclass(slots=True)
class Member:
    """One trajectory that may still train. ``start``: version of its first turn's dispatch. ``sampled``: that
    dispatch is a fact; before, it is a reservation that a new dispatch replaces."""

    index: int
    start: int | None = None
    sampled: bool = False
    finished: bool = False


@dataclass(slots=True)
class Group:
    """One outstanding group. ``lost``: indices given up without a replacement. ``completed``: its place in the
    order of completion."""

    name: str
    task: str
    ordinal: int
    size: int
    reissues: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    lost: int = 0
    finished: int = 0
    start: int | None = None
    completed: int | None = None


class Window:
    """See the module. Mutated by the scheduler only, one event at a time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._limit = config.window
        self._starts: Counter[int] = Counter()
        self._completions = 0
        self.open: dict[str, Group] = {}
        """Untrained groups that are in no batch."""
        self.complete: dict[str, Group] = {}
        """Those of ``open`` whose members all finished."""
        self.formed: dict[int, tuple[str, ...]] = {}
        """Batches whose product is not published, by the version they train."""
        self.in_batches: dict[str, Group] = {}
        self._in_formed = 0
        """Groups of ``formed``, counted."""
        self._may_start: bool | None = None
        """What ``may_start`` answers; None when that may have changed."""
        self.published = 0
        self.held = 0
        """The version that the trainer has: it can train this one's batch."""
        self.next_version = 0
        """n: the version that the next batch to form trains."""

    # --- versions -----------------------------------------------------------------------------------
    @property
    def training(self) -> int | None:
        """The version whose batch is formed and not trained (the oldest such)."""
        return min((v for v in self.formed if v >= self.held), default=None)

    def trained(self, version: int) -> None:
        self._hold(version + 1)

    def publish(self, version: int) -> None:
        self.published = max(self.published, version)
        self._may_start = None
        self._hold(version)
        for past in [v for v in self.formed if v < self.published]:
            self._in_formed -= len(self.formed[past])
            for name in self.formed.pop(past):
                self.in_batches.pop(name, None)

    def _hold(self, version: int) -> None:
        self.held = max(self.held, version)
        self.next_version = max(self.next_version, self.held)
        self._may_start = None

    # --- the window -----------------------------------------------------------------------------------
    @property
    def outstanding(self) -> int:
        return len(self.open) + self._in_formed

    @property
    def room(self) -> int:
        """Groups that may still be opened: the window, and no more than the steps that are left can train."""
        room = self._limit - self.outstanding
        if room <= 0:
            return room
        if self._config.max_steps is not None:
            steps_left = self._config.max_steps - self.next_version
            room = min(room, steps_left * self._config.batch_groups - len(self.open))
        if self._config.cohorts:
            room = min(room, self._config.batch_groups - len(self.open))
        return room

    @property
    def publication_waits(self) -> bool:
        """Whether new weights must not be published yet: a cohort in flight is to end with those it began with."""
        return self._config.cohorts and len(self.complete) < len(self.open)

    def may_start(self) -> bool:
        """Whether one more group may start now, at the published version, with every N_j <= (j + 1) * B after it."""
        if self._may_start is None:
            self._may_start = self._another_may_start()
        return self._may_start

    def _another_may_start(self) -> bool:
        n, s, b = self.next_version, self._config.max_staleness, self._config.batch_groups
        last = self.published + s
        if last < n:
            return False
        counts = quota.cumulative(self._lasts(), n, s)
        return all(counts[j + 1] + 1 <= (j + 1) * b for j in range(min(last - n, s), s + 1))

    def last_admissible(self, group: Group) -> int | None:
        return None if group.start is None else group.start + self._config.max_staleness

    def at_deadline(self, group: Group) -> bool:
        """Whether it trains in the next batch or never."""
        return group.start is not None and group.start + self._config.max_staleness <= self.next_version

    # --- groups and members ------------------------------------------------------------------------
    def open_group(self, name: str, task: str, ordinal: int, size: int, reissues: int) -> None:
        if name in self.open or name in self.in_batches:
            raise EventError(f"group {name} is opened twice")
        self.open[name] = Group(name, task, ordinal, size, reissues)

    def add_member(self, group: Group, trajectory: str, index: int) -> None:
        if any(m.index == index for m in group.members.values()) or len(group.members) + group.lost >= group.size:
            raise EventError(f"trajectory {trajectory}: index {index} of group {group.name} is taken")
        group.members[trajectory] = Member(index)

    def start_member(self, group: Group, trajectory: str, version: int, *, sampled: bool) -> None:
        """A first turn goes out (a reservation at ``version``), or is known to have gone out with it."""
        member = group.members[trajectory]
        if member.sampled:
            return
        member.start, member.sampled = version, sampled
        self._refresh_start(group)

    def finish_member(self, group: Group, trajectory: str) -> bool:
        """The trajectory may train. True if that completes its group."""
        member = group.members[trajectory]
        if member.start is None:
            raise EventError(f"trajectory {trajectory} finished without any turn dispatched: it cannot train")
        if member.finished:
            return False
        member.finished = True
        group.finished += 1
        return self._check_complete(group)

    def lose_member(self, group: Group, trajectory: str, *, replaced: bool) -> bool:
        """The trajectory will not train. True if that completes its group."""
        member = group.members.pop(trajectory)
        group.finished -= member.finished
        group.lost += not replaced
        if group.completed is not None:
            group.completed = None
            del self.complete[group.name]
        self._refresh_start(group)
        return self._check_complete(group)

    def too_small(self, group: Group) -> bool:
        """Whether so many members are given up that the group can never train."""
        return group.size - group.lost < self._config.min_valid

    def remove(self, name: str) -> Group | None:
        """Forget an open group; None if it is not open."""
        group = self.open.pop(name, None)
        if group is not None:
            self.complete.pop(name, None)
            self._count(group.start, -1)
        return group

    # --- batches ---------------------------------------------------------------------------------------
    def batch(self) -> Selection | None:
        """The batch of ``next_version`` from complete groups alone, in the order of ``config.consumption``."""
        if len(self.complete) < self._config.batch_groups:
            return None
        if self._config.consumption == "in_order":
            selection = self.best_batch(lambda g: (g.ordinal,))
            return selection if selection is not None and self.complete.keys() >= set(selection.groups) else None
        if self._config.consumption == "windowed":
            end = self._window_end()
            reach = [g for g in self.open.values() if g.ordinal < end]
            selection = self._select(g for g in reach if g.completed is not None)
            if selection is not None or self._select(reach) is not None:
                return selection
            # What the quota forces lies beyond: to wait for the window to move would be to wait for ever.
        return self._select(self.complete.values())

    def best_batch(self, rank: Callable[[Group], Rank]) -> Selection | None:
        """The best admissible batch of all open groups, complete or not: its unfinished members are the frontier.

        ``rank``: when a group is expected to finish, or anything that orders like it. None while too few are open.
        """
        ranked = (self._candidate(g, rank(g)) for g in self.open.values())
        return quota.select(ranked, self._needs(), self.next_version, self._config.batch_groups)

    def form(self, version: int, groups: Iterable[str]) -> None:
        """The groups leave for the batch of ``version``."""
        names = tuple(groups)
        for name in names:
            group = self.remove(name)
            if group is not None:
                self.in_batches[name] = group
        self._in_formed += len(names) - len(self.formed.get(version, ()))
        self.formed[version] = names
        self.next_version = max(self.next_version, version + 1)
        self._may_start = None

    def obstacles(self) -> tuple[str, ...]:
        """The fewest incomplete groups without which the complete ones would make an admissible batch.

        Where ``config.consumption`` looks at some groups only: those of them that are incomplete.
        """
        s = self._config.max_staleness
        if self._config.consumption == "in_order":
            selection = self.best_batch(lambda g: (g.ordinal,))
            return tuple(name for name in (selection.groups if selection else ()) if name not in self.complete)
        if self._config.consumption == "windowed":
            end = self._window_end()
            return tuple(g.name for g in self._incomplete() if g.ordinal < end)
        complete = Counter(g.start + s for g in self.complete.values() if g.start is not None)
        incomplete = (self._candidate(g, _least_finished(g)) for g in self._incomplete())
        return quota.obstacles(complete, incomplete, self._needs(), self.next_version)

    def stale(self) -> tuple[str, ...]:
        """Groups that cannot all train in time any more; empty unless somebody broke the rules (see ``quota``)."""
        n, s, b = self.next_version, self._config.max_staleness, self._config.batch_groups
        counts = quota.cumulative(self._lasts(), n, s)
        if all(count <= level * b for level, count in enumerate(counts)):
            return ()
        return quota.excess((self._candidate(g, _least_finished(g)) for g in self.open.values()), n, b, s)

    # --- inside ------------------------------------------------------------------------------------------
    def _window_end(self) -> float:
        """Ordinal of the first task out of reach of ``windowed`` consumption: it moves on as the oldest complete."""
        oldest = min((g.ordinal for g in self._incomplete()), default=math.inf)
        return oldest + (self._config.consumption_window or 0)

    def _select(self, groups: Iterable[Group]) -> Selection | None:
        """By completion, incomplete ones last; in the order of start versions first if ``consumption`` says so."""
        by_start = self._config.consumption == "oldest"
        ranked = (
            self._candidate(g, (g.start or 0 if by_start else 0, math.inf if g.completed is None else g.completed))
            for g in groups
        )
        return quota.select(ranked, self._needs(), self.next_version, self._config.batch_groups)

    def _incomplete(self) -> Iterator[Group]:
        return (g for g in self.open.values() if g.completed is None)

    def _candidate(self, group: Group, rank: Rank) -> Candidate:
        return Candidate(group.name, self.last_admissible(group), rank)

    def _lasts(self) -> dict[int, int]:
        return {start + self._config.max_staleness: number for start, number in self._starts.items()}

    def _needs(self) -> list[int]:
        return quota.required(self._lasts(), self.next_version, self._config.batch_groups, self._config.max_staleness)

    def _check_complete(self, group: Group) -> bool:
        settled = group.finished == len(group.members) and group.finished + group.lost == group.size
        if not settled or group.completed is not None or self.too_small(group):
            return False
        group.completed = self._completions
        self._completions += 1
        self.complete[group.name] = group
        return True

    def _refresh_start(self, group: Group) -> None:
        start = min((m.start for m in group.members.values() if m.start is not None), default=None)
        if start != group.start:
            self._count(group.start, -1)
            self._count(start, +1)
            group.start = start

    def _count(self, start: int | None, change: int) -> None:
        if start is None:
            return
        self._may_start = None
        self._starts[start] += change
        if not self._starts[start]:
            del self._starts[start]


def _least_finished(group: Group) -> Rank:
    """Whom to give up last: complete groups, then those with most members finished, then the older tasks."""
    return (group.completed is None, -group.finished, group.ordinal)
