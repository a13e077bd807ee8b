"""What the scheduler costs: CPU time of its own thread, so that a busy machine changes little."""

from __future__ import annotations

import time
from decimal import Decimal

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import StopReason


def _turns(names: list[str], count: int) -> list[ev.Event]:
    """``count`` whole turns of every trajectory."""
    events: list[ev.Event] = []
    for turn in range(count):
        for name in names:
            events += [
                ev.TurnRequested(name, turn, 100, 50, 100),
                ev.TurnDispatched(name, turn, "w0", 0),
                ev.TurnFinished(name, turn, 10, 0, StopReason.STOP),
                ev.ToolStarted(name, turn),
            ]
    return events


def test_one_core_handles_5000_events_a_second_with_10000_live_trajectories() -> None:
    config = SchedulerConfig(batch_groups=625, group_size=8, async_factor=Decimal(1), max_staleness=1)
    scheduler = Scheduler(config)
    names = [f"g{group}/{index}" for group in range(config.window) for index in range(8)]
    opened = [ev.GroupOpened(f"g{group}", group, "t", 8) for group in range(config.window)]
    members = [ev.TrajectoryOpened(name, name.split("/")[0], int(name[-1]), 0) for name in names]
    scheduler.restore([ev.VersionPublished(0), *opened, *members, ev.WorkerUp("w0", 10_000_000, 256, 0)], 0.0)
    assert len(scheduler.live) == 10_000
    events: list[ev.Event] = _turns(names, 1) + [ev.TrajectoryFinished(name) for name in names[:2000]]
    begun = time.thread_time()
    dispatched = sum(isinstance(a, Dispatch) for event in events for a in scheduler.handle(event, 0.0))
    seconds = time.thread_time() - begun
    assert dispatched == 10_000
    assert len(events) / seconds > 5_000
