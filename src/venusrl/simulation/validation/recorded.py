"""A run of our own against its simulation: the same trajectories on an engine with the costs that were learned.

Owns: how a recorded run becomes a scenario, which figures are compared, and their bands. Must not know: where a run
keeps its files (it is given a ``Recording``).

What is given and what is simulated: given are the trajectories (tokens of every turn, tool and verification times), the
trainer's and the weights' times as measured, and the engine's coefficients as its client learned them in that run.
Simulated are the batches at the engine, its queue, its cache, the schedule, and so every time at the engine, the steps
and the run. The machine is shared by engine, trainer, sandboxes and coordinator, and slower at some times than at
others, which a constant cost does not know: hence the width of the bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

import msgspec

from venusrl.recipe import Recipe
from venusrl.scheduling.calibration import Estimate
from venusrl.simulation.results import Result
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, Scenario, TrainerSpec, Workload
from venusrl.simulation.suites.arms import prepare
from venusrl.simulation.suites.from_recipe import recipe_arm, recipe_scenario
from venusrl.simulation.validation.checks import Check
from venusrl.simulation.workloads.replay import Replay, replay
from venusrl.types import Group, Trajectory, Turn

EMBEDDED = "embedded"
_PREFILL_CHUNK = 512
"""Of the embedded engine, its default."""
_PAGE = 16
"""Tokens, likewise."""
_LEAST_PREFILL_S = 1e-6
_TIME_BAND = (0.8, 1.25)
_HIT_BAND = 0.05
_FITS = 0.9
"""Share of the engine's time that learned costs should explain."""
_LOST = "a turn that waits in the client while weights change keeps KV under the old version's name: nobody finds it"


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished run. ``engine``: its worker's costs; ``train_s``: of each step, the checkpoint included; ``publish_s``
    and ``load_s``: means; ``steps_s``: when each step was trained, from the moment that the engine served."""

    name: str
    recipe: Recipe
    groups: list[Group]
    engine: Estimate
    train_s: list[float]
    publish_s: float
    load_s: float
    steps_s: list[float]


def check_recording(recording: Recording) -> Iterator[Check]:
    """The simulation of the run against the run. Raises WorkloadError when it trained nothing."""
    scenario = recorded_scenario(recording)
    prepared, policy = prepare(recipe_arm(recording.recipe), scenario, 0)
    # As the run updated its weights, whatever the policy's original does.
    result = simulate(msgspec.structs.replace(prepared, fleet=scenario.fleet), policy, 0)
    turns = [turn for group in recording.groups for t in group.trajectories for turn in t.turns]
    explained = _explained(recording, turns)
    left_out = f"the costs that were learned explain {explained:.0%} of the engine's time" if explained < _FITS else ""

    def check(figure: str, measured: float, simulated: float, low: float, high: float, gap: str = "") -> Check:
        source = f"run {recording.name}"
        return Check(EMBEDDED, figure, source, f"{measured:.3g}", simulated, low, high, gap)

    def ratio(figure: str, measured: float, simulated: float, *, rate: bool = False) -> Check:
        low, high = _TIME_BAND
        quicker = (simulated > measured) is rate
        return check(figure, measured, simulated, low * measured, high * measured, left_out if quicker else "")

    steps = [step.trained_at for step in result.steps]
    yield ratio("time of all steps (s)", recording.steps_s[-1], steps[-1])
    first = recording.steps_s[0] - recording.train_s[0]
    yield ratio("time to the first batch (s)", first, result.steps[0].formed_at)
    yield ratio("time a step (s)", _spacing(recording.steps_s), _spacing(steps))
    yield ratio("a turn at the engine, its queue included (s)", mean(map(_at_engine, turns)), _turn_s(result))
    generated = sum(turn.generated_tokens for turn in turns)
    busy = result.engines[0].busy_s
    yield ratio("tokens/s while the engine works", generated / _busy_s(turns), generated / busy, rate=True)
    prompts = sum(turn.prompt_tokens for turn in turns)
    hit = sum(turn.cached_tokens for turn in turns) / prompts
    found = sum(t.cached for t in result.trajectories)
    simulated = found / (found + sum(t.prefilled for t in result.trajectories))
    yield check("hit rate", hit, simulated, hit - _HIT_BAND, hit + _HIT_BAND, _LOST if simulated > hit else "")


def recorded_scenario(recording: Recording) -> Scenario:
    """The recipe's schedule and engine, with what was measured in place of what is modelled."""
    recipe = recording.recipe
    rollout = recipe.rollout
    workload = _with_overhead(
        replay(map(_since_served(recording.groups), recording.groups)), recording.engine.overhead_s
    )
    made = recipe_scenario(recipe, workload, model="qwen3-4b", gpu="h100", steps=len(recording.steps_s))
    costs = recording.engine.costs
    engine = EngineSpec(
        "worker-0",
        rollout.kv_capacity_tokens,
        rollout.slots,
        # The modelled engine wants prompts to take time, however little.
        msgspec.structs.replace(costs, prefill_token_s=max(_LEAST_PREFILL_S, costs.prefill_token_s)),
        prefill_chunk=_PREFILL_CHUNK,
        kv_control=True,
        page_tokens=_PAGE,
    )
    return msgspec.structs.replace(
        made,
        name=recording.name,
        fleet=msgspec.structs.replace(made.fleet, engines=(engine,), stale_kv="flush", load_s=recording.load_s),
        trainer=TrainerSpec(fixed_s=mean(recording.train_s), publish_s=recording.publish_s),
        keep_trajectories=True,
    )


def _since_served(groups: Sequence[Group]) -> Callable[[Group], Group]:
    """Groups as of the moment that the engine served: sandboxes made while it started took none of that time."""
    served = min(t.turns[0].dispatched_at for group in groups for t in group.trajectories if t.turns)

    def cut(t: Trajectory) -> Trajectory:
        asked = t.turns[0].requested_at if t.turns else t.started_at
        return msgspec.structs.replace(t, started_at=max(t.started_at, min(served, asked)))

    return lambda group: msgspec.structs.replace(group, trajectories=[cut(t) for t in group.trajectories])


def _with_overhead(workload: Replay, overhead_s: float) -> Workload:
    """What an answer takes beside the engine's work passes before its tool begins."""
    return Replay(
        tuple(
            tuple(
                msgspec.structs.replace(
                    script,
                    turns=tuple(t._replace(tool_s=t.tool_s + overhead_s) for t in script.turns),
                )
                for script in group
            )
            for group in workload.groups
        )
    )


def _spacing(steps: Sequence[float]) -> float:
    """Mean time between steps; of a single one its own."""
    return (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else steps[0]


def _at_engine(turn: Turn) -> float:
    return turn.finished_at - turn.dispatched_at


def _turn_s(result: Result) -> float:
    spent = sum(t.queued_s + t.prefill_s + t.decode_s for t in result.trajectories)
    return spent / sum(t.turns for t in result.trajectories)


def _explained(recording: Recording, turns: Sequence[Turn]) -> float:
    """Share of the time in which some turn was at the engine that the learned costs give for the work done in it. A
    robust fit makes little of the spells in which the trainer has the cores."""
    costs, busy_s = recording.engine.costs, _busy_s(turns)
    beside = min(recording.recipe.rollout.slots, sum(map(_at_engine, turns)) / busy_s)
    work_s = 0.0
    for turn in turns:
        read = turn.generated_tokens * (turn.prompt_tokens + turn.generated_tokens / 2)
        work_s += costs.prefill_s(turn.prompt_tokens - turn.cached_tokens, turn.cached_tokens)
        work_s += turn.generated_tokens * costs.step_base_s / beside
        work_s += turn.generated_tokens * costs.step_sequence_s + read * costs.step_kv_token_s
    return work_s / busy_s


def _busy_s(turns: Sequence[Turn]) -> float:
    """Seconds in which some turn was at the engine."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((turn.dispatched_at, turn.finished_at) for turn in turns):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy
