"""The guard: hysteresis, and whom it pauses."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.sandboxes.admission.api import HostView, SandboxView
from venusrl.sandboxes.admission.guard import Guard, Thresholds, freed_by_pausing, order_of_pausing

MIB = 1 << 20
CAPACITY = 1000 * MIB


def view(number: int, private: int = 10 * MIB, **how: object) -> SandboxView:
    made = SandboxView(f"s{number}", "t", "", 60.0, private, 512 * MIB, idle_s=5.0)
    return msgspec.structs.replace(made, **how)


def host(free: float, pressure: float | None = None, sandboxes: tuple[SandboxView, ...] = ()) -> HostView:
    return HostView("h", CAPACITY, int(free * CAPACITY), 4.0, pressure=pressure, sandboxes=sandboxes)


def test_what_closed_it_is_not_what_opens_it_again() -> None:
    guard, at = Guard(), Thresholds()
    levels = [
        guard.level(host(free)) for free in (0.5, at.close + 0.01, at.close - 0.01, at.close + 0.01, at.open + 0.01)
    ]
    assert levels == ["open", "open", "closed", "closed", "open"]


def test_it_pauses_until_well_above_the_line() -> None:
    guard, at = Guard(), Thresholds()
    levels = [
        guard.level(host(free)) for free in (at.relieve - 0.01, at.relieve + 0.01, at.close + 0.01, at.open + 0.01)
    ]
    assert levels == ["relieving", "relieving", "closed", "open"]


def test_pressure_counts_as_memory_does() -> None:
    guard = Guard()
    levels = [guard.level(host(0.1, pressure)) for pressure in (0.0, 12.0, 7.0, 40.0, 12.0, 7.0, 1.0)]
    assert levels == ["open", "closed", "closed", "relieving", "relieving", "closed", "open"]


def test_a_sandbox_that_thrashes_at_its_own_limit_closes_no_host_that_has_memory() -> None:
    idle = (view(0), view(1))
    assert Guard().level(host(0.5, 90.0)) == "open"
    assert Guard().relieve(host(0.5, 90.0, idle)) == ()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=30))
def test_between_the_lines_a_host_keeps_its_level(frees: list[float]) -> None:
    guard, at, before = Guard(), Thresholds(), "open"
    for free in frees:
        now = guard.level(host(free))
        seen = int(free * CAPACITY) / CAPACITY
        if at.close <= seen < at.open and before != "relieving":
            assert now == before
        before = now


def test_the_most_memory_a_second_of_resuming_goes_first_and_no_more_than_needed() -> None:
    small = view(0, 5 * MIB, resume_cost_s=0.01)
    large = view(1, 40 * MIB, resume_cost_s=0.1)
    slow = view(2, 45 * MIB, resume_cost_s=10.0)
    paused = Guard().relieve(host(0.02, sandboxes=(slow, large, small)))
    assert [pause.sandbox for pause in paused] == ["s0", "s1"], "20 MiB are wanted: 5 and 40"
    assert "MiB of memory left on h" in paused[0].reason
    assert Guard().relieve(host(0.5, sandboxes=(slow, large, small))) == ()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            view,
            st.integers(0, 10_000),
            st.integers(0, 50 * MIB),
            mandatory=st.booleans(),
            paused=st.booleans(),
            idle_s=st.one_of(st.none(), st.floats(0, 100)),
            priority=st.floats(-5, 5),
            reclaimable=st.one_of(st.none(), st.integers(0, 50 * MIB)),
        ),
        max_size=20,
        unique_by=lambda one: one.id,
    ),
    st.booleans(),
)
def test_never_a_mandatory_one_while_another_will_do(views: list[SandboxView], busy_too: bool) -> None:
    order = order_of_pausing(views, busy_too=busy_too)
    assert all(not one.paused and freed_by_pausing(one) > 0 for one in order)
    assert busy_too or all(one.idle_s is not None for one in order)
    marks = [(one.mandatory, one.idle_s is None) for one in order]
    assert marks == sorted(marks)
    assert order == order_of_pausing(list(reversed(views)), busy_too=busy_too)


def test_lower_priority_goes_before_cheaper_memory() -> None:
    views = [view(n, 10 * MIB if n < 3 else 40 * MIB, priority=float(n)) for n in range(6)]
    assert {one.id for one in order_of_pausing(views, busy_too=False)[:2]} == {"s0", "s1"}


def test_one_with_a_command_running_only_when_it_is_critical() -> None:
    busy = view(0, idle_s=None)
    at = Thresholds()
    assert Guard().relieve(host(at.relieve - 0.001, sandboxes=(busy,))) == ()
    assert [pause.sandbox for pause in Guard().relieve(host(at.critical - 0.001, sandboxes=(busy,)))] == ["s0"]


def test_a_namespace_whose_pause_frees_nothing_is_left_alone() -> None:
    assert Guard().relieve(host(0.01, sandboxes=(view(0, reclaimable=0),))) == ()
