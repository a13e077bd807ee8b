"""What is left of a trajectory: the interface of predictors and the plain data they answer with.

Owns: ``Forecast`` and its parts, the ``Predictor`` contract, and what follows from a forecast alone (seconds, the
slowest of several). Must not know: policies, how any predictor works.

Words: *remaining* counts from the last finished turn on. A turn that waits or generates is remaining, less the tokens
of it already reported; so is the tool call in progress. A trajectory that is being verified has nothing remaining but
its verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.events import Event

Source = Literal["learned", "siblings", "constant", "oracle", "shuffled"]


class Spread(NamedTuple):
    """A quantity that is not known yet: three quantiles and the mean (0 <= p10 <= p50 <= p90)."""

    p10: float
    p50: float
    p90: float
    mean: float

    @classmethod
    def exactly(cls, value: float) -> Spread:
        return cls(value, value, value, value)


NOTHING = Spread.exactly(0.0)


class Forecast(NamedTuple):
    """What remains of one trajectory. ``context``: tokens by which its KV still grows (generated and observations);
    ``tool_s``: tool calls, the present one included; ``verify_s``: from its last turn's end to the verdict."""

    turns: Spread
    tokens: Spread
    context: Spread
    tool_s: Spread
    verify_s: Spread
    source: Source


class Expected(NamedTuple):
    """The means of a ``Forecast``."""

    turns: float
    tokens: float
    context: float
    tool_s: float
    verify_s: float


DONE = Forecast(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, "oracle")
"""A trajectory that is finished."""


class Gap(Protocol):
    """The tool call in progress, given how long it has lasted."""

    @property
    def remaining(self) -> Spread:
        """Seconds until it returns."""
        ...

    def within(self, seconds: float) -> float:
        """Probability that it returns within ``seconds`` from now."""
        ...


class Quality(msgspec.Struct, frozen=True):
    """How good the forecasts of remaining turns were, measured on trajectories that ended after they were made.

    Forecasts are kept as they were given at some turns of each trajectory, and scored when it ends; the newest count.
    ``None``: not enough of them, or (a correlation) forecasts or lengths are all alike. ``coverage``: share of
    lengths within p10..p90 (aim: 0.8). ``fallback_*``: the same forecasts by the sibling heuristic.
    """

    active: Source
    trajectories: int
    """Scored ones in the window."""
    spearman: float | None = None
    kendall: float | None = None
    coverage: float | None = None
    fallback_spearman: float | None = None
    fallback_kendall: float | None = None
    switches: int = 0
    """How often the heuristic took over, or gave way again."""
    refits: int = 0


class Predictor(ABC):
    """Base of all predictors. The owner reports every event (also those before the first question), in order, and
    calls ``refit`` now and then.

    Deterministic: the same calls give the same answers. A forecast is worked out when it is first asked for after
    something new of the trajectory or its group, and kept until the next. ``forecast``, ``expected``, ``gap`` and
    ``group`` raise KeyError for what is not live: unknown, failed, or closed.
    """

    name: str = "predictor"

    @abstractmethod
    def observe(self, event: Event, now: float) -> None:
        """Take note of one event: amortised O(1)."""

    @abstractmethod
    def forecast(self, trajectory: str) -> Forecast:
        """What remains of it. Cheap to ask again: it is worked out once a turn."""

    def expected(self, trajectory: str) -> Expected:
        """The means of ``forecast`` alone, for those who ask at every turn: cheaper to work out, and not kept."""
        return means(self.forecast(trajectory))

    def forecast_many(self, trajectories: Sequence[str]) -> list[Forecast]:
        """As ``forecast`` for each; one pass where that is faster."""
        return [self.forecast(name) for name in trajectories]

    @abstractmethod
    def gap(self, trajectory: str, now: float) -> Gap:
        """The tool call that ``trajectory`` is in, or will be in after its present turn (elapsed time 0)."""

    @abstractmethod
    def group(self, group: str) -> Forecast:
        """What remains of the group: of the slowest of its unfinished members, taken as independent given what is
        known; ``DONE`` when all are finished."""

    def refit(self) -> bool:
        """Learn anew from what was observed, if that is due; says whether it was.

        Most predictors have nothing to do here. One that has may do it within ``observe`` (so in a simulator), or leave
        it to its owner, who has an event loop to keep free: see ``learned``.
        """
        return False

    @abstractmethod
    def quality(self) -> Quality:
        """Where the predictor stands."""

    def state(self) -> bytes:
        """What it has learned, to be kept with the run; live trajectories are not part of it."""
        return b""

    def load(self, state: bytes) -> None:
        """Go on from ``state()`` of an earlier process, before any event. Raises ``StateError``."""
        if state:
            raise StateError(f"predictor {self.name} keeps no state, and was given some")


class StateError(ValueError):
    """The saved state is of another release or another predictor, or damaged; the message says which."""


def means(forecast: Forecast) -> Expected:
    turns, tokens, context, tool_s, verify_s, _ = forecast
    return Expected(turns.mean, tokens.mean, context.mean, tool_s.mean, verify_s.mean)


def expected_seconds(
    forecast: Forecast,
    costs: EngineCosts,
    *,
    batch: int = 1,
    kv_tokens: float = 0.0,
    context: float = 0.0,
    level: Literal["p10", "p50", "p90", "mean"] = "mean",
) -> float:
    """How long the trajectory still takes on a worker whose running ``batch`` holds ``kv_tokens`` (its own ``context``
    included), if it never waits: decoding, prefill of its observations, tools, verdict."""
    tokens: float = getattr(forecast.tokens, level)
    grown: float = getattr(forecast.context, level)
    tools: float = getattr(forecast.tool_s, level)
    verdict: float = getattr(forecast.verify_s, level)
    decode = tokens * costs.step_s(max(1, batch), kv_tokens + grown / 2)
    observed = max(0.0, grown - tokens)
    return decode + costs.prefill_s(observed, context + grown / 2) + tools + verdict


def slowest(forecasts: Iterable[Forecast]) -> Forecast:
    """The largest of several independent trajectories, quantity by quantity; ``DONE`` without any."""
    from venusrl.scheduling.predictor.spreads import largest

    found = list(forecasts)
    if not found:
        return DONE
    if len(found) == 1:
        return found[0]
    turns, tokens, context, tool_s, verify_s = (largest([f[i] for f in found]) for i in range(5))  # type: ignore[misc]
    return Forecast(turns, tokens, context, tool_s, verify_s, found[0].source)
