"""From what the store says to where the run stood: the scheduler's events and the live groups.

Owns: the translation of a ``RecoveredState``. Places that waited or were in flight are opened again in their own
group with the next attempt; groups that can no longer train are closed with a reason; recorded batches that are
not trained go back to the trainer.

Must not know: processes, engines, how weights are loaded. A trainer that was ahead of the store reports itself:
it repeats the newest version that its checkpoint contains, and that report is an ordinary one.

Guarantees: nothing finished is played again; no place gets more attempts than it is allowed, however often the run
is resumed; the same store gives the same events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from venusrl.coordinator.episodes import EpisodeSettings, Facts, LiveGroup
from venusrl.coordinator.errors import RunFailed
from venusrl.coordinator.store import GroupState, RecoveredGroup, RecoveredState, RunStore
from venusrl.scheduling.events import (
    BatchFormed,
    Event,
    GroupDropped,
    GroupOpened,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnDispatched,
    VersionPublished,
)
from venusrl.scheduling.scheduler import REISSUED
from venusrl.types import FailureKind, Task


class Recovered(msgspec.Struct, frozen=True):
    """``events`` are for ``Scheduler.restore``, ``groups`` for ``Episodes.adopt``."""

    events: list[Event]
    groups: list[LiveGroup]


def rebuild(store: RunStore, state: RecoveredState, tasks: Mapping[str, Task], settings: EpisodeSettings) -> Recovered:
    """Bring the store into a state that can go on, and say what happened so far. Raises RunFailed."""
    recovered = Recovered([VersionPublished(state.version)], [])
    for record in state.groups:
        _rebuild_group(store, record, tasks, settings, recovered)
    for closed in state.closed:
        if closed.reason in REISSUED:
            recovered.events.append(GroupDropped(closed.id, closed.reason, closed.reissues))
    recovered.events.extend(BatchFormed(batch.version, batch.group_ids) for batch in state.pending_batches)
    return recovered


def _rebuild_group(
    store: RunStore,
    record: RecoveredGroup,
    tasks: Mapping[str, Task],
    settings: EpisodeSettings,
    recovered: Recovered,
) -> None:
    given_up = [v.index for v in record.vacancies if v.infrastructure_failures > settings.retries]
    lost = record.size - len(record.finished) - len(record.vacancies) + len(given_up)
    if record.state is GroupState.OPEN and record.size - lost < settings.min_valid:
        store.close_group(record.id, "group_too_small")
        return
    for index in given_up:
        store.give_up_place(record.id, index)
    group = LiveGroup(record.id, record.ordinal, _task(tasks, record), record.size, lost=lost)
    group.failures = Counter({v.index: v.infrastructure_failures for v in record.vacancies})
    recovered.events.append(
        GroupOpened(record.id, record.ordinal, record.task_id, record.size, reissues=record.reissues)
    )
    _note_finished(store, record, group, recovered.events)
    for vacancy in record.vacancies:
        if vacancy.index not in given_up:
            opened = store.replace_trajectory(record.id, vacancy.index)
            group.running[opened.id] = opened
            recovered.events.append(TrajectoryOpened(opened.id, record.id, opened.index, opened.attempt))
    _note_lost(record, group, given_up, recovered.events)
    if group.settled and record.state is GroupState.OPEN:
        store.complete_group(record.id)
    recovered.groups.append(group)


def _note_finished(store: RunStore, record: RecoveredGroup, group: LiveGroup, events: list[Event]) -> None:
    for member in record.finished:
        trajectory = store.trajectory(member.id)
        if trajectory is None:
            raise RunFailed(f"the store has no record of finished trajectory {member.id}", reason="store_corrupt")
        group.finished[member.id] = Facts.of(trajectory)
        group.last_finished = member.id
        events.append(TrajectoryOpened(member.id, record.id, member.index, member.attempt))
        events.append(TurnDispatched(member.id, 0, "", member.start_version))
        events.append(TrajectoryFinished(member.id))


def _note_lost(record: RecoveredGroup, group: LiveGroup, given_up: list[int], events: list[Event]) -> None:
    """Places that were given up, now or before the crash, as the scheduler would have seen them."""
    taken = {member.index for member in record.finished} | {opened.index for opened in group.running.values()}
    for index in sorted(set(range(record.size)) - taken):
        name = f"{record.id}/{index}/given-up"
        reason = "given_up" if index in given_up else "given_up_before"
        events.append(TrajectoryOpened(name, record.id, index, 0))
        events.append(TrajectoryFailed(name, FailureKind.INFRASTRUCTURE, reason, replaced=False))


def _task(tasks: Mapping[str, Task], record: RecoveredGroup) -> Task:
    task = tasks.get(record.task_id)
    if task is None:
        raise RunFailed(f"task {record.task_id} of group {record.id} is not among the run's tasks", reason="tasks")
    return task
