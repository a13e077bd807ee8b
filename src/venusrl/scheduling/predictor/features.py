"""What a model is told of a trajectory.

Owns: the list of features and their computation. Must not know: models.

A model corrects the heuristic's forecast, so features are ratios and deviations (from everybody, from the
trajectory's own past) where they can be: they mean the same after a shift of all lengths.
"""

from __future__ import annotations

import math
from array import array

from venusrl.scheduling.predictor import Spread
from venusrl.scheduling.predictor.siblings import Belief, Siblings
from venusrl.scheduling.predictor.tracks import Tally, Track

NAMES = (
    "forecast",
    "forecast_width",
    "turns",
    "turns_share",
    "tokens_share",
    "context_share",
    "group_deviation",
    "group_known",
    "siblings_finished",
    "siblings_finished_mean",
    "longest_running",
    "task_known",
    "task_mean",
    "first_prompt",
    "context",
    "generated",
    "generated_recent",
    "generated_last",
    "observed",
    "observed_recent",
    "observed_last",
    "tool",
    "tool_recent",
    "tool_last",
    "failing_share",
    "failing_streak",
)
"""Logarithms but for shares and counts. ``generated``, ``observed``, ``tool``: a turn's, next to everybody's;
``_recent`` and ``_last``: next to the trajectory's own mean."""


def features(siblings: Siblings, track: Track, belief: Belief, turns: Spread) -> array[float]:
    """In the order of ``NAMES``. ``turns``: the heuristic's forecast."""
    weight, total = siblings.others(track, belief)
    limits, played = siblings.limits, track.turns
    mean = siblings.lengths.log_mean
    others = max(1, belief.size - 1)
    found = [
        math.log(turns.p50),
        math.log(turns.p90 / turns.p10),
        math.log1p(played),
        played / limits.max_turns if limits.max_turns is not None else 0.0,
        track.tokens / limits.max_tokens if limits.max_tokens is not None else 0.0,
        track.prompt / limits.max_context if limits.max_context is not None else 0.0,
        siblings.variance.expected(weight, total),
        weight / others,
        belief.finished / others,
        belief.finished_mean,
        math.log1p(belief.longest_running) - mean,
        belief.task_weight,
        belief.task_mean,
        math.log1p(track.first_prompt),
        math.log1p(track.prompt),
    ]
    for pace, tally in siblings.paces(track):
        found.extend(_tally(tally, pace.all.log_mean))
    calls = max(1, track.tools.n)
    found.append(track.failing / calls)
    found.append(float(min(track.streak, 10)))
    return array("f", found)


def _tally(tally: Tally, everybody: float) -> tuple[float, float, float]:
    if not tally.n:
        return 0.0, 0.0, 0.0
    own = tally.logs / tally.n
    return own - everybody, tally.recent - own, tally.last - own
