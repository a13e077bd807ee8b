"""Engine costs learned from turns: against the simulator's engine, whose costs are known, and against noise."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.calibration import CostFit, Estimate, Sample, TurnLog, differ
from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.engine import Engine
from venusrl.simulation.requests import Request
from venusrl.simulation.scenario import EngineSpec

SMALL = EngineCosts(0.004, 0.0004, 1e-7, 1.5e-4, 1e-9)
LARGE = EngineCosts(0.0085, 2.4e-5, 6e-8, 1.2e-5, 2e-10)


class Bench:
    """Conversations on a simulated engine, told to a ``TurnLog`` as a client would tell them."""

    def __init__(self, costs: EngineCosts, live: int, seed: int = 1, *, slots: int = 64) -> None:
        self.engine = Engine(EngineSpec("engine", 900_000, slots, costs, prefill_chunk=512))
        self.log = TurnLog(slots)
        self.now = 0.0
        self._random = random.Random(seed)
        self._contexts = {f"t{i}": 0 for i in range(live)}
        self._due = [(self._random.uniform(0, 5), name) for name in self._contexts]
        """When conversations ask next, or hear their answer late."""
        heapq.heapify(self._due)
        self._late: dict[str, Request] = {}
        self.held_up_s = 0.0
        """By which some answers are late, though the engine was not."""

    def run(self, turns: int) -> Estimate | None:
        self._ended = 0
        while self._ended < turns:
            at = self.engine.next_at()
            if at is not None and (not self._due or at <= self._due[0][0]):
                self.now = max(self.now, at)
                for request in self.engine.fire(at):
                    if self._random.random() < 0.05:
                        self._late[request.trajectory] = request
                        heapq.heappush(self._due, (at + self.held_up_s, request.trajectory))
                    else:
                        self._answered(request)
            else:
                at, name = heapq.heappop(self._due)
                self.now = max(self.now, at)
                if name in self._late:
                    self._answered(self._late.pop(name))
                else:
                    self._ask(name)
            self.engine.settle(self.now)
        return self.log.estimate

    def _ask(self, name: str) -> None:
        context = self._contexts[name]
        fresh = context == 0 or context > 6000
        context = self._random.randint(100, 3000) if fresh else context + self._random.randint(20, 300)
        session = name if not fresh else f"{name.split('.')[0]}.{self._random.random()}"
        self._contexts[session] = self._contexts.pop(name)
        self.engine.submit(Request(session, (), context, self._random.randint(5, 200)), 0, self.now)
        self.log.begin(session, context, self.now)

    def _answered(self, request: Request) -> None:
        self._ended += 1
        self.log.end(request.trajectory, request.found or 0, request.generated, self.now)
        self._contexts[request.trajectory] = request.context
        heapq.heappush(self._due, (self.now + self._random.expovariate(0.5), request.trajectory))


@pytest.mark.parametrize("costs", [SMALL, LARGE])
@pytest.mark.parametrize("live", [4, 16])
def test_costs_are_found_again_in_the_range_that_was_seen(costs: EngineCosts, live: int) -> None:
    estimate = Bench(costs, live).run(1200)

    assert estimate is not None
    assert estimate.error < 0.05
    for batch in (1, live // 2, live):
        found = estimate.costs.step_s(batch, batch * 2500)
        assert found == pytest.approx(costs.step_s(batch, batch * 2500), rel=0.15)
    # Prompts are a hundredth of the time where decoding is long: known to its order of magnitude.
    assert estimate.costs.prefill_s(2000) == pytest.approx(costs.prefill_s(2000), rel=0.7)


def test_answers_that_the_machine_held_up_change_little() -> None:
    bench = Bench(SMALL, 8)
    bench.held_up_s = 30.0
    estimate = bench.run(1500)

    assert estimate is not None
    assert estimate.costs.step_s(8, 20_000) == pytest.approx(SMALL.step_s(8, 20_000), rel=0.3)


def test_nothing_is_said_before_there_is_enough_to_go_by() -> None:
    bench = Bench(SMALL, 4)
    assert bench.run(40) is None
    assert bench.run(800) is not None


def test_costs_that_change_are_learned_anew() -> None:
    slow = EngineCosts(*(3 * value for value in (0.004, 0.0004, 1e-7, 1.5e-4, 1e-9)))
    bench = Bench(SMALL, 6)
    first = bench.run(1200)
    bench.engine.costs = slow
    second = bench.run(1500)

    assert first is not None
    assert second is not None
    assert second.costs.step_s(6, 15_000) == pytest.approx(slow.step_s(6, 15_000), rel=0.15)
    assert differ(first.costs, second.costs, 6, 15_000)
    assert not differ(second.costs, second.costs, 6, 15_000)


def test_times_that_say_nothing_of_the_work_give_no_costs() -> None:
    rng, fit = random.Random(0), CostFit()
    for _ in range(400):
        fit.add(Sample(10 ** rng.uniform(-3, 3), 10, 40, 4000, 100, 5000))
    assert fit.estimate is None


def test_what_ran_through_a_pause_or_out_of_turn_is_no_sample() -> None:
    log = TurnLog(slots=2)
    for number in range(500):
        log.begin(f"a{number}", 100, number * 10.0)
        log.begin(f"b{number}", 100, number * 10.0 + 1)
        if number % 2:
            log.disturb()
        else:
            log.begin(f"c{number}", 100, number * 10.0 + 2)
            log.end(f"c{number}", 0, 10, number * 10.0 + 3)  # it cannot have run
        log.end(f"a{number}", 0, 10, number * 10.0 + 4)
        log.end(f"b{number}", 0, 10, number * 10.0 + 5)
    assert log.estimate is None


@pytest.mark.parametrize("live", [12, 40])
def test_the_queue_inside_a_full_engine_is_not_taken_for_work(live: int) -> None:
    estimate = Bench(SMALL, live, slots=6).run(1500)

    assert estimate is not None
    assert estimate.costs.step_s(6, 15_000) == pytest.approx(SMALL.step_s(6, 15_000), rel=0.2)


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "abort", "lose", "disturb"]), st.integers(0, 12), st.floats(0, 50)),
        max_size=200,
    )
)
@settings(deadline=None, max_examples=60)
def test_any_history_leaves_costs_that_are_not_negative(history: list[tuple[str, int, float]]) -> None:
    log, now = TurnLog(slots=4), 0.0
    for what, number, later in history * 4:
        now += later
        name = f"r{number}"
        if what == "begin" and name not in log._live:
            log.begin(name, 50 * number + 1, now)
        elif what == "end":
            log.end(name, 10 * number, number, now)
        elif what == "abort":
            log.end(name, 10 * number, number, now, clean=False)
        elif what == "lose":
            log.lose(name, now)
        elif what == "disturb":
            log.disturb()
    estimate = log.estimate
    if estimate is not None:
        costs = estimate.costs
        assert min(costs.step_base_s, costs.step_sequence_s, costs.step_kv_token_s, costs.prefill_token_s) >= 0
        assert costs.step_s(4, 1000) > 0
