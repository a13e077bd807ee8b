"""The scheduler's state in words and figures.

Owns: ``snapshot`` and ``waiting_for``, both read-only. Must not know: events and actions.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from venusrl.scheduling.actions import FinishRun
from venusrl.scheduling.snapshot import GroupView, SchedulerSnapshot, WorkerView
from venusrl.scheduling.window import Group

if TYPE_CHECKING:
    from venusrl.scheduling.scheduler import Scheduler

STATES = ("waiting", "running", "complete", "training")
DOINGS = ("starting", "held", "generating", "tool", "verifying", "finished")


def snapshot(scheduler: Scheduler) -> SchedulerSnapshot:
    """One consistent picture."""
    window = scheduler.window
    mandatory = _mandatory(scheduler)
    groups = [_group_view(scheduler, g, mandatory) for g in [*window.in_batches.values(), *window.open.values()]]
    states = Counter(view.state for view in groups)
    # After a recovery the groups of older batches are known by name only.
    states["training"] = sum(map(len, window.formed.values()))
    doings = Counter(live.doing for live in scheduler.live.values())
    holds = Counter(live.held for live in scheduler.live.values() if live.held is not None)
    ages = [window.next_version - g.start for g in window.open.values() if g.start is not None]
    opening = scheduler.opening + len(scheduler.reopening)
    return SchedulerSnapshot(
        version=window.published,
        next_version=window.next_version,
        training=window.training,
        outstanding=window.outstanding + opening,
        window=scheduler.config.window,
        opening=opening,
        states={state: states[state] for state in STATES},
        groups=groups,
        trajectories={doing: doings[doing] for doing in DOINGS},
        workers=[
            WorkerView(w.name, w.version, w.slots, len(w.running), len(w.sessions), w.draining)
            for w in scheduler.fleet.workers.values()
        ],
        holds=dict(sorted(holds.items())),
        staleness_mean=sum(ages) / len(ages) if ages else 0.0,
        staleness_max=max(ages, default=0),
        waiting_for=waiting_for(scheduler),
        refills_left=scheduler.refills_left,
        retired=dict(sorted(scheduler.retired.items())),
        consecutive_dead_groups=scheduler.dead_groups,
        late_events=scheduler.late_events,
    )


def waiting_for(scheduler: Scheduler) -> str:
    """Why no batch forms now: the first of the causes below that holds."""
    window, config = scheduler.window, scheduler.config
    if scheduler.ended is not None:
        code = "done" if isinstance(scheduler.ended, FinishRun) else "failed"
        return f"{code}: {scheduler.ended.reason}"
    if window.training is not None:
        return f"training: the batch of version {window.training} is with the trainer"
    if len(window.complete) >= config.batch_groups:
        return _mandatory_text(scheduler)
    workers = scheduler.fleet.workers.values()
    if not workers:
        return "engine: no worker is up"
    live = scheduler.live.values()
    unfinished = [t for t in live if t.doing != "finished"]
    if unfinished and all(t.doing == "held" and t.held in ("weights", "draining") for t in unfinished):
        return f"weights: no worker that a turn may go to has version {window.published}"
    denied = sum(t.denied for t in unfinished)
    if unfinished and denied == len(unfinished):
        return f"sandboxes: {denied} trajectories are denied one"
    text = f"groups: {len(window.complete)} of {config.batch_groups} complete, {len(window.open)} open"
    return text + (f", {denied} trajectories without a sandbox" if denied else "")


def _mandatory_text(scheduler: Scheduler) -> str:
    groups = [scheduler.window.open[name] for name in scheduler.window.obstacles()]
    shown = ", ".join(f"{g.name} ({g.finished} of {g.size} finished)" for g in groups[:3])
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return f"mandatory: {shown}{more} must train in the batch of version {scheduler.window.next_version}"


def _mandatory(scheduler: Scheduler) -> frozenset[str]:
    """What the quota forces into the next batch, if groups finish in the order of what they lack now."""
    selection = scheduler.window.best_batch(lambda g: (g.size - g.lost - g.finished, g.ordinal))
    return selection.mandatory if selection is not None else frozenset()


def _group_view(scheduler: Scheduler, group: Group, mandatory: frozenset[str]) -> GroupView:
    window = scheduler.window
    is_open = group.name in window.open
    return GroupView(
        group=group.name,
        task=group.task,
        ordinal=group.ordinal,
        size=group.size,
        finished=group.finished,
        state=_state(group) if is_open else "training",
        start=group.start,
        last_admissible=window.last_admissible(group),
        mandatory=group.name in mandatory,
        at_deadline=is_open and window.at_deadline(group),
    )


def _state(group: Group) -> str:
    if group.completed is not None:
        return "complete"
    return "waiting" if group.start is None else "running"
