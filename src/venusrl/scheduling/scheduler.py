"""The state machine of a run: events in, actions out.

Owns: the composition of window, worker fleet and policy. Must not know: clocks, tasks, engines, asyncio.

Guarantees: see ``Scheduler``.
"""

from __future__ import annotations

from collections.abc import Iterable

from venusrl.scheduling.actions import Action
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.events import Event
from venusrl.scheduling.snapshot import SchedulerSnapshot


class Scheduler:
    """``handle(event, now)`` with ``now`` never decreasing. Being written: interface first."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of one event and decide."""
        raise RuntimeError("being written")

    def restore(self, events: Iterable[Event], now: float) -> list[Action]:
        """After a crash: take note of synthetic events as if they had happened, then decide once.

        Order: ``VersionPublished`` of the weights in use; for every group that is not finally closed, and whose
        batch's weights are not yet in use, ``GroupOpened`` and, per live trajectory, ``TrajectoryOpened``, then for the
        finished ones ``TurnDispatched`` (turn 0, its start version, worker "") and ``TrajectoryFinished``, and
        ``TrajectoryFailed(replaced=False)`` for those given up; ``BatchFormed`` for every recorded batch of the
        versions from the one in use on; ``TaskOrderExhausted`` if so; ``WorkerUp`` for workers that serve.
        """
        raise RuntimeError("being written")

    @property
    def refills_left(self) -> int:
        """Zero-variance groups that may still be replaced before the next batch."""
        raise RuntimeError("being written")

    def snapshot(self) -> SchedulerSnapshot:
        """The present state; cheap enough to call a few times a second."""
        raise RuntimeError("being written")
