"""The truth about trajectories, for the predictor that knows it.

Owns: ``TrueLengths``: what is left of a simulated trajectory, by its name. Must not know: predictors.

The names are those that ``episodes`` gives: ``g12/3.0`` is the first attempt of member 3 of task 12's group,
``g12.r1/3.0`` the same member when that group is tried again.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from venusrl.scheduling.predictor.arms import Remaining
from venusrl.simulation.episodes import REISSUED_ATTEMPT
from venusrl.simulation.scenario import Script, Workload


class _Left:
    """Sums over the turns that follow each turn."""

    __slots__ = ("context", "script", "tokens", "tools")

    def __init__(self, script: Script) -> None:
        turns, calls = script.turns, script.turns[:-1]
        self.script = script
        self.tokens = _suffixes([turn.generated for turn in turns])
        self.tools = _suffixes([turn.tool_s for turn in calls])
        self.context = _suffixes([turn.observation for turn in calls])


def _suffixes(values: list[float] | list[int]) -> list[float]:
    """Sum of values[k:] for every k, 0 behind the end."""
    return [*reversed(list(accumulate(reversed(values)))), 0.0]


class TrueLengths:
    """See the module. Implements ``Truth``."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._left = lru_cache(maxsize=65_536)(self._look_up)

    def remaining(self, trajectory: str, turns: int) -> Remaining:
        left = self._left(trajectory)
        count = len(left.script.turns)
        done = min(turns, count)
        # The call after the last finished turn has not begun yet.
        call = min(max(0, done - 1), count - 1)
        tokens = int(left.tokens[done])
        return Remaining(
            turns=count - done,
            tokens=tokens,
            context=tokens + int(left.context[call]),
            tool_s=left.tools[call],
            verify_s=left.script.verify_s,
        )

    def tool_s(self, trajectory: str, turn: int) -> float:
        turns = self._left(trajectory).script.turns
        return turns[turn].tool_s if 0 <= turn < len(turns) - 1 else 0.0

    def _look_up(self, trajectory: str) -> _Left:
        group, _, member = trajectory.partition("/")
        stem, _, reissues = group.partition(".r")
        index, _, attempt = member.partition(".")
        number = int(attempt) + REISSUED_ATTEMPT * int(reissues or 0)
        return _Left(self._workload.script(self._seed, int(stem[1:]), int(index), number))
