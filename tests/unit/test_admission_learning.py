"""What is learned of a template, and how far it is trusted."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.sandboxes.admission.calibration import Calibration, deviations, normal_quantile
from venusrl.sandboxes.admission.learning import KeptProfile, Learned, Row, bucket

MIB = 1 << 20


def row(learned: Learned, age_s: float) -> Row:
    profile = learned.profile("t")
    assert profile is not None
    found = profile.row(age_s)
    assert found is not None
    return found


def live(learned: Learned, name: str, held: int, length_s: int, *, ends: bool = True) -> None:
    for moment in range(0, length_s, 5):
        learned.observe("t", "", name, float(moment), held)
    if ends:
        learned.ended(name)


@given(age=st.floats(0, 1e6), more=st.floats(0, 1e6))
def test_ages_are_in_order(age: float, more: float) -> None:
    assert bucket(age) <= bucket(age + more)
    assert bucket(age) >= 0


def test_nothing_is_known_before_two_independent_lives() -> None:
    learned = Learned()
    for moment in range(0, 300, 5):
        for member in range(8):
            learned.observe("t", "one group", f"s{member}", float(moment), 10 * MIB)
    profile = learned.profile("t")
    assert profile is not None
    assert profile.row(60.0) is None, "eight clones are one life"
    for number in range(12):
        live(learned, f"s{number}", 10 * MIB, 300)
    assert row(learned, 60.0).mean == pytest.approx(10 * MIB)
    assert learned.profile("other") is None


def test_beyond_what_was_watched_the_declared_size_counts_until_enough_was_watched() -> None:
    """Censored lives: counted for what they were seen to hold, less sure of what comes."""
    unknown = []
    for lives_watched in (4, 16, 64):
        learned = Learned()
        for number in range(lives_watched):
            live(learned, f"s{number}", 10 * MIB, 100, ends=False)
        edge = row(learned, 98.0).ahead
        unknown.append(edge[-1].unknown)
        assert edge[-1].mean == pytest.approx(10 * MIB), "expected to go on as it was"
        assert edge[0].unknown < edge[-1].unknown, "the near future is surer"
        assert row(learned, 5.0).ahead[0].unknown == 0.0, "those ages were all seen"
    assert 1.0 > unknown[0] > unknown[1] > unknown[2] > 0.0
    finished = Learned()
    for number in range(12):
        live(finished, f"s{number}", 10 * MIB, 100)
    assert row(finished, 98.0).ahead[-1].unknown < 0.01, "all have ended: nothing is to come"


def test_what_will_have_ended_counts_less() -> None:
    learned = Learned()
    for number in range(40):
        live(learned, f"s{number}", 10 * MIB, 100 if number % 2 else 700)
    ahead = row(learned, 60.0).ahead
    assert ahead[0].mean == pytest.approx(10 * MIB, rel=0.15)
    assert ahead[2].mean == pytest.approx(5 * MIB, rel=0.3), "half of those alive at 60 s live to 140"


def test_a_workload_that_changes_is_followed() -> None:
    learned = Learned(half_life=100.0)
    for number in range(300):
        live(learned, f"old{number}", 10 * MIB, 15)
    before = row(learned, 5.0).mean
    for number in range(600):
        live(learned, f"new{number}", 40 * MIB, 15)
    assert before == pytest.approx(10 * MIB)
    assert row(learned, 5.0).mean > 38 * MIB, "a plain mean would say 30"


def test_ended_twice_or_never_seen_is_harmless() -> None:
    learned = Learned()
    learned.ended("nobody")
    live(learned, "s", MIB, 20)
    learned.ended("s")


@pytest.mark.parametrize(("target", "expected"), [(0.05, 1.645), (0.01, 2.326), (0.001, 3.090)])
def test_without_skewness_the_quantile_is_the_normal_one(target: float, expected: float) -> None:
    assert normal_quantile(target) == pytest.approx(expected, abs=1e-3)
    assert deviations(normal_quantile(target), 0.0) == pytest.approx(expected, abs=1e-3)


def test_a_right_tail_asks_for_more_as_a_gamma_does() -> None:
    draws = random.Random(3)
    shape = 4.0
    values = sorted((draws.gammavariate(shape, 1.0) - shape) / shape**0.5 for _ in range(40_000))
    true = values[int(0.99 * len(values))]
    assert deviations(normal_quantile(0.01), 2.0 / shape**0.5) == pytest.approx(true, rel=0.05)
    assert deviations(2.0, -1.0) == 2.0, "a left tail buys nothing"


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0.5, 2.5))
def test_forecasts_come_to_hold_as_often_as_they_claim(seed: int, scale: float) -> None:
    """Theory may be wrong about the spread by up to 2.5 times: the factor makes up for it."""
    draws, target = random.Random(seed), 0.02
    calibration = Calibration(target)
    for _ in range(4000):
        calibration.measured(draws.gauss(0.0, scale), normal_quantile(target))
    missed, forecasts = calibration.missed, calibration.forecasts
    for _ in range(6000):
        calibration.measured(draws.gauss(0.0, scale), normal_quantile(target))
    assert (calibration.missed - missed) / (calibration.forecasts - forecasts) < 1.6 * target
    assert calibration.factor >= 1.0, "never below what theory asks for"


def test_what_was_learned_is_known_again() -> None:
    rng = random.Random(3)
    learned = Learned()
    for number in range(200):
        live(learned, f"s{number}", rng.randrange(5, 50) * MIB, rng.randrange(20, 400))
    again = Learned()
    again.take_up(msgspec.json.decode(msgspec.json.encode(learned.kept(10)), type=dict[str, KeptProfile]))
    profile = learned.profile("t")
    assert profile is not None
    profile.row(0.0)  # both have looked at everything they saw
    for age_s in (0.0, 30.0, 100.0, 350.0):
        assert row(again, age_s) == row(learned, age_s)
    for each in (learned, again):  # and they go on alike
        for number in range(40):
            live(each, f"more{number}", 80 * MIB, 200)
    assert row(again, 100.0) == row(learned, 100.0)


def test_lives_that_go_on_are_counted_once() -> None:
    def group_of_four(learned: Learned, moments: range) -> None:
        for moment in moments:
            for member in range(4):
                learned.observe("t", "g", f"g{member}", float(moment), (10 + member) * MIB)

    whole, before, after = Learned(), Learned(), Learned()
    for learned in (whole, before):
        for number in range(10):
            live(learned, f"s{number}", 20 * MIB, 200)
        group_of_four(learned, range(0, 60, 5))
    after.take_up(before.kept(10))
    for learned in (whole, after):
        group_of_four(learned, range(60, 65, 5))  # the same class of ages as before
    one, other = (msgspec.to_builtins(learned.kept(1)["t"])["buckets"] for learned in (whole, after))
    assert one == other


def test_the_templates_used_last_are_kept() -> None:
    learned = Learned()
    for template in ("a", "b", "c"):
        learned.observe(template, "", f"in {template}", 0.0, MIB)
    learned.observe("a", "", "another", 0.0, MIB)
    assert list(learned.kept(2)) == ["c", "a"]


@pytest.mark.parametrize(
    "change",
    [
        {"unit": 0.0},
        {"unit": float("nan")},
        {"seen": -1},
        {"buckets": {0: (1.0,)}},
        {"buckets": {-1: (1.0,) * 8}},
        {"lags": ((1.0, 1.0),)},
        {"pairs": (1.0, 0.0)},
    ],
)
def test_what_cannot_be_a_profile_is_refused(change: dict[str, Any]) -> None:
    learned = Learned()
    learned.observe("t", "", "s", 0.0, MIB)
    kept = learned.kept(1)["t"]
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
        Learned().take_up({"t": msgspec.structs.replace(kept, **change)})
