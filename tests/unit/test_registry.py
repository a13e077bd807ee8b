"""The registry: names and options, and modes that are never looser than the run."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies.concurrency import Concurrency
from venusrl.scheduling.policies.registry import REGISTRY, UnknownPolicy, find

ALPHAS = ("0", "0.5", "1", "1.5", "2", "2.5", "3")


def config(alpha: str, extra: int = 0, batch: int = 4) -> SchedulerConfig:
    return SchedulerConfig(batch, 2, Decimal(alpha), math.ceil(Decimal(alpha)) + extra)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnknownPolicy, match="there is no policy 'fcsf'; there are venus, fcfs,"):
        find("fcsf")


def test_an_unknown_option_lists_those_there_are() -> None:
    with pytest.raises(UnknownPolicy, match=r"rollflash has no option slots; it has concurrency, max_running"):
        find("rollflash").policy(slots=3)


def test_policies_are_fresh_carry_their_names_and_take_options() -> None:
    for name, baseline in REGISTRY.items():
        first, second = baseline.policy(), baseline.policy()
        assert first is not second
        assert first.name == name
    limited = find("slime").policy(concurrency=7)
    assert isinstance(limited, Concurrency)
    assert limited.name == "slime"
    with pytest.raises(ValueError, match="max_running"):
        find("rollflash").policy(max_running=0)


@given(
    name=st.sampled_from(sorted(REGISTRY)),
    alpha=st.sampled_from(ALPHAS),
    extra=st.integers(0, 3),
    batch=st.integers(1, 9),
)
def test_a_mode_is_never_looser_than_the_run_and_known_to_itself(name: str, alpha: str, extra: int, batch: int) -> None:
    given_, baseline = config(alpha, extra, batch), find(name)
    mode = baseline.config(given_)
    assert mode.window <= given_.window
    assert mode.max_staleness <= given_.max_staleness
    assert mode.deadline == "wait"
    assert (mode.batch_groups, mode.group_size, mode.max_steps) == (batch, 2, None)
    assert baseline.config(mode) == mode
    assert baseline.update(given_) == baseline.update(mode) == ("drain" if mode.on_policy else baseline.weight_update)


@pytest.mark.parametrize(
    ("name", "alphas", "staleness"),
    [
        ("fcfs", ALPHAS, [1, 2, 2, 3, 3, 4, 4]),
        ("slime", ALPHAS, [1, 2, 2, 3, 3, 4, 4]),
        ("rollflash", ALPHAS, [0, 1, 1, 2, 2, 3, 3]),
        ("rollflash-agentic", ("0", "0", "1", "1", "2", "2", "3"), [0, 0, 1, 1, 2, 2, 3]),
        ("slime-one-step-off", ("0", "0", "1", "1", "1", "1", "1"), [0, 0, 1, 1, 1, 1, 1]),
    ],
)
def test_each_system_has_the_async_factors_that_it_knows(
    name: str, alphas: tuple[str, ...], staleness: list[int]
) -> None:
    modes = [find(name).config(config(alpha, 1)) for alpha in ALPHAS]
    assert [mode.async_factor for mode in modes] == [Decimal(alpha) for alpha in alphas]
    assert [mode.max_staleness for mode in modes] == staleness


def test_modes_are_those_of_the_originals() -> None:
    one = config("1")
    said = {name: (b.update(one), b.config(one).consumption, b.config(one).cohorts) for name, b in REGISTRY.items()}
    assert said["slime"] == ("abort", "completion", False)
    assert said["slime-one-step-off"] == ("drain", "oldest", True)
    assert said["rollflash"] == ("abort", "oldest", False)
    assert said["rollflash-agentic"] == ("abort", "in_order", False)
    assert said["windowed-fifo"] == ("in_flight", "windowed", False)
    assert find("windowed-fifo").config(config("1", batch=5)).consumption_window == 8
    for name in ("fcfs", "fcfs-gate", "thunderagent", "continuum", "venus"):
        assert said[name] == ("in_flight", "oldest", False)


def test_on_policy_all_of_them_drain() -> None:
    assert {baseline.update(config("0")) for baseline in REGISTRY.values()} == {"drain"}
