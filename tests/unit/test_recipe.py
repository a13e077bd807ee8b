"""The recipe: strict at load, every fault with its mend, exact decimals, and every shipped one valid."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from venusrl.recipe import Recipe, RecipeError, load, resolve, shipped, to_toml, warnings

MINIMAL: dict[str, Any] = {
    "run": {"name": "x"},
    "model": {"path": "builtin:demo-policy"},
    "training": {"steps": 3},
}


def recipe_with(**sections: dict[str, Any]) -> Recipe:
    return resolve({**MINIMAL, **{name: {**MINIMAL.get(name, {}), **keys} for name, keys in sections.items()}})


def fault(**sections: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe_with(**sections)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_loads_and_writes_itself_back(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(recipe))
    assert load(str(path)) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert warnings(recipe) == []


def test_the_promised_recipes_ship() -> None:
    assert {"demo", "smollm2", "qwen3-4b-swe"} <= set(shipped())


def test_the_production_shape_is_the_one_described() -> None:
    recipe = load("qwen3-4b-swe")
    assert recipe.schedule.group_size == 8
    assert recipe.agent.max_turns == 300
    assert recipe.agent.max_output_tokens == 128 * 1024
    assert recipe.schedule.async_factor == Decimal("1.5")


def test_unknown_keys_are_faults_that_name_the_nearest_key() -> None:
    assert "training.learning_rat: there is no such key; did you mean learning_rate?" in fault(
        training={"learning_rat": 1e-4}
    )
    assert "trainning: there is no such key; did you mean training?" in fault(trainning={})
    assert "model.xyzzy: there is no such key" in fault(model={"xyzzy": 1})


def test_every_fault_is_reported_at_once() -> None:
    text = fault(training={"steps": 0, "max_grad_norm": -1}, rollout={"workers": "two"})
    assert all(key in text for key in ("training.steps", "training.max_grad_norm", "rollout.workers"))
    conflicts = fault(schedule={"async_factor": 0, "deadline": "drop"}, training={"warmup_steps": 9})
    assert 'use "wait"' in conflicts
    assert 'set rollout.weight_update = "drain"' in conflicts
    assert "warmup_steps" in conflicts


@pytest.mark.parametrize("value", [True, "5", 5.5, [5], None])
def test_types_are_strict(value: object) -> None:
    assert "training.steps" in fault(training={"steps": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "many", True, -1])
def test_async_factor_is_a_finite_number(value: object) -> None:
    assert "schedule.async_factor" in fault(schedule={"async_factor": value})


@pytest.mark.parametrize(("written", "exact"), [("1.1", "1.1"), ("0.1", "0.1"), ("2", "2"), ("1.50", "1.5")])
def test_decimals_are_what_the_author_wrote(written: str, exact: str) -> None:
    table = tomllib.loads(f"v = {written}")
    recipe = recipe_with(schedule={"async_factor": table["v"]})
    assert recipe.schedule.async_factor == Decimal(exact)
    assert resolve(tomllib.loads(to_toml(recipe))).schedule.async_factor == Decimal(exact)


@pytest.mark.parametrize(("factor", "bound"), [(1, 1), (1.5, 2), (0.5, 1), (3, 3)])
def test_the_staleness_bound_defaults_to_the_factor_rounded_up(factor: float, bound: int) -> None:
    assert recipe_with(schedule={"async_factor": factor}).schedule.staleness_bound == bound


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"schedule": {"async_factor": 1.5, "max_staleness": 1}}, "schedule.max_staleness must be at least"),
        ({"agent": {"max_turn_tokens": 600, "max_output_tokens": 512}}, "agent.max_turn_tokens is larger"),
        ({"agent": {"max_output_tokens": 4096}}, "must be smaller than rollout.context_tokens"),
        ({"rollout": {"context_tokens": 4096, "kv_capacity_tokens": 2048}}, "does not fit"),
        ({"rollout": {"engine": "sglang"}}, "rollout.engine: input should be 'embedded' or 'vllm' (it is 'sglang')"),
        ({"rollout": {"urls": ["http://a", "http://b"], "workers": 3}}, "rollout.urls names 2"),
        ({"training": {"betas": [0.9, 1.0]}}, "training.betas"),
        ({"tasks": {"held_out_count": 50}}, "evaluation.tasks = 100 is more than"),
        ({"tasks": {"source": "my-tasks"}}, "tasks.held_out is needed"),
        ({"run": {"name": "../up"}}, "run.name"),
        ({"sandbox": {"runtime": "e2b"}}, "sandbox.url must be the http(s) address"),
        ({"sandbox": {"url": "http://127.0.0.1:3000"}}, 'need sandbox.runtime = "e2b"'),
        ({"run": {"name": "r", "keep_trajectories_of_steps": 2}}, "training.keep_checkpoints x checkpoint_every = 3"),
    ],
)
def test_conflicts_are_faults_at_load(sections: dict[str, dict[str, Any]], says: str) -> None:
    assert says in fault(**sections)


def test_options_without_effect_are_warnings_that_survive_writing_the_recipe() -> None:
    recipe = recipe_with(
        training={"importance_cap": 5.0}, schedule={"drop_grace_s": 1.0}, rollout={"engine": "vllm", "threads": 2}
    )
    found = warnings(recipe)
    assert [line.split(" has")[0] for line in found] == [
        "training.importance_cap",
        "schedule.drop_grace_s",
        "rollout.threads",
    ]
    assert warnings(resolve(tomllib.loads(to_toml(recipe)))) == found
    assert warnings(recipe_with()) == []
    assert len(warnings(recipe_with(training={"learning_rate": 0, "shuffle_rewards": True}))) == 2
    elsewhere = {"runtime": "e2b", "url": "http://127.0.0.1:3000", "memory_mib": 64}
    assert "sandbox.memory_mib have no effect" in warnings(recipe_with(sandbox=elsewhere))[0]


def test_overrides_are_toml_or_bare_strings() -> None:
    recipe = load(
        "demo",
        [
            "training.steps=7",
            "schedule.async_factor=1.25",
            "run.name=short",
            "rollout.cpus=[0, 1]",
            "evaluation.greedy=false",
        ],
    )
    assert (recipe.training.steps, recipe.run.name, recipe.rollout.cpus) == (7, "short", (0, 1))
    assert recipe.schedule.async_factor == Decimal("1.25")
    assert recipe.evaluation.greedy is False


@pytest.mark.parametrize("override", ["training.steps", "=3", "run.name.first=3", "training.step=3", "steps=3"])
def test_a_wrong_override_is_a_fault(override: str) -> None:
    with pytest.raises(RecipeError):
        load("demo", [override])


def test_text_survives_writing() -> None:
    recipe = recipe_with(agent={"system_prompt": 'tab\t quote" back\\slash\nline \x7f \x01 é 漢 🙂'})
    assert resolve(tomllib.loads(to_toml(recipe))) == recipe


def test_a_recipe_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    for source in ("nothing", str(tmp_path / "nothing.toml")):
        with pytest.raises(RecipeError, match="demo"):
            load(source)
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(RecipeError, match="is not TOML"):
        load(str(broken))
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(str(broken))
    with pytest.raises(RecipeError, match="no recipe file"):
        load(str(tmp_path))
