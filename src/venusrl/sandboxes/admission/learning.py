"""What a template's sandboxes will hold, learned from what they held.

Owns: ``Learned``, one ``Profile`` a template: moments of the private footprint by age, how long lives last, how much of
today's deviation persists, and how much a trajectory group's sandboxes move together.

Must not know: hosts, capacity, policy.

Guarantees: deterministic in the order of calls. Until two independent lives have reached an age, the answer for it is
the declared size. Lives that have not ended count for the ages they reached (Kaplan and Meier's estimate of survival);
later ages are expected to be like the last one, less surely the further they lie beyond what was watched. Old lives
fade, so that a changed workload is followed. Memory is bounded: a few hundred bytes a living sandbox, forgotten at its
end.
"""

from __future__ import annotations

import math

import msgspec

LOOKAHEADS = (5.0, 20.0, 80.0, 320.0)
"""Seconds ahead at which memory is forecast. Each stands for the time up to the next one; the first is the reaction
time: what grows within it grows before anything can be paused."""
_HORIZON_S = 1280.0
_WIDTH_S = 10.0
_BUCKETS_A_DOUBLING = 3
_ENOUGH = 2.0
"""Independent lives (a group of clones is little more than one) below which an age counts as unknown."""
HALF_LIFE = 4000.0
"""Ended lives after which one counts half."""
_SAME_TIME_S = 2.5
"""Two of a group whose ages differ by less are taken as seen at the same time."""
_PRIOR_PAIRS = 20.0
_FEW = 32
_CLIP = 8.0
_CERTAIN = 20.0
_SELECT = 0.4
"""What a deviation of one sandbox counts beside its mean when ages are compared: among many others it counts little."""


def bucket(age_s: float) -> int:
    """The age's class: a few seconds wide at first, then a quarter of the age."""
    return int(_BUCKETS_A_DOUBLING * math.log2(1.0 + max(0.0, age_s) / _WIDTH_S))


def _begins(index: int) -> float:
    return _WIDTH_S * (math.exp2(index / _BUCKETS_A_DOUBLING) - 1.0)


class Ahead(msgspec.Struct, frozen=True, gc=False):
    """One lookahead of one age. Bytes. ``skew`` is the cube root of the third central moment, ``error`` the standard
    error of ``mean``, common to all of a template's sandboxes. ``slope``: by how much a byte more now raises the mean;
    ``left``: how much of the rest is still uncertain once it is known what is held now. ``unknown`` is the probability
    of doing something new at ages that nobody has reached: there the declared size counts."""

    mean: float
    sd: float
    skew: float
    error: float
    slope: float
    left: float
    unknown: float


class Row(msgspec.Struct, frozen=True):
    """What is known of one age: the mean now, and each lookahead. ``together``: the correlation of two sandboxes of
    one group at one instant."""

    mean: float
    together: float
    ahead: tuple[Ahead, ...]


class KeptProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile as it outlives its process. ``buckets``: an age's class to its counts, in the order of
    ``_Bucket.__slots__``; ``pairs`` and ``lags``: what correlations were summed from."""

    unit: float
    seen: int
    buckets: dict[int, tuple[float, ...]]
    pairs: tuple[float, float]
    lags: tuple[tuple[float, float], ...]


class Profile:
    """One template."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._unit = 1.0
        self._buckets: dict[int, _Bucket] = {}
        self._alive: dict[str, _Life] = {}
        self._groups: dict[str, dict[str, _Life]] = {}
        self._pairs = _Correlation(1.0)
        self._lags = [_Correlation(0.5) for _ in LOOKAHEADS]
        self._rows: dict[int, Row] = {}
        self._known: list[int] = []
        self._seen = 0
        self._built_at = 0

    @property
    def together(self) -> float:
        """Correlation of two sandboxes of one group at one instant."""
        return self._pairs.value

    def kept(self) -> KeptProfile:
        """What is known, without the lives that go on: seen again, they are counted from the age they have then."""
        buckets = {index: one.copy() for index, one in self._buckets.items()}
        for group in self._groups.values():
            for life in group.values():
                here = buckets[life.bucket]
                here.members = max(0.0, here.members - self._unit)
            oldest = buckets[max(life.bucket for life in group.values())]
            oldest.groups = max(0.0, oldest.groups - self._unit)
        return KeptProfile(
            unit=self._unit,
            seen=self._seen,
            buckets={index: one.counts() for index, one in buckets.items()},
            pairs=self._pairs.sums(),
            lags=tuple(lag.sums() for lag in self._lags),
        )

    @classmethod
    def again(cls, kept: KeptProfile, half_life: float = HALF_LIFE) -> Profile:
        """As it was kept. Raises ValueError when that cannot be a profile."""
        numbers = [kept.unit, *kept.pairs, *(each for one in kept.buckets.values() for each in one)]
        numbers += [each for lag in kept.lags for each in lag]
        if (
            not all(map(math.isfinite, numbers))
            or kept.unit <= 0.0
            or kept.seen < 0
            or min(kept.buckets, default=0) < 0
        ):
            raise ValueError("counts of a profile are numbers, its unit is more than nothing")
        if len(kept.lags) != len(LOOKAHEADS) or any(power <= 0.0 for _, power in (kept.pairs, *kept.lags)):
            raise ValueError(f"a profile has {len(LOOKAHEADS)} lookaheads, each with some weight")
        made = cls(half_life)
        made._unit, made._seen = kept.unit, kept.seen
        made._buckets = {index: _Bucket.of(counts) for index, counts in kept.buckets.items()}
        made._pairs = _Correlation.of(kept.pairs)
        made._lags = [_Correlation.of(lag) for lag in kept.lags]
        made._rebuild()
        return made

    def observe(self, group: str, sandbox: str, age_s: float, private: int) -> None:
        index = bucket(age_s)
        life = self._alive.get(sandbox)
        if life is None:
            life = self._alive[sandbox] = _Life(group or sandbox, index)
            self._groups.setdefault(life.group, {})[sandbox] = life
            self._enter(life, index, first=True)
        elif index > life.bucket:
            for passed in range(life.bucket, index):
                self._bucket(passed).left += self._unit
            life.bucket = index
            self._enter(life, index, first=False)
        self._bucket(index).add(float(private), self._unit)
        self._relate(life, sandbox, age_s, self._deviation(index, private))
        self._seen += 1

    def ended(self, sandbox: str) -> None:
        life = self._alive.pop(sandbox, None)
        if life is None:
            return
        self._bucket(life.bucket).ended += self._unit
        group = self._groups[life.group]
        del group[sandbox]
        if not group:
            del self._groups[life.group]
        self._fade()

    def row(self, age_s: float) -> Row | None:
        """None while nothing is known of this age."""
        if self._seen - self._built_at >= max(_FEW, min(self._built_at // 10, 2000)):
            self._rebuild()
        if not self._known:
            return None
        index = bucket(age_s)
        if index not in self._rows:
            self._rows[index] = self._build(index)
        return self._rows[index]

    # -- counting

    def _bucket(self, index: int) -> _Bucket:
        found = self._buckets.get(index)
        if found is None:
            found = self._buckets[index] = _Bucket()
        return found

    def _enter(self, life: _Life, index: int, *, first: bool) -> None:
        here = self._bucket(index)
        here.members += self._unit
        others = self._groups[life.group].values()
        if not any(other is not life and other.bucket >= index for other in others):
            here.groups += self._unit

    def _fade(self) -> None:
        """Newer lives weigh more: the unit grows, and everything is scaled down now and then."""
        self._unit *= self._growth
        if self._unit > 1e9:
            for one in self._buckets.values():
                one.scale(1.0 / self._unit)
            self._unit = 1.0

    def _deviation(self, index: int, private: int) -> float | None:
        here = self._bucket(index)
        if here.members < 2 * self._unit:
            return None
        mean, sd, _ = here.scaled(1.0)
        if sd <= 0.0:
            return None
        return max(-_CLIP, min(_CLIP, (private - mean) / sd))

    def _relate(self, life: _Life, sandbox: str, age_s: float, deviation: float | None) -> None:
        """Pairs within the group at one time, and pairs of one sandbox at two times."""
        life.age_s, life.deviation = age_s, deviation
        if deviation is None:
            return
        for name, other in self._groups[life.group].items():
            if name != sandbox and other.deviation is not None and abs(other.age_s - age_s) <= _SAME_TIME_S:
                self._pairs.add(deviation, other.deviation)
        for number, wanted in enumerate(LOOKAHEADS):
            marker = life.markers[number]
            if marker is None or age_s - marker[0] > 2.0 * wanted:
                life.markers[number] = (age_s, deviation)
            elif age_s - marker[0] >= wanted:
                self._lags[number].add(marker[1], deviation)
                life.markers[number] = (age_s, deviation)

    # -- answering

    def _rebuild(self) -> None:
        self._built_at = self._seen
        self._rows.clear()
        self._known = sorted(index for index, one in self._buckets.items() if self._independent(one) >= _ENOUGH)

    def _independent(self, one: _Bucket) -> float:
        """How many independent lives the bucket's are worth."""
        if one.groups <= 0.0 or one.weight <= 0.0:
            return 0.0
        members, groups = one.members / self._unit, one.groups / self._unit
        return members / (1.0 + max(0.0, members / groups - 1.0) * self.together)

    def _build(self, index: int) -> Row:
        mean, sd, _ = self._buckets[self._nearest(index)].scaled(1.0)
        age_s = 0.5 * (_begins(index) + _begins(index + 1))
        ahead = [self._worst(age_s, number, sd) for number in range(len(LOOKAHEADS))]
        return Row(mean, self.together, tuple(ahead))

    def _worst(self, age_s: float, number: int, sd_now: float) -> Ahead:
        """The worst age from this lookahead to the next, for one of that age that deviates by ``sd_now`` now."""
        newest = self._known[-1]
        soonest = age_s + LOOKAHEADS[number]
        latest = age_s + (LOOKAHEADS[number + 1] if number + 1 < len(LOOKAHEADS) else _HORIZON_S)
        beyond = self._surprise(age_s, soonest, latest)
        worst = (0.0, 0.0, 0.0, 0.0)
        for there in range(min(bucket(soonest), newest), min(bucket(latest), newest) + 1):
            nearest = self._nearest(there)
            alive = self._survival(age_s, max(soonest, _begins(there)))
            mean, sd, skew = self._buckets[nearest].scaled(alive)
            if mean + _SELECT * sd > worst[0] + _SELECT * worst[1]:
                worst = (mean, sd, skew, sd / math.sqrt(self._samples(nearest)))
        mean, sd, skew, error = worst
        persists = self._lags[number].value
        left = math.sqrt(1.0 - persists * persists)
        slope = persists * sd / sd_now if sd_now > 0.0 else 0.0
        return Ahead(mean, sd, skew, error, slope, left, beyond)

    def _surprise(self, age_s: float, soonest: float, latest: float) -> float:
        """The probability of living beyond every age that is known and doing there what none has done before.

        Rule of succession: after so many independent lives have been watched for so long, the next stretch of time
        brings news with the share that it has of all the time then watched.
        """
        edge = _begins(self._known[-1] + 1)
        if latest <= edge:
            return 0.0
        ahead = latest - max(age_s, edge)
        watched = self._independent(self._buckets[self._known[-1]]) * edge
        return self._survival(age_s, max(soonest, edge)) * ahead / (ahead + watched)

    def _samples(self, index: int) -> float:
        """How many independent samples the bucket's mean rests on: those of one life agree as much as its deviations
        persist over lookaheads shorter than the bucket."""
        one = self._buckets[index]
        width = _begins(index + 1) - _begins(index)
        lags = [lag.value for lag, ahead in zip(self._lags, LOOKAHEADS, strict=True) if ahead <= width]
        persists = sum(lags) / len(lags) if lags else 1.0
        each = max(1.0, one.weight / one.members)
        return max(1.0, self._independent(one)) / (persists + (1.0 - persists) / each)

    def _nearest(self, index: int) -> int:
        """The bucket itself if it is known, else the larger of its known neighbours."""
        if index in self._known:
            return index
        below = [one for one in self._known if one < index][-1:]
        above = [one for one in self._known if one > index][:1]
        return max(below + above, key=lambda one: self._buckets[one].scaled(1.0)[0])

    def _survival(self, age_s: float, later_s: float) -> float:
        """The probability that one alive at one age lives to a later one."""
        hazard = 0.0
        for index in range(bucket(age_s), bucket(later_s) + 1):
            one = self._buckets.get(index)
            if one is None or one.ended <= 0.0:
                continue
            begins, ends = _begins(index), _begins(index + 1)
            part = (min(ends, later_s) - max(begins, age_s)) / (ends - begins)
            hazard += max(0.0, part) * (math.log((one.left + one.ended) / one.left) if one.left > 0.0 else _CERTAIN)
        return math.exp(-hazard)


class Learned:
    """Every template's profile."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._profiles: dict[str, Profile] = {}
        self._template_of: dict[str, str] = {}

    def observe(self, template: str, group: str, sandbox: str, age_s: float, private: int) -> None:
        profile = self._profiles.get(template)
        if profile is None:
            profile = self._profiles[template] = Profile(self._half_life)
        if sandbox not in self._template_of:
            self._template_of[sandbox] = template
            self._profiles[template] = self._profiles.pop(template)  # the templates used last stand last
        profile.observe(group, sandbox, age_s, private)

    def ended(self, sandbox: str) -> None:
        template = self._template_of.pop(sandbox, None)
        if template is not None:
            self._profiles[template].ended(sandbox)

    def profile(self, template: str) -> Profile | None:
        return self._profiles.get(template)

    def kept(self, most: int) -> dict[str, KeptProfile]:
        """What is to outlive the process: of the templates used last, at most ``most``."""
        last = list(self._profiles)[-most:]
        return {template: self._profiles[template].kept() for template in last}

    def take_up(self, kept: dict[str, KeptProfile]) -> None:
        """Know what an earlier process knew. Raises ValueError, nothing being taken up, when it makes no sense."""
        self._profiles = {
            template: Profile.again(profile, self._half_life) for template, profile in kept.items()
        } | self._profiles


class _Bucket:
    """Weighted moments of one age, and what became of those who reached it."""

    __slots__ = ("ended", "groups", "left", "members", "s1", "s2", "s3", "weight")

    def __init__(self) -> None:
        self.weight = self.s1 = self.s2 = self.s3 = 0.0
        self.members = self.groups = self.left = self.ended = 0.0

    def add(self, value: float, unit: float) -> None:
        self.weight += unit
        self.s1 += unit * value
        self.s2 += unit * value * value
        self.s3 += unit * value * value * value

    @classmethod
    def of(cls, counts: tuple[float, ...]) -> _Bucket:
        """Raises ValueError."""
        made = cls()
        for name, value in zip(cls.__slots__, counts, strict=True):
            setattr(made, name, value)
        return made

    def counts(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def copy(self) -> _Bucket:
        return _Bucket.of(self.counts())

    def scale(self, factor: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * factor)

    def scaled(self, alive: float) -> tuple[float, float, float]:
        """Mean, deviation and cube root of the third central moment, if only a share ``alive`` is still there."""
        if self.weight <= 0.0:
            return 0.0, 0.0, 0.0
        first = alive * self.s1 / self.weight
        second = alive * self.s2 / self.weight
        third = alive * self.s3 / self.weight
        variance = max(0.0, second - first * first)
        if variance <= 1e-12 * second:  # constant: what is left is rounding
            return first, 0.0, 0.0
        return first, math.sqrt(variance), math.cbrt(third - 3.0 * first * second + 2.0 * first**3)


class _Correlation:
    """Of standardised pairs; the prior weighs as much as twenty of them."""

    __slots__ = ("_power", "_products")

    def __init__(self, prior: float) -> None:
        self._products = _PRIOR_PAIRS * prior
        self._power = _PRIOR_PAIRS

    @classmethod
    def of(cls, sums: tuple[float, float]) -> _Correlation:
        made = cls(0.0)
        made._products, made._power = sums
        return made

    def sums(self) -> tuple[float, float]:
        return self._products, self._power

    def add(self, one: float, other: float) -> None:
        self._products += one * other
        self._power += 0.5 * (one * one + other * other)
        if self._power > 1e5:  # the older half fades
            self._products *= 0.5
            self._power *= 0.5

    @property
    def value(self) -> float:
        return max(0.0, min(1.0, self._products / self._power))


class _Life:
    """A sandbox that is alive, as far as it was seen."""

    __slots__ = ("age_s", "bucket", "deviation", "group", "markers")

    def __init__(self, group: str, index: int) -> None:
        self.group = group
        self.bucket = index
        self.age_s = 0.0
        self.deviation: float | None = None
        self.markers: list[tuple[float, float] | None] = [None] * len(LOOKAHEADS)
