"""Groups of trajectories to forecast, drawn with known correlation, and a driver that scores forecasts of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from venusrl.scheduling import events as ev
from venusrl.scheduling.predictor import Forecast, Predictor
from venusrl.scheduling.predictor.replay import Recorded, RecordedGroup, RecordedTurn, replay


def draw(
    groups: int,
    *,
    size: int = 4,
    share: float = 0.3,
    mean_turns: float = 12.0,
    spread: float = 0.6,
    hint: float = 0.0,
    cap: int = 10_000,
    tasks: int | None = None,
    name: str = "g",
    seed: int = 0,
) -> list[RecordedGroup]:
    """Log-normal lengths of which ``share`` of the variance is the group's (the task's, when there are ``tasks``);
    ``hint``: how much a trajectory's observations tell of its own length."""
    drawn = []
    for g in range(groups):
        task = g if tasks is None else g % tasks
        common = random.Random(f"{seed}/task/{task}").gauss(0, math.sqrt(share))
        rng = random.Random(f"{seed}/group/{g}")
        members = []
        for i in range(size):
            z = common + rng.gauss(0, math.sqrt(1 - share))
            length = max(1, min(cap, round(mean_turns * math.exp(spread * z))))
            turns = tuple(_turn(rng, math.exp(hint * z)) for _ in range(length))
            members.append(Recorded(f"{name}{g}/{i}", 1000, turns, verify_s=5.0))
        drawn.append(RecordedGroup(f"{name}{g}", f"task-{task}", tuple(members)))
    return drawn


def _turn(rng: random.Random, hint: float) -> RecordedTurn:
    generated = max(1, round(rng.lognormvariate(math.log(180), 0.4)))
    observed = round(hint * rng.lognormvariate(5.0, 0.5))
    return RecordedTurn(generated, generated * 0.02, rng.lognormvariate(0.0, 1.0), observed, rng.randrange(2))


class Asked(NamedTuple):
    """A forecast when a turn was asked for, and what came. ``ended``: trajectories that had ended by then."""

    trajectory: str
    turn: int
    ended: int
    forecast: Forecast
    turns: int
    tokens: int
    tool_s: float


def ask(
    predictor: Predictor, groups: list[RecordedGroup], window: int, turns: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32)
) -> Iterator[Asked]:
    """Tell the predictor all that happened; ask it at some turns of every trajectory."""
    members = {m.name: m for group in groups for m in group.members}
    ended = 0
    for now, event in replay(groups, window):
        predictor.observe(event, now)
        ended += isinstance(event, ev.TrajectoryFinished)
        if isinstance(event, ev.TurnRequested) and event.turn in turns:
            left = members[event.trajectory].turns[event.turn :]
            yield Asked(
                event.trajectory,
                event.turn,
                ended,
                predictor.forecast(event.trajectory),
                len(left),
                sum(turn.generated for turn in left),
                math.fsum(turn.tool_s for turn in left[:-1]),
            )


def tell(predictor: Predictor, groups: list[RecordedGroup], window: int) -> None:
    """All that happened, unasked."""
    for now, event in replay(groups, window):
        predictor.observe(event, now)
