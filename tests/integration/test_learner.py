"""One optimizer step on a tiny model: against a slow reference, stored losses, and what must not matter."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from venusrl.recipe import Recipe
from venusrl.testing.batches import make_batch
from venusrl.testing.tiny_model import build_tiny_model
from venusrl.training.batching import plan, rows_of
from venusrl.training.errors import TrainingError
from venusrl.training.grpo import Objective, Sampling, token_losses
from venusrl.training.learner import Learner
from venusrl.training.models import Scorer, can_share_prompts, load_model, load_whole_state
from venusrl.training.world import World
from venusrl.types import Batch, Segment, VersionSpan

GOLDEN = Path(__file__).parent / "data" / "golden_losses.json"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def recipe(model: Path, *, rollout: dict[str, Any] | None = None, **training: Any) -> Recipe:
    settings = {"steps": 8, "learning_rate": 1e-2, **training}
    return Recipe.model_validate(
        {
            "run": {"name": "t"},
            "model": {"path": str(model)},
            "training": settings,
            "rollout": rollout or {},
        }
    )


def learner(model: Path, *, rollout: dict[str, Any] | None = None, **training: Any) -> Learner:
    reference = load_model(model) if training.get("kl_coefficient") else None
    return Learner(recipe(model, rollout=rollout, **training), load_model(model), reference=reference, world=World())


def scored_by(model: Path, batch: Batch) -> Batch:
    """The batch with the model's own log-probabilities as behaviour, so that ratios start near 1."""
    policy = load_model(model)
    groups = []
    for group in batch.groups:
        members = []
        for trajectory in group.trajectories:
            segments = []
            for segment in trajectory.segments:
                with torch.no_grad():
                    logits = policy(input_ids=torch.tensor([segment.token_ids])).logits[0]
                all_scores = torch.log_softmax(logits[:-1], -1)
                logprobs = [
                    float(all_scores[i - 1, token]) if trains else 0.0
                    for i, (token, trains) in enumerate(zip(segment.token_ids, segment.loss_mask, strict=True))
                ]
                segments.append(msgspec.structs.replace(segment, logprobs=logprobs))
            members.append(msgspec.structs.replace(trajectory, segments=segments))
        groups.append(msgspec.structs.replace(group, trajectories=members))
    return msgspec.structs.replace(batch, groups=groups)


def slow_loss(model: Path, batch: Batch, *, temperature: float = 1.0) -> float:
    """Every row by itself, unpadded, the full forward pass, one token at a time."""
    policy = load_model(model)
    rows = rows_of(batch, normalize_std=True)
    total = 0.0
    for row in rows.rows:
        with torch.no_grad():
            logits = policy(input_ids=row.tokens.unsqueeze(0)).logits[0].double() / temperature
        for place, behaviour in zip(row.sampled.tolist(), row.behaviour.tolist(), strict=True):
            scores = torch.log_softmax(logits[place - 1], -1)
            ratio = math.exp(float(scores[row.tokens[place]]) - behaviour)
            clipped = min(max(ratio, 0.8), 1.28)
            total += -min(ratio * row.advantage, clipped * row.advantage)
    return total / rows.sampled_tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_equals_the_slow_reference(model_directory: Path, seed: int, temperature: float) -> None:
    batch = scored_by(model_directory, make_batch(0, seed=seed, groups=3, size=4))
    metrics = learner(model_directory, rollout={"temperature": temperature}).step(batch)
    assert metrics["train/loss"] == pytest.approx(slow_loss(model_directory, batch, temperature=temperature), abs=2e-5)


def weights_after(model: Path, batches: list[Batch], **training: Any) -> tuple[list[float], dict[str, Tensor]]:
    subject = learner(model, **training)
    losses = [subject.step(batch)["train/loss"] for batch in batches]
    return losses, subject.weights()


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=tolerance), name


@pytest.mark.parametrize("options", [{}, {"loss": "decoupled"}, {"kl_coefficient": 0.1}])
def test_the_micro_batch_budget_does_not_matter(model_directory: Path, options: dict[str, Any]) -> None:
    batches = [scored_by(model_directory, make_batch(v, groups=3, size=4)) for v in range(2)]
    losses, weights = weights_after(model_directory, batches, micro_batch_tokens=100_000, **options)
    for budget in (1, 37, 100):
        other_losses, other_weights = weights_after(model_directory, batches, micro_batch_tokens=budget, **options)
        assert other_losses == pytest.approx(losses, abs=1e-5)
        # Adam divides by the root of tiny second moments: rounding in a gradient near zero is magnified to a share
        # of the learning rate, 1e-2 here.
        assert_same_weights(weights, other_weights, 2e-3)


def test_golden_losses(model_directory: Path) -> None:
    """Five steps of a seeded model. Rewrite the file on purpose only: VENUSRL_WRITE_GOLDEN=1."""
    batches = [scored_by(model_directory, make_batch(v, seed=7, groups=4, size=4, staleness=1)) for v in range(5)]
    losses, _ = weights_after(model_directory, batches, learning_rate=3e-3, warmup_steps=2, weight_decay=0.1)
    if os.environ.get("VENUSRL_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-3, abs=1e-5)


def test_learning_raises_the_probability_of_what_was_rewarded(model_directory: Path) -> None:
    batch = scored_by(model_directory, make_batch(0, rewards=[[1, 0, 0, 0], [0, 1, 1, 1]]))
    subject = learner(model_directory, learning_rate=1e-3)
    first = subject.step(batch)
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-5)
    assert first["train/clip_fraction"] == 0.0
    assert first["train/logprob_diff_mean"] == pytest.approx(0.0, abs=1e-4)
    assert first["reward/mean"] == 0.5
    second = subject.step(batch)
    assert second["train/loss"] < first["train/loss"]
    assert second["train/kl"] > 0


def test_learning_rate_zero_changes_nothing_but_measures_all(model_directory: Path) -> None:
    subject = learner(model_directory, learning_rate=0.0, weight_decay=0.1)
    before = {name: tensor.clone() for name, tensor in subject.weights().items()}
    metrics = subject.step(scored_by(model_directory, make_batch(0)))
    assert_same_weights(before, subject.weights(), 0.0)
    assert metrics["train/grad_norm"] > 0


def test_warm_up_then_constant(model_directory: Path) -> None:
    subject = learner(model_directory, learning_rate=1.0, warmup_steps=4)
    assert [subject.learning_rate(v) for v in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_skipping_rows_without_advantage_does_not_change_the_loss(model_directory: Path) -> None:
    batch = scored_by(model_directory, make_batch(0, rewards=[[1, 1, 1, 1], [0, 1, 1, 0]]))
    metrics = learner(model_directory).step(batch)
    assert metrics["train/scored_tokens"] < metrics["train/sampled_tokens"]
    assert metrics["train/loss"] == pytest.approx(slow_loss(model_directory, batch), abs=2e-5)
    assert metrics["train/zero_advantage_fraction"] == 0.5


def test_a_batch_without_any_advantage_trains_to_nothing_and_reports(model_directory: Path) -> None:
    batch = scored_by(model_directory, make_batch(0, rewards=[[1, 1, 1, 1], [0, 0, 0, 0]]))
    subject = learner(model_directory)
    before = {name: tensor.clone() for name, tensor in subject.weights().items()}
    metrics = subject.step(batch)
    assert_same_weights(before, subject.weights(), 0.0)
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0.0
    assert metrics["train/logprob_diff_mean"] < 1e-4


def test_same_version_difference_leaves_out_older_tokens(model_directory: Path) -> None:
    batch = make_batch(5, groups=4, staleness=0)
    fresh = learner(model_directory).step(batch)
    assert fresh["train/logprob_diff_mean"] == pytest.approx(fresh["train/logprob_diff_all_mean"])
    stale = learner(model_directory).step(make_batch(5, groups=8, staleness=2))
    assert stale["rollout/staleness_max"] == 2
    assert stale["train/logprob_diff_mean"] != pytest.approx(stale["train/logprob_diff_all_mean"])


def test_a_gradient_that_is_not_finite_changes_nothing(model_directory: Path) -> None:
    subject = learner(model_directory)
    broken = {name: tensor.clone() for name, tensor in subject.weights().items()}
    broken["model.norm.weight"][0] = float("nan")
    subject.load_weights(broken)
    with pytest.raises(TrainingError, match="not finite"):
        subject.step(make_batch(0))
    assert torch.isfinite(subject.weights()["model.embed_tokens.weight"]).all()


def test_weights_of_another_model_are_refused(model_directory: Path) -> None:
    subject = load_model(model_directory)
    with pytest.raises(Exception, match="another model"):
        load_whole_state(subject, {"other": torch.zeros(1)})


# --- shared prompts and ranks -----------------------------------------------------------------------------------------
def with_shared_prompts(batch: Batch, prompt: int) -> Batch:
    """Give all trajectories of a group the same first ``prompt`` tokens, before everything they had."""
    groups = []
    for number, group in enumerate(batch.groups):
        shared = [(number * 31 + place * 7) % 256 for place in range(prompt)]
        members = []
        for trajectory in group.trajectories:
            segments = []
            for segment in trajectory.segments:
                first = segment.loss_mask.index(True)
                shift = prompt - first
                segments.append(
                    Segment(
                        token_ids=shared + segment.token_ids[first:],
                        loss_mask=[False] * prompt + segment.loss_mask[first:],
                        logprobs=[0.0] * prompt + segment.logprobs[first:],
                        spans=[VersionSpan(s.version, s.start + shift, s.end + shift) for s in segment.spans],
                    )
                )
            members.append(msgspec.structs.replace(trajectory, segments=segments))
        groups.append(msgspec.structs.replace(group, trajectories=members))
    return msgspec.structs.replace(batch, groups=groups)


def loss_and_gradient(model: Path, batch: Batch, *, ranks: int = 1, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """As the ranks together would compute it, without an optimizer."""
    scorer = Scorer(load_model(model), Sampling(), torch.float32)
    rows = rows_of(batch, normalize_std=True)
    total = 0.0
    for rank in plan(rows.rows, ranks=ranks, keep_zero_advantage=False, **options):
        for micro_batch in rank:
            policy, _ = scorer(micro_batch)
            losses = token_losses(policy, micro_batch.behaviour, micro_batch.advantage, Objective())
            loss = (losses.loss * micro_batch.weight).sum() / rows.sampled_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total, {name: p.grad for name, p in scorer.model.named_parameters() if p.grad is not None}


def assert_same_step(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("budget", [1, 150, 100_000])
def test_reading_a_prompt_once_changes_nothing(model_directory: Path, budget: int) -> None:
    batch = scored_by(model_directory, with_shared_prompts(make_batch(0, groups=3, size=4), 40))
    rows = rows_of(batch, normalize_std=True).rows
    (shared,) = plan(rows, token_budget=100_000, ranks=1, keep_zero_advantage=False, share_prompts=True)
    assert {int(micro_batch.prompt.shape[0]) for micro_batch in shared} == {39}
    assert_same_step(
        loss_and_gradient(model_directory, batch, token_budget=budget, share_prompts=True),
        loss_and_gradient(model_directory, batch, token_budget=budget),
    )


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_padding_to_the_number_of_ranks_weighs_nothing(model_directory: Path, ranks: int) -> None:
    batch = scored_by(model_directory, make_batch(0, groups=3, size=3))
    assert_same_step(
        loss_and_gradient(model_directory, batch, token_budget=70, ranks=ranks),
        loss_and_gradient(model_directory, batch, token_budget=70),
    )


def test_a_cache_that_forgets_is_not_shared(model_directory: Path) -> None:
    model = load_model(model_directory)
    assert can_share_prompts(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not can_share_prompts(model)
