"""The memory that a host's sandboxes will hold, as sums that a newcomer is added to in constant time.

Owns: ``Load``: means, variances (by trajectory group), third moments and errors of estimate at each lookahead.

Must not know: where to place what; pressure.

Guarantees: adding sandboxes in any order gives the same sums up to rounding. A group's sandboxes are not summed as if
independent: with correlation r, n of them have variance n(1 - r)v + r(n sd)^2.
"""

from __future__ import annotations

import math

import msgspec

from venusrl.sandboxes.admission.api import Request, SandboxView
from venusrl.sandboxes.admission.calibration import deviations
from venusrl.sandboxes.admission.learning import LOOKAHEADS, Learned, Row, bucket

STEPS = range(len(LOOKAHEADS))


class Newcomer(msgspec.Struct, frozen=True):
    """A request with what is known of its template. ``most``: what it can hold at the most; ``has``: what it brings."""

    template: str
    group: str
    row: Row | None
    most: float
    has: float = 0.0

    def mean(self, step: int) -> float:
        if self.row is None:
            return self.most
        ahead = self.row.ahead[step]
        return max(self.has, ahead.mean + ahead.unknown * self.most)


def newcomer(request: Request, learned: Learned) -> Newcomer:
    """One that resumes brings its memory along."""
    has = float(request.private or 0)
    row = _row(learned, request.template, 0.0)
    return Newcomer(request.template, request.group, row, max(float(request.declared), has), has)


class Load:
    """Sums over the sandboxes of one host. ``shared`` is counted once, whoever uses it."""

    def __init__(self, learned: Learned, shared: int = 0) -> None:
        self._learned = learned
        self.shared = float(shared)
        self._fixed = 0.0
        self._guessed = 0.0
        self._alike: dict[tuple[str, str, int, bool], _Alike] = {}
        self._sums: _Sums | None = None

    def add(self, view: SandboxView) -> None:
        """What it holds now says something of what it will. A paused one holds what it holds."""
        if view.paused:
            self._fixed += view.private
        else:
            most = max(view.declared, view.private)
            index = bucket(view.age_s)
            key = (view.group or view.id, view.template, index, view.private > 0)
            alike = self._alike.get(key)
            if alike is None:
                row = _row(self._learned, view.template, view.age_s)
                if row is None:
                    self._fixed += most
                    self._guessed += most
                    self._sums = None
                    return
                alike = self._alike[key] = _Alike(row, view.private > 0)
            alike.count += 1
            alike.most += most
            alike.excess += view.private - alike.row.mean if alike.measured else 0.0
        self._sums = None

    @property
    def mean(self) -> list[float]:
        return self._settled().mean

    @property
    def guessed(self) -> float:
        """How much of the first lookahead's mean is declared size, for want of knowledge."""
        return self._guessed + self._settled().guessed

    def spread(self, step: int, new: Newcomer | None = None) -> tuple[float, float]:
        """Deviation and skewness of the total at a lookahead, with a newcomer if given."""
        sums = self._settled()
        variance, third, errors = sums.variance[step], sums.third[step], sums.errors
        own = 0.0
        if new is not None and new.row is not None:
            ahead, together = new.row.ahead[step], new.row.together
            sd, skew = sums.common.get(new.group, _NO_ONE)[step] if new.group else (0.0, 0.0)
            moved, pulled = math.sqrt(together) * ahead.sd, math.cbrt(together) * ahead.skew
            variance += (1.0 - together) * ahead.sd**2 + (sd + moved) ** 2 - sd**2
            third += (1.0 - together) * ahead.skew**3 + (skew + pulled) ** 3 - skew**3
            own = ahead.error
        skewness = third / variance**1.5 if variance > 0.0 else 0.0
        template = new.template if new is not None else ""
        for name, error in errors.items():
            variance += (error[step] + (own if name == template else 0.0)) ** 2
        if template not in errors:
            variance += own**2
        return math.sqrt(max(0.0, variance)), skewness

    def at(self, step: int, quantile: float, factor: float, new: Newcomer | None = None, shared_more: int = 0) -> float:
        """The footprint at one lookahead: exceeded with the quantile's probability."""
        sd, skewness = self.spread(step, new)
        sums = self._settled()
        mean, most = sums.mean[step], sums.most
        if new is not None:
            mean, most = mean + new.mean(step), most + max(new.most, new.mean(step))
        wanted = mean + factor * deviations(quantile, skewness) * sd
        return self.shared + shared_more + min(wanted, most)

    def footprint(self, quantile: float, factor: float, new: Newcomer | None = None, shared_more: int = 0) -> float:
        """The largest over the lookaheads."""
        return max(self.at(step, quantile, factor, new, shared_more) for step in STEPS)

    def _settled(self) -> _Sums:
        if self._sums is None:
            self._sums = self._settle()
        return self._sums

    def _settle(self) -> _Sums:
        sums = _Sums(self._fixed)
        for (group, template, _, _), alike in self._alike.items():
            sums.add(group, template, alike)
        for common in sums.common.values():
            for step, (sd, skew) in enumerate(common):
                sums.variance[step] += sd**2
                sums.third[step] += skew**3
        return sums


class _Alike:
    """Sandboxes of one group, template and age, all measured or none: they differ in what they hold beyond the mean."""

    __slots__ = ("count", "excess", "measured", "most", "row")

    def __init__(self, row: Row, measured: bool) -> None:
        self.row = row
        self.measured = measured
        self.count = 0
        self.excess = 0.0
        self.most = 0.0


class _Sums:
    """Everything added up. ``common``: each group's share that moves as one (deviation, cube root of the third)."""

    def __init__(self, fixed: float) -> None:
        self.most = fixed
        self.guessed = 0.0
        self.mean = [fixed for _ in STEPS]
        self.variance = [0.0 for _ in STEPS]
        self.third = [0.0 for _ in STEPS]
        self.errors: dict[str, list[float]] = {}
        self.common: dict[str, list[tuple[float, float]]] = {}

    def add(self, group: str, template: str, alike: _Alike) -> None:
        count, together = alike.count, alike.row.together
        moves, pulls = count * math.sqrt(together), count * math.cbrt(together)
        apart = count * (1.0 - together)
        common = self.common.setdefault(group, list(_NO_ONE))
        errors = self.errors.setdefault(template, [0.0 for _ in STEPS])
        largest = 0.0
        for step, ahead in enumerate(alike.row.ahead):
            mean = max(0.0, count * ahead.mean + ahead.slope * alike.excess) + ahead.unknown * alike.most
            largest = max(largest, mean)
            self.mean[step] += mean
            self.guessed += ahead.unknown * alike.most if step == 0 else 0.0
            left = ahead.left if alike.measured else 1.0
            own, own_skew = left * ahead.sd, left * ahead.skew
            self.variance[step] += apart * own**2
            self.third[step] += apart * own_skew**3
            sd, skew = common[step]
            common[step] = (sd + moves * own, skew + pulls * own_skew)
            errors[step] += count * left * ahead.error
        self.most += max(alike.most, largest)


_NO_ONE = tuple((0.0, 0.0) for _ in STEPS)


def _row(learned: Learned, template: str, age_s: float) -> Row | None:
    profile = learned.profile(template)
    return profile.row(age_s) if profile else None
