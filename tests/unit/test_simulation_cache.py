"""KV residency: what is found, what is evicted first, and exact counts under any sequence of requests."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.simulation.cache import RELEASED, RETAINED, Cache, Found, Path


def run(cache: Cache, trajectory: str, group: str, shared: int, own: int) -> tuple[int, int]:
    """A request from start to end; what it found of prefix and own tokens."""
    found = cache.occupy(trajectory, path(group, shared))
    cache.vacate(trajectory, found.node, own, cache.epoch)
    return found.path, found.own


def path(group: str, shared: int) -> Path:
    return ((group, shared),) if shared else ()


def test_the_next_turn_finds_the_prefix_and_its_own_tokens() -> None:
    cache = Cache()
    assert run(cache, "a", "g", 100, 50) == (0, 0)
    assert run(cache, "a", "g", 100, 80) == (100, 50)
    assert (cache.idle, cache.pinned) == (180, 0)


def test_a_groups_prefix_is_counted_once_and_found_by_its_siblings() -> None:
    cache = Cache()
    first = cache.occupy("a", path("g", 100)).node
    second, found, *_ = cache.occupy("b", path("g", 100))
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
    assert (cache.lacking(path("g", 100)), cache.own("b")) == (100, 35)
    assert run(cache, "a", "g", 100, 50) == (0, 0)


def test_a_prefix_stays_while_anything_hangs_below_it() -> None:
    cache = Cache()
    run(cache, "a", "g", 100, 50)
    run(cache, "b", "h", 0, 40)
    run(cache, "c", "g", 100, 60)
    cache.evict(50 + 40)
    assert cache.lacking(path("g", 100)) == 0
    assert (cache.own("a"), cache.own("b"), cache.own("c")) == (0, 0, 60)
    cache.evict(60)
    assert cache.lacking(path("g", 100)) == 0
    cache.evict(40)
    assert cache.lacking(path("g", 100)) == 40


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
    prefix = cache.occupy("a", path("a", 0)).node
    cache.rank("a", RETAINED)
    cache.vacate("a", prefix, 10, cache.epoch)
    run(cache, "b", "b", 0, 10)
    cache.evict(10)
    assert (cache.own("a"), cache.own("b")) == (10, 0)


def test_what_ran_across_a_flush_serves_nobody_later() -> None:
    cache = Cache()
    prefix = cache.occupy("a", path("g", 100)).node
    epoch = cache.epoch
    run(cache, "b", "g", 100, 10)
    cache.flush()
    assert (cache.idle, cache.pinned) == (0, 100)
    other, found, *_ = cache.occupy("c", path("g", 100))
    assert found == 0
    assert cache.pinned == 200
    cache.vacate("a", prefix, 50, epoch)
    assert (cache.idle, cache.pinned, cache.own("a")) == (0, 100, 0)
    cache.vacate("c", other, 50, cache.epoch)
    assert (cache.idle, cache.pinned) == (150, 0)


def test_a_prefix_that_nobody_finished_computing_is_cut() -> None:
    cache = Cache()
    prefix = cache.occupy("a", path("g", 100)).node
    assert prefix is not None
    cache.vacate("a", prefix, 0, cache.epoch, [(prefix, 70)])
    assert (cache.idle, cache.lacking(path("g", 100))) == (30, 70)
    prefix, found, *_ = cache.occupy("a", path("g", 100))
    assert prefix is not None
    assert found == 30
    cache.vacate("a", prefix, 0, cache.epoch, [(prefix, 100)])
    assert (cache.idle, cache.lacking(path("g", 100))) == (0, 100)


TREE: dict[str, Path] = {
    "t0": (),
    "t1": (("g", 25),),
    "t2": (("g", 25), ("g1", 10), ("g2", 30)),
    "t3": (("g", 25), ("g1", 10), ("g2", 30), ("g3", 5)),
    "t4": (("g", 25), ("g1", 10), ("h2", 20)),
    "t5": (("h", 40), ("h1", 15)),
    "t6": (("h", 40), ("h1", 15)),
    "t7": (("i", 50),),
}
"""What each trajectory may share, to its end."""


class Model:
    """The cache's books kept the plain way: who runs, with how much of a path, since which flush."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.running: dict[str, tuple[Found, int, int]] = {}
        self.depth: dict[str, int] = {}
        """How far along its path each trajectory came: that never shrinks."""

    def start(self, name: str, depth: int) -> None:
        depth = self.depth[name] = min(len(TREE[name]), max(depth, self.depth.get(name, 0)))
        path, before, own = TREE[name][:depth], self.cache.pinned, self.cache.own(name)
        lacking, growth = self.cache.lacking(path), self.cache.newly_pinned(path)
        found = self.cache.occupy(name, path)
        assert self.cache.pinned == before + growth
        assert found.path == sum(tokens for _, tokens in path) - sum(tokens for _, tokens in found.lacking)
        assert lacking - own <= sum(tokens for _, tokens in found.lacking) <= lacking
        assert found.own <= own
        self.running[name] = (found, depth, self.cache.epoch)

    def stop(self, name: str, own: int) -> None:
        found, depth, epoch = self.running.pop(name)
        end, rest = depth, own
        while end < len(TREE[name]) and TREE[name][end][1] <= rest:
            rest -= TREE[name][end][1]
            end += 1
        self.depth[name] = end
        self.cache.vacate(name, found.node, own, epoch, onwards=TREE[name][depth:end])
        assert self.cache.own(name) == (rest if epoch == self.cache.epoch else 0)

    def abort(self, name: str) -> None:
        """It ends with nothing of its prompt computed; the end of its path goes if only it needed that (who came later
        cannot have ended before)."""
        found, _, epoch = self.running.pop(name)
        alone = takewhile(lambda lack: lack[0].running == lack[0].children == 1, reversed(found.lacking))
        self.cache.vacate(name, found.node, 0, epoch, list(alone))

    def check(self) -> None:
        paths = [found.node.up() for found, _, _ in self.running.values() if found.node is not None]
        assert self.cache.pinned == sum({id(node): node.tokens for path in paths for node in path}.values())
        shared, owns = list(self.cache._shared.values()), list(self.cache._owns.values())
        assert self.cache.idle == sum(node.tokens for node in [*owns, *(node for node in shared if not node.running)])
        assert all(node.tokens > 0 for node in [*owns, *shared])
        above = [node.prefix for node in [*owns, *shared] if node.prefix is not None]
        assert all(self.cache._shared[node.key] is node for node in above)
        for node in shared:
            below = sum(other is node for other in above)
            assert node.children == below + sum(found.node is node for found, _, _ in self.running.values())
        ordered = [node for order in self.cache._order for node in order]
        leaves = [node for node in shared if not node.children]
        assert sorted(map(id, ordered)) == sorted(map(id, [*owns, *leaves]))


STEPS = st.lists(
    st.tuples(st.sampled_from("ssssdefirma"), st.integers(0, 7), st.integers(1, 60)), min_size=20, max_size=80
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.booleans())
def test_counts_are_exact_whatever_happens(steps: list[tuple[str, int, int]], whole: bool) -> None:
    cache = Cache(whole=whole, control=True)
    model = Model(cache)
    for what, number, amount in steps:
        name = f"t{number}"
        if what == "s" and name not in model.running:
            model.start(name, amount % 5)
        elif what in "se" and name in model.running:
            model.stop(name, amount if what == "s" else 0)
        elif what == "a" and name in model.running:
            model.abort(name)
        elif what == "d":
            before = cache.idle
            gone = cache.evict(amount)
            assert gone >= min(amount, before)
            assert whole or gone == min(amount, before)
        elif what == "f" and amount > 50:
            cache.flush()
        elif what == "i" and name not in model.running:
            cache.insert(name, TREE[name][: model.depth.get(name, 0)], amount)
        elif what == "r":
            cache.rank(name, amount % 3)
        elif what == "m" and name not in model.running:
            cache.drop(name)
        model.check()
    for name in list(model.running):
        model.stop(name, 5)
    model.check()
    cache.evict(10**9)
    assert cache.idle == 0
    assert not cache._shared
    model.check()


def test_what_a_sibling_computed_of_the_same_tokens_is_found_and_counted_once() -> None:
    cache = Cache()
    first = cache.occupy("a", (("g", 100),))
    cache.vacate("a", first.node, 70, cache.epoch, onwards=(("g1", 60),))
    assert (cache.idle, cache.own("a")) == (170, 10)
    # b decodes the same 60 tokens, and 5 others.
    second = cache.occupy("b", (("g", 100),))
    cache.vacate("b", second.node, 65, cache.epoch, onwards=(("g1", 60),))
    assert (cache.idle, cache.own("b")) == (175, 5)
    third = cache.occupy("c", (("g", 100), ("g1", 60), ("g2", 20)))
    assert (third.path, third.own) == (160, 0)
    assert [tokens for _, tokens in third.lacking] == [20]
    cache.vacate("c", third.node, 0, cache.epoch, third.lacking)
    # Tails go before what they hang below.
    assert cache.evict(15) == 15
    assert cache.lacking((("g", 100), ("g1", 60))) == 0
    assert cache.evict(30) == 30
    assert cache.lacking((("g", 100), ("g1", 60))) == 30


def test_own_tokens_that_others_came_to_share_are_found_as_such() -> None:
    cache = Cache()
    cache.insert("a", (("g", 100),), 50)
    found = cache.occupy("a", (("g", 100), ("g1", 30), ("g2", 40)))
    assert (found.path, found.own) == (150, 0)
    assert [(node.key, tokens) for node, tokens in found.lacking] == [("g2", 20)]
    assert (cache.idle, cache.pinned) == (0, 170)


def test_nothing_idle_nothing_evicted() -> None:
    cache = Cache()
    cache.occupy("a", path("g", 100))
    assert cache.evict(10) == 0
    assert cache.pinned == pytest.approx(100)
