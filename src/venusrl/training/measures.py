"""What a step measures, summed over micro-batches and ranks.

Owns: the sums and maxima behind the ``train/`` metrics. Guarantees: padding rows count nothing; a mean over no
token is left out rather than invented.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from venusrl.training.batching import MicroBatch
from venusrl.training.grpo import TokenLosses

_SUMS = ("tokens", "loss", "kl", "reference", "clipped", "capped", "entropy", "difference", "current", "current_diff")


class Measures:
    """Mutable accumulator of one step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._largest = 0.0
        """Of the log-probability differences on tokens of the version being trained."""

    def add(self, batch: MicroBatch, policy: Tensor, entropy: Tensor, losses: TokenLosses) -> None:
        difference = (policy - batch.behaviour).abs()
        counted = batch.weight * batch.current
        values = {
            "tokens": batch.weight,
            "loss": losses.loss.detach() * batch.weight,
            "kl": losses.divergence * batch.weight,
            "reference": losses.reference_divergence * batch.weight,
            "clipped": losses.clipped * batch.weight,
            "capped": losses.capped * batch.weight,
            "entropy": entropy * batch.weight,
            "difference": difference * batch.weight,
            "current": counted,
            "current_diff": difference * counted,
        }
        for name, value in values.items():
            self._sums[name] += float(value.double().sum())
        self._largest = max(self._largest, float((difference * counted).max()))

    def reduce(self, device: torch.device) -> None:
        """Combine over all ranks. A collective."""
        sums = torch.tensor([self._sums[name] for name in _SUMS], dtype=torch.float64, device=device)
        largest = torch.tensor(self._largest, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self._sums.update(zip(_SUMS, sums.tolist(), strict=True))
        self._largest = float(largest)

    def metrics(self, denominator: int) -> dict[str, float]:
        """``denominator``: the batch's sampled tokens; rows that were skipped have loss 0 and are in it.

        Every other mean is over the tokens that were scored. ``train/logprob_diff_{mean,max}`` compare trainer and
        engine on tokens of the trained version only: pure numerics, no policy change.
        """
        sums = self._sums
        tokens = sums["tokens"]
        metrics = {"train/loss": sums["loss"] / denominator, "train/scored_tokens": tokens}
        if tokens:
            metrics["train/kl"] = sums["kl"] / tokens
            metrics["train/kl_reference"] = sums["reference"] / tokens
            metrics["train/clip_fraction"] = sums["clipped"] / tokens
            metrics["train/importance_capped_fraction"] = sums["capped"] / tokens
            metrics["train/entropy"] = sums["entropy"] / tokens
            metrics["train/logprob_diff_all_mean"] = sums["difference"] / tokens
        if sums["current"]:
            metrics["train/logprob_diff_mean"] = sums["current_diff"] / sums["current"]
            metrics["train/logprob_diff_max"] = self._largest
        return metrics
