"""The state machine of a run: events in, actions out.

Owns: the composition of window, fleet and policy; the life of every trajectory as far as order is concerned;
opening and giving up groups, forming batches, ending the run. Must not know: clocks, tasks, engines, asyncio. It
draws no random number: the same events at the same times give the same actions.

Guarantees, as long as events are reported as ``events`` says:

- at most floor((1 + alpha) * B) groups are outstanding, and near the end no more than can still train;
- a trajectory starts only on a worker that has the published weights, and only where the quota lets it; no turn goes
  to a worker with older weights than its trajectory started with; on-policy none goes to a worker that is behind;
- a formed batch is admissible, its groups are complete and none is older than S; the bound is checked again while
  groups are in flight, and what breaks it is cancelled as ``stale`` (never, by the theorem in ``quota``);
- every requested turn is dispatched once, unless it is withdrawn; a held one has a reason;
- ``snapshot().waiting_for`` always says why no batch forms; when none can form any more, the run is ended.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import (
    Action,
    CancelTrajectory,
    Dispatch,
    FailRun,
    FinishRun,
    FormBatch,
    Hold,
    OpenGroup,
    Preempt,
)
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.events import Event
from venusrl.scheduling.explain import snapshot, waiting_for
from venusrl.scheduling.fleet import Fleet, Worker
from venusrl.scheduling.live import Live, Reissue
from venusrl.scheduling.policies import PendingTurn, Policy
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.snapshot import SchedulerSnapshot
from venusrl.scheduling.window import EventError, Group, Window
from venusrl.types import FailureKind

ZERO_VARIANCE = "zero_variance"
STALENESS_QUOTA = "staleness_quota"
REISSUED = frozenset({"stale", "deadline"})
"""Reasons to give a group up that are not its task's fault: the task is tried again."""


class Scheduler:
    """``handle`` every event, carry out what it answers. ``now`` is in seconds and never decreases."""

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.policy = Fcfs() if policy is None else policy
        self.window = Window(config)
        self.fleet = Fleet()
        self.workers: Mapping[str, Worker] = self.fleet.workers
        self.now = 0.0
        """Seconds, as given with the last event."""
        self.live: dict[str, Live] = {}
        self.opening = 0
        """Fresh groups asked for and not answered."""
        self.reopening: dict[str, int] = {}
        """Reissues asked for and not answered: dropped group -> how often its task was reissued."""
        self.exhausted = False
        self.ended: FinishRun | FailRun | None = None
        self.retired: Counter[str] = Counter()
        self.dead_groups = 0
        self.late_events = 0
        self.blocked_since: float | None = None
        """Since when B groups are complete and mandatory ones are not."""
        self._to_reissue: deque[Reissue] = deque()
        self._refills = 0
        self._quota_holds = False
        self._failures: Counter[str] = Counter()
        self._changed = True
        """Whether something happened that concerns groups; ``_full``: no group may be opened before it does."""
        self._full = False
        self._out: list[Action] = []
        self._handlers: Mapping[type, Callable[[Any], object]] = {
            ev.Tick: self._on_tick,
            ev.WorkerUp: self._on_worker_up,
            ev.WorkerDown: lambda e: self.fleet.down(e.worker),
            ev.WorkerMeasured: _nothing,
            ev.WorkerCalibrated: lambda e: self._known(self.fleet.calibrate(e.worker, e.costs)),
            ev.WorkerDraining: lambda e: self._known(self.fleet.drain(e.worker)),
            ev.WorkerAcknowledged: lambda e: self._known(self.fleet.acknowledge(e.worker, e.version)),
            ev.VersionPublished: self._on_version_published,
            ev.BatchFormed: self._on_batch_formed,
            ev.BatchTrained: self._on_batch_trained,
            ev.GroupOpened: self._on_group_opened,
            ev.GroupDropped: lambda e: self._reissue(e.group, e.reissues, e.reason),
            ev.TaskOrderExhausted: self._on_exhausted,
            ev.TrajectoryOpened: self._on_trajectory_opened,
            ev.TurnRequested: self._on_turn_requested,
            ev.TurnDispatched: self._on_turn_dispatched,
            ev.TokensGenerated: _nothing,
            ev.TurnFinished: self._on_turn_finished,
            ev.KVTransferred: self._on_kv_transferred,
            ev.ToolStarted: lambda e: self._doing(e.trajectory, "tool"),
            ev.ToolFinished: _nothing,
            ev.VerificationStarted: lambda e: self._doing(e.trajectory, "verifying"),
            ev.VerificationFinished: _nothing,
            ev.TrajectoryFinished: self._on_trajectory_finished,
            ev.TrajectoryFailed: self._on_trajectory_failed,
            ev.GroupClosed: self._on_group_closed,
            ev.SandboxReady: lambda e: self._sandbox(e.trajectory, denied=False),
            ev.SandboxDenied: lambda e: self._sandbox(e.trajectory, denied=True),
            ev.SandboxPaused: _nothing,
        }

    # --- the door --------------------------------------------------------------------------------------
    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of one event and decide. Raises EventError for one that contradicts those before it."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]:
        """Events of one instant, then one decision. Matters where the first alone would mislead: of workers that take
        new weights together, the first to acknowledge would get every trajectory that waits for them."""
        self.now = now
        observe, handlers = self.policy.observe, self._handlers
        for event in events:
            observe(event, self)
            handlers[type(event)](event)
        return self._decide()

    def restore(self, events: Iterable[Event], now: float) -> list[Action]:
        """After a crash: take note of synthetic events as if they had happened, then decide once.

        Order: ``VersionPublished`` of the weights in use; for every group that is in no batch and not closed,
        ``GroupOpened`` and, per live trajectory, ``TrajectoryOpened``, then for the finished ones ``TurnDispatched``
        (turn 0, its start version, worker "") and ``TrajectoryFinished``, and ``TrajectoryFailed(replaced=False)`` for
        those given up; ``GroupDropped`` for dropped groups not yet reissued; ``BatchFormed`` for every recorded batch
        of the versions from the one in use on; ``TaskOrderExhausted`` if so; ``WorkerUp`` for workers that serve.
        """
        return self.handle_all(events, now)

    @property
    def refills_left(self) -> int:
        """Zero-variance groups that may still be replaced before the next batch."""
        return max(0, self.config.zero_variance_refills - self._refills)

    def snapshot(self) -> SchedulerSnapshot:
        """The present state; cheap enough to call a few times a second."""
        return snapshot(self)

    def waiting_for(self) -> str:
        """Why no batch forms now (see ``SchedulerSnapshot.waiting_for``)."""
        return waiting_for(self)

    @property
    def wake_at(self) -> float | None:
        """When to send a ``Tick`` if nothing happens before; None = never."""
        wake = self.policy.wake_at(self)
        if self.blocked_since is None:
            return wake
        grace_ends = self.blocked_since + self.config.drop_grace_s
        return grace_ends if wake is None else min(wake, grace_ends)

    # --- what a policy may look at (policies.View) ---------------------------------------------------
    def group(self, trajectory: str) -> Group | None:
        live = self.live.get(trajectory)
        return None if live is None else live.group

    def doing(self, trajectory: str) -> str | None:
        live = self.live.get(trajectory)
        return None if live is None else live.doing

    @property
    def changes(self) -> int:
        return self.fleet.changes

    @property
    def freed(self) -> int:
        return self.fleet.freed

    def home(self, trajectory: str) -> Worker | None:
        return self.fleet.home(trajectory)

    def held(self, turn: PendingTurn) -> str | None:
        group = self.live[turn.trajectory].group
        if group.start is None and not self.window.may_start():
            return STALENESS_QUOTA
        return None

    def refusal(self, turn: PendingTurn, worker: Worker) -> str | None:
        if worker.draining:
            return "draining"
        if worker.version >= self.window.published:
            return None
        member = self.live[turn.trajectory].group.members[turn.trajectory]
        fresh = not member.sampled or self.config.on_policy
        oldest = self.window.published if fresh else (member.start or 0)
        return None if worker.version >= oldest else "weights"

    def urgency(self, turn: PendingTurn) -> int:
        return int(self.window.at_deadline(self.live[turn.trajectory].group))

    # --- taking note -------------------------------------------------------------------------------------
    def _known(self, known: object) -> bool:
        """Count an event about something that is already gone."""
        self.late_events += not known
        return bool(known)

    def _on_tick(self, event: ev.Tick) -> None:
        # Only a grace period depends on time alone.
        self._changed = self._changed or self.blocked_since is not None

    def _on_worker_up(self, event: ev.WorkerUp) -> None:
        self.fleet.up(event.worker, event.kv_capacity, event.slots, event.version, event.costs)

    def _on_version_published(self, event: ev.VersionPublished) -> None:
        self.window.publish(event.version)
        self._changed = True

    def _on_batch_formed(self, event: ev.BatchFormed) -> None:
        self.window.form(event.version, event.groups)
        self._end_all(event.groups)
        self._changed = True

    def _on_batch_trained(self, event: ev.BatchTrained) -> None:
        self.window.trained(event.version)
        self._changed = True

    def _on_group_opened(self, event: ev.GroupOpened) -> None:
        times = self.reopening.pop(event.reissue_of, 0) if event.reissue_of is not None else event.reissues
        if not times:
            self.opening = max(0, self.opening - 1)
        self.window.open_group(event.group, event.task, event.ordinal, event.size, times)
        self._changed = True

    def _on_exhausted(self, event: ev.TaskOrderExhausted) -> None:
        self.exhausted = True
        self.opening = 0
        self._changed = True

    def _on_trajectory_opened(self, event: ev.TrajectoryOpened) -> None:
        group = self.window.open.get(event.group)
        if not self._known(group) or group is None:
            # Its group was given up while it was on its way.
            self._out.append(CancelTrajectory("group_closed", event.trajectory))
            return
        if event.trajectory in self.live:
            raise EventError(f"trajectory {event.trajectory} is opened twice")
        self.window.add_member(group, event.trajectory, event.index)
        self.live[event.trajectory] = Live(group)
        wanted = self.policy.sandbox(event.trajectory, self)
        if wanted is not None:
            self._out.append(wanted)

    def _on_turn_requested(self, event: ev.TurnRequested) -> None:
        live = self.live.get(event.trajectory)
        if not self._known(live) or live is None:
            return
        if live.doing == "finished":
            raise EventError(f"trajectory {event.trajectory} asks for a turn after its end")
        self.fleet.free(event.trajectory)
        live.denied = False
        self._hold(live, "new")
        self.policy.add(
            PendingTurn(
                trajectory=event.trajectory,
                group=live.group.name,
                turn=event.turn,
                prompt_tokens=event.prompt_tokens,
                shared_prefix=event.shared_prefix,
                max_tokens=event.max_tokens,
                resumed=event.resumed,
                requested_at=self.now,
            )
        )

    def _on_turn_dispatched(self, event: ev.TurnDispatched) -> None:
        live = self.live.get(event.trajectory)
        if not self._known(live) or live is None:
            return
        before = live.group.start
        self.window.start_member(live.group, event.trajectory, event.version, sampled=True)
        self._changed = self._changed or live.group.start != before
        home = self.fleet.home(event.trajectory)
        if home is not None and home.name != event.worker:
            self.fleet.place(event.trajectory, event.worker)

    def _on_turn_finished(self, event: ev.TurnFinished) -> None:
        if self._doing(event.trajectory, "tool"):
            self.fleet.free(event.trajectory)

    def _on_kv_transferred(self, event: ev.KVTransferred) -> None:
        if self._known(event.trajectory in self.live) and event.tokens:
            self.fleet.move(event.trajectory, event.worker)

    def _on_trajectory_finished(self, event: ev.TrajectoryFinished) -> None:
        if not self._doing(event.trajectory, "finished"):
            return
        self.policy.remove(event.trajectory)
        self.fleet.leave(event.trajectory)
        self._completed(self.window.finish_member(self.live[event.trajectory].group, event.trajectory))

    def _on_trajectory_failed(self, event: ev.TrajectoryFailed) -> None:
        live = self._end(event.trajectory)
        if not self._known(live) or live is None:
            return
        if event.kind is not FailureKind.CANCELLED:
            self._failures[event.reason] += 1
        self._changed = True
        self._completed(self.window.lose_member(live.group, event.trajectory, replaced=event.replaced))
        if self.window.too_small(live.group):
            self._retire(live.group.name, "group_too_small")
            self.dead_groups += 1

    def _on_group_closed(self, event: ev.GroupClosed) -> None:
        if not self._known(event.group in self.window.open):
            return
        self._retire(event.group, event.reason, cancel_as="group_closed")
        if event.reason == ZERO_VARIANCE:
            self._refills += 1
            self._alive()
        else:
            self.dead_groups += 1

    def _sandbox(self, trajectory: str, *, denied: bool) -> None:
        live = self.live.get(trajectory)
        if self._known(live) and live is not None:
            live.denied = denied

    def _doing(self, trajectory: str, what: str) -> bool:
        live = self.live.get(trajectory)
        if not self._known(live) or live is None:
            return False
        live.doing, live.held = what, None
        return True

    def _hold(self, live: Live, reason: str) -> None:
        live.doing, live.held = "held", reason

    def _completed(self, completed: bool) -> None:
        if completed:
            self._changed = True
            self._alive()

    def _alive(self) -> None:
        """Not every group fails: the causes seen so far explain nothing."""
        self.dead_groups = 0
        self._failures.clear()

    def _end(self, trajectory: str) -> Live | None:
        """Forget a trajectory (its group is told elsewhere)."""
        self.policy.remove(trajectory)
        self.fleet.leave(trajectory)
        return self.live.pop(trajectory, None)

    def _end_all(self, groups: Iterable[str]) -> None:
        for name in groups:
            group = self.window.in_batches.get(name)
            for trajectory in group.members if group is not None else ():
                self._end(trajectory)

    def _retire(self, name: str, reason: str, *, cancel_as: str | None = None) -> None:
        """Give a group up: cancel its members, free its place, have its task tried again if it is not to blame."""
        group = self.window.remove(name)
        if group is None:
            return
        self.retired[reason] += 1
        self._changed = True
        for trajectory in group.members:
            self._end(trajectory)
            self._out.append(CancelTrajectory(cancel_as or reason, trajectory))
        if reason in REISSUED:
            self._reissue(name, group.reissues, reason)

    def _reissue(self, name: str, times: int, reason: str) -> None:
        if times < self.config.max_reissues:
            self._to_reissue.append(Reissue(name, times + 1, reason))

    # --- deciding ----------------------------------------------------------------------------------------
    def _decide(self) -> list[Action]:
        if self.ended is None and self._changed:
            self._changed = self._full = False
            self._settle()
        if self.ended is None:
            self._apply_policy()
            if not self._full:
                self._open()
        out, self._out = self._out, []
        return out

    def _settle(self) -> None:
        """Everything about groups: guard the bound, drop what may be dropped, form, open, end."""
        for name in self.window.stale():
            self._retire(name, "stale")
        self._drop_obstacles()
        self._form()
        self._conclude()
        if self._quota_holds:
            self._quota_holds = False
            self.fleet.touch()

    def _drop_obstacles(self) -> None:
        """``deadline = "drop"``: mandatory groups that hold up a batch of B complete others longer than the grace."""
        enough = len(self.window.complete) >= self.config.batch_groups
        if self.config.deadline != "drop" or not enough or self.window.batch() is not None:
            self.blocked_since = None
            return
        if self.blocked_since is None:
            self.blocked_since = self.now
        # The trainer waits for nothing before it is free.
        if self.window.training is None and self.now - self.blocked_since >= self.config.drop_grace_s:
            for name in self.window.obstacles():
                self._retire(name, "deadline")
            self.blocked_since = None

    def _form(self) -> None:
        if self.window.training is not None or self._steps_are_over():
            return
        selection = self.window.batch()
        groups = selection.groups if selection is not None else self._short_last_batch()
        if not groups:
            return
        version = self.window.next_version
        self.window.form(version, groups)
        self._end_all(groups)
        self._refills = 0
        self._out.append(FormBatch("admissible", version, groups))

    def _short_last_batch(self) -> tuple[str, ...]:
        left = self.window.open
        allowed = self.config.short_last_batch and self._no_more_groups() and len(left) < self.config.batch_groups
        return tuple(left) if allowed and len(self.window.complete) == len(left) else ()

    def _open(self) -> None:
        asked = self.opening + len(self.reopening)
        room = self.window.room - asked
        if room <= 0:
            self._full = True
            return
        room = min(room, self.policy.group_limit(self) - self.window.outstanding - asked)
        while room > 0 and self._to_reissue:
            again = self._to_reissue.popleft()
            self.reopening[again.group] = again.times
            self._out.append(OpenGroup(again.reason, again.group))
            room -= 1
        if not self.exhausted:
            for _ in range(room):
                self.opening += 1
                self._out.append(OpenGroup("window"))

    def _conclude(self) -> None:
        if self.dead_groups >= self.config.max_dead_groups:
            causes = ", ".join(f"{reason} x {count}" for reason, count in self._failures.most_common())
            self._end_run(FailRun("all_groups_failing", causes))
        elif self._steps_are_over() and self.window.training is None:
            self._end_run(FinishRun("max_steps"))
        elif (
            self._no_more_groups()
            and self.window.training is None
            and len(self.window.open) < (1 if self.config.short_last_batch else self.config.batch_groups)
        ):
            self._end_run(FinishRun("task_order_exhausted"))

    def _no_more_groups(self) -> bool:
        return self.exhausted and not (self.opening or self.reopening or self._to_reissue)

    def _steps_are_over(self) -> bool:
        return self.config.max_steps is not None and self.window.next_version >= self.config.max_steps

    def _end_run(self, action: FinishRun | FailRun) -> None:
        self.ended = action
        self._out.append(action)

    def _apply_policy(self) -> None:
        for action in self.policy.decide(self):
            live = self.live[action.trajectory]
            if isinstance(action, Hold):
                self._hold(live, action.reason)
                self._quota_holds = self._quota_holds or action.reason == STALENESS_QUOTA
            elif isinstance(action, Dispatch):
                self._send(live, action)
            elif isinstance(action, Preempt) and live.doing != "generating":
                raise EventError(f"the policy preempts {action.trajectory}, which is {live.doing}")
            self._out.append(action)

    def _send(self, live: Live, action: Dispatch) -> None:
        worker = self.fleet.workers[action.worker]
        group = live.group
        if group.start is None and not self.window.may_start():
            raise EventError(f"the policy starts group {group.name} against the staleness quota")
        self.window.start_member(group, action.trajectory, worker.version, sampled=False)
        self.fleet.place(action.trajectory, action.worker)
        live.doing, live.held = "generating", None


def _nothing(event: Event) -> None:
    """Of interest to policies that predict; order alone does not need it."""
