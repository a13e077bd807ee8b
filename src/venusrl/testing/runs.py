"""Runs without engines, sandboxes or a policy: made-up trajectories in a real store.

Owns: the smallest valid recipe and trajectories that satisfy every check of the store. For tests of whatever
reads a run store or speaks the trainer API, one's own trainer included.

Must not know: how real trajectories come to be.

Guarantees: no randomness, no clock; what it makes is trainable unless it is told otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from venusrl.coordinator.store import OpenedTrajectory, RunStore
from venusrl.recipe import Recipe, resolve
from venusrl.types import EndReason, Failure, Segment, StopReason, Trajectory, Turn, VersionSpan

TASKS = tuple(f"task-{number}" for number in range(8))


def small_recipe(**sections: dict[str, Any]) -> Recipe:
    """Two groups of two a batch, staleness bound 1; ``sections`` override."""
    table: dict[str, Any] = {
        "run": {"name": "made-up"},
        "model": {"path": "/no/model"},
        "training": {"steps": 4},
        "schedule": {"batch_groups": 2, "group_size": 2, "async_factor": 1},
    }
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section
    return resolve(table)


def new_store(run_dir: Path, *, resume: bool = False, **sections: dict[str, Any]) -> RunStore:
    """A locked store of ``small_recipe`` over ``TASKS``, its order set."""
    store = RunStore.open(run_dir, small_recipe(**sections), resume=resume)
    store.set_task_order(TASKS, seed=0, epochs=0)
    return store


def made_up_trajectory(
    opened: OpenedTrajectory,
    task_id: str,
    *,
    version: int = 0,
    reward: float | None = 1.0,
    sampled: int = 3,
    failure: Failure | None = None,
    end_version: int | None = None,
) -> Trajectory:
    """Two prompt tokens and ``sampled`` others, the last of them of ``end_version`` (default: as the first)."""
    total = 2 + sampled
    last = version if end_version is None else end_version
    spans = [VersionSpan(version, 2, total)]
    if last != version:
        spans = [VersionSpan(version, 2, total - 1), VersionSpan(last, total - 1, total)]
    segment = Segment(
        token_ids=list(range(total)),
        loss_mask=[False] * 2 + [True] * sampled,
        logprobs=[0.0] * 2 + [-0.5] * sampled,
        spans=spans,
    )
    return Trajectory(
        id=opened.id,
        group_id=opened.group_id,
        task_id=task_id,
        index=opened.index,
        attempt=opened.attempt,
        start_version=version,
        segments=[segment],
        turns=[Turn(0, 2, sampled, 0, StopReason.STOP, "submit")],
        reward=reward,
        end=EndReason.SUBMITTED if failure is None else EndReason.FAILED,
        failure=failure,
    )


def complete_group(store: RunStore, size: int = 2, *, version: int = 0) -> str:
    """Open a group, finish all of its trajectories at ``version`` with rewards 0, 1, 0..., and complete it."""
    group = store.open_group(size)
    if group is None:
        raise ValueError("the order of tasks is exhausted")
    for member in group.trajectories:
        store.finish_trajectory(
            made_up_trajectory(member, group.task_id, version=version, reward=float(member.index % 2))
        )
    store.complete_group(group.id)
    return group.id
