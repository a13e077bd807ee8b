"""An independent check of what a scheduler promises, from the events it is told and the actions it answers.

Owns: ``Promises``, a log that raises ``PromiseBroken`` at the first broken promise. Must not know: how the scheduler
decides, who carries its actions out; it keeps its own books and uses none of ``scheduling.window`` or
``scheduling.quota``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.config import SchedulerConfig
from venusrl.testing.virtual_run import PromiseBroken


@dataclass(slots=True)
class _Member:
    group: str
    start: int | None = None
    versions: set[int] = field(default_factory=set)
    asked: int | None = None
    """The turn that is asked for and not dispatched, since ``since``."""
    since: float = 0.0
    running: int | None = None
    finished: bool = False


@dataclass(slots=True)
class _Group:
    size: int
    members: dict[str, _Member] = field(default_factory=dict)
    lost: int = 0


class Promises:
    """Call it with every event. ``longest_hold_s``: the bound that no turn may wait beyond (None = no bound)."""

    def __init__(self, config: SchedulerConfig, longest_hold_s: float | None = None) -> None:
        self.longest_hold_s = 0.0
        self.dispatched: Counter[tuple[str, int]] = Counter()
        self._config = config
        self._bound_s = longest_hold_s
        self._window = math.floor((1 + Fraction(config.async_factor)) * config.batch_groups)
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, _Member] = {}
        self._workers: dict[str, int] = {}
        self._draining: set[str] = set()
        self._opening = 0
        self._batches: dict[int, tuple[str, ...]] = {}
        self._published = self._trained = 0

    def __call__(self, now: float, event: ev.Event, answer: Sequence[act.Action]) -> None:
        self._note(now, event)
        for action in answer:
            self._act(now, action)
        if isinstance(event, ev.TurnDispatched | ev.BatchTrained | ev.GroupOpened):
            self._check_bounds()

    def finish(self, now: float) -> None:
        """At the end of the run: every turn that was asked for was dispatched, or nobody trains its trajectory."""
        for name, member in self._members.items():
            if member.asked is not None:
                self._waited(name, now - member.since)

    # --- what happens ---------------------------------------------------------------------------------------
    def _note(self, now: float, event: ev.Event) -> None:
        match event:
            case ev.VersionPublished(version=version):
                self._published = version
                for past in [v for v in self._batches if v < version]:
                    del self._batches[past]
            case ev.BatchTrained(version=version):
                self._trained = version + 1
            case ev.WorkerUp(worker=worker, version=version) | ev.WorkerAcknowledged(worker=worker, version=version):
                self._workers[worker] = version
                self._draining.discard(worker)
            case ev.WorkerDown(worker=worker):
                self._workers.pop(worker, None)
            case ev.WorkerDraining(worker=worker):
                self._draining.add(worker)
            case ev.GroupOpened(group=group, size=size):
                self._opening -= 1
                self._groups[group] = _Group(size)
            case ev.TaskOrderExhausted():
                self._opening -= 1
            case _:
                self._note_trajectory(now, event)

    def _note_trajectory(self, now: float, event: ev.Event) -> None:
        match event:
            case ev.TrajectoryOpened(trajectory=name, group=group):
                if group in self._groups:
                    self._members[name] = self._groups[group].members[name] = _Member(group)
            case ev.TurnRequested(trajectory=name, turn=turn) if name in self._members:
                member = self._members[name]
                member.asked, member.since, member.running = turn, now, None
            case ev.TurnDispatched(trajectory=name, version=version) if name in self._members:
                self._started(name, self._members[name], version)
            case ev.TurnFinished(trajectory=name) if name in self._members:
                self._members[name].running = None
            case ev.TrajectoryFinished(trajectory=name) if name in self._members:
                self._members[name].finished = True
            case ev.TrajectoryFailed(trajectory=name, replaced=replaced) if name in self._members:
                shrunk = self._members.pop(name).group
                record = self._groups[shrunk]
                del record.members[name]
                record.lost += not replaced
                if record.size - record.lost < self._config.min_valid:
                    self._forget(shrunk)
            case ev.GroupClosed(group=group) if group in self._groups:
                self._forget(group)
            case _:
                pass

    def _started(self, name: str, member: _Member, version: int) -> None:
        member.versions.add(version)
        if member.start is None:
            member.start = version
            if version != self._published:
                raise PromiseBroken(f"{name} starts at {version}, published is {self._published}")
        elif version < member.start:
            raise PromiseBroken(f"{name} started at {member.start} and goes to version {version}")

    # --- what is decided ------------------------------------------------------------------------------------
    def _act(self, now: float, action: act.Action) -> None:
        match action:
            case act.OpenGroup():
                self._opening += 1
                outstanding = len(self._groups) + sum(map(len, self._batches.values())) + self._opening
                if outstanding > self._window:
                    raise PromiseBroken(f"{outstanding} groups would be outstanding, the window is {self._window}")
            case act.Dispatch():
                self._dispatched(now, action)
            case act.Preempt(trajectory=name):
                if self._members[name].running is None:
                    raise PromiseBroken(f"{name} is preempted and does not run")
            case act.FormBatch():
                self._formed(action)
            case act.CancelTrajectory(trajectory=name) if name in self._members:
                self._forget(self._members[name].group)
            case _:
                pass

    def _dispatched(self, now: float, action: act.Dispatch) -> None:
        member = self._members[action.trajectory]
        if member.asked != action.turn or member.running is not None:
            raise PromiseBroken(f"{action} was not asked for, or is dispatched already")
        if action.worker not in self._workers or action.worker in self._draining:
            raise PromiseBroken(f"{action} goes to a worker that takes no turn")
        self._waited(action.trajectory, now - member.since)
        self.dispatched[action.trajectory, action.turn] += 1
        member.asked, member.running = None, action.turn

    def _waited(self, name: str, seconds: float) -> None:
        self.longest_hold_s = max(self.longest_hold_s, seconds)
        if self._bound_s is not None and seconds > self._bound_s:
            raise PromiseBroken(f"a turn of {name} was held for {seconds:.1f} s")

    def _formed(self, action: act.FormBatch) -> None:
        config = self._config
        if action.version != self._trained or any(v >= action.version for v in self._batches):
            raise PromiseBroken(f"{action} is not the trainer's next batch")
        if len(set(action.groups)) != config.batch_groups and not config.short_last_batch:
            raise PromiseBroken(f"{action} does not hold {config.batch_groups} groups")
        for name in action.groups:
            group = self._groups[name]
            if len(group.members) + group.lost != group.size:
                raise PromiseBroken(f"group {name} of {action} lacks members")
            for trajectory, member in group.members.items():
                self._check_member(trajectory, member, action.version)
            self._forget(name)
        self._batches[action.version] = action.groups

    def _check_member(self, name: str, member: _Member, version: int) -> None:
        config = self._config
        if not member.finished:
            raise PromiseBroken(f"{name} trains at {version} and is not finished")
        if member.start is None or version - member.start > config.max_staleness:
            raise PromiseBroken(f"{name} started at {member.start} and trains at {version}")
        if config.on_policy and member.versions != {version}:
            raise PromiseBroken(f"{name} has tokens of {member.versions} and trains on-policy at {version}")

    def _forget(self, group: str) -> None:
        for name in self._groups.pop(group).members:
            del self._members[name]

    # --- the quota, counted anew ------------------------------------------------------------------------------
    def _check_bounds(self) -> None:
        """N_j <= (j + 1) * B for every j >= -1."""
        config = self._config
        n = max([self._trained, *(v + 1 for v in self._batches)])
        spare: Counter[int] = Counter()
        for group in self._groups.values():
            starts = [m.start for m in group.members.values() if m.start is not None]
            if starts:
                spare[min(starts) + config.max_staleness - n] += 1
        total = 0
        for level in sorted(spare):
            total += spare[level]
            if total > max(0, level + 1) * config.batch_groups:
                raise PromiseBroken(f"{total} groups must train within {level + 1} batches of {config.batch_groups}")
