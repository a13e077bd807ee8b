"""Policies as a recipe names them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest

from venusrl.coordinator.forecasts import Forecasts
from venusrl.coordinator.policies import RUNNABLE, make_policy, make_predictor, scheduler_config
from venusrl.recipe import PolicyName, RecipeError, load, warnings
from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Action, CreateSandbox, Migrate, PauseSandbox
from venusrl.scheduling.events import Event
from venusrl.scheduling.policies.registry import REGISTRY
from venusrl.scheduling.policies.venus import Venus
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.learned import Learned
from venusrl.scheduling.predictor.siblings import Siblings
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import StopReason


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
    policy = make_policy(recipe, make_predictor(recipe))
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


def test_venus_believes_what_the_recipe_says() -> None:
    assert make_predictor(load("demo", [])) is None
    siblings = make_predictor(load("demo", ["schedule.policy=venus"]))
    learned = make_predictor(load("demo", ["schedule.policy=venus", "schedule.predictor=learned"]))
    assert isinstance(siblings, Siblings)
    assert siblings.limits.max_turns == 6
    assert isinstance(learned, Learned)
    assert not learned.config.inline, "fitting must not stop the event loop"
    assert "has an effect only with" in warnings(load("demo", ["schedule.predictor=learned"]))[0]


def _finished(predictor: Predictor, count: int) -> None:
    for number in range(count):
        name, now = f"t{number}", float(number)
        told: list[Event] = [
            ev.GroupOpened(f"g{number}", number, "task", 1),
            ev.TrajectoryOpened(name, f"g{number}", 0, 0),
            ev.TurnRequested(name, 0, 100, 50, 100),
            ev.TurnDispatched(name, 0, "w", 0),
            ev.TurnFinished(name, 0, 10, 0, StopReason.STOP),
            ev.VerificationStarted(name),
            ev.VerificationFinished(name, 1.0),
            ev.TrajectoryFinished(name),
        ]
        for event in told:
            predictor.observe(event, now)


def test_what_was_learned_survives_the_process(tmp_path: Path) -> None:
    said: list[str] = []
    first = Forecasts(Siblings(), tmp_path / "predictor.bin", lambda kind, fields: said.append(kind))
    first.load()
    assert first.predictor is not None
    _finished(first.predictor, 20)
    first.save()
    again = Forecasts(Siblings(), tmp_path / "predictor.bin", lambda kind, fields: said.append(kind))
    again.load()
    assert again.predictor is not None
    assert again.predictor.state() == first.predictor.state() != Siblings().state()
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == ["predictor.bin"]


async def test_a_damaged_file_costs_what_was_learned_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "predictor.bin").write_bytes(b"not a state")
    said: list[tuple[str, dict[str, object]]] = []
    forecasts = Forecasts(Siblings(), tmp_path / "predictor.bin", lambda kind, fields: said.append((kind, fields)))
    forecasts.load()
    assert [kind for kind, _ in said] == ["predictor_reset"]
    assert not await forecasts.refit()
    assert not await Forecasts(None, tmp_path / "none", lambda kind, fields: None).refit()


def test_a_real_run_never_asks_to_pause_a_sandbox() -> None:
    recipe = load("demo", ["schedule.policy=venus"])
    scheduler = Scheduler(scheduler_config(recipe), make_policy(recipe))
    scheduler.handle(ev.WorkerUp("w", 32768, 64, 0), 0.0)
    asked: list[Action] = []
    for number in range(16):
        asked += scheduler.handle(ev.GroupOpened(f"g{number}", number, f"task{number}", 1), 0.0)
        asked += scheduler.handle(ev.TrajectoryOpened(f"t{number}", f"g{number}", 0, 0), 0.0)
        asked += scheduler.handle(ev.SandboxReady(f"t{number}"), 1.0)
    for number in range(8):
        asked += scheduler.handle(ev.SandboxDenied(f"t{number}", 1.0), 2.0 + number)
    assert any(isinstance(action, CreateSandbox) for action in asked)
    assert not any(isinstance(action, PauseSandbox | Migrate) for action in asked)


def test_a_disk_without_room_costs_what_was_learned_and_not_the_run(tmp_path: Path) -> None:
    forecasts = Forecasts(Siblings(), tmp_path / "gone" / "predictor.bin", lambda kind, fields: None)
    with pytest.raises(OSError, match="gone"):
        forecasts.save()
    forecasts.try_to_save()
