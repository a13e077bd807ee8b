"""What the scheduler is told. Plain immutable data; ids are opaque strings.

Owns: the vocabulary of observations. Must not know: who observed them or how. Every event is
delivered together with ``now`` (seconds, any epoch, never decreasing) through ``Scheduler.handle``.
"""

from __future__ import annotations

import msgspec

from venusrl.scheduling.costs import EngineCosts
from venusrl.types import FailureKind, StopReason


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Tick(_Event, frozen=True):
    """Time passed; lets grace periods, ageing and holds expire."""


# --- engine workers -----------------------------------------------------------------------------
class WorkerUp(_Event, frozen=True):
    """A worker serves. ``kv_capacity``: tokens. ``slots``: sequences it decodes at once. ``costs``: what its work
    takes, where that is known."""

    worker: str
    kv_capacity: int
    slots: int
    version: int
    costs: EngineCosts | None = None


class WorkerDown(_Event, frozen=True):
    """A worker is gone; its running turns come back as ``TurnRequested`` again."""

    worker: str


class WorkerMeasured(_Event, frozen=True):
    worker: str
    running: int
    waiting: int
    kv_used: int


class WorkerCalibrated(_Event, frozen=True):
    """What the worker's work takes, learned from its turns: replaces what was believed."""

    worker: str
    costs: EngineCosts


class WorkerDraining(_Event, frozen=True):
    """New weights wait for the worker's running turns to end: it takes no further turn until it
    acknowledges a version (or comes up again). A turn may go to another worker meanwhile."""

    worker: str


class WorkerAcknowledged(_Event, frozen=True):
    """The worker now generates with ``version``. ``flushed``: no later turn finds the KV that idles there."""

    worker: str
    version: int
    flushed: bool = False


# --- versions and batches -------------------------------------------------------------------------
class VersionPublished(_Event, frozen=True):
    """The weights of ``version`` are current: the batch that produced it is no longer outstanding."""

    version: int


class BatchFormed(_Event, frozen=True):
    """Recovery only: ``FormBatch`` was carried out before a crash; these groups belong to that batch."""

    version: int
    groups: tuple[str, ...]


class BatchTrained(_Event, frozen=True):
    """The optimizer step of the batch that trained ``version`` is over; ``version + 1`` will be published."""

    version: int


# --- groups and trajectories ------------------------------------------------------------------------
class GroupOpened(_Event, frozen=True):
    """Answer to ``OpenGroup``. ``size``: trajectories in the group; ``reissue_of``: as asked. ``reissues``, recovery
    only: how often its task had been tried again by then, this group included."""

    group: str
    ordinal: int
    task: str
    size: int
    reissue_of: str | None = None
    reissues: int = 0


class GroupDropped(_Event, frozen=True):
    """Recovery only: the group was dropped for ``reason`` before a crash and its task not yet tried again;
    ``reissues``: how often it had been by then."""

    group: str
    reason: str
    reissues: int = 0


class TaskOrderExhausted(_Event, frozen=True):
    """Answer to ``OpenGroup`` when no task is left: no further group will be opened."""


class TrajectoryOpened(_Event, frozen=True):
    """A trajectory exists and will ask for turns. ``attempt`` > 0: a replacement for a failed one."""

    trajectory: str
    group: str
    index: int
    attempt: int


class TurnRequested(_Event, frozen=True):
    """A trajectory is ready to generate. ``prompt_tokens``: whole context; ``shared_prefix``: its leading
    tokens common to the group. ``resumed``: tokens of this turn already generated before an abort."""

    trajectory: str
    turn: int
    prompt_tokens: int
    shared_prefix: int
    max_tokens: int
    resumed: int = 0


class TurnDispatched(_Event, frozen=True):
    """The turn's request left for the worker, which generated with ``version`` at that moment."""

    trajectory: str
    turn: int
    worker: str
    version: int


class TokensGenerated(_Event, frozen=True):
    """A running turn got ``count`` tokens more. Only where ``Policy.tokens_every_s`` asks for it and engines say so
    before a turn ends: modelled ones do, those behind the HTTP client answer whole."""

    trajectory: str
    turn: int
    count: int


class TurnFinished(_Event, frozen=True):
    """``stop`` is ABORT after a ``Preempt``; the turn is then requested again with ``resumed``. ``cached_tokens``: of
    its context, found in the worker's cache (an aborted one says nothing of it). ``leaves_kv``: whether a later turn
    there may find what it computed (not when new weights came meanwhile)."""

    trajectory: str
    turn: int
    generated: int
    cached_tokens: int
    stop: StopReason
    leaves_kv: bool = True


class KVTransferred(_Event, frozen=True):
    """Answer to ``Migrate``: ``tokens`` of the trajectory's KV are now on ``worker``; 0 = it stayed where it was."""

    trajectory: str
    worker: str
    tokens: int


class ToolStarted(_Event, frozen=True):
    """``tool``: what runs, of a small fixed set of names; empty where nobody knows."""

    trajectory: str
    turn: int
    tool: str = ""


class ToolFinished(_Event, frozen=True):
    trajectory: str
    turn: int
    observation_tokens: int
    exit_code: int | None


class VerificationStarted(_Event, frozen=True):
    trajectory: str


class VerificationFinished(_Event, frozen=True):
    trajectory: str
    reward: float


class TrajectoryFinished(_Event, frozen=True):
    """The trajectory is on disk with its verdict and may train."""

    trajectory: str


class TrajectoryFailed(_Event, frozen=True):
    """Infrastructure failure or cancellation: it will not train. (A policy failure *finishes*.)
    ``replaced``: a replacement with the same index follows; without one its group shrinks by it."""

    trajectory: str
    kind: FailureKind
    reason: str
    replaced: bool


class GroupClosed(_Event, frozen=True):
    """The group left without being trained: too many of it failed, or it had zero variance and is refilled
    (``reason = "zero_variance"``, then reported *instead of* its last ``TrajectoryFinished``, and only while
    ``Scheduler.refills_left`` > 0: a complete group may enter a batch at once). A fresh group follows."""

    group: str
    reason: str


# --- sandboxes ----------------------------------------------------------------------------------------
class SandboxReady(_Event, frozen=True):
    trajectory: str


class SandboxDenied(_Event, frozen=True):
    trajectory: str
    retry_after_s: float


class SandboxPaused(_Event, frozen=True):
    trajectory: str


Event = (
    Tick
    | WorkerUp
    | WorkerDown
    | WorkerMeasured
    | WorkerCalibrated
    | WorkerDraining
    | WorkerAcknowledged
    | VersionPublished
    | BatchFormed
    | BatchTrained
    | GroupOpened
    | GroupDropped
    | TaskOrderExhausted
    | TrajectoryOpened
    | TurnRequested
    | TurnDispatched
    | TokensGenerated
    | TurnFinished
    | KVTransferred
    | ToolStarted
    | ToolFinished
    | VerificationStarted
    | VerificationFinished
    | TrajectoryFinished
    | TrajectoryFailed
    | GroupClosed
    | SandboxReady
    | SandboxDenied
    | SandboxPaused
)
