"""How forecasts compared with what came, and which of two forecasters is to be believed.

Owns: ``Scores`` (the newest ended trajectories' forecasts) and ``Switch`` (learned or heuristic). Must not know: how
anything is forecast.

Prequential: a forecast is kept when it is made and scored when its trajectory ends, so that nothing is ever scored on
data it was fitted to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from venusrl.scheduling.predictor.ranks import spearman

Correlation = Callable[[Sequence[float], Sequence[float]], float | None]

FEWEST = 48
"""Ended trajectories below which nothing is said."""
_MARGIN = 0.05
"""With 0.02 a model that knew nothing got its turn by chance, and cost up to 0.03 while it had it."""


class Scored(NamedTuple):
    """One forecast of remaining turns against what came. ``model`` is None when there was none yet."""

    actual: float
    heuristic: float
    model: float | None
    covered: bool


class Comparison(NamedTuple):
    """Rank correlations of the model and of the heuristic over the forecasts for which both spoke."""

    model: float | None
    heuristic: float | None


class Scores:
    """The forecasts of the ``window`` trajectories that ended last."""

    def __init__(self, window: int) -> None:
        self._ended: deque[tuple[Scored, ...]] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, forecasts: tuple[Scored, ...]) -> None:
        if forecasts:
            self._ended.append(forecasts)

    def __iter__(self) -> Iterator[Scored]:
        for forecasts in self._ended:
            yield from forecasts

    def coverage(self) -> float | None:
        """Share of outcomes within p10..p90, every trajectory counting alike."""
        if len(self._ended) < FEWEST:
            return None
        return sum(sum(s.covered for s in one) / len(one) for one in self._ended) / len(self._ended)

    def compare(self, correlation: Correlation = spearman) -> Comparison:
        if sum(any(s.model is not None for s in one) for one in self._ended) < FEWEST:
            return Comparison(None, None)
        both = [s for s in self if s.model is not None]
        actual = [s.actual for s in both]
        model, heuristic = [s.model or 0.0 for s in both], [s.heuristic for s in both]
        return Comparison(correlation(model, actual), correlation(heuristic, actual))

    def fallback(self, correlation: Correlation = spearman) -> float | None:
        """The heuristic's correlation over all forecasts, whether there was a model or not."""
        if len(self._ended) < FEWEST:
            return None
        return correlation([s.heuristic for s in self], [s.actual for s in self])

    def state(self) -> list[Any]:
        return [[list(s) for s in one] for one in self._ended]

    def load(self, state: list[Any]) -> None:
        self._ended.clear()
        for one in state:
            self._ended.append(tuple(Scored(float(a), float(h), m, bool(c)) for a, h, m, c in one))


class Switch:
    """The heuristic until a model is proven; whenever the model ranks worse than it; until that is over.

    Both ways compare Spearman's correlation over the same forecasts. The way back asks for a margin, so that chance
    does not flip it at every look.
    """

    def __init__(self) -> None:
        self.learned = False
        self.flips = 0

    def look(self, found: Comparison) -> None:
        model, heuristic = found.model, found.heuristic
        if model is None or heuristic is None:
            return
        wanted = model >= heuristic if self.learned else model >= heuristic + _MARGIN
        self.flips += wanted != self.learned
        self.learned = wanted
