"""No policy beats the physical limit, and it is close where nothing is scarce."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from itertools import accumulate

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies.registry import REGISTRY, Baseline
from venusrl.scheduling.policies.venus import Venus
from venusrl.scheduling.predictor.arms import Oracle
from venusrl.simulation.bound import bound
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, FailureSpec, FleetSpec, SandboxSpec, Scenario, TrainerSpec
from venusrl.simulation.truth import TrueLengths
from venusrl.simulation.workloads.branches import Line, branches
from venusrl.simulation.workloads.replay import Replay
from venusrl.simulation.workloads.synthetic import Synthetic

ROUNDING = 1 - 1e-9


@st.composite
def engines(draw: st.DrawFn, longest: int) -> tuple[EngineSpec, ...]:
    costs = EngineCosts(
        step_base_s=draw(st.sampled_from([0.0, 0.01])),
        step_sequence_s=draw(st.sampled_from([0.0, 1e-4])),
        step_kv_token_s=draw(st.sampled_from([0.0, 1e-7, 1e-5])),
        prefill_token_s=draw(st.sampled_from([1e-5, 1e-3])),
        prefill_token_context_s=draw(st.sampled_from([0.0, 1e-8])),
        transfer_token_s=draw(st.sampled_from([None, 1e-6])),
    )
    return tuple(
        EngineSpec(
            name=f"w{number}",
            kv_capacity=longest + draw(st.sampled_from([0, 100, 3000, 50_000])),
            slots=draw(st.integers(1, 12)),
            costs=costs,
            speed=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
            prefill_chunk=draw(st.sampled_from([64, 2048])),
            prefix_cache=draw(st.sampled_from([True, True, True, False])),
            kv_control=draw(st.booleans()),
            eviction=draw(st.sampled_from(["tail", "whole"])),
        )
        for number in range(draw(st.integers(1, 3)))
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    alpha = draw(st.sampled_from(["0", "0.5", "1", "1.5", "2"]))
    turns = draw(st.integers(1, 4))
    config = SchedulerConfig(
        batch_groups=draw(st.integers(1, 3)),
        group_size=draw(st.integers(2, 3)),
        async_factor=Decimal(alpha),
        max_staleness=math.ceil(float(alpha)) + draw(st.integers(0, 1)),
        max_steps=draw(st.integers(1, 4)),
    )
    workload = Synthetic(
        turns=(1, turns),
        prompt=(100, 600),
        own_prompt=draw(st.sampled_from([(0, 0), (0, 200)])),
        generated=(1, draw(st.sampled_from([20, 200]))),
        observation=(0, 200),
        tool_s=(0.0, draw(st.sampled_from([0.1, 5.0, 60.0]))),
        setup_s=(0.0, draw(st.sampled_from([0.0, 5.0]))),
        verify_s=(0.0, draw(st.sampled_from([0.0, 5.0]))),
    )
    return Scenario(
        name="random",
        scheduler=config,
        fleet=FleetSpec(
            draw(engines(800 + turns * 400)),
            weight_update="drain" if alpha == "0" else draw(st.sampled_from(["turn_boundary", "in_flight", "abort"])),
            stale_kv=draw(st.sampled_from(["keep", "flush"])),
            load_s=draw(st.sampled_from([0.0, 1.0])),
        ),
        trainer=TrainerSpec(
            fixed_s=draw(st.sampled_from([0.0, 3.0])),
            token_s=1e-4,
            attention_s=1e-8,
            publish_s=draw(st.sampled_from([0.0, 1.0])),
            publish_blocks=draw(st.booleans()),
        ),
        workload=workload,
        sandboxes=SandboxSpec(
            memory=draw(st.sampled_from([None, 2.0, 5.0])), setups_at_once=draw(st.sampled_from([None, 1]))
        ),
        failures=FailureSpec(worker_mtbf_s=draw(st.sampled_from([None, None, None, 50.0])), worker_restart_s=5.0),
    )


def as_run_by(baseline: Baseline, scenario: Scenario) -> Scenario:
    config = scenario.scheduler
    return msgspec.structs.replace(
        scenario,
        scheduler=baseline.config(config),
        fleet=msgspec.structs.replace(scenario.fleet, weight_update=baseline.update(config)),
    )


@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 1000))
def test_no_policy_beats_the_bound(name: str, scenario: Scenario, seed: int) -> None:
    baseline = REGISTRY[name]
    result = simulate(as_run_by(baseline, scenario), baseline.policy(), seed)
    assert result.time_s >= bound(scenario, seed).time_s * ROUNDING


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 1000))
def test_not_even_one_that_knows_the_lengths_beats_the_bound(scenario: Scenario, seed: int) -> None:
    result = simulate(scenario, Venus(predictor=Oracle(TrueLengths(scenario.workload, seed))), seed)
    assert result.time_s >= bound(scenario, seed).time_s * ROUNDING


def alike(scenario: Scenario, seed: int) -> Scenario:
    """The same trajectories, of which more is the same: answers and observations, up to some token of each."""
    chance, config = random.Random(seed), scenario.scheduler
    groups = config.window + config.batch_groups * (config.max_steps or 1)
    scripts = [[scenario.workload.script(seed, o, i, 0) for i in range(config.group_size)] for o in range(groups)]
    lines = []
    for number, script in enumerate(script for group in scripts for script in group):
        ends = list(accumulate(tokens for turn in script.turns for tokens in (turn.generated, turn.observation)))
        same = chance.randint(0, script.length)
        tokens = [0] * same + [number + 1] * (script.length - same)
        lines.append(Line(tokens, [script.prompt, *(min(script.length, script.prompt + end) for end in ends)]))
    common = iter(branches(lines))
    members = tuple(tuple(msgspec.structs.replace(s, branches=next(common)) for s in group) for group in scripts)
    return msgspec.structs.replace(scenario, workload=Replay(members))


@pytest.mark.parametrize("name", ["fcfs", "thunderagent-repaired"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 1000))
def test_no_policy_beats_the_bound_where_much_is_shared(name: str, scenario: Scenario, seed: int) -> None:
    baseline, scenario = REGISTRY[name], alike(scenario, seed)
    result = simulate(as_run_by(baseline, scenario), baseline.policy(), seed)
    assert result.time_s >= bound(scenario, seed).time_s * ROUNDING


def easy(*, groups: int, size: int, steps: int, alpha: str = "0") -> Scenario:
    """Nothing is scarce: much KV, few trajectories, a quick trainer."""
    costs = EngineCosts(0.01, 1e-5, 1e-8, 1e-5, 1e-10)
    return Scenario(
        name="easy",
        scheduler=SchedulerConfig(groups, size, Decimal(alpha), int(alpha), max_steps=steps, min_valid=min(size, 2)),
        fleet=FleetSpec(
            (EngineSpec("w", 10**7, 10**4, costs),), weight_update="drain" if alpha == "0" else "in_flight", load_s=0.5
        ),
        trainer=TrainerSpec(fixed_s=2.0, token_s=1e-5, publish_s=1.0),
        workload=Synthetic(turns=(5, 20)),
    )


def test_a_single_trajectory_takes_what_the_bound_says() -> None:
    scenario = easy(groups=1, size=1, steps=1)
    result = simulate(scenario, REGISTRY["fcfs"].policy(), 3)
    assert bound(scenario, 3).time_s == pytest.approx(result.time_s, rel=0.001)


def test_where_nothing_is_scarce_the_bound_is_within_five_percent() -> None:
    scenario = easy(groups=4, size=4, steps=4)
    result = simulate(scenario, REGISTRY["fcfs"].policy(), 3)
    assert 0.95 <= bound(scenario, 3).time_s / result.time_s <= 1
