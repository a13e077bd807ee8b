"""The quota's arithmetic against brute force over all batches."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from venusrl.scheduling.quota import Candidate, cumulative, excess, is_admissible, obstacles, required, select

N = 10


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], int, int]:
    """Started and unstarted groups around version N, a batch size and a staleness bound."""
    batch_groups, staleness = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    last = st.none() | st.integers(N - 1, N + staleness)
    lasts = draw(st.lists(last, max_size=7))
    ranks = draw(st.permutations(range(len(lasts))))
    return [Candidate(f"g{i}", v, (ranks[i],)) for i, v in enumerate(lasts)], batch_groups, staleness


def _lasts(groups: list[Candidate]) -> Counter[int]:
    return Counter(c.last for c in groups if c.last is not None)


def _admissible_batches(
    groups: list[Candidate], usable: list[Candidate], batch_groups: int, staleness: int
) -> list[tuple[Candidate, ...]]:
    lasts = _lasts(groups)
    return [
        batch
        for batch in combinations(usable, batch_groups)
        if is_admissible([c.last for c in batch], lasts, N, batch_groups, staleness)
    ]


def test_cumulative_counts_every_group_at_its_level_and_above() -> None:
    assert cumulative({N - 1: 1, N: 2, N + 2: 3}, N, 2) == [1, 3, 3, 6]


def test_required_leaves_each_later_batch_its_share() -> None:
    assert required({N: 2, N + 1: 3, N + 2: 4}, N, 4, 2) == [2, 1, 1]


@given(situations(), st.data())
def test_select_finds_the_best_admissible_batch_iff_one_exists(
    situation: tuple[list[Candidate], int, int], data: st.DataObject
) -> None:
    groups, batch_groups, staleness = situation
    usable = [c for c in groups if data.draw(st.booleans())]
    chosen = select(usable, required(_lasts(groups), N, batch_groups, staleness), N, batch_groups)
    possible = _admissible_batches(groups, usable, batch_groups, staleness)
    if not possible:
        assert chosen is None
        return
    assert chosen is not None
    by_name = {c.group: c for c in groups}
    assert tuple(by_name[name] for name in sorted(chosen.groups)) in possible
    # Lowest ranks, compared from the highest one down: the frontier's slowest member is as early as can be.
    assert sorted((by_name[g].rank for g in chosen.groups), reverse=True) == min(
        sorted((c.rank for c in batch), reverse=True) for batch in possible
    )
    assert chosen.at_deadline == {c.group for c in groups if c.last == N} & set(chosen.groups)
    assert chosen.at_deadline <= chosen.mandatory <= set(chosen.groups)


@given(situations(), st.data())
def test_obstacles_are_the_fewest_whose_removal_lets_a_batch_form(
    situation: tuple[list[Candidate], int, int], data: st.DataObject
) -> None:
    groups, batch_groups, staleness = situation
    groups = [c for c in groups if c.last is None or c.last >= N]
    complete = [c for c in groups if c.last is not None and data.draw(st.booleans())]
    incomplete = [c for c in groups if c not in complete]
    if len(complete) < batch_groups:
        return
    needs = required(_lasts(groups), N, batch_groups, staleness)
    if any(need > batch_groups for need in needs):
        return
    removed = obstacles(_lasts(complete), incomplete, needs, N)

    def formable(without: tuple[str, ...]) -> bool:
        left = [c for c in groups if c.group not in without]
        return bool(_admissible_batches(left, complete, batch_groups, staleness))

    assert set(removed) <= {c.group for c in incomplete}
    assert formable(removed)
    fewer = len(removed) - 1
    assert fewer < 0 or not any(formable(tuple(c.group for c in drop)) for drop in combinations(incomplete, fewer))


@given(situations())
def test_excess_is_the_fewest_whose_loss_restores_the_bound(situation: tuple[list[Candidate], int, int]) -> None:
    groups, batch_groups, staleness = situation

    def sound(without: tuple[str, ...]) -> bool:
        left = _lasts([c for c in groups if c.group not in without])
        return all(count <= level * batch_groups for level, count in enumerate(cumulative(left, N, staleness)))

    given_up = excess(groups, N, batch_groups, staleness)
    assert sound(given_up)
    started = [c.group for c in groups if c.last is not None]
    assert not given_up or not any(sound(drop) for drop in combinations(started, len(given_up) - 1))
