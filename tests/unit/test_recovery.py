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
from venusrl.scheduling.events import GroupDropped, GroupOpened
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


def test_how_often_a_task_was_tried_again_outlives_a_crash(tmp_path: Path) -> None:
    recipe = resolve({"run": {"name": "r"}, "model": {"path": "m"}, "training": {"steps": 3}})
    config = SchedulerConfig(2, 2, Decimal(1), 1, max_reissues=2)
    settings = EpisodeSettings(group_size=2, retries=1, min_valid=2)
    with RunStore.open(tmp_path / "r", recipe, resume=False) as store:
        store.set_task_order(list(TASKS), seed=0, epochs=1)
        opened = store.open_group(2)
        for times in (1, 2):
            assert opened is not None
            store.close_group(opened.id, "deadline")
            opened = store.open_group(2, reissue_of=opened.id)
            recovered = rebuild(store, store.recover(), TASKS, settings)
            assert [e.reissues for e in recovered.events if isinstance(e, GroupOpened)] == [times]
            scheduler = Scheduler(config)
            scheduler.restore(recovered.events, 0.0)
            assert opened is not None
            assert scheduler.window.open[opened.id].reissues == times
        assert opened is not None
        store.close_group(opened.id, "deadline")
        recovered = rebuild(store, store.recover(), TASKS, settings)
    assert [e for e in recovered.events if isinstance(e, GroupDropped)] == [GroupDropped(opened.id, "deadline", 2)]
    actions = Scheduler(config).restore(recovered.events, 0.0)
    assert all(action.reissue_of is None for action in actions if isinstance(action, OpenGroup)), "it had its chances"
