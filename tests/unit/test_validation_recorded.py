"""A recorded run against its simulation, on runs whose times are known by arithmetic."""

from __future__ import annotations

import msgspec
import pytest

from venusrl.coordinator.store import OpenedTrajectory
from venusrl.recipe import resolve
from venusrl.scheduling.calibration import Estimate
from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.validation.recorded import Recording, check_recording, recorded_scenario
from venusrl.testing.runs import made_up_trajectory
from venusrl.types import Group, StopReason, Trajectory, Turn

STEP_S, PROMPT, TOKENS, TOOL_S = 0.1, 64, 20, 3.0
ENGINE = Estimate(EngineCosts(STEP_S, 0.0, 0.0, 0.0, 0.0), overhead_s=0.5, error=0.05, samples=200)
TURN_S = TOKENS * STEP_S
TRAJECTORY_S = 2 * (TURN_S + 0.5) + TOOL_S


def _found(tokens: int) -> int:
    """In pages of 16."""
    return tokens - tokens % 16


def trajectory(group: int, index: int) -> Trajectory:
    """Two turns of a fixed length; all trajectories of a batch run side by side."""
    begun = group * (TRAJECTORY_S + 10.0)
    second = begun + TURN_S + TOOL_S + 0.5
    first = Turn(0, PROMPT, TOKENS, _found(PROMPT - 1) if index else 0, StopReason.STOP, "")
    turns = [
        msgspec.structs.replace(
            first, requested_at=begun, dispatched_at=begun, finished_at=begun + TURN_S, tool_s=TOOL_S
        ),
        msgspec.structs.replace(
            first,
            index=1,
            prompt_tokens=PROMPT + TOKENS + 10,
            cached_tokens=_found(PROMPT + TOKENS),
            requested_at=second,
            dispatched_at=second,
            finished_at=second + TURN_S,
        ),
    ]
    made = made_up_trajectory(OpenedTrajectory(f"g{group}/{index}", f"g{group}", index, 0), f"t{group}", version=group)
    return msgspec.structs.replace(made, turns=turns, started_at=begun, verify_s=0.0)


@pytest.fixture
def recording() -> Recording:
    recipe = resolve(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "training": {"steps": 2},
            "rollout": {"weight_update": "drain"},
            "schedule": {"batch_groups": 1, "group_size": 4, "async_factor": 0},
        }
    )
    groups = [Group(f"g{g}", f"t{g}", g, g, [trajectory(g, index) for index in range(4)]) for g in range(2)]
    step_s = TRAJECTORY_S + 10.0
    return Recording("run", recipe, groups, ENGINE, [10.0, 10.0], 0.0, 0.0, [step_s, 2 * step_s])


def test_a_run_that_went_as_its_engine_was_said_to_agrees(recording: Recording) -> None:
    checks = list(check_recording(recording))
    assert [f"{c.figure}: {c.published}, {c.simulated:.3f}" for c in checks if not c.holds] == []
    assert {c.figure for c in checks} >= {"time a step (s)", "hit rate", "tokens/s while the engine works"}
    assert {c.source for c in checks} == {"run run"}


def test_an_engine_said_to_be_twice_as_slow_is_found_out(recording: Recording) -> None:
    slow = msgspec.structs.replace(ENGINE, costs=msgspec.structs.replace(ENGINE.costs, step_base_s=2 * STEP_S))
    verdicts = {c.figure: c.verdict for c in check_recording(msgspec.structs.replace(recording, engine=slow))}
    assert verdicts["tokens/s while the engine works"] == "FAILS"
    assert verdicts["a turn at the engine, its queue included (s)"] == "FAILS"
    assert verdicts["hit rate"] == "holds"


def test_what_learned_costs_leave_out_of_the_engines_time_explains_a_quicker_simulation(recording: Recording) -> None:
    quick = msgspec.structs.replace(ENGINE, costs=msgspec.structs.replace(ENGINE.costs, step_base_s=STEP_S / 2))
    checks = {c.figure: c for c in check_recording(msgspec.structs.replace(recording, engine=quick))}
    turn = checks["a turn at the engine, its queue included (s)"]
    assert turn.verdict == "gap"
    assert "explain 50%" in turn.known_gap


def test_the_scenario_has_the_recipes_schedule_and_the_measured_machine(recording: Recording) -> None:
    scenario = recorded_scenario(msgspec.structs.replace(recording, load_s=0.25, publish_s=0.5))
    (engine,) = scenario.fleet.engines
    assert (engine.kv_capacity, engine.slots) == (
        recording.recipe.rollout.kv_capacity_tokens,
        recording.recipe.rollout.slots,
    )
    assert engine.costs.step_s(4, 1000) == ENGINE.costs.step_s(4, 1000)
    assert (scenario.fleet.load_s, scenario.fleet.weight_update, scenario.trainer.publish_s) == (0.25, "drain", 0.5)
    assert scenario.trainer.step_s([100]) == 10.0
