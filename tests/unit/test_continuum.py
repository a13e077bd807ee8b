"""Continuum: the time to live by its formula, the order, the gate, and what gives way."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, Hold, ReleaseKV, RetainKV
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies.continuum import Continuum
from venusrl.scheduling.policies.occupancy import Occupancy
from venusrl.scheduling.policies.tool_times import Memory, ToolTimes
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import StopReason

times = st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.0, 3.5, 60.0)), min_size=1, max_size=12)


def tool_times(*seconds: float, cold: int = 1) -> ToolTimes:
    made = ToolTimes(cold)
    for second in seconds:
        made.add(second)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # P(1) = 1/3, P(2) = 2/3, P(10) = 1. For V = 5: 5/3 - 1 = 0.67, 10/3 - 2 = 1.33, 5 - 10 = -5.
        (5.0, 2.0),
        # V = 2.9: 0.97 - 1 and 1.93 - 2 are losses: do not keep it at all.
        (2.9, 0.0),
        # V = 25: 8.3 - 1 = 7.3, 16.7 - 2 = 14.7, 25 - 10 = 15.
        (25.0, 10.0),
        (23.0, 2.0),
        (0.0, 0.0),
        (-1.0, 0.0),
    ],
)
def test_the_time_to_live_of_a_distribution_worked_out_by_hand(value: float, expected: float) -> None:
    assert tool_times(10.0, 1.0, 2.0).ttl(value) == expected


@given(seconds=times, value=st.floats(0.01, 200.0))
def test_the_time_to_live_is_the_best_there_is(seconds: list[float], value: float) -> None:
    def gain(ttl: float) -> float:
        return sum(s <= ttl for s in seconds) / len(seconds) * value - ttl

    assert gain(tool_times(*seconds).ttl(value)) == pytest.approx(max(map(gain, [0.0, *seconds])))


def test_while_tool_times_are_unknown_kv_is_kept_for_what_its_loss_would_cost() -> None:
    made = tool_times(*[1.0] * 99, cold=100)
    assert made.ttl(7.0) == 7.0
    made.add(1.0)
    assert made.ttl(7.0) == 1.0


def test_old_tool_times_are_forgotten() -> None:
    made = ToolTimes(cold=1, window=50)
    for seconds in [5.0] * 50 + [1.0] * 50:
        made.add(seconds)
    assert made.ttl(100.0) == 1.0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_eta_is_the_correlation_of_turns_done_and_left(lengths: list[int]) -> None:
    memory = Memory()
    pairs = []
    for length in lengths:
        memory.add(length)
        pairs += [(k, length - k) for k in range(1, length + 1)]
    n = len(pairs)
    mean_k, mean_left = sum(k for k, _ in pairs) / n, sum(left for _, left in pairs) / n
    product = sum((k - mean_k) * (left - mean_left) for k, left in pairs)
    spread = sum((k - mean_k) ** 2 for k, _ in pairs) * sum((left - mean_left) ** 2 for _, left in pairs)
    assert memory.eta == pytest.approx(-product / spread**0.5 if spread else 0.0, abs=1e-9)


def test_eta_is_one_where_all_programs_are_alike() -> None:
    memory = Memory()
    memory.add(10)
    memory.add(10)
    assert memory.eta == pytest.approx(1.0)


def test_occupancy_counts_a_common_prefix_once() -> None:
    kv = Occupancy()
    kv.put("a", "g", 100, 40)
    kv.put("b", "g", 120, 40)
    assert kv.used == 40 + 60 + 80
    assert kv.with_("c", "g", 50, 40) == kv.used + 10
    assert kv.with_("a", "g", 150, 40) == kv.used + 50
    kv.drop("a")
    assert kv.with_("b", "g", 10, 0) == 10
    kv.drop("b")
    assert kv.used == 0


class Bench:
    """A scheduler with the policy and one worker that prefills 100 tokens a second."""

    def __init__(self, capacity: int = 1000, slots: int = 8, **options: Any) -> None:
        self.scheduler = Scheduler(SchedulerConfig(100, 1, Decimal(0), 0, min_valid=1), Continuum(**options))
        self.now = 0.0
        self.turns: dict[str, int] = {}
        self.tell(ev.VersionPublished(0), ev.WorkerUp("w", capacity, slots, 0, EngineCosts(0.01, 0, 0, 0.01, 0)))

    def tell(self, *events: ev.Event) -> list[tuple[str, str]]:
        said = []
        for event in events:
            for action in self.scheduler.handle(event, self.now):
                if isinstance(action, Dispatch):
                    said.append((action.trajectory, "sent"))
                elif isinstance(action, Hold | RetainKV | ReleaseKV):
                    said.append((action.trajectory, action.reason))
        return said

    def at(self, now: float) -> list[tuple[str, str]]:
        said = []
        while (due := self.scheduler.wake_at) is not None and due <= now:
            self.now = max(self.now, due)
            said += self.tell(ev.Tick())
        self.now = now
        return said

    def ask(self, name: str, prompt: int, resumed: int = 0) -> list[tuple[str, str]]:
        if name not in self.turns:
            self.turns[name] = 0
            self.tell(ev.GroupOpened(f"g{name}", len(self.turns), "t", 1))
            self.tell(ev.TrajectoryOpened(name, f"g{name}", 0, 0))
        return self.tell(ev.TurnRequested(name, self.turns[name], prompt, 0, 100, resumed))

    def answer(self, name: str, generated: int = 0, stop: StopReason = StopReason.STOP) -> list[tuple[str, str]]:
        said = self.tell(ev.TurnFinished(name, self.turns[name], generated, 0, stop))
        if stop is not StopReason.ABORT:
            self.turns[name] += 1
            said += self.tell(ev.ToolStarted(name, self.turns[name] - 1))
        return said

    def returns(self, name: str, prompt: int) -> list[tuple[str, str]]:
        return self.tell(ev.ToolFinished(name, self.turns[name] - 1, 0, 0)) + self.ask(name, prompt)

    def end(self, name: str) -> list[tuple[str, str]]:
        return self.tell(ev.VerificationStarted(name))


def test_programs_are_served_in_the_order_they_arrived_and_none_overtakes() -> None:
    bench = Bench()
    assert bench.ask("a", 600) == [("a", "sent")]
    assert bench.ask("b", 500) == [("b", "capacity")]
    assert bench.ask("c", 10) == [("c", "capacity")]
    # Nothing else runs: what it keeps must not stand in the way.
    assert bench.answer("a", 100) == [("a", "ttl"), ("a", "deadlock"), ("b", "sent"), ("c", "sent")]


def test_kept_kv_is_room_that_nobody_else_has_until_its_time_is_over() -> None:
    """700 tokens take 7 s to compute again: without experience they are kept for that long."""
    bench = Bench()
    bench.ask("a", 600)
    bench.ask("x", 200)
    assert bench.answer("a", 100) == [("a", "ttl")]
    assert bench.ask("b", 500) == [("b", "capacity")]
    assert bench.at(6.9) == []
    assert bench.at(7.0) == [("a", "ttl_over"), ("b", "sent")]


def test_a_turn_whose_kv_is_kept_goes_before_programs_that_came_earlier() -> None:
    bench = Bench(slots=1)
    for name in "bac":
        bench.ask(name, 100)
    assert bench.answer("b", 0) == [("b", "ttl"), ("a", "sent")]
    assert bench.at(2.0) == [("b", "ttl_over")]
    assert bench.answer("a", 0) == [("a", "ttl"), ("c", "sent")]
    assert bench.returns("b", 100) == [("b", "capacity")]
    assert bench.returns("a", 100) == [("a", "capacity")]
    assert bench.answer("c", 0) == [("c", "ttl"), ("a", "sent")]


def test_a_preempted_turn_goes_before_programs_that_came_earlier() -> None:
    bench = Bench(slots=1)
    for name in "axb":
        bench.ask(name, 100)
    bench.answer("a", 0)
    bench.answer("x", 0)
    bench.at(2.0)  # Nothing is kept any more.
    assert bench.returns("a", 100) + bench.returns("x", 100) == [("a", "capacity"), ("x", "capacity")]
    assert bench.answer("b", 10, StopReason.ABORT) == [("a", "sent")]
    assert bench.ask("b", 100, resumed=10) == [("b", "capacity")]
    assert bench.answer("a", 0) == [("a", "ttl"), ("b", "sent")]


def test_kv_is_kept_longer_where_turns_that_lost_theirs_wait_long() -> None:
    """Tools take 10 s and computing 100 tokens again 1 s: kept only once waiting counts as well."""
    for wait, kept in ((10.0, False), (3000.0, True)):
        bench = Bench(slots=1, cold_start=5)
        for number in range(5):
            bench.ask(f"p{number}", 100)
            bench.answer(f"p{number}", 0)
            bench.at(bench.now + 10.0)
            bench.returns(f"p{number}", 100)
            bench.answer(f"p{number}", 0)
            bench.end(f"p{number}")
        bench.ask("a", 100)
        assert bench.answer("a", 0) == []
        bench.ask("y", 100)
        bench.returns("a", 100)
        bench.at(bench.now + wait)
        bench.answer("y", 0)
        assert (bench.answer("a", 0) == [("a", "ttl")]) is kept


def test_when_nothing_runs_the_program_that_arrived_last_gives_up_its_kv() -> None:
    bench = Bench()
    for name in "abc":
        bench.ask(name, 250)
    for name in "abc":
        bench.answer(name, 50)
    assert bench.ask("d", 380) == [("c", "deadlock"), ("d", "sent")]


def test_a_context_larger_than_the_worker_runs_alone() -> None:
    bench = Bench()
    bench.ask("a", 100)
    assert bench.ask("giant", 5000) == [("giant", "capacity")]
    assert bench.answer("a", 0) == [("a", "ttl"), ("a", "deadlock"), ("giant", "sent")]
    assert bench.ask("b", 10) == [("b", "capacity")]


def test_short_tools_are_waited_for_and_long_ones_are_not() -> None:
    for seconds, kept in ((0.5, True), (60.0, False)):
        bench = Bench(cold_start=5)
        for number in range(5):
            bench.ask(f"p{number}", 50)
            bench.answer(f"p{number}", 0)
            bench.at(bench.now + seconds)
            bench.returns(f"p{number}", 60)
            bench.answer(f"p{number}", 0)
            bench.end(f"p{number}")
        bench.ask("a", 500)
        assert (("a", "ttl") in bench.answer("a", 0)) is kept


def test_a_worker_that_dies_takes_its_programs_and_another_serves_them() -> None:
    bench = Bench()
    bench.ask("a", 600)
    bench.ask("b", 600)
    bench.tell(ev.WorkerDown("w"))
    assert bench.ask("a", 600) == [("a", "no_worker")]
    said = bench.tell(ev.WorkerUp("v", 1000, 8, 0))
    assert ("a", "sent") in said
    assert ("b", "sent") not in said


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="positive"):
        Continuum(cold_start=0)
