"""The loss against a slow, obvious reference, and the rules of advantages (T19, T20, T24)."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from venusrl.training.grpo import LOG_RATIO_LIMIT, Objective, Sampling, advantages, score, token_losses

LOGPROB = st.floats(-12.0, -0.001)
ADVANTAGE = st.floats(-3.0, 3.0)


# --- advantages -------------------------------------------------------------------------------------------------
def test_advantages_are_centred_and_scaled() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.25]
    votes = advantages(rewards, normalize_std=True)
    deviation = statistics.stdev(rewards)
    assert votes == pytest.approx([(r - statistics.mean(rewards)) / (deviation + 1e-6) for r in rewards])


def test_advantages_without_std() -> None:
    assert advantages([1.0, 0.0], normalize_std=False) == [0.5, -0.5]


@given(st.floats(-5, 5), st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize: bool) -> None:
    assert advantages([reward] * size, normalize_std=normalize) == [0.0] * size


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_sum_to_zero(rewards: list[float]) -> None:
    assert sum(advantages(rewards, normalize_std=False)) == pytest.approx(0.0, abs=1e-9)


# --- the token loss against plain Python ------------------------------------------------------------------------
def reference_loss(
    policy: float, behaviour: float, advantage: float, objective: Objective, proximal: float, reference: float | None
) -> tuple[float, bool]:
    """Loss and whether the clip is active, of one token, without tensors."""

    def ratio(above: float, below: float) -> float:
        return math.exp(min(max(above - below, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))

    weight, anchor = 1.0, behaviour
    if objective.kind == "decoupled":
        weight, anchor = min(ratio(proximal, behaviour), objective.importance_cap), proximal
    r = ratio(policy, anchor)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if advantage >= 0:
        limited = r > high
        loss = -weight * (high if limited else r) * advantage
    else:
        limited = r < low
        loss = -weight * (low if limited else r) * advantage
    if reference is not None:
        difference = reference - policy
        loss += objective.kl_coefficient * (math.exp(difference) - 1 - difference)
    return loss, limited and advantage != 0


OBJECTIVES = [
    Objective(),
    Objective(clip_low=0.1, clip_high=0.5),
    Objective(kind="decoupled", importance_cap=1.5),
    Objective(kl_coefficient=0.1),
    Objective(kind="decoupled", kl_coefficient=0.02, clip_low=0.0, clip_high=0.0),
]


@given(
    st.sampled_from(OBJECTIVES),
    st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=12),
)
def test_token_loss_equals_the_reference(
    objective: Objective, tokens: list[tuple[float, float, float, float, float]]
) -> None:
    policy, behaviour, proximal, reference, advantage = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    with_reference = objective.kl_coefficient > 0
    losses = token_losses(
        policy,
        behaviour,
        advantage,
        objective,
        proximal=proximal if objective.kind == "decoupled" else None,
        reference=reference if with_reference else None,
    )
    for index, (p, b, x, k, a) in enumerate(tokens):
        loss, clipped = reference_loss(p, b, a, objective, x, k if with_reference else None)
        assert float(losses.loss[index]) == pytest.approx(loss, rel=1e-9, abs=1e-9)
        near_the_edge = min(
            abs(math.exp(p - (x if objective.kind == "decoupled" else b)) - bound)
            for bound in (1 - objective.clip_low, 1 + objective.clip_high)
        )
        if near_the_edge > 1e-9 and abs(a) > 1e-9:
            assert bool(losses.clipped[index]) == clipped


def test_the_clip_stops_the_gradient() -> None:
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    losses = token_losses(policy, torch.tensor([-2.0, -1.0]), torch.tensor([1.0, 1.0]), Objective())
    losses.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, -1.0]
    assert losses.clipped.tolist() == [1.0, 0.0]


def test_a_far_away_policy_gives_finite_numbers() -> None:
    policy = torch.tensor([-200.0, -0.1], requires_grad=True)
    losses = token_losses(policy, torch.tensor([-0.1, -200.0]), torch.tensor([-1.0, -1.0]), Objective())
    losses.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(losses.loss).all()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()


def test_decoupled_at_its_own_proximal_is_weighted_policy_gradient() -> None:
    policy = torch.tensor([-1.0, -0.5], requires_grad=True)
    objective = Objective(kind="decoupled", importance_cap=2.0)
    losses = token_losses(
        policy, torch.tensor([-1.2, -3.0]), torch.tensor([1.0, -2.0]), objective, proximal=policy.detach()
    )
    losses.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-math.exp(0.2), 2.0 * 2.0])
    assert losses.capped.tolist() == [0.0, 1.0]


def test_decoupled_needs_proximal_log_probabilities() -> None:
    one = torch.tensor([-1.0])
    with pytest.raises(ValueError, match="proximal"):
        token_losses(one, one, one, Objective(kind="decoupled"))


# --- the distribution that was sampled from ---------------------------------------------------------------------
def slow_distribution(logits: list[float], target: int, sampling: Sampling) -> list[float]:
    """Probabilities after temperature, top-k and top-p, the target always kept."""
    exponents = [math.exp(value / sampling.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda index: -logits[index])
    kept = order[: sampling.top_k] if sampling.top_k else order
    total = sum(exponents[index] for index in kept)
    support: set[int] = set()
    mass = 0.0
    for index in kept:
        if mass < sampling.top_p or not support:
            support.add(index)
        mass += exponents[index] / total
    support.add(target)
    norm = sum(exponents[index] for index in support)
    return [exponents[index] / norm if index in support else 0.0 for index in range(len(logits))]


@given(
    st.lists(st.integers(-400, 400), min_size=2, max_size=12, unique=True),
    st.data(),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([1.0, 0.9, 0.35]),
    st.sampled_from([0, 1, 3]),
)
def test_scores_equal_the_slow_distribution(
    hundredths: list[int], data: st.DataObject, temperature: float, top_p: float, top_k: int
) -> None:
    logits = [value / 100 for value in hundredths]
    target = data.draw(st.integers(0, len(logits) - 1))
    sampling = Sampling(temperature, top_p, top_k)
    log_probs, entropy = score(torch.tensor([logits], dtype=torch.float64), torch.tensor([target]), sampling)
    expected = slow_distribution(logits, target, sampling)
    assert float(log_probs) == pytest.approx(math.log(expected[target]), abs=1e-4)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in expected if p > 0), abs=1e-4)


def test_truncated_scores_have_a_finite_gradient() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -5.0]], requires_grad=True)
    log_probs, _ = score(logits, torch.tensor([0]), Sampling(top_p=0.5, top_k=2))
    log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert float(log_probs.detach()) == pytest.approx(0.0)
