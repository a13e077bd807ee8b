"""The best schedule of tiny instances: searched, and not beaten (how close ``venus`` comes: tests/system)."""

from __future__ import annotations

from decimal import Decimal

import pytest

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies.registry import find
from venusrl.scheduling.policies.venus import Venus
from venusrl.scheduling.predictor.arms import Oracle
from venusrl.simulation.bound import bound
from venusrl.simulation.demand import demand, hardware, remaining
from venusrl.simulation.optimum import Optimum, optimum
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, FleetSpec, Scenario, TrainerSpec
from venusrl.simulation.truth import TrueLengths
from venusrl.simulation.workloads.synthetic import Synthetic

TOLERANCE = 0.005
INSTANCES = ((2, 1, 3, 0), (2, 1, 3, 1), (2, 2, 2, 0))
"""(groups of two, workers, turns at most, seed)."""


def tiny(groups: int, workers: int, turns: int) -> Scenario:
    """One batch; the KV of a worker holds about three of its four to six trajectories."""
    costs = EngineCosts(0.01, 1e-4, 0.0, 1e-4, 0.0)
    return Scenario(
        name="tiny",
        scheduler=SchedulerConfig(groups, 2, Decimal(0), 0, max_steps=1),
        fleet=FleetSpec(
            tuple(EngineSpec(f"w{i}", 22_000, 8, costs, priority_queue=False) for i in range(workers)),
            weight_update="drain",
        ),
        trainer=TrainerSpec(fixed_s=1.0),
        workload=Synthetic(
            turns=(1, turns),
            prompt=(2000, 4000),
            own_prompt=(0, 4000),
            generated=(100, 400),
            observation=(500, 3000),
            tool_s=(0.5, 6.0),
            setup_s=(0.0, 0.0),
            verify_s=(0.0, 1.0),
        ),
    )


def best(groups: int, workers: int, turns: int, seed: int) -> Optimum:
    scenario = tiny(groups, workers, turns)
    start = min(seconds(name, scenario, seed) for name in ("fcfs", "oracle"))
    return optimum(scenario, seed, start_s=start, max_branches=2000, tolerance=TOLERANCE)


def seconds(name: str, scenario: Scenario, seed: int) -> float:
    if name == "oracle":
        return simulate(scenario, Venus(predictor=Oracle(TrueLengths(scenario.workload, seed))), seed).time_s
    return simulate(scenario, find(name).policy(), seed).time_s


@pytest.mark.parametrize("instance", INSTANCES)
def test_the_search_ends_between_the_bound_and_every_policy(instance: tuple[int, int, int, int]) -> None:
    *shape, seed = instance
    scenario, found = tiny(*shape), best(*instance)
    assert found.complete
    assert bound(scenario, seed).time_s <= found.time_s
    for name in ("fcfs", "fcfs-gate", "thunderagent-best", "continuum", "venus", "oracle"):
        assert seconds(name, scenario, seed) >= found.time_s * (1 - TOLERANCE)


def test_a_lone_trajectory_leaves_nothing_to_decide() -> None:
    scenario = tiny(1, 1, 1)
    found = optimum(scenario, 0)
    assert found.complete
    assert found.time_s == pytest.approx(seconds("fcfs", scenario, 0), rel=0.01)


def test_what_is_left_sums_to_the_demand() -> None:
    scenario = tiny(1, 1, 3)
    machine = hardware(scenario.fleet)
    for index in range(2):
        script = scenario.workload.script(3, 0, index, 0)
        rests, whole = remaining(script, machine), demand([script], machine, scenario.trainer)
        assert len(rests) == len(script.turns) + 1
        assert rests[0].tokens == script.generated
        assert rests[0].engine_s == pytest.approx(whole.engine_s - machine.costs.prefill_s(script.shared_prefix))
        assert rests[-1].alone_s == script.verify_s
        assert rests[0].alone_s <= whole.started_s
