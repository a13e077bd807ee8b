"""Draws follow the distribution that their log-probabilities name."""

from __future__ import annotations

import math

import pytest
import torch

from venusrl.rollout.engines.embedded.sampling import Draw, NotFinite, sample
from venusrl.types import SamplingParams


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(logits: list[float], params: SamplingParams, count: int) -> tuple[list[int], list[float]]:
    rows = torch.tensor([logits] * count)
    return sample(rows, [Draw(params)] * count, generator())


def frequencies(tokens: list[int], size: int) -> list[float]:
    return [tokens.count(i) / len(tokens) for i in range(size)]


def test_frequencies_and_logprobs_agree() -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    tokens, logprobs = draw(logits, SamplingParams(temperature=0.7), 6_000)
    expected = torch.softmax(torch.tensor(logits) / 0.7, -1).tolist()
    assert frequencies(tokens, 4) == pytest.approx(expected, abs=0.025)
    assert all(math.exp(p) == pytest.approx(expected[t], rel=1e-5) for t, p in zip(tokens, logprobs, strict=True))


def test_top_p_keeps_the_smallest_set_and_renormalises() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    tokens, logprobs = draw(logits, SamplingParams(top_p=0.6), 2_000)
    assert set(tokens) == {0, 1}
    expected = {0: 0.5 / 0.8, 1: 0.3 / 0.8}
    assert all(math.exp(p) == pytest.approx(expected[t], rel=1e-5) for t, p in zip(tokens, logprobs, strict=True))
    assert set(draw(logits, SamplingParams(top_p=0.49), 1000)[0]) == {0}
    assert set(draw(logits, SamplingParams(top_p=1e-6), 1000)[0]) == {0}


def test_top_k_cuts_before_top_p() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    tokens, _ = draw(logits, SamplingParams(top_k=2), 2_000)
    assert set(tokens) == {0, 1}
    # Among the two, 0.4 / 0.7 = 0.57 is enough for top_p = 0.55.
    assert set(draw(logits, SamplingParams(top_k=2, top_p=0.55), 1000)[0]) == {0}
    assert set(draw(logits, SamplingParams(top_k=99), 5000)[0]) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_a_large_flat_vocabulary_is_cut_like_a_small_one(top_p: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 3000) * 0.5
    _, logprobs = sample(logits, [Draw(SamplingParams(top_p=top_p))] * 3, generator())
    tokens, _ = sample(logits, [Draw(SamplingParams(top_p=top_p))] * 3, generator())
    for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
        probabilities, order = torch.softmax(row.double(), -1).sort(descending=True)
        kept = int((probabilities.cumsum(-1) - probabilities < top_p).sum())
        place = order.tolist().index(token)
        assert place < kept
        mass = float(probabilities[:kept].sum())
        assert math.exp(logprob) == pytest.approx(float(probabilities[place]) / mass, rel=1e-3)


def test_greedy_is_the_largest_with_its_plain_logprob() -> None:
    tokens, logprobs = draw([0.0, 3.0, 1.0], SamplingParams(temperature=0.0, top_p=0.1), 3)
    assert tokens == [1, 1, 1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), -1)[1]))


def test_a_seeded_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    row = torch.randn(1, 50)
    alone, _ = sample(row, [Draw(SamplingParams(), generator(7))], generator(1))
    others = torch.randn(5, 50)
    mixed, _ = sample(
        torch.cat([others, row]), [Draw(SamplingParams())] * 5 + [Draw(SamplingParams(), generator(7))], generator(9)
    )
    assert mixed[-1] == alone[0]


def test_impossible_tokens_are_never_drawn() -> None:
    tokens, _ = draw([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")], SamplingParams(), 2_000)
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_diverged_logits_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(NotFinite):
        draw([0.0, bad, 1.0], SamplingParams(temperature=temperature), 2)
