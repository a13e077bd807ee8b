"""The interface of scheduling policies: which turn runs where, and when.

Owns: ``Policy`` and the view of the run it decides on. Must not know: any particular policy. Whether a turn *may*
run on a worker (versions, staleness quota) is not a policy's business: it asks the view, and the scheduler refuses
a policy that did not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.fleet import Worker


class PendingTurn(msgspec.Struct, frozen=True):
    """A turn that was requested and not dispatched (fields as in ``TurnRequested``)."""

    trajectory: str
    group: str
    turn: int
    prompt_tokens: int
    shared_prefix: int
    max_tokens: int
    resumed: int
    requested_at: float


class View(Protocol):
    """What a policy may look at. It changes while ``decide`` runs: each decision takes effect at once."""

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Those that are up."""
        ...

    @property
    def changes(self) -> int:
        """Grows when something other than a freed slot may let a held turn go."""
        ...

    @property
    def freed(self) -> int:
        """Grows when a worker's slot becomes free."""
        ...

    def home(self, trajectory: str) -> Worker | None:
        """The worker that holds the trajectory's KV, while it is up."""
        ...

    def held(self, turn: PendingTurn) -> str | None:
        """Why the turn may run nowhere now; None if it may."""
        ...

    def refusal(self, turn: PendingTurn, worker: Worker) -> str | None:
        """Why the turn may not run on this worker now; None if it may."""
        ...

    def urgency(self, turn: PendingTurn) -> int:
        """1 for a group at its deadline, else 0."""
        ...


class Policy(Protocol):
    """Decides on the turns it was given and not relieved of."""

    def add(self, turn: PendingTurn) -> None:
        """A turn waits (again; a second request of the same trajectory replaces the first and keeps its place)."""
        ...

    def remove(self, trajectory: str) -> None:
        """Its turn is not wanted any more. Unknown trajectories are fine."""
        ...

    def decide(self, view: View) -> Iterator[Dispatch | Hold]:
        """Decisions for now. Each is carried out before the next is asked for; the iterator is always exhausted.

        ``Hold`` only when its reason is new for that turn. With nothing to decide it must cost next to nothing.
        """
        ...
