"""Drawing the next tokens, with the log-probability of what was drawn.

Owns: temperature, top-k, top-p and the draw, for a batch whose members differ in all of them.

Must not know: where logits come from.

Guarantees: the log-probability is that of the distribution the token was drawn from, after temperature, top-k
and top-p; greedy tokens (temperature 0) carry the log-probability at temperature 1. A draw with its own
generator does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from venusrl.types import SamplingParams

_FIRST_CANDIDATES = 256


class NotFinite(Exception):
    """The model's logits are not finite: its weights have diverged."""


@dataclass(frozen=True)
class Draw:
    """``generator``: the request's own; None = the engine's."""

    sampling: SamplingParams
    generator: torch.Generator | None = None


def sample(logits: torch.Tensor, draws: Sequence[Draw], shared: torch.Generator) -> tuple[list[int], list[float]]:
    """One token and its log-probability a row of float32 ``logits``. Raises NotFinite."""
    temperatures = torch.tensor([d.sampling.temperature or 1.0 for d in draws])
    greedy = [d.sampling.temperature == 0 for d in draws]
    scaled = logits / temperatures[:, None]
    cut = [i for i, d in enumerate(draws) if not greedy[i] and (d.sampling.top_p < 1 or d.sampling.top_k > 0)]
    if cut:
        scaled[cut] = _cut(scaled[cut], [draws[i].sampling for i in cut])
    logprobs = torch.log_softmax(scaled, -1)
    tokens = _pick(logprobs, draws, shared)
    if any(greedy):
        mask = torch.tensor(greedy)
        tokens[mask] = logprobs[mask].argmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    if not bool(torch.isfinite(chosen).all()):
        raise NotFinite("the model's logits are not finite")
    return tokens.tolist(), chosen.tolist()


def _pick(logprobs: torch.Tensor, draws: Sequence[Draw], shared: torch.Generator) -> torch.Tensor:
    """Invert each row's cumulative distribution at one uniform number (float64: sums over large vocabularies)."""
    uniform = torch.rand(len(draws), generator=shared, dtype=torch.float64)
    for row, draw in enumerate(draws):
        if draw.generator is not None:
            uniform[row] = torch.rand((), generator=draw.generator, dtype=torch.float64)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = (uniform * cumulative[:, -1]).unsqueeze(-1)
    # The first token whose cumulative mass exceeds the target has mass itself; rounding may find none: then the
    # last one that has.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True)[:, 0], last)


def _cut(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Minus infinity outside the top-k, then outside the smallest set that holds ``top_p`` of what is left."""
    size = logits.shape[-1]
    top_k = torch.tensor([p.top_k or size for p in params]).clamp_(max=size)[:, None]
    top_p = torch.tensor([p.top_p if p.top_p < 1 else float("inf") for p in params])[:, None]
    # Few candidates usually hold top_p, and taking them is far cheaper than sorting a large vocabulary.
    count = min(size, max([_FIRST_CANDIDATES, *(p.top_k for p in params)]))
    while True:
        values, order = logits.topk(count, dim=-1)
        inside = torch.arange(count) < top_k
        within_k = values.masked_fill(~inside, float("-inf")).logsumexp(-1, keepdim=True)
        mass = torch.where(top_k < size, within_k, logits.logsumexp(-1, keepdim=True))
        probabilities = (values - mass).exp()
        kept = inside & (probabilities.cumsum(-1) - probabilities < top_p)
        if count == size or not bool((kept[:, -1:] & (top_k > count)).any()):
            break
        count = min(size, count * 4)
    kept[:, 0] = True
    return torch.full_like(logits, float("-inf")).scatter_(-1, order, values.masked_fill(~kept, float("-inf")))
