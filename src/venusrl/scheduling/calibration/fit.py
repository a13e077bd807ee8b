"""Engine costs from samples of work and time.

Owns: the robust fit. Must not know: requests, engines, the clock.

A sample says: in so many seconds the engine made so many steps for one sequence, while all sequences together decoded
so many tokens over so much context and so much was prefilled. The coefficients are those of ``EngineCosts`` and a fixed
overhead a request (the network's, not handed on). They are never negative, and found by least squares of the relative
error, where a sample that is far off (the machine was busy with something else) counts less. Only the newest samples
count. What the samples cannot tell apart (a batch that is always the same) is shared out evenly: sums are right in the
range that was seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from venusrl.scheduling.costs import EngineCosts

_KEPT = 384
_REFIT_EVERY = 32
_LEAST = 64
"""Samples before which nothing is said."""
_OFF = 1e3
"""Relative errors beyond are all the same."""
_FAR, _LEAST_FAR = 3.0, 0.05
"""Median errors (and the least relative error) at which a sample counts half."""
_WORST_ERROR = 0.5
"""Median relative error above which the model does not describe the engine."""
_ROUNDS, _SWEEPS = 5, 400
_RIDGES = (6.0, 1.0, 1.0, 1.0, 1.0, 1.0)
_STIFF, _LEAST_STIFF = 8.0, 1e-5
"""What breaks ties: a ridge in the order of the coefficients, as strong as the samples are noisy (times the squared
relative error). An engine that is always full shows only the coefficients' sum, which then is shared out evenly between
them, but for the overhead, which takes what nothing else explains."""
_TOLD_APART = 0.15


class Sample(NamedTuple):
    """One request's time at the engine and what was done in it. ``steps``: tokens that it decoded; ``decoded``: of all
    sequences; ``read``: context tokens read for those; ``prefilled``: prompt tokens computed, of anybody; ``attended``:
    context tokens that they attended to."""

    seconds: float
    steps: float
    decoded: float
    read: float
    prefilled: float
    attended: float

    @property
    def work(self) -> tuple[float, ...]:
        """In the order of the coefficients; the first is the overhead of a request."""
        return (1.0, self.steps, self.decoded, self.read, self.prefilled, self.attended)


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``error``: median relative error over ``samples`` samples. ``overhead_s``: of a request, beside its work."""

    costs: EngineCosts
    overhead_s: float
    error: float
    samples: int


class CostFit:
    """See the module."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._new = 0
        self._coefficients: list[float] | None = None
        self._error = 0.0

    def add(self, sample: Sample) -> None:
        """Take note of a sample with a positive time; others say nothing and are passed over."""
        if sample.seconds <= 0 or sample.steps <= 0:
            return
        self._samples.append(sample)
        self._new += 1
        if len(self._samples) >= _LEAST and self._new >= _REFIT_EVERY:
            self._new = 0
            self._refit()

    @property
    def estimate(self) -> Estimate | None:
        """None until there is enough to go by, or when nothing fits."""
        if self._coefficients is None or self._error > _WORST_ERROR:
            return None
        overhead, base, sequence, kv, prefill, attention = self._coefficients
        if base + sequence <= 0:
            return None
        costs = EngineCosts(base, sequence, kv, prefill, attention)
        return Estimate(costs, overhead, self._error, len(self._samples))

    @property
    def prefill_s(self) -> tuple[float, float]:
        """Seconds a prefilled and an attended token, as far as known; 0 before."""
        return (0.0, 0.0) if self._coefficients is None else (self._coefficients[4], self._coefficients[5])

    def _refit(self) -> None:
        """Weights follow from the fit before, the fit from the weights, beginning anew each time: costs that changed
        would make all new samples look far off. Weights are relative to the predicted time: relative
        to the measured one, samples that the machine held up would count too little."""
        rows = [(sample.work, sample.seconds) for sample in self._samples]
        measured = [seconds for _, seconds in rows]
        found = _solve(rows, [1 / seconds for seconds in measured], _LEAST_STIFF)
        for _ in range(_ROUNDS):
            predicted = [_dot(found, work) for work, _ in rows]
            expected = [p if p > 0 else m for p, m in zip(predicted, measured, strict=True)]
            errors = [min(_OFF, abs(m - p) / e) for p, m, e in zip(predicted, measured, expected, strict=True)]
            error = median(errors)
            found = _solve(rows, _weights(expected, errors, error), max(_LEAST_STIFF, _STIFF * min(1.0, error) ** 2))
        self._coefficients = found
        self._error = median(abs(seconds - _dot(found, work)) / seconds for work, seconds in rows)


def differ(before: EngineCosts | None, after: EngineCosts, batch: int, kv_tokens: int) -> bool:
    """Whether they price a step at ``batch`` sequences, a step alone or the prefill of a prompt notably otherwise."""
    if before is None:
        return True
    pairs = (
        (before.step_s(batch, kv_tokens), after.step_s(batch, kv_tokens)),
        (before.step_s(1, 0), after.step_s(1, 0)),
        (before.prefill_s(max(1, kv_tokens // batch)), after.prefill_s(max(1, kv_tokens // batch))),
    )
    return any(abs(old - new) > _TOLD_APART * max(old, new) for old, new in pairs)


def _weights(expected: Sequence[float], errors: Sequence[float], middle: float) -> list[float]:
    """The inverse of the expected time; less of it the further a sample is off (Cauchy's weights)."""
    far = max(_LEAST_FAR, _FAR * middle)
    return [1 / e / (1 + (error / far) ** 2) ** 0.5 for e, error in zip(expected, errors, strict=True)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(rows: Sequence[tuple[Sequence[float], float]], weights: Sequence[float], stiffness: float) -> list[float]:
    """Non-negative least squares of weighted rows, by coordinate descent on the normal equations. Columns are brought
    to one scale first, so that the ridge means the same for all."""
    count = len(rows[0][0])
    weighted = [([value * w for value in work], seconds * w) for (work, seconds), w in zip(rows, weights, strict=True)]
    scale = [sum(work[k] ** 2 for work, _ in weighted) ** 0.5 or 1.0 for k in range(count)]
    matrix = [
        [sum(work[i] * work[j] for work, _ in weighted) / scale[i] / scale[j] for j in range(count)]
        for i in range(count)
    ]
    target = [sum(work[k] * seconds for work, seconds in weighted) / scale[k] for k in range(count)]
    found = [0.0] * count
    for _ in range(_SWEEPS):
        moved = 0.0
        for k in range(count):
            pull = target[k] - _dot(matrix[k], found) + matrix[k][k] * found[k]
            value = max(0.0, pull / (matrix[k][k] + stiffness * _RIDGES[k]))
            moved = max(moved, abs(value - found[k]))
            found[k] = value
        if moved <= 1e-9 * max(found):
            break
    return [value / scale[k] for k, value in enumerate(found)]
