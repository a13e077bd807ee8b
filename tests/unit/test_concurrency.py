"""The limit on live trajectories around any policy."""

from __future__ import annotations

from decimal import Decimal

import pytest

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies.concurrency import Concurrency
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.policies.rollflash import RollFlash
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import FailureKind, StopReason


class Bench:
    def __init__(self, limit: int, *groups: str) -> None:
        self.scheduler = Scheduler(SchedulerConfig(8, 2, Decimal(1), 1, min_valid=1), Concurrency(Fcfs(), limit))
        self.tell(ev.VersionPublished(0), ev.WorkerUp("w", 10_000, 64, 0))
        for number, group in enumerate(groups):
            self.tell(ev.GroupOpened(group, number, "t", 2))
            self.tell(*(ev.TrajectoryOpened(f"{group}{i}", group, i, 0) for i in range(2)))

    def tell(self, *events: ev.Event) -> list[tuple[str, str]]:
        said = []
        for event in events:
            for action in self.scheduler.handle(event, 0.0):
                if isinstance(action, Dispatch):
                    said.append((action.trajectory, "sent"))
                    self.tell(ev.TurnDispatched(action.trajectory, action.turn, action.worker, 0))
                elif isinstance(action, Hold):
                    said.append((action.trajectory, action.reason))
        return said

    def ask(self, *names: str, turn: int = 0) -> list[tuple[str, str]]:
        return self.tell(*(ev.TurnRequested(n, turn, 10, 5, 10) for n in names))

    def answer(self, name: str, turn: int = 0) -> list[tuple[str, str]]:
        return self.tell(ev.TurnFinished(name, turn, 5, 0, StopReason.STOP))


def test_a_place_is_kept_between_turns_and_given_up_when_the_model_has_said_all() -> None:
    bench = Bench(1, "a")
    assert bench.ask("a0", "a1") == [("a0", "sent"), ("a1", "concurrency")]
    assert bench.answer("a0") == []
    assert bench.ask("a0", turn=1) == [("a0", "sent")]
    bench.answer("a0", 1)
    assert bench.tell(ev.VerificationStarted("a0")) == [("a1", "sent")]
    assert bench.tell(ev.TrajectoryFinished("a0")) == []


def test_places_go_to_the_oldest_task_first() -> None:
    bench = Bench(1, "a", "b", "c")
    bench.ask("a0", "c0", "b1", "b0", "a1")
    order = []
    name = "a0"
    for _ in range(4):
        bench.answer(name)
        ((name, _),) = bench.tell(ev.VerificationStarted(name))
        order.append(name)
    assert order == ["a1", "b1", "b0", "c0"]


def test_whoever_fails_gives_its_place_up_waiting_or_not() -> None:
    bench = Bench(1, "a", "b")
    bench.ask("a0", "a1", "b0")
    gone = FailureKind.INFRASTRUCTURE
    assert bench.tell(ev.TrajectoryFailed("a1", gone, "x", replaced=False)) == []
    assert bench.tell(ev.TrajectoryFailed("a0", gone, "x", replaced=False)) == [("b0", "sent")]


def test_a_turn_asked_for_again_while_it_waits_keeps_one_place() -> None:
    bench = Bench(1, "a")
    bench.ask("a0", "a1")
    assert bench.ask("a1") == [("a1", "concurrency")]
    bench.answer("a0")
    assert bench.tell(ev.VerificationStarted("a0")) == [("a1", "sent")]
    assert bench.ask("b0") == []


def test_a_group_that_may_not_start_any_more_gives_its_place_back() -> None:
    """Else members of groups that the next batch needs would wait for one that waits for that batch."""
    bench = Bench(3)
    policy = Concurrency(RollFlash(affinity="prompt"), 3)
    bench.scheduler = Scheduler(SchedulerConfig(2, 2, Decimal(1), 1), policy)
    bench.tell(ev.VersionPublished(0), ev.WorkerUp("w0", 10_000, 64, 0), ev.WorkerUp("w1", 10_000, 64, 0))
    for number, group in enumerate("exycf"):
        bench.tell(ev.GroupOpened(group, number, "t", 2))
        bench.tell(*(ev.TrajectoryOpened(f"{group}{i}", group, i, 0) for i in range(2)))
    assert bench.ask("e0", "x0", "y0") == [("e0", "sent"), ("x0", "sent"), ("y0", "sent")]
    bench.tell(ev.VerificationStarted("e0"), ev.VerificationStarted("y0"), ev.WorkerDraining("w1"))
    assert bench.ask("c0") == [("c0", "draining")]
    bench.tell(ev.TrajectoryFinished("e0"), ev.TrajectoryFinished("y0"))
    assert bench.ask("f0") == [("f0", "sent")]
    # Four groups have begun, no other may before a batch has formed: c0 has given its place, the third, to e1.
    assert bench.ask("e1") == [("e1", "sent")]
    assert bench.ask("x1") == [("x1", "concurrency")]
    bench.tell(ev.WorkerAcknowledged("w1", 0), ev.VerificationStarted("e1"), ev.TrajectoryFinished("e1"))
    bench.tell(ev.VerificationStarted("x0"))
    assert bench.ask("y1") == [("y1", "sent")]
    bench.tell(ev.VerificationStarted("y1"))
    bench.tell(ev.TrajectoryFinished("y1"), ev.BatchTrained(0))
    assert bench.tell(ev.VersionPublished(1)) == [("c0", "weights")]
    assert bench.tell(ev.WorkerAcknowledged("w1", 1)) == [("c0", "sent")]


def test_the_limit_is_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Concurrency(Fcfs(), 0)
