"""Rows, baselines and micro-batches: what trains, what counts, what is padding (T19, T20, T24)."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from venusrl.testing.batches import make_batch, make_segment, make_trajectory
from venusrl.training.batching import MicroBatch, Row, Rows, plan, rows_of
from venusrl.training.errors import BatchError
from venusrl.types import Batch, FailureKind, Group, Segment, Trajectory, VersionSpan

SEGMENT = Segment([1, 2, 3], [False, True, True], [0.0, -0.5, -0.25], [VersionSpan(0, 1, 3)])


def batch_of(*groups: list[Trajectory], version: int = 0) -> Batch:
    return Batch("b", version, [Group(f"g{i}", f"t{i}", i, 0, list(group)) for i, group in enumerate(groups)])


def advantages_of(rows: Rows) -> list[float]:
    return [row.advantage for row in rows.rows]


def plain(rewards: list[float], group: str = "g0") -> list[Trajectory]:
    return [make_trajectory(f"{group}/{index}", [SEGMENT], reward) for index, reward in enumerate(rewards)]


# --- cases --------------------------------------------------------------------------------------------------------
def test_T19_infrastructure_failures_reach_neither_baseline_nor_loss() -> None:
    members = plain([1.0, 0.0, 1.0])
    failed = make_trajectory("g0/3", [SEGMENT], 0.0, failure=FailureKind.INFRASTRUCTURE)
    policy = make_trajectory("g0/4", [SEGMENT], 0.0, failure=FailureKind.POLICY)
    without = rows_of(batch_of([*members, policy]), normalize_std=True)
    with_failed = rows_of(batch_of([*members, failed, policy]), normalize_std=True)
    assert advantages_of(with_failed) == advantages_of(without)
    assert with_failed.sampled_tokens == without.sampled_tokens == 8
    assert with_failed.rewards == [1.0, 0.0, 1.0, 0.0]


def test_T20_masked_sample_does_not_shift_the_mean() -> None:
    masked = make_trajectory("g0/2", [SEGMENT], None, failure=FailureKind.CANCELLED)
    rows = rows_of(batch_of([*plain([1.0, 1.0]), masked]), normalize_std=True)
    assert advantages_of(rows) == advantages_of(rows_of(batch_of(plain([1.0, 1.0])), normalize_std=True)) == [0.0, 0.0]


def test_T24_the_baseline_is_over_trajectories_not_rows() -> None:
    long = [make_trajectory(f"g0/{i}", [SEGMENT] * count, float(i > 1)) for i, count in enumerate((1, 1, 2, 2))]
    rows = rows_of(batch_of(long), normalize_std=False)
    assert advantages_of(rows) == [-0.5, -0.5, 0.5, 0.5, 0.5, 0.5]
    assert rows.rewards == [0.0, 0.0, 1.0, 1.0]


# --- rows ---------------------------------------------------------------------------------------------------------
def test_a_row_ends_with_its_last_sampled_token() -> None:
    segment = Segment([5, 6, 7, 8], [False, True, False, False], [0.0, -1.0, 0.0, 0.0], [VersionSpan(2, 1, 2)])
    rows = rows_of(
        batch_of([make_trajectory("g0/0", [segment], 1.0, version=2), *plain([0.0])[:1]], version=3), normalize_std=True
    )
    row = rows.rows[0]
    assert (row.tokens.tolist(), row.sampled.tolist(), row.length) == ([5, 6], [1], 1)
    assert row.current.tolist() == [False]
    assert rows.staleness == [1, 3]


def test_tokens_of_the_trained_version_are_marked() -> None:
    segment = Segment(
        [1, 2, 3, 4], [False, True, True, True], [0.0, -1.0, -1.0, -1.0], [VersionSpan(3, 1, 2), VersionSpan(4, 2, 4)]
    )
    rows = rows_of(batch_of([make_trajectory("g0/0", [segment], 1.0, version=3)], version=4), normalize_std=True)
    assert rows.rows[0].current.tolist() == [False, True, True]


BROKEN = {
    "differ in length": msgspec.structs.replace(SEGMENT, logprobs=[0.0]),
    "first token": Segment([1], [True], [-1.0], [VersionSpan(0, 0, 1)]),
    "do not cover": msgspec.structs.replace(SEGMENT, spans=[VersionSpan(0, 1, 2)]),
    "of version 7": msgspec.structs.replace(SEGMENT, spans=[VersionSpan(7, 1, 3)]),
    "is not one": msgspec.structs.replace(SEGMENT, logprobs=[0.0, float("nan"), -1.0]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_segment_is_refused_by_name(message: str) -> None:
    with pytest.raises(BatchError, match=f"g0/0, segment 0.*{message}"):
        rows_of(batch_of([make_trajectory("g0/0", [BROKEN[message]], 1.0)]), normalize_std=True)


def test_a_batch_without_valid_trajectories_is_refused() -> None:
    with pytest.raises(BatchError, match="no trajectory"):
        rows_of(batch_of([make_trajectory("g0/0", [SEGMENT], None)]), normalize_std=True)


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(BatchError, match="reward nan"):
        rows_of(batch_of(plain([float("nan"), 1.0])), normalize_std=True)


def test_shuffled_rewards_are_a_permutation_fixed_by_seed_and_version() -> None:
    batch = make_batch(3, groups=4, size=4, rewards=[[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]])
    plainly = rows_of(batch, normalize_std=False)
    first = rows_of(batch, normalize_std=False, shuffle_seed=1)
    again = rows_of(batch, normalize_std=False, shuffle_seed=1)
    other = rows_of(msgspec.structs.replace(batch, version=4), normalize_std=False, shuffle_seed=1)
    assert advantages_of(first) == advantages_of(again)
    assert advantages_of(first) != advantages_of(plainly)
    assert advantages_of(first) != advantages_of(other)
    assert first.rewards == plainly.rewards, "the reported reward is the real one"


# --- micro-batches ------------------------------------------------------------------------------------------------
def random_rows(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)
    group = [
        make_trajectory(f"g0/{index}", [make_segment(rng, 0, turns=rng.randint(1, 3))], float(rng.random() < 0.5))
        for index in range(count)
    ]
    return rows_of(batch_of(group), normalize_std=True).rows


def fingerprint(micro_batch: MicroBatch) -> list[tuple[int, float, float]]:
    """Of every weighted sampled token: target, log-probability, advantage."""
    columns = (micro_batch.targets, micro_batch.behaviour, micro_batch.advantage, micro_batch.weight)
    return [(int(t), float(b), float(a)) for t, b, a, w in zip(*(c.tolist() for c in columns), strict=True) if w]


@given(st.integers(0, 10**6), st.integers(2, 20), st.integers(1, 200), st.integers(1, 4), st.booleans())
def test_every_weighted_token_is_dealt_exactly_once(
    seed: int, count: int, budget: int, ranks: int, keep_zero: bool
) -> None:
    rows = random_rows(seed, count)
    dealt = plan(rows, token_budget=budget, ranks=ranks, keep_zero_advantage=keep_zero)
    trained = [row for row in rows if row.advantage or keep_zero]
    if trained:
        expected = [
            (int(t), float(b), float(torch.tensor(row.advantage)))
            for row in trained
            for t, b in zip(row.tokens[row.sampled].tolist(), row.behaviour.tolist(), strict=True)
        ]
        got = [token for rank in dealt for micro_batch in rank for token in fingerprint(micro_batch)]
        assert sorted(got) == sorted(expected)
    assert len({len(rank) for rank in dealt}) == 1, "ranks work in lockstep"
    assert all(rank for rank in dealt)
    for micro_batch in (m for rank in dealt for m in rank):
        assert micro_batch.inputs.numel() <= budget or micro_batch.inputs.shape[0] == 1


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_positions_predict_their_targets(seed: int, count: int) -> None:
    rows = random_rows(seed, count)
    (micro_batches,) = plan(rows, token_budget=64, ranks=1, keep_zero_advantage=True)
    for micro_batch in micro_batches:
        following = torch.cat([micro_batch.inputs[:, 1:], torch.full_like(micro_batch.inputs[:, :1], -1)], dim=1)
        seen = following[micro_batch.row_index, micro_batch.position]
        lengths = {int(r): int(p) for r, p in zip(micro_batch.row_index, micro_batch.position, strict=True)}
        for index, (row, position) in enumerate(zip(micro_batch.row_index, micro_batch.position, strict=True)):
            if int(position) != lengths[int(row)]:  # a row's last target is not among its inputs
                assert int(seen[index]) == int(micro_batch.targets[index])


def test_a_batch_without_advantage_still_measures_itself() -> None:
    rows = [replace(row, advantage=0.0) for row in random_rows(0, 6)]
    dealt = plan(rows, token_budget=10**6, ranks=2, keep_zero_advantage=False)
    assert [len(rank) for rank in dealt] == [1, 1]
    assert float(dealt[0][0].weight.sum()) > 0
    assert float(dealt[1][0].weight.sum()) == 0.0


def test_padding_is_small_when_lengths_vary() -> None:
    rows = random_rows(1, 64)
    (micro_batches,) = plan(rows, token_budget=128, ranks=1, keep_zero_advantage=True)
    padded = sum(micro_batch.inputs.numel() for micro_batch in micro_batches)
    assert padded < 1.15 * sum(row.length for row in rows)
