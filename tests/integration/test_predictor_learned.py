"""The learned predictor: trees as data, calibration, scores and the switch, drift, keeping."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.predictor_groups import Asked, ask, draw, tell

from venusrl.scheduling.predictor import Spread, StateError
from venusrl.scheduling.predictor.boosting import Boosting, LibraryMissing
from venusrl.scheduling.predictor.calibration import LEVELS, Outcome, corrected, factors, survival_quantile
from venusrl.scheduling.predictor.features import NAMES
from venusrl.scheduling.predictor.forest import Forest
from venusrl.scheduling.predictor.learned import Learned, LearnedConfig
from venusrl.scheduling.predictor.ranks import spearman
from venusrl.scheduling.predictor.scores import Comparison, Scored, Scores, Switch
from venusrl.scheduling.predictor.siblings import Siblings

QUICK = LearnedConfig(half_life=128, window=256, scores=128, first_fit=32, refit_every=64, look_every=32, rows=1500)


# --- trees ----------------------------------------------------------------------------------------------------
def test_a_forest_is_evaluated_as_the_library_does_it() -> None:
    lightgbm, numpy = pytest.importorskip("lightgbm"), pytest.importorskip("numpy")
    rng = numpy.random.default_rng(0)
    rows = rng.normal(size=(600, 5)).astype(numpy.float32)
    values = rows[:, 0] * 2 + abs(rows[:, 1]) + rng.normal(size=600) * 0.1
    ours = Boosting(trees=15).fit(rows.tolist(), values.tolist(), [1.0] * 600, 0.5)
    settings_ = {"objective": "quantile", "alpha": 0.5, "num_leaves": 8, "min_data_in_leaf": 40, "max_bin": 63}
    settings_ |= {"num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 1, "verbose": -1}
    data = lightgbm.Dataset(rows, values.astype(numpy.float32), weight=numpy.ones(600), params=settings_)
    theirs = lightgbm.train(settings_, data, num_boost_round=15)
    for row in rows[:50]:
        assert ours.predict(array("f", row)) == pytest.approx(float(theirs.predict(row[None])[0]), abs=1e-6)
    assert ours == Boosting(trees=15).fit(rows.tolist(), values.tolist(), [1.0] * 600, 0.5)


@pytest.mark.parametrize(
    "tree",
    [
        (),
        ((9, 0.0, 1, 2), (-1, 1.0, 0, 0), (-1, 2.0, 0, 0)),
        ((0, 0.0, 0, 1), (-1, 1.0, 0, 0)),
        ((0, 0.0, 1, 5), (-1, 1.0, 0, 0)),
    ],
)
def test_a_damaged_forest_is_refused(tree: tuple[tuple[int, float, int, int], ...]) -> None:
    with pytest.raises(ValueError, match="tree"):
        Forest((tree,)).check(3)


def test_without_the_library_the_message_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lightgbm", None)
    with pytest.raises(LibraryMissing, match=r"venusrl\[predictor\]"):
        Learned()


# --- calibration ------------------------------------------------------------------------------------------------
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 3.0), st.floats(0.2, 2.0))
def test_calibrated_quantiles_cover_exchangeable_outcomes(seed: int, bias: float, width: float) -> None:
    """However wrong a forecast is in place and width: what follows lies below its quantile as often as that says."""
    rng = random.Random(seed)

    def outcome() -> float:
        return rng.lognormvariate(2, 0.7)

    said = [bias * math.exp(2 + width * NormalDist(0, 1).inv_cdf(q)) for q in LEVELS]
    past = [outcome() for _ in range(200)]
    shifts = factors([[Outcome(math.log(y / q), True) for y in past] for q in said])
    found = corrected(Spread(said[0], said[1], said[2], 1.0), shifts, 0.0)
    future = [outcome() for _ in range(800)]
    for level, quantile in zip(LEVELS, found[:3], strict=True):
        # Binomial bounds of both samples, four deviations wide.
        allowed = 4 * math.sqrt(level * (1 - level) * (1 / 200 + 1 / 800)) + 1 / 200
        if abs(math.log(quantile / said[LEVELS.index(level)])) < math.log(7.9):
            assert sum(y <= quantile for y in future) / 800 == pytest.approx(level, abs=allowed)


def test_outcomes_that_are_not_known_yet_do_not_bias_to_short() -> None:
    rng = random.Random(5)
    truth = [rng.lognormvariate(0, 1) for _ in range(4000)]
    seen = [(y, limit) for y in truth if (limit := rng.lognormvariate(0.3, 0.5))]
    outcomes = [Outcome(math.log(min(y, limit)), y <= limit) for y, limit in seen]
    ended = sorted(o.log_ratio for o in outcomes if o.known)
    assert survival_quantile(outcomes, 0.5) == pytest.approx(0.0, abs=0.08)
    assert ended[len(ended) // 2] < -0.3, "the median of those that ended is far too short"


def test_few_outcomes_correct_nothing() -> None:
    assert factors([[Outcome(3.0, True)] * 10] * 3) == (0.0, 0.0, 0.0)


# --- scores and the switch --------------------------------------------------------------------------------------
def test_the_heuristic_takes_over_while_the_model_ranks_worse() -> None:
    switch = Switch()
    for model, heuristic, learned in [
        (None, None, False),
        (0.31, 0.30, False),
        (0.40, 0.30, True),
        (0.31, 0.30, True),
        (0.29, 0.30, False),
        (0.31, 0.30, False),
        (None, 0.30, False),
        (0.36, 0.30, True),
    ]:
        switch.look(Comparison(model, heuristic))
        assert switch.learned is learned
    assert switch.flips == 3


def test_scores_are_of_the_newest_and_say_nothing_of_few() -> None:
    scores = Scores(window=60)
    for n in range(40):
        scores.add((Scored(n, n, n, True),))
    assert scores.compare() == Comparison(None, None)
    assert scores.coverage() is None
    for n in range(60):
        scores.add((Scored(n, n, -n, n % 2 == 0),))
    assert scores.compare().model == pytest.approx(-1.0)
    assert scores.compare().heuristic == pytest.approx(1.0)
    assert scores.coverage() == pytest.approx(0.5)


# --- the whole -----------------------------------------------------------------------------------------------------
class Wrong:
    """A regressor that learned the opposite of the truth: what is forecast long is short."""

    def fit(
        self, rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float], level: float
    ) -> Forest:
        at = sorted(row[0] for row in rows)[len(rows) // 2]
        return Forest((((0, at, 1, 2), (-1, 2.0, 0, 0), (-1, -2.0, 0, 0)),))


def rank(asked: list[Asked]) -> float:
    return spearman([a.forecast.turns.p50 for a in asked], [float(a.turns) for a in asked]) or 0.0


def test_what_observations_tell_is_learned() -> None:
    pytest.importorskip("lightgbm")
    groups = draw(100, hint=0.6)
    learned, heuristic = Learned(config=QUICK), Siblings()
    told = [a for a in ask(learned, groups, 6) if a.ended > 200 and a.turn in (2, 4, 8)]
    plain = [a for a in ask(heuristic, groups, 6) if a.ended > 200 and a.turn in (2, 4, 8)]
    assert rank(told) > rank(plain) + 0.1
    quality = learned.quality()
    assert quality.active == "learned"
    assert quality.spearman is not None
    assert quality.fallback_spearman is not None
    assert quality.spearman > quality.fallback_spearman
    assert quality.kendall is not None
    assert quality.coverage == pytest.approx(0.82, abs=0.1)
    inside = sum(a.forecast.turns.p10 <= a.turns <= a.forecast.turns.p90 for a in told) / len(told)
    assert inside == pytest.approx(0.82, abs=0.1)


def test_a_model_that_misleads_never_answers() -> None:
    groups = draw(70, share=0.6, tasks=12)
    predictor = Learned(config=QUICK, regressor=Wrong())
    told = list(ask(predictor, groups, 6))
    quality = predictor.quality()
    assert quality.refits > 1
    assert quality.active == "siblings"
    assert {a.forecast.source for a in told} == {"siblings"}


def test_the_heuristic_takes_over_from_a_model_that_goes_wrong_and_gives_way_again() -> None:
    pytest.importorskip("lightgbm")
    predictor = Learned(config=msgspec.structs.replace(QUICK, inline=False))
    tell(predictor, draw(60, hint=0.6), 6)
    predictor.refit()
    tell(predictor, draw(40, hint=0.6, name="b", seed=1), 6)
    predictor.refit()
    assert predictor.quality().active == "learned"
    good = predictor._forests
    predictor.adopt([Forest((((NAMES.index("observed"), 0.0, 1, 2), (-1, 2.0, 0, 0), (-1, -2.0, 0, 0)),))] * 3)
    tell(predictor, draw(40, hint=0.6, name="c", seed=2), 6)
    predictor.look()
    assert predictor.quality().active == "siblings"
    predictor.adopt(good)
    tell(predictor, draw(50, hint=0.6, name="d", seed=3), 6)
    predictor.look()
    assert predictor.quality().active == "learned"
    assert predictor.quality().switches == 3


def test_after_a_shift_of_lengths_it_ranks_and_covers_again_within_a_step() -> None:
    """Lengths double. One step (here 128 trajectories) later forecasts are as good as before."""
    pytest.importorskip("lightgbm")
    before = draw(60, share=0.5, tasks=15, hint=0.4)
    after = draw(56, share=0.5, tasks=15, hint=0.4, mean_turns=24.0, name="after")
    told = list(ask(Learned(config=QUICK), before + after, 8))
    old = [a for a in told if 110 < a.ended <= 240]
    new = [a for a in told if a.ended > 240 + 128]
    assert rank(new) > rank(old) - 0.1
    bias = sum(a.forecast.turns.mean for a in new) / sum(a.turns for a in new)
    assert bias == pytest.approx(1.0, abs=0.35)
    inside = sum(a.forecast.turns.p10 <= a.turns <= a.forecast.turns.p90 for a in new) / len(new)
    assert inside > 0.65


def test_it_does_the_same_again() -> None:
    pytest.importorskip("lightgbm")
    groups = draw(25, hint=0.4)
    one = [a.forecast for a in ask(Learned(config=QUICK), groups, 5)]
    assert one == [a.forecast for a in ask(Learned(config=QUICK), groups, 5)]


def test_it_is_kept_with_the_run() -> None:
    pytest.importorskip("lightgbm")
    first, second = Learned(config=QUICK), Learned(config=QUICK)
    tell(first, draw(50, hint=0.6), 6)
    second.load(first.state())
    assert second.quality() == first.quality()
    later = draw(12, hint=0.6, name="later", seed=1)
    means = [[a.forecast.turns.mean for a in ask(predictor, later, 3)] for predictor in (first, second)]
    apart = [abs(a / b - 1) for a, b in zip(*means, strict=True)]
    assert sum(apart) / len(apart) < 0.05
    for state in (b"", b"nonsense", Siblings().state()):
        with pytest.raises(StateError):
            second.load(state)


def test_its_owner_may_fit_in_a_thread() -> None:
    pytest.importorskip("lightgbm")
    predictor = Learned(config=msgspec.structs.replace(QUICK, inline=False))
    tell(predictor, draw(60), 6)
    assert predictor.quality().refits == 0
    job = predictor.prepare()
    assert job is not None
    assert predictor.prepare() is None
    tell(predictor, draw(5, name="meanwhile"), 6)
    predictor.adopt(job.run())
    assert predictor.quality().refits == 1
