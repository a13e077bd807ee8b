"""The parts of a run, made and wired to each other.

Owns: which part hears of what: scheduler actions to their executors, events to their observers, a trainer's report
to the steps, a step's weights to the publisher, faults to the run's end. No behaviour of its own beyond that.

Must not know: when a run begins or ends (``run.py``).

Guarantees: making an ``Assembly`` starts nothing; its ``close`` stops whatever was started, in any state, in bounded
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from venusrl.coordinator import view
from venusrl.coordinator.amend import amend_record
from venusrl.coordinator.engines import LocalEngines, RemoteEngines
from venusrl.coordinator.episodes import Episodes, EpisodeSettings
from venusrl.coordinator.errors import RunFailed, ShutdownTimeout
from venusrl.coordinator.evaluation import EvaluationItem, EvaluationPlan, Evaluator
from venusrl.coordinator.forecasts import Forecasts
from venusrl.coordinator.host import SchedulerHost
from venusrl.coordinator.policies import MIN_VALID, make_policy, make_predictor, scheduler_config
from venusrl.coordinator.processes import Command, ProcessExit, SupervisedProcess
from venusrl.coordinator.publish import PublishRecord, RunningTurns, WeightPublisher, Weights
from venusrl.coordinator.recovery import rebuild
from venusrl.coordinator.steps import Meter, Steps, failure_histogram
from venusrl.coordinator.store import EvaluationRecord, OpenedTrajectory, RecoveredState, RunStore, TrainedReport
from venusrl.coordinator.supervisor import Supervisor
from venusrl.coordinator.trainer_api import TrainerApi
from venusrl.coordinator.workers import Allowance, EnginePool, EngineStarter
from venusrl.observe.recorder import RunRecorder
from venusrl.observe.status import EvaluationPoint, Status
from venusrl.recipe import Recipe
from venusrl.rollout.chat import ChatTokenizer
from venusrl.rollout.direct import DirectTurns
from venusrl.rollout.engines.protocol import EngineClient
from venusrl.rollout.episode import EpisodeLimits, EpisodeSpec, run_episode
from venusrl.rollout.gateway import Gateway
from venusrl.rollout.settings import GatewaySettings
from venusrl.sandboxes.protocol import Sandboxes
from venusrl.scheduling.actions import (
    CancelTrajectory,
    CreateSandbox,
    Dispatch,
    FailRun,
    FinishRun,
    FormBatch,
    Hold,
    OpenGroup,
    Preempt,
    ReleaseKV,
    RetainKV,
)
from venusrl.scheduling.events import Event, WorkerAcknowledged
from venusrl.scheduling.scheduler import Scheduler
from venusrl.tasks import TaskSets
from venusrl.training.launch import KEY_VARIABLE, trainer_command
from venusrl.types import Task, Trajectory

_log = logging.getLogger(__name__)
ENGINE_KEY_VARIABLE = "VENUSRL_ENGINE_KEY"
"""Where the bearer key of engines that run elsewhere is read from."""
_EVALUATION_NICE = 10


class Faults:
    """The first fault of a part that nobody awaits; it ends the run."""

    def __init__(self) -> None:
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(self, error: Exception) -> None:
        if self._first.done():
            _log.error("another fault after the first", exc_info=error)
        else:
            self._first.set_exception(error)

    async def watch(self) -> None:
        """Raise it, when it comes."""
        await asyncio.shield(self._first)

    def close(self) -> None:
        if not self._first.done():
            self._first.cancel()
        elif not self._first.cancelled():
            self._first.exception()  # seen: it was the run's end, or came after it


class Assembly:
    """All parts of one run, made and wired to each other. Raises TokenizerError."""

    def __init__(
        self,
        recipe: Recipe,
        store: RunStore,
        recorder: RunRecorder,
        supervisor: Supervisor,
        tasks: TaskSets,
        sandboxes: Sandboxes,
        model: Path,
    ) -> None:
        self.recipe = recipe
        self.store = store
        self.over = False
        """The run winds down: the trainer may leave."""
        self.ended = asyncio.Event()
        self.finish: FinishRun | None = None
        self.faults = Faults()
        self._recorder = recorder
        self._supervisor = supervisor
        self._sandboxes = sandboxes
        self._model = model
        self._held_out = {task.id: task for task in tasks.held_out[: recipe.evaluation.tasks]}
        self._tasks = {task.id: task for task in tasks.train}
        self._notes = view.Notes()
        self._key = secrets.token_urlsafe(32)
        self._tokenizer = ChatTokenizer.load(model)
        self._gateway_settings = GatewaySettings.of(recipe, self._tokenizer.stop_token_ids)
        self._allowance = Allowance("rollout.restarts", recipe.rollout.restarts)
        self._state: RecoveredState | None = None
        self.meter = Meter()
        self._build_rollout()
        self._build_training()
        self._build_evaluation()
        self._wire()

    # --- building ---------------------------------------------------------------------------------------------
    def _build_rollout(self) -> None:
        recipe = self.recipe
        predictor = make_predictor(recipe)
        self.forecasts = Forecasts(predictor, self.store.run_dir / "predictor.bin", self._event)
        self.scheduler = Scheduler(scheduler_config(recipe), make_policy(recipe, predictor))
        self.host = SchedulerHost(self.scheduler, on_failure=self.faults.report)
        self.gateway = Gateway({}, self._tokenizer, self.host.notify, settings=self._gateway_settings)
        self.running = RunningTurns()
        self.publisher = WeightPublisher(
            mode=recipe.rollout.weight_update,
            timeout_s=recipe.rollout.weight_sync_timeout_s,
            running=self.running,
            notify=self.host.notify,
            preempt=lambda trajectory, turn: self.gateway.apply(Preempt("weights", trajectory, turn)),
            settle=self.gateway.settled,
            on_broken=lambda name, error: self.pool.broken(name, error),
            on_record=self._published,
        )
        names, starter = self._engines("worker", recipe.rollout.urls, recipe.rollout.workers)
        self.pool = EnginePool(
            names,
            starter,
            self.publisher,
            allowance=self._allowance,
            notify=self.host.notify,
            attach=self.gateway.add_worker,
            detach=self.gateway.remove_worker,
            on_event=self._event,
        )
        self.episodes = Episodes(
            store=self.store,
            tasks=self._tasks,
            play=self._play,
            settings=self._episode_settings,
            notify=self.host.notify,
            refills_left=lambda: self.scheduler.refills_left,
            cancel_turns=self.gateway.cancel,
            on_failure=self.faults.report,
            on_event=self._event,
        )

    def _build_training(self) -> None:
        recipe = self.recipe
        self.api = TrainerApi(
            self.store,
            key=self._key,
            max_steps=recipe.training.steps,
            on_trained=self._trained,
            waiting_for=self.scheduler.waiting_for,
        )
        self.trainer = SupervisedProcess(
            "trainer",
            lambda: Command(
                trainer_command(run_dir=self.store.run_dir, url=self.api.url, ranks=recipe.training.ranks),
                {KEY_VARIABLE: self._key, "OMP_NUM_THREADS": str(recipe.training.threads)},
                cpus=recipe.training.cpus,
            ),
            log_path=self._logs / "trainer.log",
            on_exit=self._trainer_ended,
        )
        self.steps = Steps(
            store=self.store,
            host=self.host,
            episodes=self.episodes,
            recorder=self._recorder,
            meter=self.meter,
            batch_ready=self.api.notify_batch_ready,
            on_version=self._publish,
            on_due=self._due,
        )

    def _build_evaluation(self) -> None:
        evaluation = self.recipe.evaluation
        _, starter = self._engines("evaluation", evaluation.urls, 1, nice=_EVALUATION_NICE, slots=evaluation.slots)
        self.evaluator = Evaluator(
            EvaluationPlan(
                task_ids=tuple(self._held_out),
                samples=evaluation.samples,
                greedy=evaluation.greedy,
                slots=evaluation.slots,
                retries=self.recipe.schedule.retries,
            ),
            store=self.store,
            checkpoints=self.store.run_dir / "checkpoints",
            starter=starter,
            allowance=self._allowance,
            attempt=self._attempt,
            weights=self.weights,
            on_result=self._evaluated,
        )

    def _wire(self) -> None:
        host = self.host
        for observe in (self.meter.observe, self.running.observe, self.episodes.observe, self._acknowledge):
            host.tap(observe)
        for turn_action in (Dispatch, Hold, Preempt, RetainKV, ReleaseKV):
            host.route(turn_action, self.gateway.apply)
        host.route(OpenGroup, self.episodes.open_group)
        host.route(CreateSandbox, self.episodes.create_sandbox)
        host.route(CancelTrajectory, self.episodes.cancel)
        host.route(FormBatch, self.steps.form)
        host.route(FinishRun, self._finish)
        host.route(FailRun, self._fail)

    def _engines(
        self, name: str, urls: tuple[str, ...], count: int, *, nice: int = 0, slots: int | None = None
    ) -> tuple[list[str], EngineStarter]:
        if urls:
            names = [f"{name}-{number}" for number in range(len(urls))]
            key = os.environ.get(ENGINE_KEY_VARIABLE, "")
            return names, RemoteEngines(self.recipe, dict(zip(names, urls, strict=True)), key)
        names = [f"{name}-{number}" for number in range(count)]
        return names, LocalEngines(self.recipe, self._logs, self._key, nice=nice, slots=slots)

    @property
    def _logs(self) -> Path:
        return self.store.run_dir / "logs"

    @property
    def _episode_settings(self) -> EpisodeSettings:
        schedule = self.recipe.schedule
        return EpisodeSettings(group_size=schedule.group_size, retries=schedule.retries, min_valid=MIN_VALID)

    # --- beginning and end ------------------------------------------------------------------------------------
    async def begin(self) -> None:
        """Serve the trainer, and bring the scheduler to where the run stood."""
        await self.api.start()
        state = self._state = self.store.recover()
        if self.store.version(0) is None:
            self.store.record_version(0, str(self._model), checkpointed=True)
        self.publisher.current = self.weights(state.version)
        self.steps.resume(state.pending_batches)
        amended = amend_record(self.store, self._recorder)
        if amended:
            _log.info("wrote %d lines that a kill had kept from the record", amended)
        await self._prune()  # what a kill interrupted; the record must have its lines before
        recovered = rebuild(self.store, state, self._tasks, self._episode_settings)
        for group in recovered.groups:
            self.episodes.adopt(group)
        self.forecasts.load()
        self.host.restore(recovered.events)
        if state.lost_trajectories:
            self._event("recovered", {"lost_trajectories": state.lost_trajectories, "lost_tokens": state.lost_tokens})

    def request_evaluations(self, version: int) -> None:
        """Ask for the evaluation of the start, and again for those that a crash lost."""
        pending = self._state.pending_evaluations if self._state is not None else ()
        for lost in sorted({key.version for key in pending}):
            self.evaluator.request(lost)
        if version == 0 and self.recipe.evaluation.at_start:
            self.evaluator.request(0)

    async def close(self) -> None:
        """Stop processes and connections. Every step is bounded, and none keeps the next from being tried."""
        left: list[str] = []
        self.faults.close()
        self.forecasts.try_to_save()
        for what, closing in (
            ("the publisher", self.publisher.close()),
            ("the gateway", self.gateway.close()),
            ("the evaluation worker", self.evaluator.close()),
            ("the trainer", self.trainer.stop()),
            ("the trainer API", self.api.close()),
        ):
            try:
                await closing
            except ShutdownTimeout as error:
                left.append(f"{what}: {error}")
        if left:
            raise ShutdownTimeout("; ".join(left))

    def weights(self, version: int) -> Weights:
        """Where a version is. Raises RunFailed when its files are gone."""
        if version == 0:
            return Weights(0, self._model)
        usual = self.store.run_dir / "checkpoints" / f"v{version:06d}" / "model"
        record = self.store.version(version)
        for path in [usual, *([Path(record.model_path)] if record is not None else [])]:
            if path.is_dir():
                return Weights(version, path)
        raise RunFailed(f"the weights of version {version} are gone: there is no {usual}", reason="weights_missing")

    def status(self, phase: str, elapsed_s: float) -> Status:
        points = [
            EvaluationPoint(record.version, record.mode, record.reward)
            for record in self.store.evaluations()
            if record.finished and record.reward is not None
        ]
        sources = view.Sources(self.recipe, self.scheduler, self.pool, self.steps, self.meter, self._notes)
        return view.status(
            sources,
            phase=phase,
            elapsed_s=elapsed_s,
            trainer="" if self.trainer.running else "down",
            evaluations=points,
            discarded=self.store.discarded_tokens(),
        )

    # --- playing ----------------------------------------------------------------------------------------------
    async def _play(self, opened: OpenedTrajectory, task: Task, stop: asyncio.Future[str]) -> Trajectory:
        return await run_episode(
            EpisodeSpec(opened.id, opened.group_id, task, opened.index, opened.attempt),
            self.gateway,
            self._sandboxes,
            EpisodeLimits.of(self.recipe, task),
            self.host.notify,
            stop=stop,
        )

    async def _attempt(self, client: EngineClient, item: EvaluationItem, version: int, number: int) -> Trajectory:
        settings = self._gateway_settings
        if item.mode == "greedy":
            greedy = msgspec.structs.replace(settings.sampling, temperature=0.0, top_p=1.0, top_k=0)
            settings = msgspec.structs.replace(settings, sampling=greedy)
        task = self._held_out[item.task_id]
        name = f"v{version}/{item.mode}/{item.task_id}/{item.sample}/{number}"
        async with self._direct(client, version, settings) as turns:
            return await run_episode(
                EpisodeSpec(name, f"v{version}/{item.mode}/{item.task_id}", task, item.sample, number),
                turns,
                self._sandboxes,
                EpisodeLimits.of(self.recipe, task),
                lambda event: None,
            )

    @contextlib.asynccontextmanager
    async def _direct(
        self, client: EngineClient, version: int, settings: GatewaySettings
    ) -> AsyncIterator[DirectTurns]:
        turns = DirectTurns(client, version, self._tokenizer, settings=settings)
        try:
            yield turns
        finally:
            await turns.close()

    # --- what parts tell each other ---------------------------------------------------------------------------
    def _acknowledge(self, event: Event) -> None:
        if isinstance(event, WorkerAcknowledged) and event.worker in self.pool.serving:
            self.gateway.acknowledge(event.worker, event.version)

    def _trained(self, report: TrainedReport, news: bool) -> None:
        self.steps.trained(report, news)
        self._supervisor.spawn(f"prune after {report.version}", self._prune())

    async def _prune(self) -> None:
        keep = self.recipe.run.keep_trajectories_of_steps
        if keep is not None:
            await asyncio.to_thread(self.store.prune, keep)

    def _publish(self, weights: Weights) -> None:
        self._supervisor.spawn(f"publish {weights.version}", self.publisher.publish(weights))

    def _published(self, record: PublishRecord) -> None:
        self.steps.acknowledged(record)

    def _due(self, version: int) -> None:
        evaluation = self.recipe.evaluation
        last = version == self.recipe.training.steps and evaluation.at_end
        if evaluation.every and version % evaluation.every == 0 and not last:
            self.evaluator.request(version)

    def _evaluated(self, record: EvaluationRecord, rewards: list[list[float]]) -> None:
        self._recorder.evaluation(record.version, record.mode, rewards)
        told = {"version": record.version, "mode": record.mode, "reward": record.reward, "failed": record.failed}
        self._notes.add("evaluation", told)

    def _trainer_ended(self, end: ProcessExit) -> None:
        self.api.greeted = False
        if not end.asked and not self.over:
            self._event("trainer_down", {"cause": str(end)})

    def _finish(self, action: FinishRun) -> None:
        self.finish = action
        self.ended.set()

    def _fail(self, action: FailRun) -> None:
        causes = failure_histogram(self.store.totals().failures)
        detail = f" ({action.detail})" if action.detail else ""
        self.faults.report(
            RunFailed(f"the run cannot go on: {action.reason}{detail}; failures so far: {causes}", action.reason)
        )

    def _event(self, kind: str, fields: dict[str, object]) -> None:
        self._recorder.event(kind, **fields)
        self._notes.add(kind, fields)
