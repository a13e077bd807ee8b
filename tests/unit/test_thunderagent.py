"""ThunderAgent as its source and the studies of it describe it: capacity, rounds, orders, and its defects. Case T34."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies.thunderagent import ThunderAgent
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import StopReason


class Proxy:
    """A scheduler with the policy, its workers, and programs (one a group, unless told) that tests drive by hand."""

    def __init__(self, *capacities: int, group_size: int = 1, **options: Any) -> None:
        self.policy = ThunderAgent(**options)
        config = SchedulerConfig(100_000, group_size, Decimal(0), 0, min_valid=1)
        self.scheduler = Scheduler(config, self.policy)
        self.now = 0.0
        self.where: dict[str, str] = {}
        self.turns: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.tell(ev.VersionPublished(0))
        for index, capacity in enumerate(capacities):
            self.tell(ev.WorkerUp(f"w{index}", capacity, 512, 0))

    def tell(self, *events: ev.Event) -> dict[str, str]:
        """What each trajectory is told: the worker that it goes to, or why it is held."""
        said: dict[str, str] = {}
        for event in events:
            for action in self.scheduler.handle(event, self.now):
                if isinstance(action, Dispatch):
                    said[action.trajectory] = self.where[action.trajectory] = action.worker
                    self.tell(ev.TurnDispatched(action.trajectory, action.turn, action.worker, 0))
                elif isinstance(action, Hold):
                    said[action.trajectory] = action.reason
        return said

    def at(self, now: float) -> dict[str, str]:
        """Time passes, with a tick whenever the scheduler asks for one."""
        said: dict[str, str] = {}
        while (due := self.scheduler.wake_at) is not None and due <= now:
            self.now = max(self.now, due)
            said |= self.tell(ev.Tick())
        self.now = now
        return said

    def open(self, *names: str, group: str | None = None) -> None:
        for index, name in enumerate(names):
            if group is None or not index:
                size = 1 if group is None else len(names)
                self.tell(ev.GroupOpened(group or f"g{name}", len(self.turns), "t", size))
            self.tell(ev.TrajectoryOpened(name, group or f"g{name}", index if group else 0, 0))
            self.turns[name] = 0

    def ask(self, name: str, prompt: int, shared: int = 0) -> dict[str, str]:
        if name not in self.turns:
            self.open(name)
        self.prompts[name] = prompt
        return self.tell(ev.TurnRequested(name, self.turns[name], prompt, shared, 1000))

    def answer(self, name: str, generated: int = 50) -> dict[str, str]:
        turn = self.turns[name]
        self.turns[name] += 1
        del self.where[name]
        return self.tell(ev.TurnFinished(name, turn, generated, 0, StopReason.STOP), ev.ToolStarted(name, turn))

    def end(self, name: str) -> dict[str, str]:
        return self.tell(ev.VerificationStarted(name), ev.TrajectoryFinished(name))

    @property
    def marked(self) -> list[str]:
        return sorted(p.name for p in self.policy.programs.values() if p.marked)

    def room(self, worker: str = "w0") -> float:
        return self.policy.backends[worker].room


def test_a_new_program_is_let_in_where_it_fits_with_its_buffer_least_active_tokens_first() -> None:
    proxy = Proxy(2000, 2000)
    assert proxy.ask("a", 1000) == {"a": "w0"}
    assert proxy.ask("b", 900) == {"b": "w1"}
    assert proxy.ask("c", 900) == {"c": "w1"}  # 2000 - 1000 is room for it; the other has less room.
    assert proxy.ask("d", 801) == {"d": "capacity"}
    assert proxy.room("w0") == 2000 - 1000 - 100


def test_whoever_comes_while_others_wait_waits_for_the_next_round_though_it_fits() -> None:
    proxy = Proxy(1000)
    assert proxy.ask("big", 950) == {"big": "capacity"}
    assert proxy.ask("small", 10) == {"small": "capacity"}
    assert proxy.at(4.9) == {}
    assert proxy.at(5.0) == {"small": "w0"}


def overfull(**options: Any) -> Proxy:
    """Ten programs of 854 tokens fit in 10,000 with their buffers; their next prompts of 1,054 do not."""
    proxy = Proxy(10_000, **options)
    names = [f"p{i}" for i in range(10)]
    for name in names:
        proxy.ask(name, 854)
        proxy.answer(name, 0)
    for index, name in enumerate(names):
        proxy.ask(name, 1054 + (index < 5))
    assert proxy.room() == -1545
    return proxy


def test_a_round_marks_all_reasoning_programs_where_two_would_do() -> None:
    """The first defect of the study: ten of ten marked, and the room unchanged."""
    proxy = overfull()
    proxy.at(5.0)
    assert len(proxy.marked) == 10
    assert proxy.room() == -1545


def test_repaired_a_round_marks_the_two_that_are_needed() -> None:
    proxy = overfull(faithful=False)
    proxy.at(5.0)
    assert proxy.marked == ["p5", "p6"]
    proxy.answer("p5", 0)
    proxy.answer("p6", 0)
    assert proxy.room() >= 0
    assert proxy.ask("p5", 1060) == {"p5": "capacity"}


def test_a_marked_program_is_paused_at_the_end_of_its_turn_and_not_before() -> None:
    proxy = overfull()
    proxy.at(5.0)
    assert len(proxy.where) == 10
    proxy.answer("p3", 0)
    assert proxy.room() == -1545 + 1155
    assert proxy.ask("p3", 1100) == {"p3": "capacity"}


def test_acting_programs_go_first_the_smallest_before_all() -> None:
    proxy = Proxy(3000)
    for name, prompt in (("a", 900), ("b", 700), ("c", 800)):
        proxy.ask(name, prompt)
    proxy.answer("a", 0)
    proxy.answer("b", 0)
    proxy.now = 1.0
    proxy.ask("a", 1200)
    proxy.answer("a", 100)  # a 1300, b 700 acting, c 800 reasoning: 2800 + 300 > 3000
    assert proxy.room() == -100
    proxy.at(5.0)
    assert proxy.ask("b", 710) == {"b": "capacity"}
    assert proxy.marked == []


def test_resumed_are_those_in_the_middle_then_new_then_acting_ones_smallest_first_while_all_fit() -> None:
    proxy = Proxy(5000)
    proxy.ask("hog", 4800)
    for name, prompt in (("new-small", 300), ("new-large", 800)):
        proxy.ask(name, prompt)
    proxy.answer("hog", 0)
    proxy.at(1.0)
    proxy.ask("hog", 5000)
    proxy.at(5.0)
    proxy.answer("hog", 0)  # It was marked: now it is paused, acting, the last class.
    assert proxy.ask("hog", 3700) == {"hog": "capacity"}  # In the middle: the first class.
    assert proxy.at(10.0) == {"hog": "w0", "new-small": "w0"}  # 3800 + 400, and 900 would be too much.


def test_a_resumed_program_goes_where_most_room_is_and_so_leaves_its_cache() -> None:
    proxy = Proxy(2000, 2000)
    proxy.ask("a", 1000)
    proxy.ask("b", 1000)
    proxy.answer("a", 0)
    proxy.ask("c", 700)  # On w1, beside b.
    assert proxy.where == {"b": "w1", "c": "w0"}
    proxy.answer("c", 0)
    proxy.at(1.0)
    proxy.ask("c", 900)  # w0: a 1000 acting, c 900 reasoning: 2100 with buffers
    proxy.at(5.0)  # a is paused
    proxy.answer("b", 0)
    proxy.end("b")
    assert proxy.ask("a", 1010) == {"a": "capacity"}
    assert proxy.at(10.0) == {"a": "w1"}


def test_repaired_it_goes_home_where_that_has_room() -> None:
    for faithful, expected in ((True, "w1"), (False, "w0")):
        proxy = Proxy(2000, 3000, faithful=faithful)
        proxy.ask("a", 1500)
        proxy.ask("b", 1200)
        assert proxy.where == {"a": "w0", "b": "w1"}
        proxy.answer("a", 0)
        proxy.now = 1.0
        proxy.ask("a", 2000)
        proxy.at(5.0)
        proxy.answer("a", 0)
        proxy.end("b")
        proxy.ask("a", 1600)
        assert proxy.at(10.0) == {"a": expected}


@pytest.mark.parametrize("faithful", [True, False])
def test_a_program_larger_than_its_worker_waits_1800_s_for_an_empty_one_unless_repaired(faithful: bool) -> None:
    proxy = Proxy(1000, faithful=faithful)
    assert proxy.ask("giant", 5000) == {"giant": "capacity"}
    if faithful:
        assert proxy.at(1799.9) == {}
        assert proxy.at(1800.0) == {"giant": "w0"}
    else:
        assert proxy.at(5.0) == {"giant": "w0"}


def test_what_waited_too_long_runs_where_it_was_before() -> None:
    proxy = Proxy(2000, 2000, release=False)
    for name, prompt in (("b", 1200), ("a", 1500)):
        proxy.ask(name, prompt)
        proxy.answer(name, 0)
    proxy.ask("a", 2000)
    proxy.at(5.0)  # a is marked.
    proxy.answer("a", 0)
    proxy.ask("c", 1900)
    proxy.at(10.0)  # c takes the place of a.
    assert proxy.where == {"c": "w1"}
    proxy.ask("a", 2050)
    assert proxy.at(1809.0) == {}
    assert proxy.at(1810.0) == {"a": "w1"}


def test_the_largest_is_placed_first_so_that_all_find_room() -> None:
    proxy = Proxy(1100, 700)
    for name, prompt in (("hog", 1000), ("hog2", 600), ("small", 500), ("large", 900)):
        proxy.ask(name, prompt)
    for name in ("hog", "hog2"):
        proxy.answer(name, 0)
        proxy.end(name)
    assert proxy.at(5.0) == {"large": "w0", "small": "w1"}


@pytest.mark.parametrize(("faithful", "first"), [(True, "grown"), (False, "b")])
def test_the_order_of_resuming_uses_sizes_of_the_moment_of_pausing_unless_repaired(faithful: bool, first: str) -> None:
    proxy = Proxy(2000, faithful=faithful)
    for prompts in ((200, 400), (250, 450)):
        for name, prompt in zip(("grown", "b"), prompts, strict=True):
            proxy.ask(name, prompt)
            proxy.answer(name)
    proxy.ask("hog", 900)
    proxy.answer("hog", 0)
    proxy.ask("hog", 2000)
    proxy.at(5.0)  # Both are paused, with 300 and 500 tokens.
    proxy.ask("grown", 1500)
    proxy.ask("b", 500)
    proxy.answer("hog", 0)
    proxy.end("hog")
    assert list(proxy.at(10.0)) == [first]


def test_a_program_that_had_one_request_counts_as_new_even_while_it_acts() -> None:
    proxy = Proxy(1000)
    proxy.ask("a", 700)
    proxy.answer("a", 300)
    proxy.at(5.0)  # a is paused, after one request.
    proxy.ask("b", 750)
    assert proxy.at(10.0) == {"b": "w0"}
    assert proxy.ask("a", 1000) == {"a": "capacity"}


def test_by_default_flags_capacity_never_frees() -> None:
    """The ninth defect: without release and without decay, programs that ended keep their room until the timeout."""
    for options, freed in (({"release": False}, False), ({}, True), ({"release": False, "decay": True}, True)):
        proxy = Proxy(2000, **options)
        proxy.ask("a", 1500)
        proxy.answer("a")
        proxy.end("a")
        proxy.ask("b", 1500)
        said = proxy.at(100.0)
        assert ("b" in said or "b" in proxy.where) is freed
        proxy.at(1800.0)
        assert proxy.where == {"b": "w0"}


def test_decay_halves_what_acting_programs_weigh_every_second_for_resuming_only() -> None:
    proxy = Proxy(2000, decay=True)
    proxy.ask("a", 1600)
    proxy.now = 3.0
    proxy.answer("a", 0)
    assert proxy.policy.backends["w0"].decayed_room(5.0, 1.0) == 2000 - 1600 / 4 - 100
    assert proxy.ask("b", 1000) == {"b": "capacity"}  # Not for being let in at once.
    assert proxy.at(5.0) == {"b": "w0"}
    # Without decay that was too much: the same round pauses a.
    assert proxy.room() == 2000 - 1000 - 100


@pytest.mark.parametrize(("faithful", "room"), [(True, 10_000 - 4 * 1100), (False, 10_000 - 4 * 1100 + 3 * 800)])
def test_a_common_prefix_counts_once_a_member_unless_repaired(faithful: bool, room: int) -> None:
    proxy = Proxy(10_000, group_size=4, faithful=faithful)
    proxy.open("a", "b", "c", "d", group="g")
    for name in "abcd":
        proxy.ask(name, 1000, shared=800)
    assert proxy.room() == room
    proxy.answer("d", 0)
    proxy.end("d")
    assert proxy.room() == room + (1100 if faithful else 300)


@pytest.mark.parametrize(("order", "expected"), [("smallest", "tiny"), ("fifo", "first"), ("largest", "large")])
def test_the_order_arms_of_the_study(order: str, expected: str) -> None:
    proxy = Proxy(2000, order=order)
    proxy.ask("hog", 1900)
    for name, prompt in (("first", 1000), ("tiny", 990), ("large", 1300)):
        proxy.ask(name, prompt)
    proxy.answer("hog", 0)
    proxy.end("hog")
    assert list(proxy.at(5.0)) == [expected]


def test_T34_smallest_first_starves_the_large_and_repaired_it_ages() -> None:
    """Small programs keep coming: a large one waits for the timeout, or until its waiting outweighs its size."""
    waits = {}
    for faithful in (True, False):
        proxy = Proxy(10_000, faithful=faithful)
        proxy.ask("hog", 9000)
        proxy.ask("large", 8000)
        number, step = 0, 0
        while "large" not in proxy.where and step < 400:
            step += 1
            for _ in range(6):
                number += 1
                proxy.ask(f"s{number}", 1500)
            for name in [n for n in proxy.where if n != "large"]:
                proxy.answer(name, 0)
                proxy.end(name)
            proxy.at(step * 5.0 + 0.1)
        waits[faithful] = step * 5.0
    assert waits[True] == pytest.approx(1800, abs=10)
    assert waits[False] < 600


def test_programs_of_a_dead_worker_wait_for_another() -> None:
    proxy = Proxy(2000, 2000)
    proxy.ask("a", 1000)
    proxy.ask("b", 1000)
    proxy.tell(ev.WorkerDown("w0"))
    assert proxy.ask("a", 1000) == {"a": "capacity"}
    proxy.answer("b", 0)
    proxy.end("b")
    assert proxy.at(5.0) == {"a": "w1"}


def test_rounds_are_five_seconds_apart_and_none_is_asked_for_without_need() -> None:
    proxy = Proxy(2000)
    proxy.ask("a", 1500)
    wakes = [proxy.scheduler.wake_at]
    proxy.now = 7.0
    proxy.ask("b", 1500)
    wakes.append(proxy.scheduler.wake_at)
    proxy.at(12.0)
    wakes.append(proxy.scheduler.wake_at)
    assert wakes == [None, 10.0, 15.0]


def test_options_are_checked() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"interval_s": 0.0},
        {"order": "random"},
        {"acting_weight": -1.0},
        {"timeout_s": -math.inf},
    )
    for options in wrong:
        with pytest.raises(ValueError, match=r"must be|there is no order"):
            ThunderAgent(**options)
