"""Remaining lengths: the pieces, the sibling heuristic, the arms."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.predictor_groups import ask, draw, tell

from venusrl.scheduling import events as ev
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.predictor import DONE, NOTHING, Forecast, Spread, StateError, expected_seconds, slowest
from venusrl.scheduling.predictor.arms import Constant, Oracle, Remaining, Shuffled
from venusrl.scheduling.predictor.groups import GroupVariance
from venusrl.scheduling.predictor.history import Durations, LifeTable
from venusrl.scheduling.predictor.ranks import kendall, spearman
from venusrl.scheduling.predictor.replay import Recorded, RecordedGroup, RecordedTurn, replay
from venusrl.scheduling.predictor.siblings import Limits, Siblings
from venusrl.types import FailureKind, StopReason

SMALL = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=14)


# --- rank correlations --------------------------------------------------------------------------------------
@given(SMALL)
def test_kendall_counts_every_pair(pairs: list[tuple[int, int]]) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    agree = tied_a = tied_b = 0
    for i in range(len(a)):
        for j in range(i):
            product = (a[i] - a[j]) * (b[i] - b[j])
            agree += (product > 0) - (product < 0)
            tied_a += a[i] == a[j]
            tied_b += b[i] == b[j]
    both = len(a) * (len(a) - 1) // 2
    if both in (tied_a, tied_b):
        assert kendall(a, b) is None
    else:
        assert kendall(a, b) == pytest.approx(agree / math.sqrt((both - tied_a) * (both - tied_b)))


def test_spearman_is_the_correlation_of_mean_ranks() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 4000]) == pytest.approx(1.0)
    assert spearman([1, 2, 2, 4], [4, 3, 2, 1]) == pytest.approx(-0.9486832980505138)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1], [1]) is None


# --- histories ------------------------------------------------------------------------------------------------
def test_a_life_table_reads_off_what_it_was_told() -> None:
    table = LifeTable(half_life=1e9)
    rng = random.Random(1)
    lengths = [max(1, round(rng.lognormvariate(3, 0.5))) for _ in range(1500)]
    for length in lengths:
        for turn in range(length - 1):
            table.survived(turn)
        table.ended(length - 1)
    for played in (0, 10, 30):
        left = sorted(n - played for n in lengths if n > played)
        said = table.remaining(played)
        assert said.p50 == pytest.approx(left[len(left) // 2], rel=0.1, abs=1)
        assert said.p90 == pytest.approx(left[len(left) * 9 // 10], rel=0.12, abs=1)
        assert said.mean == pytest.approx(sum(left) / len(left), rel=0.08)


@pytest.mark.parametrize("length", [1, 4, 20])
def test_lengths_that_never_differ_are_known(length: int) -> None:
    table = LifeTable(half_life=64)
    for _ in range(300):
        for turn in range(length - 1):
            table.survived(turn)
        table.ended(length - 1)
    said = table.remaining(0)
    assert said[:3] == pytest.approx((length, length, length), abs=length // 20), "late turns share their hazards"
    assert said.mean == pytest.approx(length, rel=0.02)


def test_unfinished_trajectories_do_not_bias_to_short() -> None:
    """A quarter ends within 10 turns; the rest is cut at 20 though it would have gone on to 100."""
    table = LifeTable(half_life=1e9)
    for n in range(400):
        length = 10 if n % 4 == 0 else 20
        for turn in range(length - 1):
            table.survived(turn)
        if length == 10:
            table.ended(9)
    ended_mean = 10.0
    assert table.remaining(0).mean > 4 * ended_mean
    assert table.survival(19) == pytest.approx(0.75, abs=0.02)


def test_lengths_beyond_a_cap_are_cut_there() -> None:
    table = LifeTable(half_life=1e9, cap=50)
    for _ in range(100):
        for turn in range(49):
            table.survived(turn)
        table.ended(49)
    assert table.remaining(0).p90 == 50
    assert table.remaining(45) == Spread(5, 5, 5, 5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 400), st.floats(-3, 3), st.floats(0.3, 1.0), st.integers(0, 60))
def test_any_part_of_the_population_has_orderly_quantiles(played: int, shift: float, power: float, told: int) -> None:
    table = LifeTable(half_life=50, cap=500)
    for n in range(told):
        for turn in range(n % 17):
            table.survived(turn)
        table.ended(n % 17)
    said = table.remaining(played, shift, power)
    assert 1 <= said.p10 <= said.p50 <= said.p90 <= max(1, 500 - played)
    assert 1 <= said.mean <= max(1, 500 - played)


def test_a_call_that_has_lasted_is_expected_to_last() -> None:
    calls = Durations(half_life=1e9, prior=1.0)
    for n in range(2000):
        calls.add(100.0 if n % 10 == 0 else 1.0)
    assert calls.remaining(0.0).p50 == pytest.approx(1.0, rel=0.3)
    after = calls.remaining(5.0)
    assert after.p50 == pytest.approx(95.0, rel=0.2)
    assert calls.survival(5.0) == pytest.approx(0.1, abs=0.01)
    assert calls.remaining(1e7).p50 > 1e5, "longer than anything seen: nobody knows, so as long again"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e5), max_size=60), st.floats(0, 1e6), st.floats(0.1, 10))
def test_durations_answer_orderly_whatever_they_saw(seen: list[float], elapsed: float, scale: float) -> None:
    calls = Durations(half_life=20, prior=2.0)
    for value in seen:
        calls.add(value)
    said = calls.remaining(elapsed, scale)
    assert 0 <= said.p10 <= said.p50 <= said.p90
    assert said.mean >= 0


def test_the_share_between_groups_is_measured() -> None:
    for truth in (0.0, 0.3, 0.7):
        rng, variance = random.Random(7), GroupVariance()
        for _ in range(128):
            common = rng.gauss(0, math.sqrt(truth))
            variance.add([common + rng.gauss(0, math.sqrt(1 - truth)) for _ in range(8)])
        assert variance.share == pytest.approx(truth, abs=0.08)


# --- the heuristic ---------------------------------------------------------------------------------------------
def test_forecasts_are_unbiased_and_cover() -> None:
    asked = [a for a in ask(Siblings(), draw(170), window=8) if a.ended > 200]
    for turn in (0, 4, 8):  # the last is about half of a length
        some = [a for a in asked if a.turn == turn]
        assert sum(a.forecast.turns.mean for a in some) / sum(a.turns for a in some) == pytest.approx(1, abs=0.09)
        assert sum(a.forecast.tokens.mean for a in some) / sum(a.tokens for a in some) == pytest.approx(1, abs=0.09)
        inside = sum(a.forecast.turns.p10 <= a.turns <= a.forecast.turns.p90 for a in some) / len(some)
        assert inside == pytest.approx(0.82, abs=0.07)


def test_siblings_and_the_tasks_past_tell() -> None:
    def rank(share: float, tasks: int | None) -> float:
        asked = [a for a in ask(Siblings(), draw(120, share=share, tasks=tasks), 6) if a.ended > 120 and a.turn == 0]
        found = spearman([a.forecast.turns.p50 for a in asked], [float(a.turns) for a in asked])
        return found or 0.0

    assert rank(0.6, tasks=20) > 0.5
    assert abs(rank(0.0, tasks=None)) < 0.15


def test_long_siblings_make_a_forecast_long_before_they_end() -> None:
    """One member has not started while its three siblings run on and on."""
    predictor = Siblings()
    tell(predictor, draw(60, share=0.6), window=4)
    before = _open(predictor, "new", 4)
    alone = predictor.forecast(before[0]).turns.mean
    for turn in range(40):
        for name in before[1:]:
            predictor.observe(ev.TurnRequested(name, turn, 1000, 0, 1000), 0.0)
            predictor.observe(ev.TurnFinished(name, turn, 100, 0, StopReason.STOP), 0.0)
    assert predictor.forecast(before[0]).turns.mean > 1.5 * alone


def test_cut_trajectories_do_not_bias_the_heuristic_to_short() -> None:
    """Everything longer than twice the median is cancelled: the estimate still covers what goes on."""
    cut = []
    for group in draw(150, share=0.0):
        members = [
            m if len(m.turns) <= 24 else Recorded(m.name, m.prompt, m.turns[:24], 0.0, True) for m in group.members
        ]
        cut.append(RecordedGroup(group.name, group.task, tuple(members)))
    predictor = Siblings()
    tell(predictor, cut, window=8)
    told = predictor.lengths.remaining(0)
    truth = [len(m.turns) for group in draw(150, share=0.0) for m in group.members]
    survivors = [len(m.turns) for group in cut for m in group.members if not m.cut]
    assert told.mean == pytest.approx(sum(truth) / len(truth), rel=0.12)
    assert told.mean > 1.05 * sum(survivors) / len(survivors), "the mean of those that ended is short"


def test_limits_bound_what_is_forecast() -> None:
    limits = Limits(max_turns=20, max_tokens=2000, max_context=4000)
    for asked in ask(Siblings(limits), draw(40, cap=20), 6):
        forecast = asked.forecast
        for spread in forecast[:4]:
            assert isinstance(spread, Spread)
            assert 0 <= spread.p10 <= spread.p50 <= spread.p90
        assert forecast.turns.p90 <= 20 - asked.turn
        assert forecast.tokens.p90 <= 2000
        assert forecast.context.p90 <= 3000
    with pytest.raises(ValueError, match="max_tokens"):
        Limits(max_tokens=0)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_turns=20, max_tokens=2000, max_context=4000)])
@pytest.mark.parametrize("arm", [Siblings, Constant])
def test_means_alone_are_those_of_the_forecast(arm: type[Siblings], limits: Limits) -> None:
    predictor = arm(limits)
    for now, event in replay(draw(40, cap=20), 6):
        predictor.observe(event, now)
        if isinstance(event, ev.TurnRequested):
            predictor.observe(ev.TokensGenerated(event.trajectory, event.turn, 40 * (event.turn % 3)), now)
        if isinstance(event, ev.TurnRequested | ev.VerificationStarted | ev.TrajectoryFinished):
            forecast = predictor.forecast(event.trajectory)
            assert predictor.expected(event.trajectory) == tuple(spread.mean for spread in forecast[:5])


def test_tokens_of_the_present_turn_count() -> None:
    predictor = Siblings()
    tell(predictor, draw(30), window=4)
    name = _open(predictor, "new", 1)[0]
    predictor.observe(ev.TurnRequested(name, 0, 1000, 0, 10_000), 0.0)
    fresh = predictor.forecast(name).tokens
    predictor.observe(ev.TokensGenerated(name, 0, 5000), 0.0)
    assert predictor.forecast(name).tokens.p50 > fresh.p50, "a turn that ran away is not about to end"


def test_what_is_over_has_nothing_left() -> None:
    predictor = Siblings()
    name, other = _open(predictor, "g", 2)
    _play(predictor, name, 3)
    predictor.observe(ev.VerificationStarted(name), 9.0)
    verifying = predictor.forecast(name)
    assert verifying.turns == verifying.tokens == verifying.tool_s == NOTHING
    assert verifying.verify_s.p50 > 0
    predictor.observe(ev.VerificationFinished(name, 1.0), 19.0)
    predictor.observe(ev.TrajectoryFinished(name), 19.0)
    assert predictor.forecast(name) == DONE
    assert predictor.group("g") == predictor.forecast(other)
    predictor.observe(ev.TrajectoryFailed(other, FailureKind.INFRASTRUCTURE, "sandbox_died", False), 20.0)
    assert predictor.group("g") == DONE
    with pytest.raises(KeyError):
        predictor.forecast(other)


def test_gaps_shrink_and_stretch() -> None:
    predictor = Siblings()
    tell(predictor, draw(60), window=4)
    name = _open(predictor, "g", 1)[0]
    predictor.observe(ev.TurnRequested(name, 0, 1000, 0, 1000), 0.0)
    before = predictor.gap(name, 0.0)
    assert before.within(0.0) == 0.0
    assert before.within(1e6) == pytest.approx(1.0, abs=0.01)
    predictor.observe(ev.TurnFinished(name, 0, 10, 0, StopReason.STOP), 0.0)
    predictor.observe(ev.ToolStarted(name, 0), 0.0)
    assert predictor.gap(name, 0.0).within(1.0) > predictor.gap(name, 8.0).within(1.0), "slow ones stay slow"
    assert predictor.gap(name, 8.0).remaining.p50 > predictor.gap(name, 0.0).remaining.p50


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_the_same_events_give_the_same_answers(seed: int, window: int) -> None:
    groups = draw(12, seed=seed)
    one = [(a.trajectory, a.turn, a.forecast) for a in ask(Siblings(), groups, window)]
    assert one == [(a.trajectory, a.turn, a.forecast) for a in ask(Siblings(), groups, window)]


def test_a_saved_heuristic_goes_on_where_it_was() -> None:
    first, second = Siblings(), Siblings()
    tell(first, draw(40, tasks=10), window=4)
    second.load(first.state())
    later = draw(10, tasks=10, name="later", seed=1)
    means = [[a.forecast.turns.mean for a in ask(predictor, later, 3)] for predictor in (first, second)]
    assert means[0] == pytest.approx(means[1], rel=0.1)
    with pytest.raises(StateError, match="damaged"):
        second.load(b"nonsense")
    with pytest.raises(StateError, match="not of siblings"):
        second.load(b"\x82\xa9predictor\xa7learned\xa6format\x01")


def test_memory_is_bounded_by_what_is_live() -> None:
    predictor = Siblings()
    tell(predictor, draw(40), window=4)
    for name in list(predictor.tracks.families):
        predictor.observe(ev.GroupClosed(name, "zero_variance"), 0.0)
    assert not predictor.tracks.live
    assert not predictor.tracks.families
    assert predictor.tracks.running == 0


# --- the arms, and what follows from forecasts ----------------------------------------------------------------
def test_a_constant_tells_nothing_apart() -> None:
    predictor = Constant()
    tell(predictor, draw(60), window=4)
    new, old = _open(predictor, "new", 2)
    _play(predictor, old, 9)
    assert predictor.forecast(new) == predictor.forecast(old)


class Known:
    def __init__(self, groups: list[RecordedGroup]) -> None:
        self._members = {m.name: m for group in groups for m in group.members}

    def remaining(self, trajectory: str, turns: int) -> Remaining:
        left: tuple[RecordedTurn, ...] = self._members[trajectory].turns[turns:]
        tokens = sum(turn.generated for turn in left)
        context = tokens + sum(turn.observation for turn in left[:-1])
        return Remaining(len(left), tokens, context, sum(turn.tool_s for turn in left[:-1]), 5.0)

    def tool_s(self, trajectory: str, turn: int) -> float:
        return self._members[trajectory].turns[turn].tool_s


def test_the_oracle_is_right() -> None:
    groups = draw(15)
    for asked in ask(Oracle(Known(groups)), groups, 4):
        assert asked.forecast.turns == Spread.exactly(asked.turns)
        assert asked.forecast.tokens == Spread.exactly(asked.tokens)
        assert asked.forecast.tool_s.mean == pytest.approx(asked.tool_s)


def test_shuffled_has_the_distribution_and_no_information() -> None:
    groups = draw(100, share=0.6, tasks=20)
    told = [a for a in ask(Siblings(), groups, 8) if a.ended > 100]
    shuffled = [a for a in ask(Shuffled(Siblings()), groups, 8) if a.ended > 100]
    assert {a.forecast.source for a in shuffled} == {"shuffled"}
    actual = [float(a.turns) for a in told]
    informed = spearman([a.forecast.turns.p50 for a in told], actual) or 0.0
    blind = spearman([a.forecast.turns.p50 for a in shuffled], actual) or 0.0
    assert informed > 0.4
    assert abs(blind) < informed / 2
    spans = [sorted(a.forecast.turns.p50 for a in some) for some in (told, shuffled)]
    assert spans[1][len(told) // 10] == pytest.approx(spans[0][len(told) // 10], rel=0.5, abs=2)
    assert spans[1][-len(told) // 10] == pytest.approx(spans[0][-len(told) // 10], rel=0.4)


def test_the_slowest_of_several_is_slower_than_each() -> None:
    alike = Forecast(Spread(5, 10, 20, 11.5), NOTHING, NOTHING, NOTHING, NOTHING, "siblings")
    rng = random.Random(3)
    deviation = math.log(21 / 6) / 2 / 1.2816
    sampled = sorted(max(11 * rng.lognormvariate(0, deviation) - 1 for _ in range(8)) for _ in range(4000))
    found = slowest([alike] * 8).turns
    assert found.p50 == pytest.approx(sampled[2000], rel=0.08)
    assert found.p90 == pytest.approx(sampled[3600], rel=0.12)
    assert slowest([alike]) == alike
    assert slowest([]) == DONE


def test_seconds_add_up() -> None:
    costs = EngineCosts(0.01, 0.0, 0.0, 0.001, 0.0)
    turns, tokens, context, tool_s, verify_s = (Spread.exactly(n) for n in (2, 100, 150, 7, 3))
    sure = Forecast(turns, tokens, context, tool_s, verify_s, "oracle")
    assert expected_seconds(sure, costs) == pytest.approx(100 * 0.01 + 50 * 0.001 + 7 + 3)
    wide = _wide()
    levels = [expected_seconds(wide, costs, level="p10"), expected_seconds(wide, costs, level="p50")]
    levels.append(expected_seconds(wide, costs, level="p90"))
    assert all(a < b for a, b in pairwise(levels))


def _wide() -> Forecast:
    spread = Spread(1, 2, 4, 2.3)
    return Forecast(spread, spread, spread, spread, spread, "siblings")


def _open(predictor: Siblings, group: str, size: int) -> list[str]:
    predictor.observe(ev.GroupOpened(group, 0, f"task of {group}", size), 0.0)
    names = [f"{group}/{i}" for i in range(size)]
    for i, name in enumerate(names):
        predictor.observe(ev.TrajectoryOpened(name, group, i, 0), 0.0)
    return names


def _play(predictor: Siblings, name: str, turns: int) -> None:
    for turn in range(turns):
        predictor.observe(ev.TurnRequested(name, turn, 1000, 0, 1000), 0.0)
        predictor.observe(ev.TurnFinished(name, turn, 100, 0, StopReason.STOP), 0.0)
