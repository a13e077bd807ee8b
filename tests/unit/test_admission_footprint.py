"""Admission by footprint: what it promises whatever the numbers are, and how it chooses."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.sandboxes.admission.api import Admit, Deny, HostView, Request, SandboxView
from venusrl.sandboxes.admission.footprint import FootprintAdmission, FootprintConfig
from venusrl.sandboxes.admission.learning import Learned
from venusrl.sandboxes.admission.load import Load, newcomer

MIB = 1 << 20
DECLARED = 512 * MIB


@cache
def lessons(private: int, spike: int = 0, together: bool = True) -> Learned:
    """Lives of 600 s that hold ``private`` bytes, and ``spike`` more one time in eight."""
    learned = Learned()
    for group in range(16):
        for moment in range(0, 600, 5):
            for member in range(4):
                phase = (moment // 5 * 7 + group * 3 + (0 if together else member * 5)) % 8
                held = private + (spike if phase == 0 else 0)
                learned.observe("t", f"g{group}", f"{group}-{member}", float(moment), held)
        for member in range(4):
            learned.ended(f"{group}-{member}")
    return learned


def taught(private: int = 20 * MIB, spike: int = 30 * MIB, *, target: float = 0.01) -> FootprintAdmission:
    """Knows those lives and no host."""
    policy = FootprintAdmission(FootprintConfig(target=target))
    policy.learned = lessons(private, spike)
    return policy


def host(name: str, capacity: int, sandboxes: tuple[SandboxView, ...] = (), **how: object) -> HostView:
    view = HostView(name, capacity, capacity, 16.0, shared={"t": 12 * MIB}, sandboxes=sandboxes)
    return msgspec.structs.replace(view, **how)


def sandbox(number: int, private: int, age_s: float = 60.0, **how: object) -> SandboxView:
    view = SandboxView(f"s{number}", "t", f"group{number // 8}", age_s, private, DECLARED)
    return msgspec.structs.replace(view, **how)


def filled(policy: FootprintAdmission, capacity: int, private: int) -> HostView:
    """One host, given the same sandbox until it is denied. Ages differ, as they do on a host that has run a while."""
    view = host("h", capacity)
    for number in range(100_000):
        answer = policy.place((view,), Request("t", f"group{number // 8}", DECLARED))
        if isinstance(answer, Deny):
            return view
        new = sandbox(number, private, 20.0 + number % 300)
        view = msgspec.structs.replace(view, sandboxes=(*view.sandboxes, new))
    raise AssertionError("never denied")


@settings(max_examples=12, deadline=None)
@given(private=st.sampled_from([20 * MIB, 90 * MIB, 400 * MIB]), capacity=st.integers(600 * MIB, 2048 * MIB))
def test_constant_footprints_never_exceed_the_capacity(private: int, capacity: int) -> None:
    policy = taught(private, 0)
    view = filled(policy, capacity, private)
    used = 12 * MIB + len(view.sandboxes) * private
    assert used <= capacity
    assert capacity - used < 2 * private + MIB, "and all of it is used"


def test_an_unknown_template_counts_as_declared() -> None:
    view = filled(FootprintAdmission(), 4 * 1024 * MIB, 10 * MIB)
    assert len(view.sandboxes) == (4 * 1024 - 12) // 512


@settings(max_examples=20, deadline=None)
@given(
    privates=st.lists(st.integers(0, 60 * MIB), min_size=1, max_size=40),
    capacity=st.integers(100 * MIB, 2048 * MIB),
    more=st.integers(0, 1024 * MIB),
    shuffle=st.randoms(use_true_random=False),
)
def test_more_capacity_never_denies_and_order_never_matters(
    privates: list[int], capacity: int, more: int, shuffle: object
) -> None:
    views = [sandbox(number, private, 30.0 * (number % 9)) for number, private in enumerate(privates)]
    request = Request("t", "group0", DECLARED)
    small = taught().place((host("h", capacity, tuple(views)),), request)
    large = taught().place((host("h", capacity + more, tuple(views)),), request)
    assert isinstance(large, Admit) or isinstance(small, Deny)
    before = taught().footprint(host("h", capacity, tuple(views)))
    shuffle.shuffle(views)  # type: ignore[attr-defined]
    assert taught().footprint(host("h", capacity, tuple(views))) == pytest.approx(before, rel=1e-9)


def load_of(learned: Learned, groups: list[str]) -> Load:
    load = Load(learned)
    for number, group in enumerate(groups):
        load.add(SandboxView(f"s{number}", "t", group, 60.0, 20 * MIB, DECLARED))
    return load


def test_a_group_bursts_together_so_it_spreads_more_than_strangers() -> None:
    learned = taught().learned
    profile = learned.profile("t")
    assert profile is not None
    assert profile.together > 0.8
    together, _ = load_of(learned, ["one"] * 8).spread(0)
    apart, _ = load_of(learned, [f"own{number}" for number in range(8)]).spread(0)
    assert together > 2.0 * apart
    assert together <= math.sqrt(8) * apart * 1.01


def test_sandboxes_that_burst_alone_are_not_taken_for_a_group() -> None:
    profile = lessons(20 * MIB, 30 * MIB, together=False).profile("t")
    assert profile is not None
    assert profile.together < 0.3


def test_adding_to_a_view_gives_what_summing_anew_gives() -> None:
    policy = taught()
    views = tuple(sandbox(number, 20 * MIB + number, 11.0 * number) for number in range(40))
    grown = host("h", 8192 * MIB, views[:10])
    policy.footprint(grown)
    for more in (11, 25, 40):
        grown = msgspec.structs.replace(grown, sandboxes=views[:more])
        policy.footprint(grown)
    anew = host("h", 8192 * MIB, views)
    assert policy.footprint(grown) == pytest.approx(taught().footprint(anew), rel=1e-9)


def test_asking_again_about_unchanged_hosts_sums_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = taught()
    hosts = tuple(
        host(f"h{number}", 8192 * MIB, tuple(sandbox(one, 5 * MIB) for one in range(50))) for number in range(20)
    )
    policy.place(hosts, Request("t", "new", DECLARED))
    added: list[SandboxView] = []
    monkeypatch.setattr(Load, "add", lambda self, view: added.append(view))
    again = tuple(msgspec.structs.replace(one, sandboxes=(*one.sandboxes[:1], *one.sandboxes[1:])) for one in hosts)
    policy.place(again, Request("t", "new", DECLARED))
    assert added == [], "a new view of the same objects is no news"
    first = msgspec.structs.replace(hosts[0], sandboxes=(*hosts[0].sandboxes, sandbox(99, 0)))
    policy.place((first, *hosts[1:]), Request("t", "new", DECLARED))
    assert [view.id for view in added] == ["s99"]


def test_a_smaller_risk_asks_for_more_room() -> None:
    views = tuple(sandbox(number, 20 * MIB) for number in range(64))
    careful = taught(target=0.0001)
    assert careful.footprint(host("h", 1, views)) > taught().footprint(host("h", 1, views))


def test_growth_that_has_not_happened_is_seen() -> None:
    """Sixteen that have just begun and hold 5 MiB, of a template that grows to 80 within a minute."""
    policy = FootprintAdmission()
    for group in range(12):
        for moment in range(0, 600, 5):
            for member in range(8):
                held = (5 + min(75, moment * 75 // 60)) * MIB
                policy.observe("t", f"g{group}", f"{group}-{member}", float(moment), held)
        for member in range(8):
            policy.ended(f"{group}-{member}")
    young = tuple(sandbox(number, 5 * MIB, 1.0) for number in range(16))
    expected = policy.footprint(host("h", 8192 * MIB, young)) - 12 * MIB
    assert expected == pytest.approx(16 * 80 * MIB, rel=0.1)


def test_a_heavy_one_is_expected_to_stay_heavy() -> None:
    policy = FootprintAdmission()
    for group in range(24):
        weight = 4 if group % 3 == 0 else 1
        for moment in range(0, 600, 5):
            for member in range(8):
                policy.observe("t", f"g{group}", f"{group}-{member}", float(moment), weight * 10 * MIB)
        for member in range(8):
            policy.ended(f"{group}-{member}")
    heavy = policy.footprint(host("h", 1, tuple(sandbox(number, 40 * MIB) for number in range(64))))
    light = policy.footprint(host("h", 1, tuple(sandbox(number, 10 * MIB) for number in range(64))))
    assert heavy > 2.5 * light


def test_the_fullest_host_that_fits_and_has_the_template() -> None:
    policy = taught()
    empty, half = host("empty", 4096 * MIB), host("half", 4096 * MIB, tuple(sandbox(n, 20 * MIB) for n in range(40)))
    without = host("without", 3000 * MIB, half.sandboxes, shared={})
    full = host("full", 1024 * MIB, tuple(sandbox(n, 20 * MIB) for n in range(60)))
    assert policy.place((empty, without, full, half), Request("t", "new", DECLARED)) == Admit("half")
    on_disk = host("on disk", 4096 * MIB, shared={}, stored=("host", "t"))
    assert policy.place((without, on_disk), Request("t", "new", DECLARED)) == Admit("on disk")
    assert policy.place((on_disk, half), Request("t", "new", DECLARED)) == Admit("half")
    busy = msgspec.structs.replace(half, cpu_used=16.0)
    assert policy.place((empty, busy), Request("t", "new", DECLARED)) == Admit("empty")
    assert policy.place((msgspec.structs.replace(half, draining=True),), Request("t", "new", DECLARED)) == Deny(
        "no_host", "no host takes new sandboxes (none there, or all draining)", 60.0
    )


def test_denials_say_what_is_short_and_when_to_come_again() -> None:
    policy = taught()
    old = tuple(sandbox(number, 20 * MIB, 590.0) for number in range(40))
    young = tuple(sandbox(number, 20 * MIB, 100.0) for number in range(40))
    request = Request("t", "new", DECLARED)
    soon = policy.place((host("h", 600 * MIB, old),), request)
    later = policy.place((host("h", 600 * MIB, young),), request)
    assert isinstance(soon, Deny)
    assert isinstance(later, Deny)
    assert soon.reason == later.reason == "memory"
    assert "MiB short on h" in later.message
    assert 1.0 <= soon.retry_after_s < later.retry_after_s <= 60.0, "lives of 600 s: those of 590 s end first"
    never = FootprintAdmission().place((host("h", 300 * MIB),), request)
    assert isinstance(never, Deny)
    assert never.reason == "too_large"


def test_a_mandatory_one_displaces_what_is_idle_and_optional() -> None:
    policy = taught()
    views = (
        *(sandbox(n, 20 * MIB, mandatory=True, idle_s=50.0) for n in range(10)),
        *(sandbox(n, 20 * MIB, idle_s=None) for n in range(10, 20)),
        *(sandbox(n, 20 * MIB, idle_s=5.0, priority=float(n)) for n in range(20, 40)),
    )
    full = host("h", policy.footprint(host("h", 1, views)) + 5 * MIB, views)
    assert isinstance(taught().place((full,), Request("t", "new", DECLARED)), Deny)
    answer = taught().place((full,), Request("t", "new", DECLARED, mandatory=True))
    assert isinstance(answer, Admit)
    paused = {pause.sandbox for pause in answer.pause}
    assert paused
    assert paused <= {f"s{n}" for n in range(20, 30)}, "idle, optional, of low priority"
    rest = tuple(msgspec.structs.replace(view, mandatory=True) for view in views)
    closed = host("h", full.capacity, rest)
    assert isinstance(taught().place((closed,), Request("t", "new", DECLARED, mandatory=True)), Deny)


def test_under_pressure_only_a_mandatory_one_gets_in_and_pays_for_it() -> None:
    policy = taught()
    views = tuple(sandbox(n, 60 * MIB, idle_s=5.0) for n in range(8))
    pressed = host("h", 4096 * MIB, views, available=50 * MIB)
    denied = policy.place((pressed,), Request("t", "new", DECLARED))
    assert isinstance(denied, Deny)
    assert denied.reason == "pressure"
    answer = policy.place((pressed,), Request("t", "new", DECLARED, mandatory=True))
    assert isinstance(answer, Admit)
    freed = sum(view.private for view in views if view.id in {pause.sandbox for pause in answer.pause})
    new = newcomer(Request("t", "new", DECLARED), policy.learned)
    assert freed >= new.mean(0) > 0


def test_a_reserve_is_for_mandatory_ones_alone() -> None:
    policy = FootprintAdmission(FootprintConfig(target=0.01, mandatory_reserve=0.5))
    policy.learned = taught().learned
    views = tuple(sandbox(n, 20 * MIB) for n in range(64))
    view = host("h", int(policy.footprint(host("h", 1, views)) * 1.6), views)
    assert isinstance(policy.place((view,), Request("t", "new", DECLARED)), Deny)
    assert policy.place((view,), Request("t", "new", DECLARED, mandatory=True)) == Admit("h")


def test_one_that_resumes_brings_its_memory() -> None:
    policy = taught()
    view = host("h", 700 * MIB, tuple(sandbox(n, 20 * MIB) for n in range(10)))
    assert isinstance(policy.place((view,), Request("t", "new", DECLARED, private=20 * MIB)), Admit)
    assert isinstance(policy.place((view,), Request("t", "new", DECLARED, private=400 * MIB)), Deny)


def test_a_target_must_be_a_small_probability() -> None:
    with pytest.raises(ValueError, match="must lie between"):
        FootprintAdmission(FootprintConfig(target=0.7))
