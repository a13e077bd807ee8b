"""From a batch of groups to micro-batches of tensors.

Owns: which tokens train, their advantage, and how rows are packed and dealt to ranks.

Must not know: models, losses, processes.

Guarantees: the loss's denominator (``Rows.sampled_tokens``) counts every sampled token of every valid trajectory,
so it does not depend on what is skipped, packed or padded; every rank gets the same number of micro-batches; a
padding row weighs nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from venusrl.training.errors import BatchError
from venusrl.training.grpo import advantages
from venusrl.types import Batch, Segment, Trajectory

LOGPROB_SLACK = 1e-3
"""A log-probability may exceed 0 by rounding; by more it is not one."""

MIN_SHARED_TOKENS = 16
"""A shorter prompt costs less to read again than to share."""
PACK_OVERHEAD_TOKENS = 64
"""What a forward and backward pass costs beside its tokens, in tokens (measured on a 2M-parameter model)."""


@dataclass(frozen=True)
class Row:
    """One segment, cut after its last sampled token (nothing later is predicted by or predicts a trained token)."""

    tokens: Tensor
    """[length] token ids."""
    sampled: Tensor
    """[n] indices into ``tokens`` of the sampled tokens, ascending, none of them 0."""
    behaviour: Tensor
    """[n] the engine's log-probabilities."""
    current: Tensor
    """[n] bool: sampled by exactly the version that this batch trains."""
    advantage: float
    weight: float = 1.0
    """0 for padding."""

    @property
    def length(self) -> int:
        """Positions the model has to read: the last sampled token is only predicted."""
        return int(self.tokens.shape[0]) - 1


@dataclass(frozen=True)
class Rows:
    """A batch, flattened; ``sampled_tokens`` is the loss's denominator."""

    rows: list[Row]
    sampled_tokens: int
    rewards: list[float]
    """Of the valid trajectories, as verified (never shuffled)."""
    staleness: list[int]
    zero_advantage_trajectories: int


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded inputs. With causal attention no mask is needed: padding comes after all it could disturb."""

    prompt: Tensor
    """[length] tokens that come before every row of ``inputs``; usually none."""
    inputs: Tensor
    """[rows, length] token ids."""
    row_index: Tensor
    """[n] row of each sampled token."""
    position: Tensor
    """[n] position in ``inputs`` whose logits predict it."""
    targets: Tensor
    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    current: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return MicroBatch(**{name: value.to(device) for name, value in vars(self).items()})


def rows_of(batch: Batch, *, normalize_std: bool, shuffle_seed: int | None = None) -> Rows:
    """Flatten ``batch``. Trajectories that may not train are left out of rows, baselines and denominators alike.

    ``shuffle_seed`` (the shuffled-rewards control): permute the rewards over all valid trajectories of the batch
    before the advantages, the same way for the same seed and version. Raises BatchError.
    """
    groups = [[trajectory for trajectory in group.trajectories if trajectory.trainable] for group in batch.groups]
    valid = [trajectory for group in groups for trajectory in group]
    if not valid:
        raise BatchError(f"batch {batch.id} holds no trajectory that may train")
    rewards = [_reward(trajectory) for trajectory in valid]
    trained_on = list(rewards)
    if shuffle_seed is not None:
        random.Random(f"{shuffle_seed}/{batch.version}").shuffle(trained_on)
    rows: list[Row] = []
    zero = taken = 0
    for group in groups:
        votes = advantages(trained_on[taken : taken + len(group)], normalize_std=normalize_std)
        taken += len(group)
        for trajectory, advantage in zip(group, votes, strict=True):
            zero += advantage == 0.0
            rows.extend(_rows(trajectory, advantage, batch.version))
    return Rows(
        rows=rows,
        sampled_tokens=sum(int(row.sampled.shape[0]) for row in rows),
        rewards=rewards,
        staleness=[batch.version - start for t in valid if (start := t.start_version) is not None],
        zero_advantage_trajectories=zero,
    )


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward):
        raise BatchError(f"trajectory {trajectory.id}: reward {reward} is not a finite number")
    return reward


def _rows(trajectory: Trajectory, advantage: float, version: int) -> list[Row]:
    rows = []
    for number, segment in enumerate(trajectory.segments):
        try:
            row = _row(segment, advantage, version)
        except BatchError as error:
            raise BatchError(f"trajectory {trajectory.id}, segment {number}: {error}") from None
        if row is not None:
            rows.append(row)
    return rows


def _row(segment: Segment, advantage: float, version: int) -> Row | None:
    """None when nothing of the segment was sampled."""
    length = len(segment.token_ids)
    if not length == len(segment.loss_mask) == len(segment.logprobs):
        raise BatchError("token_ids, loss_mask and logprobs differ in length")
    sampled = [index for index, trains in enumerate(segment.loss_mask) if trains]
    if not sampled:
        return None
    if sampled[0] == 0:
        raise BatchError("the first token is marked as sampled, but nothing precedes it to predict it")
    versions = _versions(segment, sampled, version)
    behaviour = [segment.logprobs[index] for index in sampled]
    if not all(math.isfinite(value) and value <= LOGPROB_SLACK for value in behaviour):
        raise BatchError("a sampled token has a log-probability that is not one")
    return Row(
        tokens=torch.tensor(segment.token_ids[: sampled[-1] + 1], dtype=torch.long),
        sampled=torch.tensor(sampled, dtype=torch.long),
        behaviour=torch.tensor(behaviour, dtype=torch.float32),
        current=torch.tensor([value == version for value in versions]),
        advantage=advantage,
    )


def _versions(segment: Segment, sampled: list[int], trained: int) -> list[int]:
    """The weight version of each sampled token. Raises BatchError unless the spans cover exactly those."""
    covered: list[int] = []
    versions: list[int] = []
    for span in segment.spans:
        if span.version > trained:
            raise BatchError(f"tokens of version {span.version} in a batch that trains version {trained}")
        covered.extend(range(span.start, span.end))
        versions.extend([span.version] * (span.end - span.start))
    if covered != sampled:
        raise BatchError("the version spans do not cover exactly the sampled tokens, in order")
    return versions


def plan(
    rows: Sequence[Row], *, token_budget: int, ranks: int, keep_zero_advantage: bool, share_prompts: bool = False
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank: at most ``token_budget`` padded tokens each (a longer row travels alone).

    Rows without advantage have no gradient and are skipped unless ``keep_zero_advantage`` (a KL term gives them
    one); when nothing else is left, one micro-batch of them stays, so that the step still measures itself.
    ``share_prompts``: rows with the same prompt read it once. Micro-batches are dealt by size, so that ranks that work
    in lockstep have like work at the same time; missing ones are padded with a copy of a row that weighs nothing.
    """
    kept = [row for row in rows if row.advantage != 0.0 or keep_zero_advantage]
    packs = _pack(kept, token_budget, ranks, share_prompts) or _pack(rows, token_budget, 1, share_prompts)[:1]
    packs.sort(key=lambda pack: pack.tokens)
    while len(packs) % ranks:
        packs.append(_Pack(0, [replace(packs[0].rows[0], weight=0.0)]))
    return [[_micro_batch(pack) for pack in packs[rank::ranks]] for rank in range(ranks)]


@dataclass
class _Pack:
    """Rows that go through the model together, the last one the longest. They share ``prompt`` leading tokens."""

    prompt: int
    rows: list[Row]

    @property
    def tokens(self) -> int:
        return self.prompt + len(self.rows) * (self.rows[-1].length - self.prompt)

    def takes(self, row: Row, budget: int) -> bool:
        """Whether ``row`` fits, and the padding that it brings is cheaper than a micro-batch of its own."""
        fits = self.prompt + (len(self.rows) + 1) * (row.length - self.prompt) <= budget
        padding = len(self.rows) * (row.length - self.rows[-1].length)
        return fits and padding <= self.prompt + PACK_OVERHEAD_TOKENS


def _pack(rows: Sequence[Row], token_budget: int, ranks: int, share_prompts: bool) -> list[_Pack]:
    """Greedy over rows sorted by length; the budget shrinks where otherwise some rank would get nothing."""
    budget = token_budget
    if ranks > 1:
        budget = min(token_budget, math.ceil(sum(row.length for row in rows) / ranks))
    packs: list[_Pack] = []
    for prompt, family in _families(rows, share_prompts):
        first = len(packs)
        for row in sorted(family, key=lambda row: row.length):
            if len(packs) > first and packs[-1].takes(row, budget):
                packs[-1].rows.append(row)
            else:
                packs.append(_Pack(prompt, [row]))
    return packs


def _families(rows: Sequence[Row], share_prompts: bool) -> list[tuple[int, list[Row]]]:
    """Rows by shared prompt (its length first), and all the others together.

    The last token of a prompt is not shared: it predicts the first sampled token of each row.
    """
    if not share_prompts:
        return [(0, list(rows))]
    by_prompt: dict[bytes, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.tokens[: int(row.sampled[0])].numpy().tobytes(), []).append(row)
    others: list[Row] = []
    families: list[tuple[int, list[Row]]] = []
    for family in by_prompt.values():
        prompt = int(family[0].sampled[0]) - 1
        if len(family) > 1 and prompt >= MIN_SHARED_TOKENS:
            families.append((prompt, family))
        else:
            others.extend(family)
    return [*families, (0, others)]


def _micro_batch(pack: _Pack) -> MicroBatch:
    rows, prompt = pack.rows, pack.prompt
    inputs = torch.zeros(len(rows), max(row.length for row in rows) - prompt, dtype=torch.long)
    for index, row in enumerate(rows):
        inputs[index, : row.length - prompt] = row.tokens[prompt:-1]
    counts = torch.tensor([row.sampled.shape[0] for row in rows])
    return MicroBatch(
        prompt=rows[0].tokens[:prompt],
        inputs=inputs,
        row_index=torch.repeat_interleave(torch.arange(len(rows)), counts),
        position=torch.cat([row.sampled - 1 - prompt for row in rows]),
        targets=torch.cat([row.tokens[row.sampled] for row in rows]),
        behaviour=torch.cat([row.behaviour for row in rows]),
        advantage=torch.repeat_interleave(torch.tensor([row.advantage for row in rows]), counts),
        weight=torch.repeat_interleave(torch.tensor([row.weight for row in rows]), counts),
        current=torch.cat([row.current for row in rows]),
    )
