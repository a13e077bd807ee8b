"""Recovery of what was about to happen: a task dropped right before a crash is tried again after it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from venusrl.coordinator.episodes import EpisodeSettings
from venusrl.coordinator.recovery import rebuild
from venusrl.coordinator.store import RunStore
from venusrl.recipe import resolve
from venusrl.scheduling.actions import OpenGroup
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.events import GroupDropped
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import Task

TASKS = {name: Task(name, "fix it", "/tasks") for name in ("a", "b", "c", "d")}


def test_a_task_dropped_right_before_a_crash_is_not_lost(tmp_path: Path) -> None:
    recipe = resolve({"run": {"name": "r"}, "model": {"path": "m"}, "training": {"steps": 3}})
    with RunStore.open(tmp_path / "r", recipe, resume=False) as store:
        store.set_task_order(list(TASKS), seed=0, epochs=1)
        dropped, dead = store.open_group(2), store.open_group(2)
        assert dropped is not None
        assert dead is not None
        store.close_group(dropped.id, "deadline")
        store.close_group(dead.id, "group_too_small")
        recovered = rebuild(store, store.recover(), TASKS, EpisodeSettings(group_size=2, retries=1, min_valid=2))
    assert [e for e in recovered.events if isinstance(e, GroupDropped)] == [GroupDropped(dropped.id, "deadline", 0)]
    scheduler = Scheduler(SchedulerConfig(2, 2, Decimal(0), 0))
    opened = [a for a in scheduler.restore(recovered.events, 0.0) if isinstance(a, OpenGroup)]
    assert [a.reissue_of for a in opened] == [dropped.id, None]
