"""Policies as a recipe names them."""

from __future__ import annotations

from decimal import Decimal
from typing import get_args

import pytest

from venusrl.coordinator.policies import RUNNABLE, make_policy, scheduler_config
from venusrl.recipe import PolicyName, RecipeError, load
from venusrl.scheduling.policies.registry import REGISTRY
from venusrl.scheduling.policies.venus import Venus


def test_a_recipe_names_what_a_real_run_can_carry_out() -> None:
    assert set(get_args(PolicyName)) == set(RUNNABLE)
    assert set(RUNNABLE) < set(REGISTRY)


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_name_makes_its_policy(name: str) -> None:
    recipe = load("demo", [f"schedule.policy={name}"])
    assert make_policy(recipe).name == name
    assert scheduler_config(recipe).async_factor == Decimal(1)


def test_options_reach_the_policy() -> None:
    recipe = load("demo", ["schedule.policy=venus", "schedule.policy_options.frontier=false"])
    policy = make_policy(recipe)
    assert isinstance(policy, Venus)
    assert not policy.settings.frontier


@pytest.mark.parametrize(
    ("policy", "option", "said"),
    [
        ("venus", "frontie=false", "frontie"),
        ("venus", "watermark=7", "watermark must lie in"),
        ("venus", 'watermark="high"', "float"),
        ("continuum", "x=1", "no option x"),
        ("fcfs", "x=1", "no option x"),
    ],
)
def test_an_option_that_a_policy_does_not_have_is_an_error(policy: str, option: str, said: str) -> None:
    recipe = load("demo", [f"schedule.policy={policy}", f"schedule.policy_options.{option}"])
    with pytest.raises(RecipeError, match=said) as raised:
        make_policy(recipe)
    assert "schedule.policy_options" in str(raised.value)
