"""The mathematics of one GRPO step, and nothing else.

Owns: advantages over a group, log-probabilities under the distribution the engine sampled from, the clipped token
loss and its measures. Pure functions of numbers and tensors.

Must not know: models, optimizers, batches of trajectories, processes.

Guarantees: advantages are votes of trajectories, never of tokens or segments; a token's loss depends on that token's
numbers only, so any way of cutting a batch into micro-batches sums to the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-6
LOG_RATIO_LIMIT = 20.0
"""exp() of more is useless as a ratio and overflows in sums; a policy that far away is clipped or capped anyway."""


def advantages(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """(R - mean) / (std + eps) over one group's valid trajectories; sample standard deviation, optional.

    Equal rewards (and a group of one) give exactly zero, so that such rows can be recognised and skipped.
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (deviation + ADVANTAGE_EPSILON) for value in centred]


@dataclass(frozen=True)
class Sampling:
    """How the engine turned logits into the distribution it sampled from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


def score(logits: Tensor, targets: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under the processed distribution, and that distribution's entropy.

    The processing is the engine's: divide by the temperature, keep the top k, keep the smallest set of tokens that
    holds top_p of the mass, renormalise. The support is recomputed from these logits (the engine's own is not in a
    trajectory), is constant for the gradient, and always contains the target: the engine did sample it, and a
    probability of zero for it would only say that the two supports differ by a rounding or by a version.
    """
    scaled = logits.float() / sampling.temperature
    if sampling.truncates:
        scaled = scaled.masked_fill(~_support(scaled.detach(), targets, sampling), -math.inf)
    picked = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    log_probs = picked - torch.logsumexp(scaled, dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(torch.softmax(scaled, dim=-1)).sum(-1)
    return log_probs, entropy


def _support(scaled: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """Boolean mask [tokens, vocabulary] of the tokens that top_k and top_p leave, plus the target."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    if 0 < sampling.top_k < ordered.shape[-1]:
        ordered[:, sampling.top_k :] = -math.inf
    mass = torch.softmax(ordered, dim=-1)
    mass_before = mass.cumsum(-1) - mass
    kept = (mass_before < sampling.top_p) & (ordered > -math.inf)
    kept[:, 0] = True
    support = torch.zeros_like(kept).scatter_(-1, order, kept)
    return support.scatter_(-1, targets.unsqueeze(-1), torch.ones_like(kept[:, :1]))


@dataclass(frozen=True)
class Objective:
    """The loss of a token, as the recipe says it."""

    kind: Literal["grpo", "decoupled"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0


@dataclass(frozen=True)
class TokenLosses:
    """One value a token. ``loss`` carries the gradient; the rest are measures."""

    loss: Tensor
    clipped: Tensor
    """1 where the clip is active (the gradient of the policy term is zero), else 0."""
    divergence: Tensor
    """k3 estimate of KL(behaviour || policy)."""
    reference_divergence: Tensor
    """k3 estimate of KL(policy || reference); zero without a reference."""
    capped: Tensor
    """1 where the importance weight was truncated (decoupled), else 0."""


def token_losses(
    policy: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    objective: Objective,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
) -> TokenLosses:
    """Clipped policy loss a token, from log-probabilities of the sampled tokens.

    ``grpo``: ratio = policy / behaviour, so that the clip acts on what really generated the token. ``decoupled``:
    ratio = policy / proximal, weighted by min(proximal / behaviour, cap); ``proximal`` is the policy at the start of
    the step and is required then.
    """
    anchor = behaviour
    weight = torch.ones_like(behaviour)
    capped = torch.zeros_like(behaviour)
    if objective.kind == "decoupled":
        if proximal is None:
            raise ValueError("the decoupled loss needs proximal log-probabilities")
        anchor = proximal
        importance = _ratio(proximal, behaviour)
        weight = importance.clamp(max=objective.importance_cap)
        capped = (importance > objective.importance_cap).float()
    ratio = _ratio(policy, anchor)
    limited = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gain, limited_gain = ratio * advantage, limited * advantage
    loss = -weight * torch.minimum(gain, limited_gain)
    reference_divergence = torch.zeros_like(behaviour)
    if reference is not None:
        divergence = _k3(policy, reference)
        reference_divergence = divergence.detach()
        loss = loss + objective.kl_coefficient * divergence
    with torch.no_grad():
        # Swapped arguments: _k3(p, q) estimates KL(p || q) from samples of p, and these tokens come from behaviour.
        behaviour_divergence = _k3(behaviour, policy)
    return TokenLosses(
        loss=loss,
        clipped=(limited_gain < gain).float(),
        divergence=behaviour_divergence,
        reference_divergence=reference_divergence,
        capped=capped,
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.exp((numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _k3(sampled_from: Tensor, other: Tensor) -> Tensor:
    """r - 1 - log r with r = other / sampled_from: unbiased for KL(sampled_from || other), never negative."""
    log_ratio = (other - sampled_from).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(log_ratio) - 1.0 - log_ratio
