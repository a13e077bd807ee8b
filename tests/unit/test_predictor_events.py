"""Whatever the events and their order: answers stay orderly, memory follows what is live, nothing is learned twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling import events as ev
from venusrl.scheduling.predictor import Predictor, Spread
from venusrl.scheduling.predictor.arms import Constant, Shuffled
from venusrl.scheduling.predictor.learned import Learned, LearnedConfig
from venusrl.scheduling.predictor.siblings import Limits, Siblings
from venusrl.types import FailureKind, StopReason

GROUPS, MEMBERS, TURNS = ("a", "b"), 2, 6
NAMES = [f"{group}{i}" for group in GROUPS for i in range(MEMBERS)]

_names = st.sampled_from(NAMES)
_turns = st.integers(0, TURNS)
_tokens = st.integers(0, 5000)
_stops = st.sampled_from([StopReason.STOP, StopReason.ABORT, StopReason.LENGTH])
_events: st.SearchStrategy[ev.Event] = st.one_of(
    st.builds(ev.GroupOpened, st.sampled_from(GROUPS), st.just(0), st.just("task"), st.just(MEMBERS)),
    st.builds(lambda n, a: ev.TrajectoryOpened(n, n[0], int(n[1]), a), _names, st.integers(0, 2)),
    st.builds(ev.TurnRequested, _names, _turns, _tokens, st.just(0), st.just(9999), st.integers(0, 50)),
    st.builds(ev.TokensGenerated, _names, _turns, _tokens),
    st.builds(ev.TurnFinished, _names, _turns, _tokens, st.just(0), _stops),
    st.builds(ev.ToolStarted, _names, _turns),
    st.builds(ev.ToolFinished, _names, _turns, _tokens, st.sampled_from([None, 0, 1])),
    st.builds(ev.VerificationStarted, _names),
    st.builds(ev.VerificationFinished, _names, st.just(1.0)),
    st.builds(ev.TrajectoryFinished, _names),
    st.builds(ev.TrajectoryFailed, _names, st.sampled_from(list(FailureKind)), st.just("x"), st.booleans()),
    st.builds(ev.GroupClosed, st.sampled_from(GROUPS), st.just("x")),
    st.builds(ev.TurnDispatched, _names, _turns, st.just("w"), st.just(0)),
)


def orderly(spread: Spread) -> bool:
    return 0 <= spread.p10 <= spread.p50 <= spread.p90 < math.inf and 0 <= spread.mean < math.inf


@settings(max_examples=120, deadline=None)
@given(st.lists(_events, max_size=80), st.integers(0, 2), st.booleans())
def test_any_sequence_of_events_is_survived(sequence: list[ev.Event], which: int, capped: bool) -> None:
    limits = Limits(max_turns=4, max_tokens=3000, max_context=6000) if capped else Limits()
    inner: Siblings = Constant(limits) if which == 1 else Siblings(limits)
    predictor: Predictor = Shuffled(inner) if which == 2 else inner
    for now, event in enumerate(sequence):
        predictor.observe(event, float(now))
        tracks = inner.tracks
        assert tracks.running == sum(not track.ended for track in tracks.live.values())
        for name in NAMES:
            if name not in tracks.live:
                with pytest.raises(KeyError):
                    predictor.forecast(name)
                continue
            forecast = predictor.forecast(name)
            assert all(orderly(spread) for spread in forecast[:5] if isinstance(spread, Spread))
            assert (forecast.turns.p10 >= 1) != tracks.live[name].ended
            gap = predictor.gap(name, float(now))
            assert orderly(gap.remaining)
            assert 0 <= gap.within(1.0) <= gap.within(60.0) <= 1
        for group in tracks.families:
            assert orderly(predictor.group(group).turns)


@settings(max_examples=25, deadline=None)
@given(st.lists(_events, max_size=120))
def test_the_learned_predictor_survives_them_too(sequence: list[ev.Event]) -> None:
    pytest.importorskip("lightgbm")
    config = LearnedConfig(first_fit=1, look_every=1, refit_every=1, window=4, scores=4, rows=8)
    predictor = Learned(config=config)
    for now, event in enumerate(sequence):
        predictor.observe(event, float(now))
    for name in predictor.siblings.tracks.live:
        assert orderly(predictor.forecast(name).turns)
    restored = Learned(config=config)
    restored.load(predictor.state())
    assert restored.quality() == predictor.quality()


def test_a_turn_that_was_aborted_counts_once_and_whole() -> None:
    predictor = Siblings()
    predictor.observe(ev.GroupOpened("a", 0, "task", 1), 0.0)
    predictor.observe(ev.TrajectoryOpened("a0", "a", 0, 0), 0.0)
    predictor.observe(ev.TurnRequested("a0", 0, 1000, 0, 9999), 0.0)
    predictor.observe(ev.TurnFinished("a0", 0, 40, 0, StopReason.ABORT), 1.0)
    predictor.observe(ev.TurnRequested("a0", 0, 1000, 0, 9999, resumed=40), 1.0)
    predictor.observe(ev.TurnFinished("a0", 0, 60, 0, StopReason.STOP), 2.0)
    predictor.observe(ev.TurnRequested("a0", 1, 1130, 0, 9999), 3.0)
    predictor.observe(ev.TurnRequested("a0", 1, 1130, 0, 9999), 4.0)  # its worker died
    track = predictor.tracks.live["a0"]
    assert (track.turns, track.tokens, track.generated.n, track.observed.n) == (1, 100, 1, 1)
    assert math.exp(track.observed.last) == pytest.approx(30, abs=0.1)


def test_what_a_recovered_run_tells_of_finished_trajectories_is_not_taken_for_lengths() -> None:
    predictor, untold = Siblings(), Siblings()
    predictor.observe(ev.GroupOpened("a", 0, "task", 2), 0.0)
    for i in range(2):
        predictor.observe(ev.TrajectoryOpened(f"a{i}", "a", i, 0), 0.0)
        predictor.observe(ev.TurnDispatched(f"a{i}", 0, "", 3), 0.0)
        predictor.observe(ev.TrajectoryFinished(f"a{i}"), 0.0)
    assert predictor.lengths.remaining(0) == untold.lengths.remaining(0)
    assert predictor.group("a").turns.mean == 0


def test_a_trajectory_may_end_in_the_middle_of_a_turn() -> None:
    """The agent asks for a turn for which there is no room left, and stops: no turn finished since the forecast."""
    pytest.importorskip("lightgbm")
    predictor = Learned(config=LearnedConfig(first_fit=20, look_every=20, refit_every=20))
    for n in range(120):
        group, name = f"g{n}", f"t{n}"
        predictor.observe(ev.GroupOpened(group, n, "task", 1), float(n))
        predictor.observe(ev.TrajectoryOpened(name, group, 0, 0), float(n))
        for turn in range(2):
            predictor.observe(ev.TurnRequested(name, turn, 1000, 0, 9999), float(n))
            predictor.observe(ev.TurnFinished(name, turn, 10, 0, StopReason.STOP), float(n))
        predictor.observe(ev.TurnRequested(name, 2, 9000, 0, 9999), float(n))
        predictor.observe(ev.VerificationStarted(name), float(n))
        predictor.observe(ev.TrajectoryFinished(name), float(n))
    assert predictor.quality().refits > 1
    assert predictor.quality().coverage is not None
