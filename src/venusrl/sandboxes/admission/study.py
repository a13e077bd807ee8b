"""Density and overload of a policy, by simulation: hosts, episodes that come in groups, and memory that bursts.

Owns: ``simulate``: always more groups waiting than fit, each admitted whole or not at all; the memory of every sandbox
follows its life; the policy sees what a host would show it and nothing else.

Must not know: which policy it is given, clocks, files. Lives and hosts come from the caller.

Guarantees: deterministic. Overload is measured exactly (between changes memory is constant), not at samples. Nothing is
paused: overload is what the policy alone lets happen, before any guard.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import add

import msgspec

from venusrl.sandboxes.admission.api import Admission, Admit, HostView, Request, SandboxView
from venusrl.sandboxes.admission.traces import MIB, Life, Trace, memory


class Setting(msgspec.Struct, frozen=True):
    """Hosts and runtime. ``overhead``: bytes of the runtime's own a sandbox; ``returned``: whether freed memory goes
    back to the host (namespace) or not (virtual machine); ``share``: the template counts once a host.

    ``tick_s``: how often a host is sampled and waiting groups are tried; at most ``groups_a_tick`` start at once.
    """

    capacity: int
    hosts: int = 1
    cpus: float = 16.0
    overhead: int = MIB
    returned: bool = True
    share: bool = True
    templates: int = 1
    tick_s: float = 5.0
    groups_a_tick: int = 4


class Span(msgspec.Struct, frozen=True):
    """A stretch of time: how many sandboxes ran on average, and the share of host time spent above the capacity."""

    seconds: float
    sandboxes: float
    overloaded: float


class Outcome(msgspec.Struct, frozen=True):
    """``spans`` cover the time after the warm-up, the only time that counts. ``touched``: episodes that lived through
    an overload; ``peak``: the largest share of a host's capacity that was ever used."""

    episodes: int
    touched: int
    most: int
    peak: float
    spans: tuple[Span, ...]

    @property
    def sandboxes(self) -> float:
        seconds = sum(span.seconds for span in self.spans)
        return sum(span.sandboxes * span.seconds for span in self.spans) / seconds

    @property
    def overloaded(self) -> float:
        seconds = sum(span.seconds for span in self.spans)
        return sum(span.overloaded * span.seconds for span in self.spans) / seconds


Groups = Callable[[int], tuple[Life, ...]]
"""The lives of the group with that number."""


class World:
    """The truth that an oracle may look at: ``room`` and ``room_of_peaks`` answer for the sandbox that asks next."""

    def __init__(self, trace: Trace, setting: Setting, groups: Groups) -> None:
        self.trace, self.setting = trace, setting
        self.now = 0.0
        self._groups = groups
        template_bytes = trace.template_mib * MIB if setting.share else 0
        self.hosts = [_Host(f"host{number}", setting.capacity, template_bytes) for number in range(setting.hosts)]
        self._by_name = {host.name: host for host in self.hosts}
        self._events: list[tuple[float, int, _Host, _Sandbox, int]] = []
        self._order = 0
        self._asking: _Sandbox | None = None
        self.ended: list[_Sandbox] = []

    # -- what an oracle sees

    def room(self, view: HostView, request: Request) -> float:
        """Bytes left at the worst second to come, were the asking sandbox admitted and nobody after it."""
        asking, host = self._asking, self._by_name[view.name]
        assert asking is not None
        more = 0 if request.template in view.shared else self._template_bytes()
        coming = asking.by_second()
        begin = int(self.now)
        future = host.future[begin : begin + len(coming)]
        worst = max(map(add, future, coming), default=0)
        worst = max(worst, max(coming[len(future) :], default=0))
        return view.capacity - sum(view.shared.values()) - more - worst

    def room_of_peaks(self, view: HostView, request: Request) -> float:
        """The same, had every sandbox its own largest memory still to come at the same second."""
        asking, host = self._asking, self._by_name[view.name]
        assert asking is not None
        more = 0 if request.template in view.shared else self._template_bytes()
        peaks = sum(one.peak_from(self.now) for one in host.sandboxes.values())
        return view.capacity - sum(view.shared.values()) - more - peaks - asking.peak_from(self.now)

    # -- what happens

    def group(self, number: int) -> list[_Sandbox]:
        setting = self.setting
        extra = setting.overhead + (0 if setting.share else self.trace.template_mib * MIB)
        template = f"template{number % setting.templates}"
        return [
            _Sandbox(f"{life.group}-{member}", template, life, memory(life, returned=setting.returned, extra=extra))
            for member, life in enumerate(self._groups(number))
        ]

    def try_group(self, group: Sequence[_Sandbox], policy: Admission) -> bool:
        """Admit it whole, or take everything back."""
        placed: list[tuple[_Host, _Sandbox]] = []
        views = [self.view(host) for host in self.hosts]
        for one in group:
            self._asking = one
            request = Request(one.template, one.life.group, self.trace.declared_mib * MIB)
            answer = policy.place(tuple(views), request)
            if not isinstance(answer, Admit):
                for host, other in placed:
                    host.remove(other, self.now)
                return False
            host = self._by_name[answer.host]
            one.born = self.now
            host.put(one, self.now)
            placed.append((host, one))
            index = self.hosts.index(host)
            views[index] = self._with(views[index], one)
        for host, one in placed:
            self._schedule(host, one)
        return True

    def foresee(self) -> None:
        """Before anything runs: keep what ``room`` needs."""
        for host in self.hosts:
            host.foresight = True

    def view(self, host: _Host) -> HostView:
        declared = self.trace.declared_mib * MIB
        views = tuple(
            SandboxView(one.id, one.template, one.life.group, age, one.holds if age > 0.0 else 0, declared)
            for one in host.sandboxes.values()
            for age in (self.now - one.born,)
        )
        shared = {one.template: self._template_bytes() for one in host.sandboxes.values()} if self.setting.share else {}
        return HostView(host.name, host.capacity, host.capacity, self.setting.cpus, shared=shared, sandboxes=views)

    def advance(self, until: float) -> None:
        """Let memory change and lives end."""
        while self._events and self._events[0][0] <= until:
            at, _, host, one, value = heapq.heappop(self._events)
            self.now = at
            if value < 0:
                host.remove(one, at)
                self.ended.append(one)
            else:
                host.change(one, value, at)
        self.now = until
        for host in self.hosts:
            host.pass_time(until)

    def sample(self, policy: Admission) -> None:
        for one in self.ended:
            policy.ended(one.id)
        self.ended.clear()
        for host in self.hosts:
            for one in host.sandboxes.values():
                if self.now > one.born:
                    policy.observe(one.template, one.life.group, one.id, self.now - one.born, one.holds)

    def _with(self, view: HostView, one: _Sandbox) -> HostView:
        new = SandboxView(one.id, one.template, one.life.group, 0.0, 0, self.trace.declared_mib * MIB)
        shared = view.shared
        if self.setting.share and one.template not in shared:
            shared = {**shared, one.template: self._template_bytes()}
        return msgspec.structs.replace(view, sandboxes=(*view.sandboxes, new), shared=shared)

    def _schedule(self, host: _Host, one: _Sandbox) -> None:
        for at, value in one.points[1:]:
            self._push(self.now + at, host, one, value)
        self._push(self.now + one.life.length_s, host, one, -1)

    def _push(self, at: float, host: _Host, one: _Sandbox, value: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, host, one, value))

    def _template_bytes(self) -> int:
        return self.trace.template_mib * MIB if self.setting.share else 0


def simulate(world: World, policy: Admission, episodes: int, warm_up_s: float, spans: int = 10) -> Outcome:
    """Run until ``episodes`` have ended after the first ``warm_up_s`` seconds."""
    waiting, number, ended = world.group(0), 0, 0
    marks: list[_Mark] = []
    touched = most = 0
    wanted = [episodes * part // spans for part in range(spans + 1)]
    while ended < episodes:
        for _ in range(world.setting.groups_a_tick):
            if not world.try_group(waiting, policy):
                if not any(host.sandboxes for host in world.hosts):
                    raise ValueError(f"the policy lets no group of {len(waiting)} onto empty hosts: nothing to study")
                break
            number += 1
            waiting = world.group(number)
        world.advance(world.now + world.setting.tick_s)
        if marks:
            ended += len(world.ended)
            touched += sum(one.overloaded for one in world.ended)
        world.sample(policy)
        if world.now < warm_up_s:
            continue
        most = max(most, sum(len(host.sandboxes) for host in world.hosts))
        if not marks:
            for host in world.hosts:
                host.largest = 0
        while len(marks) <= spans and ended >= wanted[len(marks)]:
            marks.append(_Mark(world))
    parts = tuple(before.span(after) for before, after in pairwise(marks) if after.at > before.at)
    peak = max(host.largest for host in world.hosts) / world.setting.capacity
    return Outcome(ended, touched, most, peak, parts)


class _Sandbox:
    """One life on a host. ``points`` are what it holds from each time after its birth on."""

    def __init__(self, name: str, template: str, life: Life, points: list[tuple[float, int]]) -> None:
        self.id = name
        self.template = template
        self.life = life
        self.points = points
        self.holds = points[0][1]
        self.born = 0.0
        self.overloaded = False
        self._starts: list[float] = []
        self._largest_from: list[int] = []
        self._by_second: list[int] = []

    def by_second(self) -> list[int]:
        """The most that it holds within each second of its life (made once)."""
        if not self._by_second:
            seconds = [0] * (int(self.life.length_s) + 2)
            ends = [at for at, _ in self.points[1:]] + [self.life.length_s]
            for (at, value), end in zip(self.points, ends, strict=True):
                for second in range(int(at), min(int(end) + 2, len(seconds))):
                    seconds[second] = max(seconds[second], value)
            self._by_second = seconds
        return self._by_second

    def peak_from(self, now: float) -> int:
        if not self._starts:
            self._starts = [at for at, _ in self.points]
            largest = 0
            for _, value in reversed(self.points):
                largest = max(largest, value)
                self._largest_from.append(largest)
            self._largest_from.reverse()
        return self._largest_from[max(0, bisect_right(self._starts, now - self.born) - 1)]


class _Host:
    """A machine: what runs on it, the memory it uses now and, for an oracle, will use in each second to come."""

    def __init__(self, name: str, capacity: int, template_bytes: int) -> None:
        self.name, self.capacity = name, capacity
        self.sandboxes: dict[str, _Sandbox] = {}
        self.future: list[int] = []
        self.used = 0
        self.largest = 0
        self.overloaded_s = self.sandbox_s = 0.0
        self._at = 0.0
        self._template_bytes = template_bytes
        self._templates: dict[str, int] = {}
        self.foresight = False

    def put(self, one: _Sandbox, now: float) -> None:
        self.pass_time(now)
        self.sandboxes[one.id] = one
        self.used += one.holds
        self._templates[one.template] = self._templates.get(one.template, 0) + 1
        self._foresee(one, now, 1)

    def remove(self, one: _Sandbox, now: float) -> None:
        self.pass_time(now)
        del self.sandboxes[one.id]
        self.used -= one.holds
        self._templates[one.template] -= 1
        if not self._templates[one.template]:
            del self._templates[one.template]
        if now < one.born + one.life.length_s:  # taken back: it never ran
            self._foresee(one, now, -1)

    def change(self, one: _Sandbox, value: int, now: float) -> None:
        self.pass_time(now)
        self.used += value - one.holds
        one.holds = value

    def pass_time(self, now: float) -> None:
        passed, self._at = now - self._at, now
        if passed <= 0.0:
            return
        total = self.used + self._template_bytes * len(self._templates)
        self.sandbox_s += passed * len(self.sandboxes)
        self.largest = max(self.largest, total)
        if total > self.capacity:
            self.overloaded_s += passed
            for one in self.sandboxes.values():
                one.overloaded = True

    def _foresee(self, one: _Sandbox, now: float, sign: int) -> None:
        if not self.foresight:
            return
        begin, coming = int(now), one.by_second()
        if len(self.future) < begin + len(coming):
            self.future.extend([0] * (begin + len(coming) - len(self.future)))
        for second, value in enumerate(coming, begin):
            self.future[second] += sign * value


class _Mark:
    """Totals at one moment."""

    def __init__(self, world: World) -> None:
        self.at = world.now
        self.hosts = len(world.hosts)
        self.sandbox_s = sum(host.sandbox_s for host in world.hosts)
        self.overloaded_s = sum(host.overloaded_s for host in world.hosts)

    def span(self, after: _Mark) -> Span:
        seconds = after.at - self.at
        overloaded = (after.overloaded_s - self.overloaded_s) / (seconds * self.hosts)
        return Span(seconds, (after.sandbox_s - self.sandbox_s) / seconds, overloaded)
