"""Engine workers and the evaluator's own engine: started, watched, started again, within an allowance."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from venusrl.coordinator.errors import RunFailed
from venusrl.coordinator.evaluation import EvaluationItem, EvaluationPlan, Evaluator
from venusrl.coordinator.publish import PublishFailed, RunningTurns, WeightPublisher, Weights
from venusrl.coordinator.store import EvaluationRecord, OpenedTrajectory, RunStore
from venusrl.coordinator.workers import Allowance, EnginePool, RunningEngine
from venusrl.recipe import Recipe, resolve
from venusrl.rollout.engines.protocol import EngineClient, EngineError
from venusrl.scheduling.calibration import Estimate
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.events import (
    Event,
    WorkerAcknowledged,
    WorkerCalibrated,
    WorkerDown,
    WorkerMeasured,
    WorkerUp,
)
from venusrl.testing.engine import FakeEngine
from venusrl.testing.runs import made_up_trajectory
from venusrl.types import Trajectory


class Incarnation:
    """One running fake engine. Implements ``RunningEngine``."""

    def __init__(self, version: int) -> None:
        self.engine = FakeEngine(lambda ids: [1], version=version)
        self.client: EngineClient = self.engine
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopped = False

    def die(self, cause: str) -> None:
        self.engine.crash(cause)
        self.exited.set_result(cause)

    async def wait_exit(self) -> str:
        return await asyncio.shield(self.exited)

    async def stop(self) -> None:
        self.stopped = True


class Starter:
    """Starts fake engines; the next starts fail with what is in ``faults``."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []
        self.started: list[tuple[str, int]] = []
        self.running: list[Incarnation] = []
        self.restarted = asyncio.Event()

    async def start(self, name: str, weights: Weights) -> RunningEngine:
        self.started.append((name, weights.version))
        if self.faults:
            raise self.faults.pop(0)
        incarnation = Incarnation(weights.version)
        self.running.append(incarnation)
        if len(self.running) > 1:
            self.restarted.set()
        return incarnation


class Fleet:
    """A pool with everything it talks to."""

    def __init__(self, folder: Path, *, restarts: int, measure_every_s: float = 60.0) -> None:
        self.folder = folder
        self.starter = Starter()
        self.events: list[Event] = []
        self.gateway: dict[str, int] = {}
        self.heard = asyncio.Event()
        self.publisher = WeightPublisher(
            mode="in_flight",
            timeout_s=1.0,
            running=RunningTurns(),
            notify=self.notify,
            preempt=lambda trajectory, turn: None,
            settle=lambda: asyncio.sleep(0),
            on_broken=lambda name, error: self.pool.broken(name, error),
        )
        self.publisher.current = Weights(5, folder)
        self.pool = EnginePool(
            ["w0"],
            self.starter,
            self.publisher,
            allowance=Allowance("rollout.restarts", restarts),
            notify=self.notify,
            attach=lambda name, client, version: self.gateway.update({name: version}),
            detach=self.detach,
            on_event=lambda kind, fields: None,
            measure_every_s=measure_every_s,
        )

    def detach(self, name: str) -> None:
        del self.gateway[name]

    def notify(self, event: Event) -> None:
        self.events.append(event)
        self.heard.set()

    async def hear(self, kind: type, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while sum(isinstance(event, kind) for event in self.events) < times:
                self.heard.clear()
                await self.heard.wait()


async def over(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_T08_a_worker_is_announced_with_the_newest_weights(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=0)
    life = asyncio.create_task(fleet.pool.keep("w0"))
    await fleet.hear(WorkerUp)
    assert fleet.starter.started == [("w0", 5)]
    assert isinstance(fleet.events[0], WorkerUp)
    assert fleet.events[0].version == 5
    assert fleet.gateway == {"w0": 5}
    await over(life)
    assert fleet.starter.running[0].stopped
    assert fleet.gateway == {}


async def test_a_dead_worker_is_announced_and_started_again_at_the_newest_weights(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=1)
    life = asyncio.create_task(fleet.pool.keep("w0"))
    await fleet.hear(WorkerUp)
    fleet.publisher.current = Weights(6, tmp_path)
    fleet.starter.running[0].die("killed by SIGKILL")
    await fleet.hear(WorkerUp, 2)
    kinds = [type(event) for event in fleet.events]
    assert kinds == [WorkerUp, WorkerDown, WorkerUp]
    assert fleet.starter.started == [("w0", 5), ("w0", 6)]
    fleet.starter.running[1].die("out of memory")
    with pytest.raises(RunFailed, match=r"rollout\.restarts = 1 .*out of memory"):
        await life


async def test_a_worker_that_cannot_start_costs_restarts_and_names_its_cause(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=2)
    fleet.starter.faults = [EngineError("no such model")] * 3
    with pytest.raises(RunFailed, match="no such model"):
        await fleet.pool.keep("w0")
    assert len(fleet.starter.started) == 3
    assert fleet.events == []


async def test_a_worker_that_does_not_take_weights_is_replaced_by_one_that_has_them(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=1)
    life = asyncio.create_task(fleet.pool.keep("w0"))
    await fleet.hear(WorkerUp)
    fleet.publisher.current = Weights(6, tmp_path)
    fleet.pool.broken("w0", PublishFailed("did not load version 6"))
    fleet.pool.broken("w0", PublishFailed("said twice"))
    await fleet.hear(WorkerUp, 2)
    assert fleet.starter.running[0].stopped
    assert fleet.starter.started[-1] == ("w0", 6)
    await over(life)


async def test_weights_published_while_a_worker_starts_reach_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=0)
    life = asyncio.create_task(fleet.pool.keep("w0"))
    await fleet.hear(WorkerUp)
    await fleet.publisher.publish(Weights(6, tmp_path))
    await fleet.hear(WorkerAcknowledged)
    assert fleet.pool.versions == {"w0": 6}
    await over(life)


async def test_a_worker_that_hangs_is_found_out(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=0, measure_every_s=0.001)
    life = asyncio.create_task(fleet.pool.keep("w0"))
    await fleet.hear(WorkerUp)
    fleet.starter.running[0].engine.crash("it hangs")
    with pytest.raises(RunFailed, match=r"it does not answer: .*it hangs"):
        await life


# --- the evaluator ----------------------------------------------------------------------------------------------
def recipe() -> Recipe:
    return resolve(
        {
            "run": {"name": "evaluator"},
            "model": {"path": "nowhere"},
            "tasks": {"source": "nowhere"},
            "training": {"steps": 1},
            "evaluation": {"at_start": False, "at_end": False},
        }
    )


class Bench:
    """An evaluator over fake engines; an attempt's reward is its version."""

    def __init__(self, store: RunStore, folder: Path, *, restarts: int = 1) -> None:
        self.starter = Starter()
        self.results: list[tuple[int, str, float | None]] = []
        self.attempts: Counter[EvaluationItem] = Counter()
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.checkpoints = folder / "checkpoints"
        self.evaluator = Evaluator(
            EvaluationPlan(("a", "b"), samples=1, greedy=True, slots=2, retries=1),
            store=store,
            checkpoints=self.checkpoints,
            starter=self.starter,
            allowance=Allowance("rollout.restarts", restarts),
            attempt=self.attempt,
            weights=lambda version: Weights(version, folder),
            on_result=self.on_result,
        )

    def on_result(self, record: EvaluationRecord, rewards: list[list[float]]) -> None:
        self.results.append((record.version, record.mode, record.reward))

    async def attempt(self, client: EngineClient, item: EvaluationItem, version: int, number: int) -> Trajectory:
        self.attempts[item] += 1
        self.begun.set()
        await self.gate.wait()
        served = await client.version()
        opened = OpenedTrajectory(f"{item}", "e", item.sample, number)
        return made_up_trajectory(opened, item.task_id, version=served, reward=served / 10, sampled=1)


async def test_T41_each_evaluation_is_pinned_to_its_version_and_protected_until_it_is_recorded(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "run", recipe()) as store:
        bench = Bench(store, tmp_path)
        bench.evaluator.request(2)
        bench.evaluator.request(4)
        bench.evaluator.request(4)
        assert sorted(path.name for path in bench.checkpoints.iterdir()) == ["v000002.keep", "v000004.keep"]
        oldest = bench.evaluator.evaluating
        assert oldest == 2
        await bench.evaluator.finish({}, 4)
        assert bench.results == [(2, "sampled", 0.2), (2, "greedy", 0.2), (4, "sampled", 0.4), (4, "greedy", 0.4)]
        assert list(bench.checkpoints.iterdir()) == []
        assert {sample.version for sample in store.evaluation_samples(2, "greedy")} == {2}
        assert len(bench.starter.started) == 1, "one engine takes one version after the other"
        bench.evaluator.request(2)
        assert bench.evaluator.evaluating is None, "what is recorded is not asked for again"
        await bench.evaluator.close()
        assert bench.starter.running[0].stopped


async def test_T41_an_evaluation_lost_in_a_crash_is_asked_for_again(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "run", recipe()) as store:
        bench = Bench(store, tmp_path)
        bench.gate.clear()
        bench.evaluator.request(2)
        life = asyncio.create_task(bench.evaluator.run())
        async with asyncio.timeout(PATIENCE_S):
            await bench.begun.wait()
        await over(life)
        assert bench.results == []
    with RunStore.open(tmp_path / "run", recipe(), resume=True) as store:
        pending = store.recover().pending_evaluations
        assert {(key.version, key.mode) for key in pending} == {(2, "sampled"), (2, "greedy")}
        again = Bench(store, tmp_path)
        again.evaluator.request(2)
        await again.evaluator.finish({}, 2)
        assert [(version, mode) for version, mode, _ in again.results] == [(2, "sampled"), (2, "greedy")]
        assert store.check_invariants() == []


async def test_a_dead_evaluation_worker_is_started_again_and_goes_on(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "run", recipe()) as store:
        bench = Bench(store, tmp_path, restarts=1)
        bench.gate.clear()
        bench.evaluator.request(3)
        life = asyncio.create_task(bench.evaluator.finish({}, 3))
        async with asyncio.timeout(PATIENCE_S):
            await bench.begun.wait()
            bench.starter.running[0].die("killed")
            await bench.starter.restarted.wait()
            bench.gate.set()
            await life
        assert [(v, mode) for v, mode, _ in bench.results] == [(3, "sampled"), (3, "greedy")]
        assert bench.starter.running[0].stopped


async def test_idle_workers_help_with_the_last_evaluation(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "run", recipe()) as store:
        bench = Bench(store, tmp_path, restarts=0)
        bench.starter.faults = []
        bench.evaluator.request(6)
        helper = FakeEngine(lambda ids: [1], version=6)
        await bench.evaluator.finish({"w0": helper}, 6)
        assert {version for version, _, _ in bench.results} == {6}
        assert ("version", "") in helper.calls
        await bench.evaluator.close()


async def test_what_the_work_takes_is_told_when_it_is_learned_and_when_it_changes(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, restarts=1, measure_every_s=0.001)
    life = asyncio.create_task(fleet.pool.keep("w0"))
    await fleet.hear(WorkerUp)
    engine = fleet.starter.running[0].engine
    costs = EngineCosts(0.01, 1e-4, 1e-7, 1e-4, 0.0)
    engine.learned = Estimate(costs, 0.001, 0.1, 100)
    await fleet.hear(WorkerCalibrated)
    engine.learned = Estimate(msgspec.structs.replace(costs, step_base_s=0.0101), 0.001, 0.1, 150)
    await fleet.hear(WorkerMeasured, 1 + sum(isinstance(event, WorkerMeasured) for event in fleet.events))
    slower = msgspec.structs.replace(costs, step_base_s=0.03, step_sequence_s=1e-3)
    engine.learned = Estimate(slower, 0.001, 0.1, 200)
    await fleet.hear(WorkerCalibrated, 2)
    told = [event.costs for event in fleet.events if isinstance(event, WorkerCalibrated)]
    assert told == [costs, slower], "a small change is not worth telling"
    fleet.starter.running[0].die("killed")
    await fleet.hear(WorkerUp, 2)
    again = [event for event in fleet.events if isinstance(event, WorkerUp)][-1]
    assert again.costs == slower, "a restart changes nothing of it"
    await over(life)
