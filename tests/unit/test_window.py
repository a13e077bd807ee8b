"""The window: exact counts, the start of a group, and the theorem over random histories."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.window import EventError, Group, Window

ALPHAS = [Decimal(a) for a in ("0", "0.5", "1", "1.5", "2", "3")]


def config(alpha: str = "1", **changes: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "batch_groups": 2,
        "group_size": 2,
        "async_factor": Decimal(alpha),
        "max_staleness": math.ceil(Decimal(alpha)),
    }
    return SchedulerConfig(**(defaults | changes))


def opened(window: Window, name: str, size: int = 2) -> Group:
    window.open_group(name, f"task-{name}", len(window.open), size, 0)
    group = window.open[name]
    for index in range(size):
        window.add_member(group, f"{name}/{index}", index)
    return group


def finished(window: Window, name: str, start: int) -> Group:
    group = opened(window, name)
    for trajectory in list(group.members):
        window.start_member(group, trajectory, start, sampled=True)
        window.finish_member(group, trajectory)
    return group


@pytest.mark.parametrize(
    ("alpha", "batch", "expected"),
    [("0", 8, 8), ("0.5", 1, 1), ("0.5", 3, 4), ("1", 8, 16), ("1.5", 3, 7), ("0.15", 100, 115), ("1.1", 10, 21)],
)
def test_the_window_is_exact(alpha: str, batch: int, expected: int) -> None:
    assert config(alpha, batch_groups=batch).window == expected


def test_many_decimals_do_not_round_the_window_up() -> None:
    assert config("0.99999999999999999999999999999999999999", batch_groups=1000).window == 1999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 0}, "max_staleness"),
        ({"batch_groups": 0}, "batch_groups"),
        ({"async_factor": Decimal(0), "deadline": "drop"}, "on-policy"),
        ({"min_valid": 3}, "min_valid"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_the_start_of_a_group_is_the_smallest_among_eligible_members() -> None:
    window = Window(config("2"))
    group = opened(window, "a")
    assert window.last_admissible(group) is None
    window.start_member(group, "a/0", 3, sampled=True)
    window.start_member(group, "a/1", 4, sampled=True)
    assert window.last_admissible(group) == 5
    window.lose_member(group, "a/0", replaced=True)
    assert group.start == 4
    window.add_member(group, "a/0.1", 0)
    window.start_member(group, "a/0.1", 6, sampled=True)
    assert group.start == 4


def test_a_reservation_gives_way_to_the_dispatch_that_happened() -> None:
    window = Window(config("2"))
    group = opened(window, "a")
    window.start_member(group, "a/0", 3, sampled=False)
    window.start_member(group, "a/0", 4, sampled=True)
    window.start_member(group, "a/0", 5, sampled=True)
    assert group.start == 4


def test_a_group_completes_when_every_index_is_finished_or_given_up() -> None:
    window = Window(config(group_size=3))
    group = opened(window, "a", size=3)
    for trajectory in ("a/0", "a/1", "a/2"):
        window.start_member(group, trajectory, 0, sampled=True)
    assert not window.finish_member(group, "a/0")
    assert not window.lose_member(group, "a/1", replaced=True)
    assert not window.finish_member(group, "a/2")
    window.add_member(group, "a/1.1", 1)
    assert window.lose_member(group, "a/1.1", replaced=False)
    assert list(window.complete) == ["a"]
    assert not window.too_small(group)


def test_a_group_with_too_few_left_never_completes() -> None:
    window = Window(config())
    group = opened(window, "a")
    window.start_member(group, "a/0", 0, sampled=True)
    window.finish_member(group, "a/0")
    assert not window.lose_member(group, "a/1", replaced=False)
    assert window.too_small(group)
    assert not window.complete


def test_impossible_events_are_refused() -> None:
    window = Window(config())
    group = opened(window, "a")
    with pytest.raises(EventError, match="twice"):
        window.open_group("a", "t", 0, 2, 0)
    with pytest.raises(EventError, match="taken"):
        window.add_member(group, "a/0.1", 0)
    with pytest.raises(EventError, match="without any turn"):
        window.finish_member(group, "a/0")


def test_a_batch_prefers_the_oldest_then_the_first_complete() -> None:
    window = Window(config("3", batch_groups=2))
    for name, start in (("new", 1), ("old", 0), ("newer", 1)):
        finished(window, name, start)
    selection = window.batch()
    assert selection is not None
    assert selection.groups == ("old", "new")


def test_no_batch_forms_past_a_group_at_its_deadline() -> None:
    window = Window(config("1"))
    straggler = opened(window, "straggler")
    window.start_member(straggler, "straggler/0", 0, sampled=True)
    for name in ("a", "b"):
        finished(window, name, 0)
    window.publish(1)
    assert window.at_deadline(straggler)
    assert window.batch() is None
    assert window.obstacles() == ("straggler",)
    window.remove("straggler")
    assert window.batch() is not None


def test_the_frontier_holds_mandatory_groups_and_those_that_finish_first() -> None:
    window = Window(config("2", batch_groups=2))
    for name, start in (("due", 0), ("quick", 2), ("slow", 2)):
        group = opened(window, name)
        window.start_member(group, f"{name}/0", start, sampled=True)
    window.publish(2)
    seconds = {"due": 100.0, "quick": 1.0, "slow": 50.0}
    selection = window.best_batch(lambda g: (seconds[g.name],))
    assert selection is not None
    assert selection.groups == ("quick", "due")
    assert selection.mandatory == selection.at_deadline == {"due"}


def test_room_near_the_end_is_what_can_still_train() -> None:
    window = Window(config("3", max_steps=3))
    assert window.room == 6
    for name in ("a", "b"):
        finished(window, name, 0)
    assert window.room == 4
    window.form(0, ["a", "b"])
    assert window.room == 4
    window.trained(0)
    window.publish(1)
    assert window.room == 4


def test_outstanding_lasts_until_the_product_is_published() -> None:
    window = Window(config("1"))
    for name in ("a", "b"):
        finished(window, name, 0)
    window.form(0, ["a", "b"])
    assert (window.outstanding, window.training, window.next_version) == (2, 0, 1)
    window.trained(0)
    assert (window.outstanding, window.training, window.next_version) == (2, None, 1)
    window.publish(1)
    assert window.outstanding == 0


class Histories(RuleBasedStateMachine):
    """Anything that can happen to a window whose user opens while there is room and starts while it may."""

    @initialize(alpha=st.sampled_from(ALPHAS), extra=st.integers(0, 2), batch=st.integers(1, 3), size=st.integers(2, 3))
    def begin(self, alpha: Decimal, extra: int, batch: int, size: int) -> None:
        self.config = config(
            str(alpha), batch_groups=batch, group_size=size, max_staleness=math.ceil(alpha) + extra, min_valid=1
        )
        self.window = Window(self.config)
        self.names = 0

    def pick(self, data: st.DataObject, finished: bool | None, started: bool | None) -> tuple[Group, str] | None:
        found = [
            (group, name)
            for group in self.window.open.values()
            for name, member in group.members.items()
            if finished in (None, member.finished) and started in (None, member.start is not None)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: self.window.room > 0)
    @rule()
    def open(self) -> None:
        self.names += 1
        opened(self.window, f"g{self.names}", self.config.group_size)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        choice = self.pick(data, finished=False, started=False)
        if choice is not None:
            group, name = choice
            if group.start is None:
                assert self.window.may_start(), "the window alone leaves room for every group to start"
            self.window.start_member(group, name, self.window.published, sampled=data.draw(st.booleans()))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        choice = self.pick(data, finished=False, started=True)
        if choice is not None:
            self.window.finish_member(*choice)

    @rule()
    def finish_everything(self) -> None:
        for group in list(self.window.open.values()):
            for name, member in list(group.members.items()):
                if member.start is not None:
                    self.window.finish_member(group, name)

    @rule(data=st.data(), replaced=st.booleans())
    def lose(self, data: st.DataObject, replaced: bool) -> None:
        choice = self.pick(data, finished=None, started=None)
        if choice is None:
            return
        group, name = choice
        index = group.members[name].index
        self.window.lose_member(group, name, replaced=replaced)
        if replaced:
            self.names += 1
            self.window.add_member(group, f"{name}+{self.names}", index)
        elif self.window.too_small(group):
            self.window.remove(group.name)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.window.open:
            self.window.remove(data.draw(st.sampled_from(sorted(self.window.open))))

    @rule()
    def form(self) -> None:
        # Also while an earlier batch is not trained: the theorem does not depend on the trainer's pace.
        selection = self.window.batch()
        if selection is not None:
            s, n = self.config.max_staleness, self.window.next_version
            starts = [self.window.open[name].start for name in selection.groups]
            assert all(start is not None and 0 <= n - start <= s for start in starts)
            assert len(set(selection.groups)) == self.config.batch_groups
            self.window.form(n, selection.groups)

    @rule()
    def train(self) -> None:
        if self.window.training is not None:
            self.window.trained(self.window.training)

    @rule()
    def publish(self) -> None:
        if self.window.published < self.window.held:
            self.window.publish(self.window.published + 1)

    @invariant()
    def bound_holds(self) -> None:
        if not hasattr(self, "window"):
            return
        s, n, b = self.config.max_staleness, self.window.next_version, self.config.batch_groups
        starts = [
            min(m.start for m in group.members.values() if m.start is not None)
            for group in self.window.open.values()
            if any(m.start is not None for m in group.members.values())
        ]
        for level in range(-1, s + 1):
            assert sum(start + s <= n + level for start in starts) <= (level + 1) * b
        assert self.window.stale() == ()
        assert self.window.outstanding <= self.config.window

    @invariant()
    def complete_groups_make_a_batch(self) -> None:
        """No deadlock: once everything open is complete and enough, a batch forms."""
        if hasattr(self, "window") and len(self.window.complete) == len(self.window.open) >= self.config.batch_groups:
            assert self.window.batch() is not None


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
