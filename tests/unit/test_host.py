"""The scheduler host: order, re-entrance, routing, faults, and what it measures."""

from __future__ import annotations

from collections.abc import Iterable

from venusrl.coordinator.host import CriticalPath, SchedulerHost
from venusrl.scheduling.actions import Action, Dispatch, FormBatch, OpenGroup
from venusrl.scheduling.events import (
    Event,
    GroupOpened,
    Tick,
    ToolFinished,
    ToolStarted,
    TrajectoryFinished,
    TurnDispatched,
    TurnFinished,
    TurnRequested,
    VerificationFinished,
    VerificationStarted,
)
from venusrl.types import StopReason


class Recording:
    """A scheduler that answers from a table and records what it saw."""

    def __init__(self, answers: dict[type, list[Action]]) -> None:
        self.answers = answers
        self.seen: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        self.seen.append((event, now))
        return self.answers.pop(type(event), [])

    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]:
        return [action for event in events for action in self.handle(event, now)]

    def restore(self, events: Iterable[Event], now: float) -> list[Action]:
        return [action for event in events for action in self.handle(event, now)]


class Hands:
    """A clock set by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def opened(group: str) -> GroupOpened:
    return GroupOpened(group, 0, "task", 2)


def test_an_event_reported_from_an_action_is_handled_after_all_actions_of_the_first() -> None:
    scheduler = Recording({Tick: [OpenGroup("window"), FormBatch("full", 0, ("g",))]})
    failures: list[Exception] = []
    host = SchedulerHost(scheduler, now=Hands(), on_failure=failures.append)
    log: list[str] = []

    def open_group(action: OpenGroup) -> None:
        host.notify(opened("g0"))
        log.append(f"open, {len(scheduler.seen)} handled")

    host.route(OpenGroup, open_group)
    host.route(FormBatch, lambda action: log.append(f"form, {len(scheduler.seen)} handled"))
    host.notify(Tick())
    assert log == ["open, 1 handled", "form, 1 handled"]
    assert [type(event) for event, _ in scheduler.seen] == [Tick, GroupOpened]
    assert failures == []


def test_what_an_earlier_session_did_is_told_at_once_and_acted_on() -> None:
    scheduler = Recording({Tick: [OpenGroup("window")]})
    host = SchedulerHost(scheduler, now=Hands(), on_failure=lambda error: None)
    host.route(OpenGroup, lambda action: host.notify(opened("g1")))
    host.restore([opened("g0"), Tick()])
    assert [getattr(event, "group", "tick") for event, _ in scheduler.seen] == ["g0", "tick", "g1"]


def test_a_fault_ends_the_run_with_its_own_cause_and_nothing_is_handled_after_it() -> None:
    scheduler = Recording({Tick: [OpenGroup("window")]})
    failures: list[Exception] = []
    host = SchedulerHost(scheduler, now=Hands(), on_failure=failures.append)
    fault = OSError("the disk is on fire")

    def burn(action: OpenGroup) -> None:
        raise fault

    host.route(OpenGroup, burn)
    host.notify(Tick())
    host.notify(Tick())
    assert failures == [fault]
    assert len(scheduler.seen) == 1
    assert host.closed


def test_an_action_without_an_executor_is_a_fault() -> None:
    failures: list[Exception] = []
    host = SchedulerHost(Recording({Tick: [OpenGroup("window")]}), now=Hands(), on_failure=failures.append)
    host.notify(Tick())
    assert "no executor for OpenGroup" in str(failures[0])


def test_waits_are_charged_from_the_releasing_event_to_the_dispatch() -> None:
    clock = Hands()
    scheduler = Recording({Tick: [Dispatch("policy", "t", 0, "w", 0)]})
    host = SchedulerHost(scheduler, now=clock, on_failure=lambda error: None)
    host.route(Dispatch, lambda action: None)
    host.notify(TurnRequested("t", 0, 10, 0, 16))
    clock.at = 5.0  # held by the scheduler: that is not the coordinator's doing
    host.notify(Tick())
    clock.at = 5.25
    host.notify(TurnDispatched("t", 0, "w", 0))
    assert host.critical.take("t") == 0.25
    assert host.critical.take("t") == 0.0
    assert host.stats().busy_s == 0.25


def test_a_trajectory_is_ours_between_an_answer_and_the_next_request() -> None:
    clock = Hands()
    host = SchedulerHost(Recording({}), now=clock, on_failure=lambda error: None)
    story: list[tuple[float, Event]] = [
        (1.0, TurnFinished("t", 0, 5, 0, StopReason.STOP)),
        (1.5, ToolStarted("t", 0)),  # the tool's time is its own
        (3.0, ToolFinished("t", 0, 20, 0)),
        (3.25, TurnRequested("t", 1, 40, 0, 16)),  # held by the scheduler
        (8.0, TurnDispatched("t", 1, "w", 0)),
        (9.0, TurnFinished("t", 1, 5, 0, StopReason.STOP)),
        (9.5, VerificationStarted("t")),
        (12.0, VerificationFinished("t", 1.0)),
        (12.75, TrajectoryFinished("t")),
    ]
    for at, event in story:
        clock.at = at
        host.notify(event)
    assert host.critical.take("t") == 0.5 + 0.25 + 0.5 + 0.75


def test_the_union_of_waits_counts_overlaps_once() -> None:
    path = CriticalPath()
    path.ours("a", 0.0)
    path.ours("b", 1.0)
    path.theirs("a", 2.0)
    path.theirs("b", 3.0)
    path.ours("c", 10.0)
    path.theirs("c", 11.0)
    path.theirs("never ours", 12.0)
    assert path.busy_s == 4.0
    assert (path.take("a"), path.take("b"), path.take("c")) == (2.0, 2.0, 1.0)
