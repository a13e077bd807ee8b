"""Which groups a batch takes, and the lag that follows: golden against what is known of the originals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from itertools import combinations, permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling import events as ev
from venusrl.scheduling import quota
from venusrl.scheduling.actions import FinishRun
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies.registry import find
from venusrl.scheduling.scheduler import Scheduler
from venusrl.scheduling.window import Window
from venusrl.testing.virtual_run import VirtualRun, Workload


def config(alpha: str = "2", batch: int = 2, **changes: Any) -> SchedulerConfig:
    return SchedulerConfig(batch, 2, Decimal(alpha), changes.pop("max_staleness", math.ceil(Decimal(alpha))), **changes)


def window(count: int, **changes: Any) -> Window:
    """``count`` groups, all started at version 0."""
    made = Window(config(**changes))
    for number in range(count):
        name = f"g{number}"
        made.open_group(name, "t", number, 2, 0)
        for index in range(2):
            made.add_member(made.open[name], f"{name}/{index}", index)
            made.start_member(made.open[name], f"{name}/{index}", 0, sampled=True)
    return made


def complete(made: Window, *numbers: int) -> None:
    for number in numbers:
        for index in range(2):
            made.finish_member(made.open[f"g{number}"], f"g{number}/{index}")


def batch(made: Window) -> list[int] | None:
    selection = made.batch()
    return None if selection is None else [int(name[1:]) for name in selection.groups]


def test_by_completion_and_in_order_of_tasks() -> None:
    any_, ordered = window(6, consumption="completion"), window(6, consumption="in_order")
    for made in (any_, ordered):
        complete(made, 4, 2, 3)
    assert batch(any_) == [4, 2]
    assert batch(ordered) is None
    assert ordered.obstacles() == ("g0", "g1")
    complete(ordered, 1, 0)
    assert batch(ordered) == [0, 1]


def test_a_window_reaches_so_far_behind_the_oldest_unfinished_task() -> None:
    made = window(6, consumption="windowed", consumption_window=3)
    complete(made, 5, 3, 2)
    assert batch(made) is None
    assert made.obstacles() == ("g0", "g1")
    complete(made, 1)
    assert batch(made) == [2, 1]
    complete(made, 0)  # Now the oldest unfinished is g4, and g5 came first.
    assert batch(made) == [5, 3]


def test_what_the_quota_forces_comes_first_in_every_mode() -> None:
    """g4 and g5 started long before the others: they train now or never."""
    for consumption, width in (("completion", None), ("in_order", None), ("windowed", 2)):
        made = Window(config(consumption=consumption, consumption_window=width))
        made.publish(2)
        for number in range(6):
            made.open_group(f"g{number}", "t", number, 2, 0)
            for index in range(2):
                made.add_member(made.open[f"g{number}"], f"g{number}/{index}", index)
                made.start_member(made.open[f"g{number}"], f"g{number}/{index}", 0 if number > 3 else 2, sampled=True)
        complete(made, 0, 1, 4)
        assert batch(made) is None
        complete(made, 5)
        assert batch(made) == [4, 5]


def test_a_cohort_opens_when_the_last_one_is_in_a_batch_and_new_weights_wait_for_it() -> None:
    scheduler = Scheduler(config("1", batch=2, cohorts=True))
    opened = scheduler.handle(ev.VersionPublished(0), 0.0)
    assert len(opened) == 2  # The window has room for four.
    made = window(2, alpha="1", cohorts=True)
    seen = [(made.publication_waits, made.room)]
    for number in range(2):
        complete(made, number)
        seen.append((made.publication_waits, made.room))
    made.form(0, ["g0", "g1"])
    seen.append((made.publication_waits, made.room))
    assert seen == [(True, 0), (True, 0), (False, 0), (False, 2)]


@pytest.mark.parametrize("consumption", ["oldest", "completion", "in_order", "windowed"])
def test_every_small_case_against_a_search_of_all_batches(consumption: Any) -> None:
    """Four groups, batches of two, all starts and orders of completion: the best admissible pair, or none."""
    width = 2 if consumption == "windowed" else None
    made = config(alpha="1", max_staleness=2, consumption=consumption, consumption_window=width)
    for starts in product((0, 1), repeat=4):
        for done in (d for count in range(5) for d in permutations(range(4), count)):
            window = Window(made)
            window.publish(1)
            for number, start in enumerate(starts):
                window.open_group(f"g{number}", "t", number, 2, 0)
                for index in range(2):
                    window.add_member(window.open[f"g{number}"], f"g{number}/{index}", index)
                    window.start_member(window.open[f"g{number}"], f"g{number}/{index}", start, sampled=True)
            complete(window, *done)
            expected = searched(consumption, width or 0, starts, done)
            found = batch(window)
            assert (None if found is None else sorted(found)) == expected, (starts, done)


def searched(consumption: str, width: int, starts: tuple[int, ...], done: tuple[int, ...]) -> list[int] | None:
    """What ``Window.batch`` should answer for version 1, batches of 2 and a bound of 2, by trying all pairs."""
    lasts = Counter(start + 2 for start in starts)
    pairs = [
        pair for pair in combinations(range(4), 2) if quota.is_admissible([starts[g] + 2 for g in pair], lasts, 1, 2, 2)
    ]

    def best(allowed: set[int], rank: Callable[[int], tuple[int, ...]]) -> list[int] | None:
        chosen = min((p for p in pairs if set(p) <= allowed), key=lambda p: sorted(map(rank, p)), default=None)
        return None if chosen is None else list(chosen)

    place = {group: number for number, group in enumerate(done)}
    if consumption == "in_order":
        ordered = best(set(range(4)), lambda g: (g,))
        return ordered if ordered is not None and set(ordered) <= set(done) else None
    if consumption == "oldest":
        return best(set(done), lambda g: (starts[g], place[g]))
    if consumption == "windowed":
        reach = set(range(4)) & set(range(min((g for g in range(4) if g not in place), default=4) + width))
        inside = best(reach & set(done), lambda g: (place[g],))
        if inside is not None or best(reach, lambda g: (place.get(g, 9), g)) is not None:
            return inside
    return best(set(done), lambda g: (place[g],))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"consumption": "windowed"}, "consumption_window"),
        ({"consumption_window": 4}, "consumption_window"),
        ({"consumption": "windowed", "consumption_window": 1}, "consumption_window"),
        ({"consumption": "in_order", "deadline": "drop"}, "drop"),
        ({"alpha": "1", "cohorts": True, "deadline": "drop"}, "drop"),
        ({"cohorts": True}, "one step off"),
    ],
)
def test_modes_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def lags(name: str, alpha: str, *, fast: bool = True, extra: int = 0, steps: int = 12) -> Counter[int]:
    """Staleness of trained trajectories, the first steps apart."""
    base = config(alpha, batch=4, max_staleness=math.ceil(Decimal(alpha)) + extra, max_steps=steps)
    turn_s = (1.0, 2.0) if fast else (20.0, 300.0)
    load = Workload(turns=(1, 1), turn_s=turn_s, train_s=60.0, publish_s=0.0, load_s=(0.0, 0.0), slots=1000)
    load = Workload(**{f: getattr(load, f) for f in load.__struct_fields__} | {"drain": alpha == "0"})
    baseline = find(name)
    run = VirtualRun(Scheduler(baseline.config(base), baseline.policy()), load).run()
    assert run.ended == FinishRun("max_steps")
    assert not run.cancelled
    return Counter(s for trained in run.batches[4:] for s in trained.staleness)


@pytest.mark.parametrize(
    ("alpha", "shares"),
    [
        ("0", {0: 1.0}),
        ("0.5", {1: 0.5, 0: 0.5}),
        ("1", {1: 1.0}),
        ("1.5", {2: 0.5, 1: 0.5}),
        ("2.5", {3: 0.5, 2: 0.5}),
        ("3", {3: 1.0}),
    ],
)
def test_the_lags_of_roll_by_async_factor(alpha: str, shares: dict[int, float]) -> None:
    """As its own buffer gave them with fast generation; and however large the run's bound is."""
    for extra in (0, 2):
        counted = lags("rollflash", alpha, extra=extra)
        total = sum(counted.values())
        assert {lag: count / total for lag, count in counted.items()} == shares


@pytest.mark.parametrize("alpha", ["1", "2", "3"])
@pytest.mark.parametrize("fast", [True, False])
def test_in_rolls_agentic_queues_every_sample_sits_at_the_async_factor(alpha: str, fast: bool) -> None:
    """Its environments take an episode when they are free, so that slow ones start later and lag less."""
    counted = lags("rollflash-agentic", alpha, fast=fast)
    if fast:
        assert set(counted) == {int(alpha)}
    assert max(counted) <= int(alpha)


def test_one_step_off_lags_by_one_with_one_version_a_cohort() -> None:
    for alpha in ("1", "2.5"):
        assert set(lags("slime-one-step-off", alpha)) == {1}
    baseline = find("slime-one-step-off")
    load = Workload(turns=(1, 6), stragglers=0.1, train_s=5.0, drain=True)
    base = config("1", batch=3, max_steps=8)
    run = VirtualRun(Scheduler(baseline.config(base), baseline.policy()), load, seed=4).run()
    for trained in run.batches:
        versions = {
            v for name in trained.groups for e in run.episodes.values() if e.group == name for v in e.versions or ()
        }
        assert versions == {max(0, trained.version - 1)}


def test_a_straggler_holds_up_the_queue_that_takes_tasks_in_order() -> None:
    load = Workload(turns=(1, 3), stragglers=0.06, straggler_factor=15.0, train_s=2.0, slots=1000, publish_s=0.1)
    base = config("2", batch=4, max_steps=10, max_staleness=4)
    clocks = {}
    for name in ("rollflash-agentic", "slime"):
        baseline = find(name)
        clocks[name] = sum(
            VirtualRun(Scheduler(baseline.config(base), baseline.policy()), load, seed).run().clock.monotonic()
            for seed in range(5)
        )
    assert clocks["slime"] < 0.9 * clocks["rollflash-agentic"]


@settings(max_examples=8)
@given(
    consumption=st.sampled_from(("completion", "in_order", "windowed")),
    alpha=st.sampled_from(("0.5", "1", "2", "3")),
    extra=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_no_mode_ever_blocks(consumption: Any, alpha: str, extra: int, seed: int) -> None:
    made = config(
        alpha,
        batch=3,
        max_staleness=math.ceil(Decimal(alpha)) + extra,
        max_steps=5,
        max_dead_groups=1000,
        consumption=consumption,
        consumption_window=3 if consumption == "windowed" else None,
        cohorts=Decimal(alpha) <= 1 and bool(seed % 2),
    )
    load = Workload(stragglers=0.1, failures=0.2, retries=1, deaths_every_s=60.0, slots=2)
    assert VirtualRun(Scheduler(made), load, seed).run().ended == FinishRun("max_steps")
