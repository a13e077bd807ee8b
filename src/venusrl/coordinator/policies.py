"""The scheduling policy that a recipe names, made ready for a real run.

Owns: which policies a real run can carry out, and their options as a recipe writes them. Must not know: how any of
them decides.

Guarantees: ``make_policy`` either returns a policy that does all that the recipe says, or raises RecipeError with the
key and its mend.
"""

from __future__ import annotations

from typing import Any

import msgspec

from venusrl.recipe import Recipe, RecipeError
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.registry import REGISTRY, Baseline, UnknownPolicy
from venusrl.scheduling.policies.venus import Venus, VenusConfig
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.boosting import LibraryMissing
from venusrl.scheduling.predictor.learned import Learned, LearnedConfig
from venusrl.scheduling.predictor.siblings import Limits, Siblings

MIN_VALID = 2
"""Trajectories that a group needs to train: a baseline of one is no baseline."""


def runnable(baseline: Baseline) -> bool:
    """Whether a real run can do what belongs to it: its engines neither abort and flush at each version nor wait
    with new weights for a cohort."""
    return baseline.weight_update != "abort" and not baseline.cohorts


RUNNABLE = tuple(name for name, baseline in REGISTRY.items() if runnable(baseline))


def make_policy(recipe: Recipe, predictor: Predictor | None = None) -> Policy:
    """A fresh policy; ``predictor`` as ``make_predictor`` gives it. Raises RecipeError for options it does not have."""
    name = recipe.schedule.policy
    options: dict[str, Any] = dict(recipe.schedule.policy_options)
    try:
        if name == "venus":
            # The embedded node keeps every sandbox it has created until it ends.
            return Venus(msgspec.convert(options, VenusConfig), predictor, pausable=False)
        return REGISTRY[name].policy(**options)
    except (msgspec.ValidationError, UnknownPolicy, ValueError, TypeError) as error:
        raise RecipeError(f"schedule.policy_options: {error}") from error


def make_predictor(recipe: Recipe) -> Predictor | None:
    """What the policy is to believe of lengths; None for one that does not ask. Raises RecipeError."""
    if recipe.schedule.policy != "venus":
        return None
    agent = recipe.agent
    limits = Limits(agent.max_turns, agent.max_output_tokens, recipe.rollout.context_tokens)
    if recipe.schedule.predictor == "siblings":
        return Siblings(limits)
    try:
        return Learned(limits, LearnedConfig(inline=False))
    except LibraryMissing as error:
        raise RecipeError(f'schedule.predictor = "learned": {error}') from error


def scheduler_config(recipe: Recipe) -> SchedulerConfig:
    """The run's numbers, with the mode that belongs to its policy."""
    schedule = recipe.schedule
    config = SchedulerConfig(
        batch_groups=schedule.batch_groups,
        group_size=schedule.group_size,
        async_factor=schedule.async_factor,
        max_staleness=schedule.staleness_bound,
        max_steps=recipe.training.steps,
        deadline=schedule.deadline,
        drop_grace_s=schedule.drop_grace_s,
        max_dead_groups=schedule.max_dead_groups,
        zero_variance_refills=schedule.zero_variance_refills,
        min_valid=MIN_VALID,
    )
    return REGISTRY[schedule.policy].config(config)
