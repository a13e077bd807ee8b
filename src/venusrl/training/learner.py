"""One optimizer step from one batch.

Owns: the model, the optimizer and what a step measures. Stateless beyond weights, moments and the version: the
learning rate is a function of the version, so a resumed run continues as if nothing had happened.

Must not know: HTTP, files.

Guarantees: the loss and the step do not depend on the micro-batch budget or the number of ranks (up to rounding); a
step whose gradient is not finite raises before it touches the weights. Every rank calls ``step`` with the same batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from venusrl.recipe import Recipe
from venusrl.training.batching import MicroBatch, Rows, plan, rows_of
from venusrl.training.errors import TrainingError
from venusrl.training.grpo import Objective, Sampling, token_losses
from venusrl.training.measures import Measures
from venusrl.training.models import Scorer, can_share_prompts, gather, load_whole_state, place_like, shard, whole_state
from venusrl.training.world import World
from venusrl.types import Batch

OptimizerState = dict[str, dict[str, Tensor]]
"""Gathered AdamW state by parameter name."""


class Learner:
    """``model`` (and ``reference``, when there is a KL term) are whole models; they are moved and sharded."""

    def __init__(self, recipe: Recipe, model: nn.Module, *, reference: nn.Module | None, world: World) -> None:
        training, rollout = recipe.training, recipe.rollout
        self._options = training
        self._world = world
        self._objective = Objective(
            kind=training.loss,
            clip_low=training.clip_low,
            clip_high=training.clip_high,
            importance_cap=training.importance_cap,
            kl_coefficient=training.kl_coefficient,
        )
        sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
        dtype = torch.bfloat16 if recipe.model.dtype == "bfloat16" else torch.float32
        self._scorer = self._placed(Scorer(model, sampling, dtype))
        # Sharded, ranks would gather parameters in different orders when one shares a prompt and another does not.
        self._share_prompts = not world.sharded and can_share_prompts(model)
        self._reference = None
        if reference is not None:
            self._reference = self._placed(Scorer(reference.requires_grad_(False), sampling, dtype))
        self._parameters = {name: p for name, p in self._scorer.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            _decay_groups(self._parameters, training.weight_decay), lr=0.0, betas=training.betas
        )

    def _placed(self, scorer: Scorer) -> Scorer:
        if self._world.sharded:
            shard(scorer, self._world.device)  # moves block by block, so the whole never has to fit on one device
        else:
            scorer.to(self._world.device)
        return scorer

    def learning_rate(self, version: int) -> float:
        """Linear warm-up over ``warmup_steps`` steps, then constant."""
        warmup = self._options.warmup_steps
        share = min(1.0, (version + 1) / warmup) if warmup else 1.0
        return self._options.learning_rate * share

    def step(self, batch: Batch) -> dict[str, float]:
        """Train ``batch``: the weights of ``batch.version`` become those of the next. Returns the step's metrics."""
        options = self._options
        rows = rows_of(
            batch,
            normalize_std=options.normalize_std,
            shuffle_seed=options.seed if options.shuffle_rewards else None,
        )
        micro_batches = plan(
            rows.rows,
            token_budget=options.micro_batch_tokens,
            ranks=self._world.size,
            keep_zero_advantage=options.kl_coefficient > 0,
            share_prompts=self._share_prompts,
        )[self._world.rank]
        measures = Measures()
        self._optimizer.zero_grad(set_to_none=False)
        for micro_batch in micro_batches:
            self._accumulate(micro_batch.to(self._world.device), rows.sampled_tokens, measures)
        grad_norm = self._clip(batch.version)
        rate = self.learning_rate(batch.version)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._world.sharded:
            measures.reduce(self._world.device)
        return {
            **measures.metrics(rows.sampled_tokens),
            **_batch_metrics(rows),
            "train/grad_norm": grad_norm,
            "train/lr": rate,
        }

    def _accumulate(self, micro_batch: MicroBatch, denominator: int, measures: Measures) -> None:
        policy, entropy = self._scorer(micro_batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(micro_batch)
        losses = token_losses(
            policy,
            micro_batch.behaviour,
            micro_batch.advantage,
            self._objective,
            # With one optimizer step a batch, the policy at the start of the step is the one that is being scored.
            proximal=policy.detach() if self._objective.kind == "decoupled" else None,
            reference=reference,
        )
        # Sharded gradients are averaged over ranks; the loss is a sum over all of them.
        loss = (losses.loss * micro_batch.weight).sum() / denominator
        (loss * self._world.size).backward()  # type: ignore[no-untyped-call]
        measures.add(micro_batch, policy.detach(), entropy, losses)

    def _clip(self, version: int) -> float:
        norm = nn.utils.clip_grad_norm_(list(self._parameters.values()), self._options.max_grad_norm)
        value = float(gather(norm))
        if not value < float("inf"):
            raise TrainingError(
                f"the gradient at version {version} is not finite (norm {value}); no weights were changed. "
                "Lower training.learning_rate or training.max_grad_norm, and see train/logprob_diff_max before it"
            )
        return value

    # --- state, gathered so that it does not depend on the number of ranks --------------------------------------
    def weights(self) -> dict[str, Tensor]:
        """float32. A collective when sharded."""
        return whole_state(self._scorer.model)

    def load_weights(self, state: dict[str, Tensor]) -> None:
        load_whole_state(self._scorer.model, state)

    def optimizer_state(self) -> OptimizerState:
        """Empty before the first step. A collective when sharded."""
        moments: OptimizerState = {}
        for name, parameter in self._parameters.items():
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if state:
                moments[name] = {key: gather(value) for key, value in state.items()}
        return moments

    def load_optimizer_state(self, moments: OptimizerState) -> None:
        for name, state in moments.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                key: value.clone() if value.ndim == 0 else place_like(value, parameter) for key, value in state.items()
            }


def _decay_groups(parameters: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms' scales and biases do not."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _batch_metrics(rows: Rows) -> dict[str, float]:
    rewards, staleness = rows.rewards, rows.staleness
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        "rollout/staleness_mean": sum(staleness) / len(staleness),
        "rollout/staleness_max": float(max(staleness)),
        "train/trajectories": float(len(rewards)),
        "train/sampled_tokens": float(rows.sampled_tokens),
        "train/zero_advantage_fraction": rows.zero_advantage_trajectories / len(rewards),
    }
