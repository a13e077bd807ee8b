"""Batches made up from a seed, in the exact shape that a run hands to its trainer.

Owns: random but valid trajectories (multi-turn masks, version spans, log-probabilities, failures). For tests of
trainers and stores; a trainer of your own can be tried on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from venusrl.types import (
    Batch,
    EndReason,
    Failure,
    FailureKind,
    Group,
    Segment,
    Trajectory,
    VersionSpan,
)


def make_segment(
    rng: random.Random, version: int, *, turns: int = 2, tokens: int = 6, vocabulary: int = 256
) -> Segment:
    """Prompt and sampled stretches by turns, with an observation at the end that nothing was sampled after."""
    ids: list[int] = []
    mask: list[bool] = []
    spans: list[VersionSpan] = []
    for _ in range(turns):
        prompt, sampled = rng.randint(1, tokens), rng.randint(1, tokens)
        spans.append(VersionSpan(version, len(ids) + prompt, len(ids) + prompt + sampled))
        ids.extend(rng.randrange(vocabulary) for _ in range(prompt + sampled))
        mask.extend([False] * prompt + [True] * sampled)
    ids.extend(rng.randrange(vocabulary) for _ in range(rng.randint(0, tokens)))
    mask.extend([False] * (len(ids) - len(mask)))
    logprobs = [rng.uniform(-8.0, -0.01) if trains else 0.0 for trains in mask]
    return Segment(ids, mask, logprobs, spans)


def make_trajectory(
    name: str,
    segments: list[Segment],
    reward: float | None,
    *,
    version: int = 0,
    failure: FailureKind | None = None,
) -> Trajectory:
    group, _, index = name.rpartition("/")
    return Trajectory(
        id=name,
        group_id=group,
        task_id=f"task-{group}",
        index=int(index),
        attempt=0,
        start_version=version,
        segments=segments,
        turns=[],
        reward=reward,
        end=EndReason.SUBMITTED if failure is None else EndReason.FAILED,
        failure=None if failure is None else Failure(failure, "made_up"),
    )


def make_batch(
    version: int,
    *,
    seed: int = 0,
    groups: int = 2,
    size: int = 4,
    staleness: int = 0,
    rewards: Sequence[Sequence[float]] | None = None,
    vocabulary: int = 256,
    tokens: int = 6,
) -> Batch:
    """A batch that trains ``version``; trajectories start up to ``staleness`` versions earlier. Rewards are 0 or 1."""
    rng = random.Random(f"{seed}/{version}")
    made = []
    for number in range(groups):
        group_id = f"g{version}-{number}"
        start = max(0, version - rng.randint(0, staleness))
        trajectories = []
        for index in range(size):
            reward = rewards[number][index] if rewards else float(rng.random() < 0.5)
            segments = [
                make_segment(rng, start, turns=rng.randint(1, 3), tokens=tokens, vocabulary=vocabulary)
                for _ in range(rng.choice((1, 1, 2)))
            ]
            trajectories.append(make_trajectory(f"{group_id}/{index}", segments, reward, version=start))
        made.append(Group(group_id, f"task-{group_id}", version * groups + number, start, trajectories))
    return Batch(f"batch-{version:06d}", version, made)
