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
    """Open the next group of the task order, or reissue the task of a dropped group."""

    reissue_of: str | None = None


class CreateSandbox(_Action, frozen=True):
    """Higher ``priority`` first."""

    trajectory: str
    priority: int


class ReleaseSandbox(_Action, frozen=True):
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
    trajectory: str
    worker: str


class RetainKV(_Action, frozen=True):
    trajectory: str
    worker: str


class ReleaseKV(_Action, frozen=True):
    trajectory: str
    worker: str


class CancelTrajectory(_Action, frozen=True):
    trajectory: str


class FormBatch(_Action, frozen=True):
    """Train ``groups`` (exactly B of them, in this order) from weight version ``version``."""

    version: int
    groups: tuple[str, ...]


class FailRun(_Action, frozen=True):
    """The run cannot go on; ``reason`` says why."""


Action = (
    OpenGroup
    | CreateSandbox
    | ReleaseSandbox
    | Dispatch
    | Hold
    | Preempt
    | Migrate
    | RetainKV
    | ReleaseKV
    | CancelTrajectory
    | FormBatch
    | FailRun
)
