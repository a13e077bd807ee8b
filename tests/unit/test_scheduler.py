"""The scheduler, event by event: cases T01, T22, T26, T28 and the rules of its docstring."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, TypeVar

import pytest

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import (
    Action,
    CancelTrajectory,
    CreateSandbox,
    Dispatch,
    FailRun,
    FinishRun,
    FormBatch,
    Hold,
    OpenGroup,
)
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.scheduler import Scheduler
from venusrl.scheduling.window import EventError
from venusrl.types import FailureKind, StopReason

A = TypeVar("A", bound=Action)


class Desk:
    """A scheduler with one worker, and the events that tests report to it. Time stands still unless moved."""

    def __init__(self, alpha: str = "1", *, start: bool = True, **changes: Any) -> None:
        defaults: dict[str, Any] = {
            "batch_groups": 2,
            "group_size": 2,
            "async_factor": Decimal(alpha),
            "max_staleness": math.ceil(Decimal(alpha)),
        }
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | changes)))
        self.now = 0.0
        self.said: list[Action] = []
        if start:
            self.tell(ev.VersionPublished(0), ev.WorkerUp("w", 10_000, 4, 0))

    def tell(self, *events: ev.Event) -> list[Action]:
        """What the scheduler answers to these events."""
        answer = [action for event in events for action in self.scheduler.handle(event, self.now)]
        self.said += answer
        return answer

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.said if isinstance(action, kind)]

    def open(self, *groups: str, reissue_of: str | None = None) -> list[Action]:
        size = self.scheduler.config.group_size
        answer = []
        for group in groups:
            answer += self.tell(ev.GroupOpened(group, int(group[1:2]), f"task-{group}", size, reissue_of))
            answer += self.tell(*(ev.TrajectoryOpened(f"{group}/{i}", group, i, 0) for i in range(size)))
        return answer

    def request(self, trajectory: str, turn: int = 0) -> list[Action]:
        return self.tell(ev.TurnRequested(trajectory, turn, 10, 5, 10))

    def start(self, trajectory: str) -> list[Action]:
        """Ask for the first turn; the worker has it when this returns."""
        answer = self.request(trajectory)
        assert any(isinstance(a, Dispatch) for a in answer)
        worker = self.scheduler.fleet.workers["w"]
        return answer + self.tell(ev.TurnDispatched(trajectory, 0, "w", worker.version))

    def finish(self, *groups: str) -> list[Action]:
        answer = []
        for group in groups:
            for index in range(self.scheduler.config.group_size):
                name = f"{group}/{index}"
                self.start(name)
                answer += self.tell(ev.TurnFinished(name, 0, 5, 0, StopReason.STOP), ev.TrajectoryFinished(name))
        return answer

    def train(self, version: int) -> list[Action]:
        return self.tell(
            ev.BatchTrained(version), ev.VersionPublished(version + 1), ev.WorkerAcknowledged("w", version + 1)
        )

    def waits_for(self, code: str) -> bool:
        return self.scheduler.snapshot().waiting_for.startswith(f"{code}:")


# --- opening ---------------------------------------------------------------------------------------------
def test_the_window_is_filled_and_no_more() -> None:
    desk = Desk("1.5")
    assert len(desk.all(OpenGroup)) == 5
    desk.open("g0", "g1", "g2", "g3", "g4")
    assert len(desk.all(OpenGroup)) == 5
    assert desk.scheduler.snapshot().outstanding == 5


def test_a_batch_frees_its_places_when_its_product_is_published() -> None:
    desk = Desk("0")
    desk.open("g0", "g1")
    assert [a.groups for a in desk.finish("g0", "g1") if isinstance(a, FormBatch)] == [("g0", "g1")]
    assert not [a for a in desk.tell(ev.BatchTrained(0)) if isinstance(a, OpenGroup)]
    assert len([a for a in desk.tell(ev.VersionPublished(1)) if isinstance(a, OpenGroup)]) == 2


def test_a_trajectory_gets_a_sandbox_older_groups_first() -> None:
    desk = Desk()
    desk.open("g0", "g1")
    created = {a.trajectory: a.priority for a in desk.all(CreateSandbox)}
    assert created["g0/0"] == created["g0/1"] > created["g1/0"]


def test_near_the_end_only_what_still_trains_is_opened() -> None:
    desk = Desk("3", max_steps=1)
    assert len(desk.all(OpenGroup)) == 2
    desk.open("g0", "g1")
    desk.finish("g0", "g1")
    assert [a.reason for a in desk.tell(ev.BatchTrained(0)) if isinstance(a, FinishRun)] == ["max_steps"]
    assert desk.waits_for("done")


def test_nothing_is_opened_for_no_steps() -> None:
    assert [type(a) for a in Desk(max_steps=0).said] == [FinishRun]


# --- the staleness bound -------------------------------------------------------------------------------
def test_T01_a_finished_group_that_aged_is_never_trained_and_counted_once() -> None:
    desk = Desk("1")
    desk.open("g0")
    desk.finish("g0")
    answer = desk.tell(ev.VersionPublished(3))
    cancelled = [(a.trajectory, a.reason) for a in answer if isinstance(a, CancelTrajectory)]
    assert cancelled == [("g0/0", "stale"), ("g0/1", "stale")]
    assert [a for a in answer if isinstance(a, OpenGroup) and a.reissue_of == "g0"]
    desk.tell(*(ev.TrajectoryFailed(f"g0/{i}", FailureKind.CANCELLED, "stale", False) for i in range(2)))
    desk.tell(ev.GroupClosed("g0", "stale"), ev.WorkerAcknowledged("w", 3))
    assert desk.scheduler.snapshot().retired == {"stale": 1}
    desk.open("g1", "g2")
    desk.finish("g1", "g2")
    assert [(a.version, a.groups) for a in desk.all(FormBatch)] == [(3, ("g1", "g2"))]


def test_T01_a_tight_bound_ends_after_its_steps() -> None:
    desk = Desk("0", max_steps=3)
    for step in range(3):
        desk.open(f"g{step}", f"g{step}b")
        desk.finish(f"g{step}", f"g{step}b")
        desk.train(step)
    assert [a.version for a in desk.all(FormBatch)] == [0, 1, 2]
    assert [a.reason for a in desk.all(FinishRun)] == ["max_steps"]
    assert not desk.all(CancelTrajectory)


def test_a_new_trajectory_starts_on_the_published_weights_only() -> None:
    desk = Desk("1")
    desk.open("g0")
    desk.tell(ev.VersionPublished(1))
    assert [(a.trajectory, a.reason) for a in desk.request("g0/0") if isinstance(a, Hold)] == [("g0/0", "weights")]
    assert not desk.tell(ev.Tick())
    assert desk.waits_for("groups")
    answer = desk.tell(ev.WorkerAcknowledged("w", 1))
    assert [a.trajectory for a in answer if isinstance(a, Dispatch)] == ["g0/0"]


def test_a_started_trajectory_goes_on_with_older_weights_unless_on_policy() -> None:
    desk = Desk("1")
    desk.open("g0")
    desk.start("g0/0")
    desk.tell(ev.TurnFinished("g0/0", 0, 5, 0, StopReason.STOP), ev.VersionPublished(1))
    assert [type(a) for a in desk.request("g0/0", 1)] == [Dispatch]


@pytest.mark.parametrize("alpha", ["0", "2"])
def test_no_turn_goes_to_weights_older_than_its_trajectory(alpha: str) -> None:
    desk = Desk(alpha)
    desk.open("g0")
    desk.tell(ev.VersionPublished(1), ev.WorkerAcknowledged("w", 1), ev.WorkerUp("late", 10_000, 4, 0))
    desk.start("g0/0")
    desk.tell(ev.TurnFinished("g0/0", 0, 5, 0, StopReason.STOP), ev.WorkerDown("w"))
    assert [a.reason for a in desk.request("g0/0", 1) if isinstance(a, Hold)] == ["weights"]


def test_the_version_at_dispatch_counts_not_the_one_at_completion() -> None:
    desk = Desk("2")
    desk.open("g0")
    desk.start("g0/0")
    desk.tell(ev.VersionPublished(1), ev.WorkerAcknowledged("w", 1))
    desk.tell(ev.TurnFinished("g0/0", 0, 5, 0, StopReason.STOP), ev.TrajectoryFinished("g0/0"))
    assert [g.start for g in desk.scheduler.snapshot().groups] == [0]


def test_a_smaller_window_than_before_holds_new_groups_back_until_they_fit() -> None:
    """Resumed with alpha = 0 what was opened with more: two groups wait, started ones keep the quota."""
    desk = Desk("0", start=False)
    opened = [ev.GroupOpened(f"g{i}", i, "t", 2) for i in range(4)]
    members = [ev.TrajectoryOpened(f"g{i}/{j}", f"g{i}", j, 0) for i in range(4) for j in range(2)]
    desk.scheduler.restore([ev.VersionPublished(0), *opened, *members, ev.WorkerUp("w", 10_000, 4, 0)], 0.0)
    desk.start("g0/0")
    desk.start("g1/0")
    assert [a.reason for a in desk.request("g2/0") if isinstance(a, Hold)] == ["staleness_quota"]
    assert [type(a) for a in desk.request("g0/1")] == [Dispatch]
    desk.request("g1/1")
    for name in ("g0/0", "g0/1", "g1/0", "g1/1"):
        desk.tell(ev.TrajectoryFinished(name))
    answer = desk.train(0)
    assert [a.trajectory for a in answer if isinstance(a, Dispatch)] == ["g2/0"]
    assert not [a for a in answer if isinstance(a, OpenGroup | CancelTrajectory)]


# --- failures ----------------------------------------------------------------------------------------------
def test_T22_groups_that_all_fail_stop_the_run_with_the_causes() -> None:
    desk = Desk(max_dead_groups=3)
    for number in range(3):
        desk.open(f"g{number}")
        for index, reason in enumerate(("sandbox_died", "engine_lost")):
            desk.tell(ev.TrajectoryFailed(f"g{number}/{index}", FailureKind.INFRASTRUCTURE, reason, replaced=False))
    failed = desk.all(FailRun)
    assert [(a.reason, a.detail) for a in failed] == [("all_groups_failing", "sandbox_died x 3")]
    assert desk.scheduler.snapshot().retired == {"group_too_small": 3}
    assert desk.waits_for("failed")
    assert desk.tell(ev.Tick()) == []


def test_T22_one_good_group_starts_the_count_anew() -> None:
    desk = Desk("3", max_dead_groups=2)
    for number in range(6):
        desk.open(f"g{number}")
        if number % 2:
            desk.finish(f"g{number}")
        else:
            desk.tell(ev.GroupClosed(f"g{number}", "all_failed"))
    assert not desk.all(FailRun)


def test_a_group_closed_by_the_coordinator_makes_room_and_stops_what_runs() -> None:
    desk = Desk()
    desk.open("g0", "g1", "g2", "g3")
    desk.start("g0/0")
    answer = desk.tell(ev.GroupClosed("g0", "all_failed"))
    assert {a.trajectory for a in answer if isinstance(a, CancelTrajectory)} == {"g0/0", "g0/1"}
    assert len([a for a in answer if isinstance(a, OpenGroup)]) == 1
    assert desk.scheduler.snapshot().workers[0].running == 0


def test_a_failed_trajectory_is_replaced_in_its_group() -> None:
    desk = Desk()
    desk.open("g0", "g1")
    desk.finish("g1")
    desk.start("g0/0")
    desk.tell(ev.TrajectoryFinished("g0/0"))
    desk.tell(ev.TrajectoryFailed("g0/1", FailureKind.INFRASTRUCTURE, "sandbox_died", replaced=True))
    assert not desk.all(FormBatch)
    desk.tell(ev.TrajectoryOpened("g0/1.1", "g0", 1, 1))
    desk.start("g0/1.1")
    assert [a.groups for a in desk.tell(ev.TrajectoryFinished("g0/1.1")) if isinstance(a, FormBatch)]


def test_a_zero_variance_group_is_refilled_within_the_bound() -> None:
    desk = Desk(zero_variance_refills=1, max_dead_groups=1)
    assert desk.scheduler.refills_left == 1
    desk.open("g0", "g1", "g2", "g3")
    answer = desk.tell(ev.GroupClosed("g0", "zero_variance"))
    assert [a.reissue_of for a in answer if isinstance(a, OpenGroup)] == [None]
    assert desk.scheduler.refills_left == 0
    assert not desk.all(FailRun)
    desk.finish("g1", "g2")
    assert desk.scheduler.refills_left == 1


def test_answers_to_a_cancellation_are_late_and_harmless() -> None:
    desk = Desk()
    desk.open("g0")
    desk.start("g0/0")
    desk.tell(ev.GroupClosed("g0", "all_failed"))
    late: list[ev.Event] = [
        ev.TurnFinished("g0/0", 0, 5, 0, StopReason.ABORT),
        ev.ToolStarted("g0/0", 0),
        ev.TurnRequested("g0/0", 1, 10, 5, 10),
        ev.SandboxReady("g0/1"),
        ev.VerificationStarted("g0/0"),
        ev.TrajectoryFinished("g0/0"),
        ev.TrajectoryFailed("g0/1", FailureKind.CANCELLED, "group_closed", False),
        ev.GroupClosed("g0", "all_failed"),
        ev.WorkerAcknowledged("gone", 1),
        ev.WorkerDraining("gone"),
    ]
    assert not desk.tell(*late)
    assert desk.scheduler.snapshot().late_events == len(late)


def test_a_replacement_for_a_group_that_is_gone_is_cancelled() -> None:
    desk = Desk()
    desk.open("g0")
    desk.tell(ev.GroupClosed("g0", "all_failed"))
    assert desk.tell(ev.TrajectoryOpened("g0/1.1", "g0", 1, 1)) == [CancelTrajectory("group_closed", "g0/1.1")]


def test_events_that_contradict_each_other_are_refused() -> None:
    desk = Desk()
    desk.open("g0")
    with pytest.raises(EventError, match="opened twice"):
        desk.tell(ev.TrajectoryOpened("g0/0", "g0", 0, 0))
    desk.start("g0/0")
    desk.tell(ev.TrajectoryFinished("g0/0"))
    with pytest.raises(EventError, match="after its end"):
        desk.request("g0/0", 1)


# --- deadlines ------------------------------------------------------------------------------------------------
def _stuck(deadline: str, **changes: Any) -> Desk:
    """g0 was started at version 0 and hangs; g1..g4 came and finished; version 1 is next, alpha is 1."""
    desk = Desk("1", deadline=deadline, drop_grace_s=10.0, **changes)
    desk.open("g0", "g1", "g2", "g3")
    desk.start("g0/0")
    desk.finish("g1", "g2")
    desk.train(0)
    desk.open("g4", "g5")
    desk.finish("g3", "g4")
    return desk


def test_T26_wait_forms_no_batch_past_a_mandatory_group() -> None:
    desk = _stuck("wait")
    desk.now = 1000.0
    assert not [a for a in desk.tell(ev.Tick()) if isinstance(a, FormBatch | CancelTrajectory)]
    assert desk.scheduler.snapshot().waiting_for == (
        "mandatory: g0 (0 of 2 finished) must train in the batch of version 1"
    )
    desk.tell(ev.TrajectoryFinished("g0/0"))
    desk.start("g0/1")
    formed = [a for a in desk.tell(ev.TrajectoryFinished("g0/1")) if isinstance(a, FormBatch)]
    assert [a.groups for a in formed] == [("g0", "g3")]


def test_T26_drop_cancels_the_straggler_after_the_grace_and_reissues_it() -> None:
    desk = _stuck("drop")
    desk.now = 9.9
    assert not desk.tell(ev.Tick())
    desk.now = 10.0
    answer = desk.tell(ev.Tick())
    assert [a for a in answer if not isinstance(a, FormBatch)] == [
        CancelTrajectory("deadline", "g0/0"),
        CancelTrajectory("deadline", "g0/1"),
        OpenGroup("deadline", "g0"),
    ]
    assert [(a.version, a.groups) for a in answer if isinstance(a, FormBatch)] == [(1, ("g3", "g4"))]
    assert desk.scheduler.snapshot().retired == {"deadline": 1}


def test_T26_a_task_that_always_hangs_is_not_reissued_for_ever() -> None:
    desk = _stuck("drop", max_reissues=0)
    desk.now = 10.0
    assert [a.reissue_of for a in desk.tell(ev.Tick()) if isinstance(a, OpenGroup)] == [None]


def test_at_its_deadline_a_group_is_promoted() -> None:
    desk = _stuck("wait")
    assert [a.urgency for a in desk.request("g0/1") if isinstance(a, Dispatch)] == [1]
    assert [a.urgency for a in desk.request("g5/0") if isinstance(a, Dispatch)] == [0]
    views = {g.group: (g.mandatory, g.at_deadline) for g in desk.scheduler.snapshot().groups}
    assert views["g0"] == (True, True)
    assert views["g5"] == (False, False)


# --- the end of the tasks ----------------------------------------------------------------------------------
def _five_prompts(**changes: Any) -> Desk:
    desk = Desk("1", max_steps=10, **changes)
    desk.open("g0", "g1", "g2", "g3")
    desk.finish("g0", "g1")
    desk.train(0)
    desk.open("g4")
    desk.tell(ev.TaskOrderExhausted())
    desk.finish("g2", "g3")
    return desk


def test_T28_a_run_whose_tasks_end_finishes_with_the_reason() -> None:
    desk = _five_prompts()
    assert not desk.all(FinishRun)
    desk.train(1)
    assert [a.reason for a in desk.all(FinishRun)] == ["task_order_exhausted"]
    assert len(desk.all(FormBatch)) == 2


def test_T28_the_last_short_batch_trains_if_the_config_says_so() -> None:
    desk = _five_prompts(short_last_batch=True)
    desk.train(1)
    assert [a.groups for a in desk.finish("g4") if isinstance(a, FormBatch)] == [("g4",)]
    desk.train(2)
    assert [a.reason for a in desk.all(FinishRun)] == ["task_order_exhausted"]


def test_T28_no_task_at_all_ends_at_once() -> None:
    desk = Desk()
    assert FinishRun("task_order_exhausted") in desk.tell(ev.TaskOrderExhausted())


# --- recovery -----------------------------------------------------------------------------------------------
def test_a_restored_scheduler_decides_like_the_one_that_was_lost() -> None:
    lost = _stuck("wait")
    restored = Scheduler(lost.scheduler.config)
    finished = [
        event
        for group, start in (("g3", 1), ("g4", 1))
        for index in range(2)
        for event in (
            ev.TrajectoryOpened(f"{group}/{index}", group, index, 0),
            ev.TurnDispatched(f"{group}/{index}", 0, "", start),
            ev.TrajectoryFinished(f"{group}/{index}"),
        )
    ]
    answer = restored.restore(
        [
            ev.VersionPublished(1),
            *(ev.GroupOpened(f"g{i}", i, f"task-g{i}", 2) for i in (0, 3, 4, 5)),
            *finished,
            *(ev.TrajectoryOpened(f"g{i}/{j}", f"g{i}", j, 0) for i in (0, 5) for j in range(2)),
            ev.TurnDispatched("g0/0", 0, "", 0),
            ev.WorkerUp("w", 10_000, 4, 1),
        ],
        0.0,
    )
    assert {type(a) for a in answer} == {CreateSandbox}
    before, after = lost.scheduler.snapshot(), restored.snapshot()
    assert sorted(after.groups, key=lambda g: g.ordinal) == sorted(before.groups, key=lambda g: g.ordinal)
    assert (after.outstanding, after.next_version, after.waiting_for) == (
        before.outstanding,
        before.next_version,
        before.waiting_for,
    )


def test_a_task_dropped_before_the_crash_is_tried_again() -> None:
    desk = Desk("1", start=False)
    dropped: list[ev.Event] = [ev.GroupDropped("g0", "deadline", 0), ev.GroupDropped("g1", "deadline", 3)]
    opened = [a for a in desk.scheduler.restore([*dropped, ev.TaskOrderExhausted()], 0.0) if isinstance(a, OpenGroup)]
    assert [(a.reason, a.reissue_of) for a in opened] == [("deadline", "g0")]


def test_batches_of_before_the_crash_train_again_and_stay_outstanding() -> None:
    desk = Desk("2", start=False)
    batches = [ev.BatchFormed(5, ("g0", "g1")), ev.BatchFormed(6, ("g2", "g3"))]
    answer = desk.scheduler.restore([ev.VersionPublished(5), *batches], 0.0)
    assert len([a for a in answer if isinstance(a, OpenGroup)]) == 2
    snapshot = desk.scheduler.snapshot()
    assert (snapshot.training, snapshot.next_version, snapshot.states["training"]) == (5, 7, 4)
    desk.tell(ev.BatchTrained(5), ev.VersionPublished(6))
    assert desk.scheduler.snapshot().training == 6
    desk.tell(ev.BatchTrained(6), ev.BatchTrained(5))
    assert desk.scheduler.snapshot().training is None
    assert desk.scheduler.snapshot().next_version == 7


# --- what is shown --------------------------------------------------------------------------------------------
def test_there_is_always_a_reason_to_wait() -> None:
    desk = Desk(start=False)
    desk.tell(ev.VersionPublished(0))
    assert desk.waits_for("engine")
    desk.tell(ev.WorkerUp("w", 10_000, 4, 0))
    assert desk.scheduler.snapshot().waiting_for == "groups: 0 of 2 complete, 0 open"
    desk.open("g0", "g1")
    desk.tell(*(ev.SandboxDenied(f"g{i}/{j}", 1.0) for i in range(2) for j in range(2)))
    assert desk.waits_for("sandboxes")
    desk.tell(ev.SandboxReady("g0/0"), ev.VersionPublished(1))
    for name in ("g0/0", "g0/1", "g1/0", "g1/1"):
        desk.request(name)
    assert desk.waits_for("weights")
    assert desk.scheduler.snapshot().holds == {"weights": 4}
    desk.tell(ev.WorkerAcknowledged("w", 1))
    for name in ("g0/0", "g0/1", "g1/0", "g1/1"):
        desk.tell(ev.TrajectoryFinished(name))
    assert desk.waits_for("training")


def test_the_snapshot_counts_what_trajectories_do() -> None:
    desk = Desk()
    desk.open("g0", "g1", "g2")
    desk.start("g0/0")
    for name in ("g0/1", "g1/0"):
        desk.start(name)
        desk.tell(ev.TurnFinished(name, 0, 5, 0, StopReason.STOP))
    desk.tell(ev.ToolStarted("g0/1", 0), ev.VerificationStarted("g1/0"))
    snapshot = desk.scheduler.snapshot()
    assert snapshot.trajectories == {
        "starting": 3,
        "held": 0,
        "generating": 1,
        "tool": 1,
        "verifying": 1,
        "finished": 0,
    }
    assert snapshot.states == {"waiting": 1, "running": 2, "complete": 0, "training": 0}
    assert (snapshot.workers[0].running, snapshot.workers[0].sessions) == (1, 3)
