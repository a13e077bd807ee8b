"""What the run store hands out and takes in, as plain data.

Owns: the rows other modules see. Must not know: SQL, files.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class GroupState(StrEnum):
    OPEN = "open"
    COMPLETE = "complete"
    BATCHED = "batched"
    TRAINED = "trained"
    CLOSED = "closed"


class TrajectoryState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class BatchState(StrEnum):
    FORMED = "formed"
    TRAINED = "trained"
    """Trained, but no checkpoint contains it yet."""
    CLOSED = "closed"


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class OpenedTrajectory(_Record, frozen=True):
    id: str
    group_id: str
    index: int
    attempt: int


class OpenedGroup(_Record, frozen=True):
    id: str
    ordinal: int
    task_id: str
    trajectories: tuple[OpenedTrajectory, ...]


class TrainedReport(_Record, frozen=True):
    """What a trainer says after a step: ``batch_id`` turned ``version - 1`` into ``version``."""

    batch_id: str
    version: int
    model_path: str
    checkpointed: bool
    metrics: dict[str, float] = {}


class VersionRecord(_Record, frozen=True):
    version: int
    model_path: str
    checkpointed: bool
    metrics: dict[str, float] = {}


class FinishedTrajectory(_Record, frozen=True):
    """A member of a group that is on disk and may train."""

    id: str
    index: int
    attempt: int
    start_version: int
    reward: float
    tokens: int


class Vacancy(_Record, frozen=True):
    """A place in a group that waits for a fresh attempt. ``infrastructure_failures``: those it had so far."""

    index: int
    next_attempt: int
    infrastructure_failures: int


class RecoveredGroup(_Record, frozen=True):
    """A group that is neither in a batch nor closed. ``start_version``: of its finished members, if any.
    ``reissues``: how often its place in the order had been taken before."""

    id: str
    ordinal: int
    task_id: str
    size: int
    state: GroupState
    start_version: int | None
    finished: tuple[FinishedTrajectory, ...]
    vacancies: tuple[Vacancy, ...]
    reissues: int = 0


class BatchRecord(_Record, frozen=True):
    id: str
    version: int
    state: BatchState
    group_ids: tuple[str, ...]


class ClosedGroup(_Record, frozen=True):
    """A closed group whose place in the order no other took. ``reissues``: how often the place was taken again."""

    id: str
    reason: str
    reissues: int


class RecoveredState(_Record, frozen=True):
    """Where the run stands. ``pending_batches`` are formed but not trained, oldest first."""

    version: int
    model_path: str | None
    next_ordinal: int
    groups: tuple[RecoveredGroup, ...]
    closed: tuple[ClosedGroup, ...]
    pending_batches: tuple[BatchRecord, ...]
    unclosed_batches: tuple[BatchRecord, ...]
    pending_evaluations: tuple[EvaluationKey, ...]
    lost_trajectories: int
    lost_tokens: int


class EvaluationKey(_Record, frozen=True):
    """``version`` is the one that triggered the evaluation, and the one that every sample is taken from."""

    version: int
    mode: str


class EvaluationSample(_Record, frozen=True):
    version: int
    task_id: str
    sample: int
    reward: float | None
    turns: int
    tokens: int
    end: str
    failure: str = ""


class EvaluationRecord(_Record, frozen=True):
    """``finished`` is false while the evaluation is asked for but not there yet."""

    version: int
    mode: str
    finished: bool
    reward: float | None
    samples: int
    failed: int
    wall_s: float


class RunIdentity(_Record, frozen=True):
    run_id: str
    created_at: float
    recipe_hash: str
    resumes: int


class RunTotals(_Record, frozen=True):
    """Sums over the whole run, computed from the rows each time, never counted beside them."""

    groups: dict[str, int]
    trajectories: dict[str, int]
    closed_groups: dict[str, int]
    failures: dict[str, int]
    """By ``kind/reason``."""
    trained_trajectories: int
    trained_tokens: int
    staleness_mean: float
    staleness_max: int
    discarded_tokens: dict[str, int]
