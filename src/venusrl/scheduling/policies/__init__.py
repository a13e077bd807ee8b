"""The interface of scheduling policies: which turn runs where and when, what KV is kept, who gets a sandbox.

Owns: ``Policy`` and the view of the run it decides on. Must not know: any particular policy. Whether a turn *may*
run on a worker (versions, staleness quota) is not a policy's business: it asks the view, and the scheduler refuses
a policy that did not. Nor are the window and the batches: a policy may only open less than the window allows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from venusrl.scheduling.actions import (
    CreateSandbox,
    Dispatch,
    Hold,
    Migrate,
    PauseSandbox,
    Preempt,
    ReleaseKV,
    RetainKV,
)
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.events import Event
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.window import Group, Window

Decision = Dispatch | Hold | Preempt | Migrate | RetainKV | ReleaseKV | CreateSandbox | PauseSandbox
"""What a policy decides: about turns, KV and sandboxes."""


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
    def config(self) -> SchedulerConfig: ...

    @property
    def window(self) -> Window:
        """Open groups, their members and ages; to read only."""
        ...

    @property
    def now(self) -> float:
        """Seconds, as given to ``handle``."""
        ...

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
        """The worker that ran its last turn, while it is up."""
        ...

    def group(self, trajectory: str) -> Group | None:
        """The open group of a live trajectory."""
        ...

    def doing(self, trajectory: str) -> str | None:
        """starting, held, generating, tool, verifying or finished; None if it is not live."""
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


class Policy(ABC):
    """Base of all policies, with defaults that suit one that orders turns and leaves KV and sandboxes alone.

    Called by the scheduler only, in this order for every event: ``observe``, then ``add`` or ``remove`` where the
    event asks for a turn or ends a trajectory, then ``decide``.
    """

    name = "policy"
    tokens_every_s: float | None = None
    """How often to hear ``TokensGenerated`` of every turn that decodes; None = what a turn's end says is enough."""

    def observe(self, event: Event, view: View) -> None:  # noqa: B027 -- order alone needs no history
        """One event, before the scheduler takes note of it (a trajectory that ends is still there)."""

    @abstractmethod
    def add(self, turn: PendingTurn) -> None:
        """A turn waits (again; a second request of the same trajectory replaces the first and keeps its place)."""

    @abstractmethod
    def remove(self, trajectory: str) -> None:
        """Its turn is not wanted any more: it is over. Unknown trajectories are fine."""

    @abstractmethod
    def decide(self, view: View) -> Iterator[Decision]:
        """Decisions for now. Each is carried out before the next is asked for; the iterator is always exhausted.

        ``Hold`` only when its reason is new for that turn. With nothing to decide it must cost next to nothing.
        """

    def group_limit(self, view: View) -> int:
        """Pacing: how many groups may be outstanding at most. What exceeds the window is cut to it."""
        return view.config.window

    def sandbox(self, trajectory: str, view: View) -> CreateSandbox | None:
        """What to ask for when a trajectory opens; None if ``decide`` will ask when its time comes."""
        group = view.group(trajectory)
        urgent = group is None or view.window.at_deadline(group)
        return CreateSandbox("opened", trajectory, 1 if urgent or group is None else -group.ordinal)

    def wake_at(self, view: View) -> float | None:
        """When ``decide`` has something to do although nothing happened; None = never."""
        return None
