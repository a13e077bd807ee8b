"""One training run, from a recipe and a directory to trained weights.

Owns: the assembly of a run (store, tasks, sandboxes, engine workers, gateway, trainer, evaluation), its
life (until the last step is trained and evaluated, a stop is asked for, the time limit passes or nothing
can go on) and its bounded teardown.

Must not know: how anything it assembles works inside; torch.

Guarantees: what it started is gone when it returns, however it returns; a run that cannot go on raises
``RunFailed`` with the original cause; a run that stopped can be resumed from its directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from venusrl.recipe import Recipe

if TYPE_CHECKING:
    from venusrl.observe.recorder import RunRecorder
    from venusrl.observe.status import Status


class RunSummary(msgspec.Struct, frozen=True):
    """How a run ended. ``outcome``: finished, stopped (asked to), time_limit or tasks_exhausted."""

    outcome: str
    reason: str
    run_dir: str
    version: int
    max_steps: int
    wall_s: float
    summary: dict[str, Any]
    """The content of ``summary.json``."""

    @property
    def resumable(self) -> bool:
        return self.version < self.max_steps


async def run_training(
    recipe: Recipe,
    run_dir: Path,
    *,
    resume: bool,
    recorder: RunRecorder,
    on_status: Callable[[Status], None] | None = None,
    stop: asyncio.Event | None = None,
) -> RunSummary:
    """Train ``recipe`` in ``run_dir`` until it is done or ``stop`` is set (a clean finish: nothing is lost).

    Raises RunFailed (with the original cause), RecipeError, TaskError, ModelError, SandboxError, StoreError.
    Cancelling it tears everything down at once; the run can be resumed all the same.
    """
    raise RuntimeError("the run is not assembled yet")
