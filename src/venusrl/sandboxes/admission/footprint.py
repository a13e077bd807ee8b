"""Admission by footprint: on a host while what its sandboxes will really hold still fits, at a stated risk.

    sum of shared(t), once a template
    + the largest over the lookaheads of  sum E[private] + k * sqrt(sum over groups Var)   <=  capacity

Owns: ``FootprintAdmission``: the choice of a host, displacement by mandatory requests, when to try again.

Must not know: how memory is measured, what a sandbox is.

Guarantees: deterministic. k comes from the target overload probability (``calibration.py``), corrected by how often
forecasts held. The first lookahead is the reaction time: growth that nobody can answer yet (the burst) is in the sum.
A host under pressure admits nothing (``guard.py``). A mandatory request is not denied while pausing idle, optional
sandboxes would make room. A host whose sandboxes are the same objects as before costs comparing them; one whose view
grew at its end costs one addition a newcomer.
"""

from __future__ import annotations

from operator import is_

import msgspec

from venusrl.sandboxes.admission.api import Admit, Deny, HostView, Pause, Request, SandboxView
from venusrl.sandboxes.admission.calibration import Calibration, deviations, normal_quantile
from venusrl.sandboxes.admission.guard import Guard, Thresholds, freed_by_pausing, order_of_pausing
from venusrl.sandboxes.admission.learning import LOOKAHEADS, KeptProfile, Learned
from venusrl.sandboxes.admission.load import STEPS, Load, Newcomer, newcomer

_SOONEST_S, _LATEST_S = 1.0, 60.0
_NEVER_S = 3600.0
_BUSY_CPUS = 0.95
_MOST_TEMPLATES = 1000
_GUESSED = 0.05
"""Forecasts with a larger share of declared sizes tell nothing of the learned ones: they are not checked."""


class FootprintConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``target`` is the probability that a host's total exceeds its capacity at a moment picked at random.

    ``mandatory_reserve`` is a share of the capacity that only mandatory requests may fill.
    """

    target: float = 0.001
    mandatory_reserve: float = 0.0
    guard: Thresholds = Thresholds()


class KeptLearning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What outlives the process: the factor on headroom, and each template's profile."""

    factor: float
    profiles: dict[str, KeptProfile]


class FootprintAdmission:
    """Ours. See ``admission/api.py`` for what the methods mean."""

    def __init__(self, config: FootprintConfig | None = None) -> None:
        self._config = config or FootprintConfig()
        self._quantile = normal_quantile(self._config.target)
        self._guard = Guard(self._config.guard)
        self._hosts: dict[str, _Known] = {}
        self.learned = Learned()
        self.calibration = Calibration(self._config.target)

    def observe(self, template: str, group: str, sandbox: str, age_s: float, private: int) -> None:
        self.learned.observe(template, group, sandbox, age_s, private)

    def ended(self, sandbox: str) -> None:
        self.learned.ended(sandbox)

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        open_hosts = [host for host in hosts if not host.draining]
        if not open_hosts:
            return Deny("no_host", "no host takes new sandboxes (none there, or all draining)", _LATEST_S)
        new = newcomer(request, self.learned)
        elsewhere = max((_one_copy(host, request.template) for host in hosts), default=0)
        best: tuple[tuple[bool, bool, bool, float, str], HostView] | None = None
        closest: tuple[float, HostView] | None = None
        for host in open_hosts:
            if self._guard.level(host) != "open":
                continue
            room = self._room(host, request, new, elsewhere)
            if room >= 0.0:
                crowded = host.cpu_used >= _BUSY_CPUS * host.cpus
                absent = request.template not in host.stored
                key = (crowded, not _holds(host, request), absent, room, host.name)
                if best is None or key < best[0]:
                    best = (key, host)
            elif closest is None or room > closest[0]:
                closest = (room, host)
        if best is not None:
            return Admit(best[1].name)
        if request.mandatory:
            displaced = self._displace(open_hosts, request, new, elsewhere)
            if displaced is not None:
                return displaced
        return self._deny(closest, request, new, elsewhere)

    def relieve(self, host: HostView) -> tuple[Pause, ...]:
        self._load(host)  # so that forecasts are checked even when nothing is placed
        return self._guard.relieve(host)

    def kept(self) -> KeptLearning:
        """What an admission of a later process is to know (``take_up``)."""
        return KeptLearning(self.calibration.factor, self.learned.kept(_MOST_TEMPLATES))

    def take_up(self, kept: KeptLearning) -> None:
        """Before anything is observed. Raises ValueError, knowing nothing more than before, when it makes no sense."""
        self.learned.take_up(kept.profiles)
        self.calibration.take_up(kept.factor)

    def forget(self, host: str) -> None:
        """A host left for good."""
        self._hosts.pop(host, None)
        self._guard.forget(host)

    def footprint(self, host: HostView) -> int:
        """What the host is expected to hold at the target's risk, in bytes."""
        return int(self._load(host).footprint(self._quantile, self.calibration.factor))

    # -- inside

    def _room(self, host: HostView, request: Request, new: Newcomer, elsewhere: int) -> float:
        """Bytes left with the newcomer; negative is what is short."""
        load = self._load(host)
        footprint = load.footprint(self._quantile, self.calibration.factor, new, _new(host, request, elsewhere))
        return self._capacity(host, request) - footprint

    def _capacity(self, host: HostView, request: Request) -> float:
        kept = 0.0 if request.mandatory else self._config.mandatory_reserve
        return host.capacity * (1.0 - kept)

    def _load(self, host: HostView) -> Load:
        known = self._hosts.get(host.name)
        if known is not None and known.shared is host.shared:
            old, new = known.sandboxes, host.sandboxes
            if old is new:
                return known.load
            if len(new) >= len(old) and all(map(is_, old, new)):
                for view in new[len(old) :]:
                    known.load.add(view)
                known.sandboxes = new
                return known.load
        load = self._sum(host)
        if known is None:
            known = self._hosts[host.name] = _Known(host, load)
        else:
            known.shared, known.sandboxes, known.load = host.shared, host.sandboxes, load
        self._check(known, host, load)
        return load

    def _sum(self, host: HostView) -> Load:
        load = Load(self.learned, sum(host.shared.values()))
        for view in host.sandboxes:
            load.add(view)
        return load

    def _check(self, known: _Known, host: HostView, load: Load) -> None:
        """Compare what was forecast a reaction time ago with what is, over the same sandboxes."""
        forecast = known.forecast
        if forecast is not None:
            passed = forecast.passed(host)
            if passed is not None and passed < LOOKAHEADS[0]:
                return
            if passed is not None and passed < LOOKAHEADS[1] and forecast.sd > 0.0:
                deviation = (forecast.still(host) - forecast.mean) / forecast.sd
                self.calibration.measured(deviation, forecast.allowed)
        trusted = load.guessed <= _GUESSED * load.mean[0]
        known.forecast = _forecast(host, load, self._quantile) if trusted else None

    def _displace(self, hosts: list[HostView], request: Request, new: Newcomer, elsewhere: int) -> Admit | None:
        """The host where the fewest seconds of resuming buy room for a mandatory request."""
        best: tuple[float, str, Admit] | None = None
        for host in hosts:
            paused = self._make_room(host, request, new, elsewhere)
            if paused is None:
                continue
            cost = sum(view.resume_cost_s for view in paused)
            reason = f"makes room on {host.name} for a sandbox that the trainer waits for"
            if best is None or (cost, host.name) < best[:2]:
                best = (cost, host.name, Admit(host.name, tuple(Pause(view.id, reason) for view in paused)))
        return None if best is None else best[2]

    def _make_room(self, host: HostView, request: Request, new: Newcomer, elsewhere: int) -> list[SandboxView] | None:
        """Idle, optional sandboxes whose pause lets the request in; None if all of them would not do."""
        pressed = self._guard.level(host) != "open"
        short = -self._room(host, request, new, elsewhere)
        wanted = max(short, max(new.mean(step) for step in STEPS) if pressed else 0.0)
        candidates = [view for view in order_of_pausing(host.sandboxes, busy_too=False) if not view.mandatory]
        chosen: list[SandboxView] = []
        freed = 0.0
        for view in candidates:
            chosen.append(view)
            freed += freed_by_pausing(view)
            if freed >= wanted and self._fits_without(host, chosen, request, new, elsewhere):
                return chosen
        return None

    def _fits_without(
        self, host: HostView, paused: list[SandboxView], request: Request, new: Newcomer, elsewhere: int
    ) -> bool:
        gone = {view.id for view in paused}
        load = Load(self.learned, sum(host.shared.values()))
        for view in host.sandboxes:
            load.add(_paused(view) if view.id in gone else view)
        footprint = load.footprint(self._quantile, self.calibration.factor, new, _new(host, request, elsewhere))
        return footprint <= self._capacity(host, request)

    def _deny(self, closest: tuple[float, HostView] | None, request: Request, new: Newcomer, elsewhere: int) -> Deny:
        if closest is None:
            return Deny("pressure", "every host is short of memory and admits nothing until it has recovered", 5.0)
        room, host = closest
        alone = Load(self.learned).footprint(self._quantile, self.calibration.factor, new, elsewhere)
        if alone > max(0.0, self._capacity(host, request)):
            short = (alone - self._capacity(host, request)) / 2**20
            message = f"the sandbox would not fit on an empty host: {short:.0f} MiB short on {host.name}"
            return Deny("too_large", message, _NEVER_S)
        short = -room / 2**20
        message = f"{short:.0f} MiB short on {host.name}, the host with the most room"
        return Deny("memory", message, self._retry_after(host, request, new, elsewhere))

    def _retry_after(self, host: HostView, request: Request, new: Newcomer, elsewhere: int) -> float:
        """When enough of those there now are expected to have ended."""
        load, more = self._load(host), _new(host, request, elsewhere)
        for step in STEPS:
            if load.at(step, self._quantile, self.calibration.factor, new, more) <= self._capacity(host, request):
                return max(_SOONEST_S, min(_LATEST_S, LOOKAHEADS[step]))
        return _LATEST_S


class _Forecast(msgspec.Struct):
    """What was expected of the sandboxes of a host one reaction time ahead."""

    ages: dict[str, float]
    mean: float
    sd: float
    allowed: float

    def passed(self, host: HostView) -> float | None:
        """Seconds since; None when none of the sandboxes is left to tell."""
        for view in host.sandboxes:
            if view.id in self.ages and not view.paused:
                return view.age_s - self.ages[view.id]
        return None

    def still(self, host: HostView) -> int:
        return sum(view.private for view in host.sandboxes if view.id in self.ages)


class _Known:
    """What is remembered of a host between two questions."""

    def __init__(self, host: HostView, load: Load) -> None:
        self.shared = host.shared
        self.sandboxes = host.sandboxes
        self.load = load
        self.forecast: _Forecast | None = None


def _forecast(host: HostView, load: Load, quantile: float) -> _Forecast:
    sd, skewness = load.spread(0)
    ages = {view.id: view.age_s for view in host.sandboxes}
    return _Forecast(ages, load.mean[0], sd, deviations(quantile, skewness))


def _new(host: HostView, request: Request, elsewhere: int) -> int:
    """The template's pages, where the host does not hold them yet for this one."""
    return 0 if _holds(host, request) else elsewhere


def _holds(host: HostView, request: Request) -> bool:
    """Whether the host has a copy of the template's pages that the sandbox may share."""
    if not request.pages or request.template not in host.copies:
        return request.template in host.shared
    return request.pages in host.copies[request.template]


def _one_copy(host: HostView, template: str) -> int:
    return host.shared.get(template, 0) // max(1, len(host.copies.get(template, ())))


def _paused(view: SandboxView) -> SandboxView:
    return msgspec.structs.replace(view, paused=True, private=view.private - freed_by_pausing(view))
