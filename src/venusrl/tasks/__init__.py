"""Tasks: what is to be done, where, and how it is judged.

Owns: loading a run's train and held-out sets, and the two moments when a task meets a sandbox (``prepare``,
``verify``). Must not know: engines, models, scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from venusrl.recipe import TasksSection
from venusrl.tasks import harbor
from venusrl.tasks.errors import TaskError
from venusrl.tasks.repair.write import write_set
from venusrl.tasks.verify import Verdict, prepare, verify
from venusrl.types import Task

__all__ = ["TaskError", "TaskSets", "Verdict", "load_tasks", "prepare", "verify"]

_BUILTIN = "builtin:code-repair"


class TaskSets(msgspec.Struct, frozen=True):
    """Disjoint by task id; ``held_out`` never trains."""

    train: list[Task]
    held_out: list[Task]


def load_tasks(section: TasksSection, workdir: Path, *, before_each: Callable[[], None] = lambda: None) -> TaskSets:
    """Read (or generate under ``workdir``) the tasks of a recipe. Raises TaskError.

    ``before_each`` is called before each task: to give up the loading of many, it raises something.
    """
    if section.source.startswith("builtin:"):
        return _builtin(section, workdir, before_each)
    train = harbor.read_set(Path(section.source).expanduser(), before_each)
    held_out = harbor.read_set(Path(section.held_out).expanduser(), before_each) if section.held_out else []
    shared = {t.id for t in train} & {t.id for t in held_out}
    if shared:
        raise TaskError(
            f"in tasks.source and in tasks.held_out alike: {', '.join(sorted(shared)[:5])}; rename or remove them"
        )
    return TaskSets(train, held_out)


def _builtin(section: TasksSection, workdir: Path, before_each: Callable[[], None]) -> TaskSets:
    if section.source != _BUILTIN:
        raise TaskError(f"tasks.source: there is no task set {section.source!r}; the built-in one is {_BUILTIN}")
    if section.held_out is not None:
        raise TaskError("tasks.held_out: the built-in task set brings its own held-out tasks; leave it out")
    folders = [
        write_set(workdir / name, count, section.seed, section.families, held_out, before_each)
        for name, count, held_out in (
            ("train", section.train_count, False),
            ("held-out", section.held_out_count, True),
        )
    ]
    return TaskSets(*(harbor.read_set(folder, before_each) for folder in folders))
