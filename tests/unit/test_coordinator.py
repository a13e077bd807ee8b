"""A run's coordination without processes: real scheduler and store, scripted episodes, a trainer in three lines."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from venusrl.coordinator.amend import amend_record
from venusrl.coordinator.episodes import Episodes, EpisodeSettings
from venusrl.coordinator.errors import StoreFull
from venusrl.coordinator.host import SchedulerHost
from venusrl.coordinator.policies import scheduler_config
from venusrl.coordinator.publish import Weights
from venusrl.coordinator.recovery import rebuild
from venusrl.coordinator.steps import Meter, Steps
from venusrl.coordinator.store import EvaluationSample, OpenedTrajectory, RunStore, TrainedReport
from venusrl.observe.recorder import RunRecorder, read_events
from venusrl.observe.summary import build_summary
from venusrl.recipe import Recipe, resolve
from venusrl.scheduling.actions import (
    CancelTrajectory,
    CreateSandbox,
    Dispatch,
    FailRun,
    FinishRun,
    FormBatch,
    Hold,
    OpenGroup,
)
from venusrl.scheduling.events import (
    Tick,
    TurnDispatched,
    TurnFinished,
    TurnRequested,
    VersionPublished,
    WorkerAcknowledged,
    WorkerUp,
)
from venusrl.scheduling.scheduler import Scheduler
from venusrl.testing.runs import made_up_trajectory
from venusrl.types import Failure, FailureKind, StopReason, Task, Trajectory

Script = Callable[[OpenedTrajectory, Task], float | Failure | None]
"""A reward, a failure, or None for an episode that never ends by itself."""


def recipe(*, steps: int = 3, tasks: int = 6, **schedule: object) -> Recipe:
    return resolve(
        {
            "run": {"name": "scene"},
            "model": {"path": "nowhere"},
            "tasks": {"source": "nowhere", "train_count": tasks},
            "rollout": {"weight_update": "drain"},
            "schedule": {"batch_groups": 2, "group_size": 2, "async_factor": 0, **schedule},
            "training": {"steps": steps},
            "evaluation": {"at_start": False, "at_end": False},
        }
    )


def even(opened: OpenedTrajectory, task: Task) -> float:
    return float(opened.index % 2)


class Scene:
    """One session of a run. The trainer trains a batch as soon as it is formed, unless it is held."""

    def __init__(self, store: RunStore, settled: Recipe, script: Script, tasks: int) -> None:
        self.store = store
        self.script = script
        self.scheduler = Scheduler(scheduler_config(settled))
        self.faults: list[Exception] = []
        self.host = SchedulerHost(self.scheduler, on_failure=self.fault)
        self.tasks = {f"task-{n}": Task(f"task-{n}", "do it", "nowhere") for n in range(tasks)}
        self.settings = EpisodeSettings(settled.schedule.group_size, settled.schedule.retries)
        self.ended = asyncio.Event()
        self.end: FinishRun | FailRun | None = None
        self.attempts: Counter[str] = Counter()
        self.played: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.trainer_held = False
        self.recorder = RunRecorder(store.run_dir)
        self.episodes = Episodes(
            store=store,
            tasks=self.tasks,
            play=self.play,
            settings=self.settings,
            notify=self.host.notify,
            refills_left=lambda: self.scheduler.refills_left,
            cancel_turns=lambda trajectory, reason: self.cancelled.append((trajectory, reason)),
            on_failure=self.fault,
            on_event=lambda kind, fields: None,
            first_backoff_s=0.0,
        )
        self.steps = Steps(
            store=store,
            host=self.host,
            episodes=self.episodes,
            recorder=self.recorder,
            meter=Meter(),
            batch_ready=self.train_soon,
            on_version=self.publish,
            on_due=lambda version: None,
        )
        self.waiting: dict[str, asyncio.Future[Dispatch]] = {}
        self.background: set[asyncio.Task[None]] = set()
        self.host.tap(self.episodes.observe)
        self.host.route(Dispatch, lambda action: self.waiting.pop(action.trajectory).set_result(action))
        self.host.route(Hold, lambda action: None)
        self.host.route(OpenGroup, self.episodes.open_group)
        self.host.route(CreateSandbox, self.episodes.create_sandbox)
        self.host.route(CancelTrajectory, self.episodes.cancel)
        self.host.route(FormBatch, self.steps.form)
        self.host.route(FinishRun, self.finish)
        self.host.route(FailRun, self.finish)

    def fault(self, error: Exception) -> None:
        self.faults.append(error)
        self.ended.set()

    def finish(self, action: FinishRun | FailRun) -> None:
        self.end = action
        self.ended.set()

    async def play(self, opened: OpenedTrajectory, task: Task, stop: asyncio.Future[str]) -> Trajectory:
        outcome = self.script(opened, task)
        self.attempts[task.id] += 1
        self.played.append(opened.id)
        dispatch = self.waiting[opened.id] = asyncio.get_running_loop().create_future()
        self.host.notify(TurnRequested(opened.id, 0, 10, 0, 8))
        await asyncio.wait({dispatch, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            version = self.scheduler.window.published
            self.host.notify(TurnDispatched(opened.id, 0, "w", version))
            await asyncio.sleep(0)
            self.host.notify(TurnFinished(opened.id, 0, 2, 0, StopReason.STOP))
            if outcome is None:
                await stop
        if stop.done():
            outcome = Failure(FailureKind.CANCELLED, stop.result())
        reward = outcome if isinstance(outcome, float) else None
        failure = outcome if isinstance(outcome, Failure) else None
        version = self.scheduler.window.published
        return made_up_trajectory(opened, task.id, version=version, reward=reward, sampled=2, failure=failure)

    def train_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self.train())
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def train(self) -> None:
        await asyncio.sleep(0)
        version = self.store.current_version()
        batch = self.store.batch_for(version)
        if self.trainer_held or batch is None:
            return
        report = TrainedReport(batch.id, version + 1, "model", checkpointed=True, metrics={"reward/mean": 0.5})
        self.steps.trained(report, self.store.mark_trained(report))

    def publish(self, weights: Weights) -> None:
        self.host.notify(VersionPublished(weights.version))
        self.host.notify(WorkerAcknowledged("w", weights.version))

    async def until_over(self) -> None:
        """Bring up the worker, then wait for the scheduler's word; time passes quickly."""
        state = self.store.recover()
        self.steps.resume(state.pending_batches)
        amend_record(self.store, self.recorder)
        recovered = rebuild(self.store, state, self.tasks, self.settings)
        for group in recovered.groups:
            self.episodes.adopt(group)
        self.host.restore(recovered.events)
        self.host.notify(WorkerUp("w", 100_000, 64, state.version))
        if state.pending_batches:
            self.train_soon()
        async with asyncio.timeout(PATIENCE_S):
            while not self.ended.is_set():
                await asyncio.sleep(0.005)
                self.host.notify(Tick())

    async def until(self, condition: Callable[[], bool]) -> None:
        life = asyncio.create_task(self.until_over())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition() and not life.done():  # noqa: ASYNC110 - any condition at all
                    await asyncio.sleep(0)
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)


@asynccontextmanager
async def scene(
    folder: Path, settled: Recipe, script: Script = even, *, tasks: int = 6, resume: bool = False
) -> AsyncIterator[Scene]:
    """One session; leaving it is a clean stop."""
    with RunStore.open(folder, settled, resume=resume) as store:
        store.set_task_order([f"task-{n}" for n in range(tasks)], seed=0, epochs=settled.tasks.epochs)
        session = Scene(store, settled, script, tasks)
        yield session
        assert await session.episodes.close("shutdown", 2.0) == []
        session.host.close()
        session.recorder.close()
        assert store.check_invariants() == []


async def test_a_run_trains_every_step_and_ends_cleanly(tmp_path: Path) -> None:
    async with scene(tmp_path, recipe(steps=3)) as run:
        await run.until_over()
        assert run.end == FinishRun("max_steps")
        assert run.store.current_version() == 3
        totals = run.store.totals()
        assert (totals.trained_trajectories, totals.staleness_max) == (12, 0)
        assert run.faults == []
        assert run.steps.rewards == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("alpha", ["0.5", "1", "1.5"])
async def test_the_staleness_bound_holds_with_a_window(tmp_path: Path, alpha: str) -> None:
    settled = recipe(steps=6, async_factor=float(alpha))
    async with scene(tmp_path, settled) as run:
        await run.until_over()
        assert run.end == FinishRun("max_steps")
        assert run.store.totals().staleness_max <= math.ceil(Decimal(alpha))


async def test_T21_a_task_that_always_fails_is_given_up_after_its_rounds(tmp_path: Path) -> None:
    broken = Failure(FailureKind.INFRASTRUCTURE, "sandbox_died")

    def script(opened: OpenedTrajectory, task: Task) -> float | Failure:
        return broken if task.id == "task-3" else even(opened, task)

    async with scene(tmp_path, recipe(steps=3, retries=2), script) as run:
        await run.until_over()
        assert run.end == FinishRun("max_steps")
        # Two places of one attempt and two replacements each, at most; too small once the first gives up.
        assert 3 <= run.attempts["task-3"] <= 6
        assert run.store.totals().closed_groups == {"group_too_small": 1}
        assert sum(run.store.totals().failures.values()) == run.attempts["task-3"]


async def test_T19_one_infrastructure_failure_costs_one_sample_and_not_its_group(tmp_path: Path) -> None:
    failed: list[str] = []

    def script(opened: OpenedTrajectory, task: Task) -> float | Failure:
        if opened.attempt == 0 and opened.index == 1:
            failed.append(opened.id)
            return Failure(FailureKind.INFRASTRUCTURE, "engine_lost")
        return even(opened, task)

    async with scene(tmp_path, recipe(steps=2), script) as run:
        await run.until_over()
        batch = run.store.batch_for(0)
        assert batch is not None
        trained = {t.id for group in batch.groups for t in group.trajectories}
        assert len(trained) == 4
        assert not trained & set(failed)
        assert run.store.totals().closed_groups == {}


async def test_T22_a_run_whose_groups_all_die_stops_with_the_causes(tmp_path: Path) -> None:
    def script(opened: OpenedTrajectory, task: Task) -> Failure:
        return Failure(FailureKind.INFRASTRUCTURE, "verifier_no_reward" if opened.index else "sandbox_died")

    async with scene(tmp_path, recipe(retries=0, max_dead_groups=3), script) as run:
        await run.until_over()
        assert isinstance(run.end, FailRun)
        assert run.end.reason == "all_groups_failing"
        assert "sandbox_died x" in run.end.detail
        assert run.store.totals().closed_groups["group_too_small"] >= 3
        assert run.store.current_version() == 0


async def test_T26_a_stuck_episode_costs_its_group_and_not_the_run(tmp_path: Path) -> None:
    stuck: set[str] = set()

    def script(opened: OpenedTrajectory, task: Task) -> float | None:
        if not stuck or opened.id in stuck:
            stuck.add(opened.id)
            return None
        return even(opened, task)

    settled = recipe(steps=3, async_factor=1, deadline="drop", drop_grace_s=0.02)
    settled = settled.model_copy(update={"rollout": settled.rollout.model_copy(update={"weight_update": "in_flight"})})
    async with scene(tmp_path, settled, script) as run:
        await run.until_over()
        assert run.end == FinishRun("max_steps")
        (lost,) = stuck
        assert (lost, "deadline") in run.cancelled
        assert run.store.totals().closed_groups == {"deadline": 1}


async def test_T28_the_order_starts_again_or_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    async with scene(tmp_path / "endless", recipe(steps=5), tasks=3) as run:
        await run.until_over()
        assert run.end == FinishRun("max_steps")
        assert sum(run.attempts.values()) == 20
    once = recipe(steps=5)
    once = once.model_copy(update={"tasks": once.tasks.model_copy(update={"epochs": 1})})
    async with scene(tmp_path / "once", once, tasks=3) as run:
        await run.until_over()
        assert run.end == FinishRun("task_order_exhausted")
        assert run.store.current_version() == 1


async def test_zero_variance_groups_are_refilled_a_bounded_number_of_times_and_then_train(tmp_path: Path) -> None:
    async with scene(tmp_path, recipe(steps=2, zero_variance_refills=1), lambda opened, task: 1.0) as run:
        await run.until_over()
        assert run.end == FinishRun("max_steps")
        assert run.store.totals().closed_groups == {"zero_variance": 2}
        assert run.store.totals().trained_trajectories == 8


def _place(trajectory: str) -> str:
    return trajectory.rpartition(".")[0]


async def test_T31_a_stopped_run_goes_on_in_its_own_groups(tmp_path: Path) -> None:
    seen: list[str] = []

    def slow_half(opened: OpenedTrajectory, task: Task) -> float | None:
        seen.append(opened.id)
        return None if opened.index == 1 and len(seen) > 5 else even(opened, task)

    async with scene(tmp_path, recipe(steps=4), slow_half) as run:
        await run.until(lambda: run.store.current_version() == 1 and len(run.episodes._opened) == 2)
        finished = {_place(t) for group in run.episodes.groups.values() for t in group.finished}
        lost = {_place(t) for t in run.episodes._opened}
    async with scene(tmp_path, recipe(steps=4), resume=True) as again:
        await again.until_over()
        assert again.end == FinishRun("max_steps")
        assert again.store.totals().closed_groups == {}
        assert not finished & {_place(t) for t in again.played}, "what was finished is not played again"
        assert lost <= {_place(t) for t in again.played}
        assert again.store.totals().trained_trajectories == 16


async def test_a_formed_batch_goes_back_to_the_trainer_after_a_crash(tmp_path: Path) -> None:
    async with scene(tmp_path, recipe(steps=2)) as run:
        run.trainer_held = True
        await run.until(lambda: run.store.batch_record(0) is not None)
        before = run.store.batch_for(0)
    async with scene(tmp_path, recipe(steps=2), resume=True) as again:
        await again.until_over()
        assert again.store.batch_for(0) == before
        assert again.end == FinishRun("max_steps")
    assert build_summary(tmp_path).trained_trajectories == 8, "those of the batch that another session formed, too"


async def test_a_step_and_an_evaluation_that_a_kill_kept_from_the_record_are_written_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, recipe(steps=2)) as run:
        kept = run.recorder.scalars
        monkeypatch.setattr(run.recorder, "scalars", lambda step, values: None if step == 2 else kept(step, values))
        run.store.open_evaluation(0, "sampled")
        await run.until_over()
        samples = [EvaluationSample(0, "task-0", n, float(n), 1, 2, "submitted") for n in (0, 1)]
        run.store.finish_evaluation(0, "sampled", samples, wall_s=1.0)
    assert build_summary(tmp_path).trained_trajectories == 4
    for _ in range(2):
        async with scene(tmp_path, recipe(steps=2), resume=True) as again:
            await again.until_over()
        made = build_summary(tmp_path)
        assert (made.steps, made.trained_trajectories, made.staleness_max) == (2, 8, 0)
        assert (made.eval_reward_start, made.reward_last) == (0.5, 0.5)
        lines = [e for e in read_events(tmp_path) if e["kind"] in ("scalars", "evaluation")]
        assert len(lines) == 4, "one a step, one of the evaluation and its scalar; no second"


async def test_attempts_are_counted_over_resumptions(tmp_path: Path) -> None:
    def script(opened: OpenedTrajectory, task: Task) -> float | Failure:
        if opened.group_id == "g000000" and opened.index == 0:
            return Failure(FailureKind.INFRASTRUCTURE, "sandbox_died")
        return even(opened, task)

    settled = recipe(steps=1, retries=1, group_size=3)
    async with scene(tmp_path, settled, script) as run:
        run.trainer_held = True
        await run.until(lambda: any(g.failures[0] == 1 for g in run.episodes.groups.values()))
    async with scene(tmp_path, settled, script, resume=True) as again:
        await again.until_over()
        assert again.end == FinishRun("max_steps")
        batch = again.store.batch_for(0)
        assert batch is not None
        sizes = {group.id: len(group.trajectories) for group in batch.groups}
        assert sizes == {"g000000": 2, "g000001": 3}


async def test_a_full_disk_ends_the_run_and_is_not_an_episode_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, recipe()) as run:

        def full(trajectory: Trajectory) -> None:
            raise StoreFull("no space left on the disk of the run")

        monkeypatch.setattr(run.store, "finish_trajectory", full)
        await run.until_over()
        assert isinstance(run.faults[0], StoreFull)
        assert run.store.totals().failures == {}
        monkeypatch.undo()


async def test_T36_a_stop_while_episodes_begin_leaves_none_behind(tmp_path: Path) -> None:
    async with scene(tmp_path, recipe(), lambda opened, task: None) as run:
        await run.until(lambda: run.episodes.running > 0)
        assert await run.episodes.close("shutdown", 2.0) == []
        assert run.episodes.running == 0
        run.host.notify(Tick())
        assert run.episodes.running == 0, "nothing begins while the run winds down"
        assert run.store.totals().failures == {"cancelled/shutdown": 4}
