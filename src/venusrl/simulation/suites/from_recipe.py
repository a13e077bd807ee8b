"""A recipe as a suite of one cell: what its schedule would do, before a GPU is rented.

Owns: what of a recipe shapes a simulation (schedule, engines' number, KV and slots, the agent's caps) and what the
user must add (the workload, the model whose costs count). Must not know: how to run it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from venusrl.recipe import Recipe, RecipeError
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies.registry import UnknownPolicy, find
from venusrl.scheduling.policies.venus import VenusConfig
from venusrl.simulation import models
from venusrl.simulation.scenario import EngineSpec, Scenario, Workload
from venusrl.simulation.suites.arms import VENUS, Arm, arm
from venusrl.simulation.suites.cells import Cell, Suite
from venusrl.simulation.workloads.openswe import OpenSwe


def recipe_suite(recipe: Recipe, workload: Workload, *, model: str, gpu: str, steps: int, seeds: int) -> Suite:
    """The recipe's policy, and venus beside it where that is another one. Trainer and engines are one GPU each (two for
    an engine of a model that needs them)."""
    scenario = recipe_scenario(recipe, workload, model=model, gpu=gpu, steps=steps)
    own = recipe_arm(recipe)
    chosen = [own] if own.ours else [own, arm(VENUS)]
    about = f"the schedule of recipe {recipe.run.name} on {workload.name}, costs of {model} on {gpu}"
    return Suite(recipe.run.name, about, [Cell(scenario.name, scenario, {"model": model})], chosen, seeds, tuned=False)


def recipe_arm(recipe: Recipe) -> Arm:
    """The recipe's policy with its options. Raises RecipeError for options that it does not have."""
    name = recipe.schedule.policy
    options: dict[str, Any] = dict(recipe.schedule.policy_options)
    try:
        if name == VENUS:
            return msgspec.structs.replace(arm(name), venus=msgspec.convert(options, VenusConfig))
        find(name).policy(**options)
    except (msgspec.ValidationError, UnknownPolicy, ValueError, TypeError) as error:
        raise RecipeError(f"schedule.policy_options: {error}") from error
    return msgspec.structs.replace(arm(name), options=options)


def recipe_scenario(recipe: Recipe, workload: Workload, *, model: str, gpu: str, steps: int) -> Scenario:
    """Its first ``steps`` steps (or all, if there are fewer)."""
    schedule, rollout = recipe.schedule, recipe.rollout
    card, shape = models.GPUS[gpu], models.MODELS[model]
    width = models.TENSOR_PARALLEL.get((model, gpu), 1)
    workers = len(rollout.urls) or rollout.workers
    ranks = recipe.training.ranks
    fleet, trainer = models.cluster(
        shape, gpu=card, gpus=workers * width + ranks, trainer_gpus=ranks, weight_update=rollout.weight_update
    )
    costs = fleet.engines[0].costs
    engines = tuple(EngineSpec(f"engine-{i}", rollout.kv_capacity_tokens, rollout.slots, costs) for i in range(workers))
    return Scenario(
        name=recipe.run.name,
        scheduler=SchedulerConfig(
            batch_groups=schedule.batch_groups,
            group_size=schedule.group_size,
            async_factor=schedule.async_factor,
            max_staleness=schedule.staleness_bound,
            max_steps=min(steps, recipe.training.steps),
        ),
        fleet=msgspec.structs.replace(fleet, engines=engines),
        trainer=trainer,
        workload=_capped(workload, recipe),
    )


def _capped(workload: Workload, recipe: Recipe) -> Workload:
    """The agent's caps, for the workload that knows them."""
    if not isinstance(workload, OpenSwe):
        return workload
    return msgspec.structs.replace(
        workload,
        max_turns=recipe.agent.max_turns,
        max_output_tokens=recipe.agent.max_output_tokens,
        max_turn_tokens=recipe.agent.max_turn_tokens,
        context_tokens=recipe.rollout.context_tokens,
        tool_timeout_s=recipe.sandbox.command_timeout_s,
    )
