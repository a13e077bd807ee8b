"""Which host ids sandboxes get."""

from __future__ import annotations

import itertools

import pytest

from venusrl.sandboxes.protocol import RuntimeUnavailable
from venusrl.sandboxes.runtimes.namespace import userns

WHOLE = "         0          0 4294967295\n"
CONTAINER = "         0     100000      65536\n"


def test_a_whole_machine_gives_disjoint_ranges_above_everybody_elses() -> None:
    pool = userns.choose_pool(None, WHOLE, WHOLE)
    slots = [pool.take() for _ in range(300)]
    bases = sorted(slot.base for slot in slots)
    assert bases[0] == userns.DEFAULT_BASE
    assert all(b - a >= userns.RANGE for a, b in itertools.pairwise(bases))
    assert bases[-1] + userns.RANGE <= userns.DEFAULT_END


def test_a_slot_given_back_is_used_again() -> None:
    pool = userns.choose_pool(None, WHOLE, WHOLE)
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    assert pool.take() == first
    assert second != first


def test_a_small_container_shares_one_range_without_its_root() -> None:
    pool = userns.choose_pool(None, CONTAINER, CONTAINER)
    first, second = pool.take(), pool.take()
    assert first == second
    assert first.base > 0
    assert first.base + first.count <= 65536
    pool.give_back(first)
    pool.give_back(second)


def test_a_chosen_base_is_kept_or_refused() -> None:
    assert userns.choose_pool(524288, WHOLE, WHOLE).take().base == 524288
    with pytest.raises(RuntimeUnavailable, match="uid_base"):
        userns.choose_pool(524288, CONTAINER, CONTAINER)
    with pytest.raises(RuntimeUnavailable, match="uid_base"):
        userns.choose_pool(0, WHOLE, WHOLE)


def test_too_few_ids_say_what_to_do() -> None:
    with pytest.raises(RuntimeUnavailable, match="at least 0"):
        userns.choose_pool(None, "0 1000 1\n", "0 1000 1\n")


def test_both_maps_count() -> None:
    with pytest.raises(RuntimeUnavailable):
        userns.choose_pool(None, WHOLE, "0 1000 1\n")
