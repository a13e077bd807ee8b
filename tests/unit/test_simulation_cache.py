"""KV residency: what is found, what is evicted first, and exact counts under any sequence of requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.simulation.cache import RELEASED, RETAINED, Cache, Node


def run(cache: Cache, trajectory: str, group: str, shared: int, own: int) -> tuple[int, int]:
    """A request from start to end; what it found of prefix and own tokens."""
    prefix, found, found_own = cache.occupy(trajectory, group, shared)
    cache.vacate(trajectory, prefix, own, cache.epoch)
    return found, found_own


def test_the_next_turn_finds_the_prefix_and_its_own_tokens() -> None:
    cache = Cache()
    assert run(cache, "a", "g", 100, 50) == (0, 0)
    assert run(cache, "a", "g", 100, 80) == (100, 50)
    assert (cache.idle, cache.pinned) == (180, 0)


def test_a_groups_prefix_is_counted_once_and_found_by_its_siblings() -> None:
    cache = Cache()
    first, _, _ = cache.occupy("a", "g", 100)
    second, found, _ = cache.occupy("b", "g", 100)
    assert found == 100
    assert cache.pinned == 100
    cache.vacate("a", first, 30, cache.epoch)
    assert (cache.idle, cache.pinned) == (30, 100)
    cache.vacate("b", second, 20, cache.epoch)
    assert (cache.idle, cache.pinned) == (150, 0)


def test_the_least_recently_used_goes_first_from_its_tail_and_its_prefix_last() -> None:
    cache = Cache()
    run(cache, "a", "g", 100, 50)
    run(cache, "b", "h", 10, 40)
    assert cache.evict(20) == 20
    assert (cache.own("a"), cache.own("b")) == (30, 40)
    # All of a's own tokens, then its childless prefix, then b's.
    assert cache.evict(135) == 135
    assert (cache.lacking("g", 100), cache.own("b")) == (100, 35)
    assert run(cache, "a", "g", 100, 50) == (0, 0)


def test_a_prefix_stays_while_anything_hangs_below_it() -> None:
    cache = Cache()
    run(cache, "a", "g", 100, 50)
    run(cache, "b", "h", 0, 40)
    run(cache, "c", "g", 100, 60)
    cache.evict(50 + 40)
    assert cache.lacking("g", 100) == 0
    assert (cache.own("a"), cache.own("b"), cache.own("c")) == (0, 0, 60)
    cache.evict(60)
    assert cache.lacking("g", 100) == 0
    cache.evict(40)
    assert cache.lacking("g", 100) == 40


def test_whole_sequences_are_evicted_where_the_engine_does_so() -> None:
    cache = Cache(whole=True)
    run(cache, "a", "g", 0, 50)
    run(cache, "b", "h", 0, 40)
    assert cache.evict(1) == 50
    assert (cache.own("a"), cache.own("b")) == (0, 40)


def test_hints_order_eviction_only_where_the_engine_has_such_a_control() -> None:
    for control in (True, False):
        cache = Cache(control=control)
        for name in "abc":
            run(cache, name, name, 0, 10)
        cache.rank("a", RETAINED)
        cache.rank("c", RELEASED)
        cache.evict(10)
        assert cache.own("c") == (0 if control else 10)
        assert cache.own("a") == (10 if control else 0)


def test_a_hint_ends_with_the_next_request() -> None:
    cache = Cache(control=True)
    run(cache, "a", "a", 0, 10)
    cache.rank("a", RETAINED)
    run(cache, "a", "a", 0, 10)
    run(cache, "b", "b", 0, 10)
    cache.evict(10)
    assert (cache.own("a"), cache.own("b")) == (0, 10)


def test_a_hint_given_while_the_request_runs_holds_for_what_it_leaves() -> None:
    cache = Cache(control=True)
    prefix, _, _ = cache.occupy("a", "a", 0)
    cache.rank("a", RETAINED)
    cache.vacate("a", prefix, 10, cache.epoch)
    run(cache, "b", "b", 0, 10)
    cache.evict(10)
    assert (cache.own("a"), cache.own("b")) == (10, 0)


def test_what_ran_across_a_flush_serves_nobody_later() -> None:
    cache = Cache()
    prefix, _, _ = cache.occupy("a", "g", 100)
    epoch = cache.epoch
    run(cache, "b", "g", 100, 10)
    cache.flush()
    assert (cache.idle, cache.pinned) == (0, 100)
    other, found, _ = cache.occupy("c", "g", 100)
    assert found == 0
    assert cache.pinned == 200
    cache.vacate("a", prefix, 50, epoch)
    assert (cache.idle, cache.pinned, cache.own("a")) == (0, 100, 0)
    cache.vacate("c", other, 50, cache.epoch)
    assert (cache.idle, cache.pinned) == (150, 0)


def test_a_prefix_that_nobody_finished_computing_is_cut() -> None:
    cache = Cache()
    prefix, _, _ = cache.occupy("a", "g", 100)
    cache.vacate("a", prefix, 0, cache.epoch, missing=70)
    assert (cache.idle, cache.lacking("g", 100)) == (30, 70)
    prefix, found, _ = cache.occupy("a", "g", 100)
    assert found == 30
    cache.vacate("a", prefix, 0, cache.epoch, missing=100)
    assert (cache.idle, cache.lacking("g", 100)) == (0, 100)


class Model:
    """The cache's books kept the plain way."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.running: dict[str, tuple[Node | None, str, int]] = {}

    def check(self) -> None:
        pinned = {id(node): node.tokens for node, _, _ in self.running.values() if node is not None}
        assert self.cache.pinned == sum(pinned.values())
        owns = sum(node.tokens for node in self.cache._owns.values())
        prefixes = sum(node.tokens for node in self.cache._prefixes.values() if not node.running)
        assert self.cache.idle == owns + prefixes
        for node in self.cache._owns.values():
            assert node.tokens > 0
            assert node.prefix is None or self.cache._prefixes[node.prefix.key] is node.prefix
        ordered = [node for order in self.cache._order for node in order]
        leaves = [n for n in self.cache._prefixes.values() if not n.children and not n.running]
        assert sorted(map(id, ordered)) == sorted(map(id, [*self.cache._owns.values(), *leaves]))


STEPS = st.lists(
    st.tuples(st.sampled_from("soodefirm"), st.integers(0, 7), st.integers(1, 60)), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.booleans())
def test_counts_are_exact_whatever_happens(steps: list[tuple[str, int, int]], whole: bool) -> None:
    cache = Cache(whole=whole, control=True)
    model = Model(cache)
    for what, number, amount in steps:
        name, group = f"t{number}", f"g{number % 3}"
        shared = 25 * (number % 3)
        if what == "s" and name not in model.running:
            prefix, _, _ = cache.occupy(name, group, shared)
            model.running[name] = (prefix, group, cache.epoch)
        elif what in "oe" and name in model.running:
            prefix, _, epoch = model.running.pop(name)
            cache.vacate(name, prefix, amount if what == "o" else 0, epoch)
        elif what == "d":
            before = cache.idle
            gone = cache.evict(amount)
            assert gone >= min(amount, before)
            assert whole or gone == min(amount, before)
        elif what == "f" and amount > 50:
            cache.flush()
        elif what == "i" and name not in model.running:
            cache.insert(name, group, shared, amount)
        elif what == "r":
            cache.rank(name, amount % 3)
        elif what == "m" and name not in model.running:
            cache.drop(name)
        model.check()
    for name, (prefix, _, epoch) in model.running.items():
        cache.vacate(name, prefix, 5, epoch)
    model.running.clear()
    model.check()
    cache.evict(10**9)
    assert cache.idle == 0
    model.check()


def test_nothing_idle_nothing_evicted() -> None:
    cache = Cache()
    cache.occupy("a", "g", 100)
    assert cache.evict(10) == 0
    assert cache.pinned == pytest.approx(100)
