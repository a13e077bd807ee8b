"""One training run, from a recipe and a directory to trained weights.

Owns: the life of a run: what is opened in which order, until when it goes on (the last step trained and
evaluated, a stop asked for, the time limit passed, nothing left to do), how it ends. ``assembly.py`` wires the parts.

Must not know: how anything it starts works inside; torch.

Guarantees: what it started is gone when it returns, however it returns, and in bounded time; a run that cannot
go on raises ``RunFailed`` (or the error of the part that failed) with the original cause; a run that did not finish
can be resumed from its directory; every wait has a time limit or a reason that the status names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from venusrl import models
from venusrl.coordinator.assembly import Assembly
from venusrl.coordinator.errors import ProcessError, RunFailed, ShutdownTimeout
from venusrl.coordinator.processes import Command, SupervisedProcess
from venusrl.coordinator.store import RunStore
from venusrl.coordinator.supervisor import Supervisor
from venusrl.observe.recorder import ObserveError
from venusrl.observe.summary import write_summary
from venusrl.recipe import Recipe, to_toml
from venusrl.sandboxes.e2b import E2BSandboxes
from venusrl.sandboxes.node import EmbeddedNode, NodeConfig
from venusrl.sandboxes.protocol import RuntimeUnavailable, Sandboxes
from venusrl.tasks import TaskSets, load_tasks
from venusrl.training.errors import EXIT_FAILED
from venusrl.training.launch import convert_command

if TYPE_CHECKING:
    from venusrl.observe.recorder import RunRecorder
    from venusrl.observe.status import Status

_log = logging.getLogger(__name__)

_STATUS_EVERY_S = 0.5
_EPISODES_END_S = 45.0
_EPISODES_ABORT_S = 15.0
_TRAINER_ENDS_S = 120.0
"""A step in progress is worth waiting for; a trainer that takes longer is stopped and loses it."""
_IDLE_TRAINER_ENDS_S = 5.0
"""One without a step hears at once that the run is over."""
_SHUTDOWN_S = 30.0
_STOPPED_EARLY = ("stopped", "asked to stop before anything was started")


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
        """Whether something is left to do: steps, or an evaluation that was stopped."""
        return self.version < self.max_steps or self.outcome == "stopped"


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

    Raises RunFailed (with the original cause), TaskError, ModelError, SandboxError, StoreError, TokenizerError.
    Cancelling it tears everything down at once; the run can be resumed all the same.
    """
    begun = time.monotonic()
    # A resumed recipe may name more steps; whatever else may change is the store's to judge.
    with RunStore.open(_absolute(run_dir), recipe, resume=resume) as store:
        recorder.event("run_started", resumed=resume, version=store.current_version(), seed=recipe.run.seed)
        try:
            outcome, reason = await _run(recipe, store, recorder, on_status, stop or asyncio.Event(), begun)
        except BaseException as error:  # whatever it is, cancellation too: raised again below
            cause = "cancelled" if isinstance(error, asyncio.CancelledError) else str(error)
            with contextlib.suppress(ObserveError):  # a full disk must not hide the cause
                recorder.event("run_finished", reason="failed", error=cause)
                write_summary(store.run_dir)
            raise
        recorder.event("run_finished", reason=outcome, detail=reason)
        return RunSummary(
            outcome=outcome,
            reason=reason,
            run_dir=str(store.run_dir),
            version=store.current_version(),
            max_steps=recipe.training.steps,
            wall_s=time.monotonic() - begun,
            summary=write_summary(store.run_dir),
        )


def _absolute(path: Path) -> Path:
    """Children have working directories of their own."""
    return path.absolute()


async def _run(
    recipe: Recipe,
    store: RunStore,
    recorder: RunRecorder,
    on_status: Callable[[Status], None] | None,
    stop: asyncio.Event,
    begun: float,
) -> tuple[str, str]:
    """Open what a run needs, drive it, and give everything back."""
    write_recipe(recipe, store.run_dir)
    tasks = await _tasks(recipe, store.run_dir / "tasks", stop)
    if tasks is None:
        return _STOPPED_EARLY
    store.set_task_order([task.id for task in tasks.train], seed=recipe.run.seed, epochs=recipe.tasks.epochs)
    model = await _model(recipe, store.run_dir / "logs", stop)
    if model is None or stop.is_set():
        return _STOPPED_EARLY
    async with _sandboxes(recipe, store.run_dir) as sandboxes:
        supervisor = Supervisor(shutdown_s=_SHUTDOWN_S)
        parts = Assembly(recipe, store, recorder, supervisor, tasks, sandboxes, model)
        drive = _Drive(recipe, parts, tasks, supervisor, stop, begun)
        if on_status is not None:
            supervisor.spawn("status", drive.show(on_status), endless=True)
        try:
            ended = await supervisor.run(drive.live())
        except BaseException as error:  # noted on whatever it is, and raised again
            try:
                await parts.episodes.close("shutdown", _EPISODES_ABORT_S, record=False)
                await drive.close()
            except ShutdownTimeout as late:
                error.add_note(str(late))
            raise
        await drive.close()
        return ended


class _Drive:
    """The life of an assembled run."""

    def __init__(
        self,
        recipe: Recipe,
        parts: Assembly,
        tasks: TaskSets,
        supervisor: Supervisor,
        stop: asyncio.Event,
        begun: float,
    ) -> None:
        self._recipe = recipe
        self._parts = parts
        self._tasks = tasks
        self._supervisor = supervisor
        self._stop = stop
        self._begun = begun
        self._phase = "starting"
        self._on_status: Callable[[Status], None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._trainer: asyncio.Task[None] | None = None

    async def live(self) -> tuple[str, str]:
        """Until the run is over; returns how it ended."""
        parts = self._parts
        self._supervisor.spawn("faults", parts.faults.watch(), endless=True)
        await parts.begin()
        version = parts.store.current_version()
        parts.request_evaluations(version)
        if version < self._recipe.training.steps:
            self._start()
            self._phase = "training"
            outcome, reason = await self._until_over()
        else:
            outcome, reason = "finished", "every step was trained before"
        if not await self._wind_down(outcome):
            return "stopped", "asked to stop during the last evaluation"
        return outcome, reason

    def _start(self) -> None:
        parts, spawn = self._parts, self._supervisor.spawn
        spawn("trainer API", parts.api.wait_failed())
        spawn("tick", parts.host.tick(), endless=True)
        spawn("forecasts", parts.forecasts.keep(), endless=True)
        self._trainer = spawn("trainer", self._train())
        self._workers = [spawn(f"worker {name}", parts.pool.keep(name), endless=True) for name in parts.pool.workers]
        self._evaluation = spawn("evaluation", parts.evaluator.run(), endless=True)

    async def _train(self) -> None:
        """Keep the trainer running until the run is over. Raises RunFailed when it cannot be kept."""
        end = await self._parts.trainer.keep_running(self._recipe.training.restarts, final=(EXIT_FAILED,))
        if not self._parts.over:
            raise RunFailed(f"the trainer left while the run goes on: {end}", reason="trainer_left")

    async def _until_over(self) -> tuple[str, str]:
        """Wait for the scheduler's word, a stop or the time limit."""
        ended, stopped = (
            asyncio.create_task(self._parts.ended.wait(), name="ended"),
            asyncio.create_task(self._stop.wait(), name="stop"),
        )
        limit = self._recipe.run.time_limit_s
        left = None if limit is None else max(0.0, limit - (time.monotonic() - self._begun))
        try:
            await asyncio.wait({ended, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, stopped):
                task.cancel()
        if self._parts.finish is not None:
            reason = self._parts.finish.reason
            return ("finished", "") if reason == "max_steps" else ("tasks_exhausted", reason)
        if self._stop.is_set():
            return "stopped", "asked to stop"
        return "time_limit", f"run.time_limit_s = {limit:g} passed"

    # --- the end ----------------------------------------------------------------------------------------------
    async def _wind_down(self, outcome: str) -> bool:
        """Stop the training half first, then evaluate what is left with everything that serves.

        False if a stop was asked for before the evaluation was over.
        """
        parts = self._parts
        self._enter(f"stopping {parts.episodes.running} episodes")
        parts.over = True
        stuck = await parts.episodes.close("shutdown", _EPISODES_END_S)
        if stuck:
            _log.warning("episodes that did not let go: %s", ", ".join(stuck))
        parts.api.finish(outcome)
        if self._trainer is not None:
            await self._end_trainer(self._trainer)
        version = parts.store.current_version()
        if outcome == "stopped":
            return True
        if self._recipe.evaluation.at_end:
            parts.evaluator.request(version)
        if parts.evaluator.evaluating is None:
            return True
        self._enter("evaluating")
        evaluation = asyncio.create_task(self._evaluate_the_rest(version), name="evaluate the rest")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({evaluation, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not evaluation.done():
                return False
            evaluation.result()
            return True
        finally:
            for task in (evaluation, stopped):
                task.cancel()
            await asyncio.gather(evaluation, stopped, return_exceptions=True)

    async def _end_trainer(self, trainer: asyncio.Task[None]) -> None:
        if self._parts.api.greeted:  # one that is still starting has nothing to lose
            # Between full checkpoints a trainer that ends writes one: that is worth waiting for, too.
            busy = self._parts.scheduler.window.training is not None or self._recipe.training.checkpoint_every > 1
            patience = _TRAINER_ENDS_S if busy else _IDLE_TRAINER_ENDS_S
            self._enter("waiting for the trainer's last step" if busy else "stopping the trainer")
            _, pending = await asyncio.wait({trainer}, timeout=patience)
            if pending:
                _log.warning("the trainer did not end within %g s and is stopped", patience)
        self._enter("stopping")
        await self._parts.trainer.stop()

    async def _evaluate_the_rest(self, version: int) -> None:
        parts = self._parts
        if self._workers:
            self._evaluation.cancel()
            await asyncio.wait({self._evaluation})
            await parts.publisher.wait_acknowledged(version, self._recipe.rollout.weight_sync_timeout_s)
        ready = {n: c for n, c in parts.pool.serving.items() if parts.pool.versions.get(n) == version}
        await parts.evaluator.finish(ready, version)

    async def close(self) -> None:
        """Give back what tasks alone do not: processes and connections. After the supervisor is done."""
        self._parts.host.close()
        await self._parts.close()

    def _enter(self, phase: str) -> None:
        """A phase may be over before the next look: it is told when it begins."""
        self._phase = phase
        if self._on_status is not None:
            self._on_status(self._status())

    def _status(self) -> Status:
        return self._parts.status(self._phase, time.monotonic() - self._begun)

    async def show(self, on_status: Callable[[Status], None]) -> None:
        self._on_status = on_status
        while True:
            on_status(self._status())
            await asyncio.sleep(_STATUS_EVERY_S)


@contextlib.asynccontextmanager
async def _sandboxes(recipe: Recipe, run_dir: Path) -> AsyncIterator[Sandboxes]:
    """This machine's own, or those of an E2B endpoint. Raises RuntimeUnavailable with the mend."""
    section = recipe.sandbox
    if section.runtime == "e2b":
        key = os.environ.get("E2B_API_KEY", "")
        if not key:
            raise RuntimeUnavailable(f"sandbox.url = {section.url} needs a key: set E2B_API_KEY in the environment")
        async with E2BSandboxes(section.url, key, sandbox_url=section.sandbox_url) as remote:
            yield remote
        return
    config = NodeConfig(max_sandboxes=section.max_sandboxes, concurrent_commands=section.concurrent_commands)
    node = EmbeddedNode(run_dir / "sandboxes", recipe.run.name, config)
    try:
        reaped = await node.start()
        if reaped:
            _log.info("removed %d sandboxes of an earlier session", reaped)
        yield node
    finally:
        await node.close()


class _StopAsked(Exception):
    """Raised in the thread that loads tasks."""


async def _tasks(recipe: Recipe, workdir: Path, stop: asyncio.Event) -> TaskSets | None:
    """The tasks; None if stopped before all were there (what is missing is made by the resumption)."""

    def check() -> None:
        if stop.is_set():
            raise _StopAsked

    try:
        return await asyncio.to_thread(load_tasks, recipe.tasks, workdir, before_each=check)
    except _StopAsked:
        return None


async def _model(recipe: Recipe, logs: Path, stop: asyncio.Event) -> Path | None:
    """The directory of the model to start from, converted first where that is needed; None if stopped meanwhile."""
    if recipe.model.path.startswith("builtin:") and not (models.resolve(recipe.model.path) / "config.json").exists():
        convert = SupervisedProcess(
            "convert", Command(convert_command(recipe.model.path)), log_path=logs / "convert.log"
        )
        await convert.start()
        ended, stopped = asyncio.create_task(convert.wait_exit()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            end = await convert.stop()
            await asyncio.gather(ended, stopped, return_exceptions=True)
        if stop.is_set():
            return None
        if end is None or end.code != 0:
            raise ProcessError(f"model.path: {recipe.model.path} could not be converted: {end}")
    return models.check_directory(models.resolve(recipe.model.path))


def write_recipe(recipe: Recipe, run_dir: Path) -> None:
    """The resolved recipe, for the trainer (JSON) and for people and resumption (TOML)."""
    for name, text in (("recipe.json", recipe.model_dump_json(indent=2)), ("recipe.toml", to_toml(recipe))):
        scratch = run_dir / f"{name}.tmp"
        scratch.write_text(text)
        os.replace(scratch, run_dir / name)
