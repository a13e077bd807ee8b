"""What the scheduler asks for. Plain immutable data; every action carries a reason code.

Owns: the vocabulary of decisions. An action is a request: its executor answers with the matching
event (``OpenGroup`` with ``GroupOpened`` or ``TaskOrderExhausted``, ``Dispatch`` with ``TurnDispatched``
and later ``TurnFinished``, ``FormBatch`` with ``BatchTrained`` and ``VersionPublished``...).
"""

from __future__ import annotations

import msgspec


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    reason: str


class OpenGroup(_Action, frozen=True):
    """Open the next group of the task order, or reissue the task of a dropped group.

    Each one is answered by one ``GroupOpened`` (naming the same ``reissue_of``) followed by its
    ``TrajectoryOpened``, or by ``TaskOrderExhausted``.
    """

    reissue_of: str | None = None


class CreateSandbox(_Action, frozen=True):
    """Higher ``priority`` first. Said again for a sandbox that is still asked for, it changes the priority; for one
    that is paused, it resumes it (answered by ``SandboxReady``)."""

    trajectory: str
    priority: int


class PauseSandbox(_Action, frozen=True):
    """Give the sandbox's memory to somebody more urgent; its state is kept. Answered by ``SandboxPaused``."""

    trajectory: str


class Dispatch(_Action, frozen=True):
    """Send the turn to ``worker`` now. ``urgency``: higher is more urgent; adapters map its sign."""

    trajectory: str
    turn: int
    worker: str
    urgency: int


class Hold(_Action, frozen=True):
    """The turn waits, for ``reason``. Emitted once per change of reason."""

    trajectory: str
    turn: int


class Preempt(_Action, frozen=True):
    """Abort the running turn, keep its partial tokens, request it again."""

    trajectory: str
    turn: int


class Migrate(_Action, frozen=True):
    """Copy the idle trajectory's KV to ``worker`` (only for fleets whose ``EngineCosts`` price a transfer), answered
    by ``KVTransferred``. Moving by re-prefill needs no such action: the next ``Dispatch`` names another worker."""

    trajectory: str
    worker: str


class RetainKV(_Action, frozen=True):
    """Evict the idle trajectory's KV on ``worker`` after that of those not retained. A hint: engines without such
    a control keep their own order."""

    trajectory: str
    worker: str


class ReleaseKV(_Action, frozen=True):
    """The idle trajectory's KV on ``worker`` may go first. A hint, as ``RetainKV``."""

    trajectory: str
    worker: str


class CancelTrajectory(_Action, frozen=True):
    """The trajectory, running or finished, will never train: stop it, discard it, count it under ``reason``.

    The scheduler has already forgotten its group, so the answer (``TrajectoryFailed``) changes nothing and no
    replacement is wanted. Reasons: ``stale`` (its staleness bound can no longer be met), ``deadline`` (its group
    was dropped for holding up a batch), ``group_closed``, ``group_too_small`` (too few siblings are left).
    """

    trajectory: str


class FormBatch(_Action, frozen=True):
    """Train ``groups`` (in this order) from weight version ``version``.

    Exactly B of them, but for the last batch of an exhausted task order when the config allows a short one.
    """

    version: int
    groups: tuple[str, ...]


class FinishRun(_Action, frozen=True):
    """Nothing more will train: end cleanly. ``reason``: ``max_steps`` (the last batch is trained) or
    ``task_order_exhausted`` (what is left cannot fill a batch; it is discarded). Emitted once."""


class FailRun(_Action, frozen=True):
    """The run cannot go on; ``reason`` is a stable code, ``detail`` the causes. Emitted once."""

    detail: str = ""


Action = (
    OpenGroup
    | CreateSandbox
    | PauseSandbox
    | Dispatch
    | Hold
    | Preempt
    | Migrate
    | RetainKV
    | ReleaseKV
    | CancelTrajectory
    | FormBatch
    | FinishRun
    | FailRun
)
