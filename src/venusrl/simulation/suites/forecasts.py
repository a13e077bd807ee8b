"""How well lengths were forecast over a simulated run whose lengths shift.

Owns: ``Ranks``: rank correlations of forecast and true remaining turns, by time since the shift. Must not know: suites,
policies.

A predictor of its own watches the run's events, so that asking it changes nothing in the run. It is asked at the first
turns of every trajectory and ever fewer of the later ones. Time is counted in trajectories that ended, in units of a
training step: ``BEFORE`` are those of the old lengths (the first step's worth only teaches), 0 those of the new lengths
while fewer than one step's worth of these had ended, and so on. A correlation is taken among forecasts made at the same
turn, since the turn itself tells old from young, and averaged over turns by their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from venusrl.scheduling.actions import Action
from venusrl.scheduling.events import Event, GroupOpened, TrajectoryFinished, TrajectoryOpened, TurnRequested
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.arms import Truth
from venusrl.scheduling.predictor.ranks import spearman

BEFORE = -1
_ASKED = frozenset((0, 1, 2, 4, 8, 16, 32, 64, 128))
_FEWEST = 12
"""Forecasts at one turn that a correlation is taken of."""


class Ranks:
    """A ``Log`` of one run. ``shift``: ordinal of the first task with other lengths; ``step``: trajectories of a
    training step."""

    def __init__(self, predictor: Predictor, truth: Truth, *, shift: int, step: int) -> None:
        self._predictor, self._truth = predictor, truth
        self._shift, self._step = shift, step
        self._new: dict[str, bool] = {}
        """By group and by trajectory."""
        self._ended = {False: 0, True: 0}
        self._pairs: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        self._predictor.observe(event, now)
        match event:
            case GroupOpened():
                self._new[event.group] = event.ordinal >= self._shift
            case TrajectoryOpened():
                self._new[event.trajectory] = self._new[event.group]
            case TrajectoryFinished():
                self._ended[self._new[event.trajectory]] += 1
            case TurnRequested(turn=turn, resumed=0) if turn in _ASKED:
                self._ask(event.trajectory, turn)

    def _ask(self, trajectory: str, turn: int) -> None:
        new = self._new[trajectory]
        if not new and self._ended[False] < self._step:
            return
        when = self._ended[True] // self._step if new else BEFORE
        said = self._predictor.forecast(trajectory).turns.p50
        self._pairs[when, turn].append((said, float(self._truth.remaining(trajectory, turn).turns)))

    def correlations(self) -> dict[int, float]:
        """Spearman's rho by steps since the shift, where there were enough forecasts."""
        sums: dict[int, tuple[float, int]] = {}
        for (when, _), pairs in sorted(self._pairs.items()):
            rho = spearman([said for said, _ in pairs], [came for _, came in pairs]) if len(pairs) >= _FEWEST else None
            if len(pairs) >= _FEWEST:
                # Forecasts that are all alike order nothing.
                total, count = sums.get(when, (0.0, 0))
                sums[when] = (total + (rho or 0.0) * len(pairs), count + len(pairs))
        return {when: total / count for when, (total, count) in sums.items()}
