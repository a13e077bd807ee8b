"""What length prediction is worth on groups with known correlation, and what it costs.

    python benchmarks/predictor.py [--json FILE]

Synthetic groups of 8 with log-normal lengths, 0.28 of the variance between groups (as published for SWE runs); with and
without observations that tell of a trajectory's length; and with lengths that double halfway. Then the cost in CPU: of
an event, of a forecast, of a fit with LightGBM and (where installed) with scikit-learn.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from venusrl.scheduling.events import TrajectoryFinished, TurnRequested
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.evaluation import evaluate
from venusrl.scheduling.predictor.features import NAMES
from venusrl.scheduling.predictor.learned import Learned
from venusrl.scheduling.predictor.ranks import spearman
from venusrl.scheduling.predictor.replay import Recorded, RecordedGroup, RecordedTurn, replay
from venusrl.scheduling.predictor.siblings import Siblings

GROUPS, SIZE, WINDOW, SHARE, SPREAD, MEAN_TURNS = 120, 8, 24, 0.28, 0.57, 24.0
STEP = 128
"""Trajectories of a training step: 16 groups of 8."""


def groups(count: int, hint: float, *, seed: int, mean: float = MEAN_TURNS, name: str = "g") -> list[RecordedGroup]:
    """``hint``: how much the logarithm of observations follows that of the trajectory's length."""
    found = []
    for g in range(count):
        rng = random.Random(f"{seed}/{name}/{g}")
        common = rng.gauss(0, math.sqrt(SHARE))
        members = []
        for i in range(SIZE):
            z = common + rng.gauss(0, math.sqrt(1 - SHARE))
            length = min(300, max(1, round(mean * math.exp(SPREAD * z))))
            members.append(Recorded(f"{name}{g}/{i}", 4000, tuple(turns(rng, length, math.exp(hint * z))), 8.0))
        found.append(RecordedGroup(f"{name}{g}", f"{name}{g}", tuple(members)))
    return found


def turns(rng: random.Random, count: int, hint: float) -> Iterator[RecordedTurn]:
    for _ in range(count):
        generated = max(1, round(rng.lognormvariate(math.log(183), 0.36)))
        tool_s = rng.lognormvariate(math.log(1.5), 1.4)
        yield RecordedTurn(generated, generated * 0.03, tool_s, round(hint * rng.lognormvariate(5.6, 1.0)), 0)


def ranking(hint: float, seed: int) -> list[dict[str, Any]]:
    drawn = groups(GROUPS, hint, seed=seed)
    return [
        {"hint": hint, "seed": seed, **msgspec.to_builtins(evaluate(predictor, drawn, WINDOW, warm_up=0.4))}
        for predictor in (Siblings(), Learned())
    ]


class Scored(NamedTuple):
    median: float
    mean: float
    left: float
    covered: bool


def drift(seed: int) -> list[dict[str, Any]]:
    """Rank correlation, bias and coverage by steps from the shift on (step -1 is the last before it)."""
    before, after = groups(80, 0.4, seed=seed), groups(80, 0.4, seed=seed, mean=2 * MEAN_TURNS, name="after")
    rows = []
    for predictor in (Siblings(), Learned()):
        for step, some in sorted(by_step(predictor, before + after, 80 * SIZE).items()):
            left = [s.left for s in some]
            if step >= -2 and len(some) > 50:
                rows.append(
                    {
                        "predictor": predictor.name,
                        "seed": seed,
                        "step": step,
                        "spearman": spearman([s.median for s in some], left),
                        "bias": sum(s.mean for s in some) / sum(left),
                        "coverage": sum(s.covered for s in some) / len(some),
                    }
                )
    return rows


def by_step(predictor: Predictor, drawn: list[RecordedGroup], shift: int) -> dict[int, list[Scored]]:
    members = {m.name: m for group in drawn for m in group.members}
    scored: dict[int, list[Scored]] = {}
    ended = 0
    for now, event in replay(drawn, WINDOW):
        predictor.observe(event, now)
        ended += isinstance(event, TrajectoryFinished)
        if isinstance(event, TurnRequested) and event.turn in (0, 1, 2, 4, 8, 16, 32, 64):
            said = predictor.forecast(event.trajectory).turns
            left = float(len(members[event.trajectory].turns) - event.turn)
            one = Scored(said.p50, said.mean, left, said.p10 <= left <= said.p90)
            scored.setdefault((ended - shift) // STEP, []).append(one)
    return scored


def costs() -> dict[str, float]:
    drawn = groups(40, 0.4, seed=9)
    found: dict[str, float] = {}
    for predictor in (Siblings(), Learned()):
        found |= {f"{predictor.name}_{what}": n for what, n in told(predictor, drawn).items()}
    return found | fits()


def told(predictor: Predictor, drawn: list[RecordedGroup]) -> dict[str, float]:
    events = list(replay(drawn, WINDOW))
    observing = asking = asked = 0.0
    for now, event in events:
        start = time.process_time()
        predictor.observe(event, now)
        middle = time.process_time()
        observing += middle - start
        if isinstance(event, TurnRequested):
            predictor.forecast(event.trajectory)
            asking += time.process_time() - middle
            asked += 1
    return {"event_us": 1e6 * observing / len(events), "forecast_us": 1e6 * asking / asked}


def fits(rows: int = 6000) -> dict[str, float]:
    """CPU seconds for three quantiles on one thread."""
    import numpy

    from venusrl.scheduling.predictor.boosting import Boosting

    rng = numpy.random.default_rng(0)
    x = rng.normal(size=(rows, len(NAMES))).astype(numpy.float32)
    y = 0.5 * x[:, 0] + 0.3 * x[:, 1] * x[:, 2] + rng.normal(size=rows)
    start = time.process_time()
    for level in (0.1, 0.5, 0.9):
        Boosting().fit(x.tolist(), y.tolist(), [1.0] * rows, level)
    found = {"fit_lightgbm_s": time.process_time() - start}
    try:
        ensemble: Any = importlib.import_module("sklearn.ensemble")
    except ImportError:
        return found
    start = time.process_time()
    for level in (0.1, 0.5, 0.9):
        ensemble.HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=40, max_leaf_nodes=8, min_samples_leaf=40, max_bins=63
        ).fit(x, y)
    return found | {"fit_scikit_learn_s": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    ranks = [row for hint in (0.0, 0.4) for seed in range(arguments.seeds) for row in ranking(hint, seed)]
    shifts = [row for seed in range(arguments.seeds) for row in drift(seed)]
    cost = costs()
    for row in ranks:
        figures = {name: value for name, value in row["overall"].items() if value is not None}
        print(row["hint"], row["seed"], row["predictor"], *(f"{name} {value:.3f}" for name, value in figures.items()))
    for row in shifts:
        print(*(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(json.dumps(cost, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"ranking": ranks, "drift": shifts, "costs": cost}, indent=2))


if __name__ == "__main__":
    main()
