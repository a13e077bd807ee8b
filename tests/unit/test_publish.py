"""Publishing weights: announced first, bounded, acknowledged or superseded, one slow worker delays no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.waiting import PATIENCE_S, until

from venusrl.coordinator.publish import PublishFailed, PublishRecord, RunningTurns, WeightPublisher, Weights
from venusrl.rollout.engines.protocol import EngineError, EngineLoad, EngineLost, GenerateRequest, Generation
from venusrl.scheduling.events import Event, TurnDispatched, TurnFinished, TurnRequested, WorkerAcknowledged, WorkerDown
from venusrl.types import StopReason


class ControlledEngine:
    """The control half of an engine, with faults on order; every call goes to a shared log."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.at_version = 0
        self.faults: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.paused = False
        self.kv_control = False

    async def order_kv(self, release: list[str], retain: list[str]) -> None:
        raise AssertionError("not used here")

    async def wait_ready(self, timeout_s: float) -> None:
        self.log.append(f"{self.name} ready")

    async def generate(self, request: GenerateRequest) -> Generation:
        raise AssertionError("not used here")

    async def abort(self, request_ids: list[str]) -> None:
        self.log.append(f"{self.name} abort {request_ids}")

    async def pause(self) -> None:
        self.log.append(f"{self.name} pause")
        self.paused = True

    async def resume(self) -> None:
        self.log.append(f"{self.name} resume")
        self.paused = False

    async def load_weights(self, path: str, version: int) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.faults:
            raise self.faults.pop(0)
        self.log.append(f"{self.name} load {version}")
        self.at_version = version

    async def reset_prefix_cache(self) -> None:
        self.log.append(f"{self.name} reset")

    async def version(self) -> int:
        return self.at_version

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 1024, 8)

    async def close(self) -> None:
        self.log.append(f"{self.name} close")


class Scene:
    """A publisher over controlled engines; events, broken workers and records are kept."""

    def __init__(self, mode: str, timeout_s: float = PATIENCE_S) -> None:
        self.log: list[str] = []
        self.events: list[Event] = []
        self.instants: list[tuple[Event, ...]] = []
        self.broken: list[tuple[str, PublishFailed]] = []
        self.broke = asyncio.Event()
        self.records: list[PublishRecord] = []
        self.running = RunningTurns()
        self.publisher = WeightPublisher(
            mode=mode,
            timeout_s=timeout_s,
            running=self.running,
            notify=self.notify,
            preempt=self.preempt,
            settle=self.settle,
            on_broken=self.on_broken,
            on_record=self.records.append,
        )

    def notify(self, *events: Event) -> None:
        self.instants.append(events)
        for event in events:
            self.events.append(event)
            self.log.append(type(event).__name__)
            self.running.observe(event)

    def preempt(self, trajectory: str, turn: int) -> None:
        self.log.append(f"preempt {trajectory}")
        self.notify(TurnFinished(trajectory, turn, 3, 0, StopReason.ABORT))

    def on_broken(self, name: str, error: PublishFailed) -> None:
        self.broken.append((name, error))
        self.broke.set()

    async def settle(self) -> None:
        self.log.append("settled")

    def engine(self, name: str) -> ControlledEngine:
        engine = ControlledEngine(name, self.log)
        self.publisher.add(name, engine, 0)
        return engine

    def acknowledged(self) -> list[tuple[str, int]]:
        return [(e.worker, e.version) for e in self.events if isinstance(e, WorkerAcknowledged)]

    async def publish(self, version: int) -> None:
        await self.publisher.publish(Weights(version, Path(f"v{version}")))


async def test_T11_stale_work_lets_go_before_any_worker_is_paused() -> None:
    scene = Scene("in_flight")
    scene.engine("w0")
    await scene.publish(1)
    assert await scene.publisher.wait_acknowledged(1, PATIENCE_S)
    assert scene.log == ["VersionPublished", "settled", "w0 pause", "w0 load 1", "w0 resume", "WorkerAcknowledged"]
    await scene.publisher.close()


async def test_T10_a_refused_update_carries_the_engines_words_within_the_limit_and_the_next_attempt_works() -> None:
    scene = Scene("in_flight")
    engine = scene.engine("w0")
    engine.faults = [EngineError("500: start_update exploded")]
    await scene.publish(1)
    assert await scene.publisher.wait_acknowledged(1, PATIENCE_S)
    assert scene.records[0].attempts == 2
    assert not engine.paused

    broken = Scene("in_flight", timeout_s=0.15)
    worse = broken.engine("w0")
    worse.faults = [EngineError("500: start_update exploded")] * 50
    await broken.publish(1)
    await broken.broke.wait()
    assert "start_update exploded" in str(broken.broken[0][1])
    assert not worse.paused
    await scene.publisher.close()
    await broken.publisher.close()


async def test_T10_an_engine_that_never_answers_is_declared_broken_in_time() -> None:
    scene = Scene("in_flight", timeout_s=0.1)
    engine = scene.engine("w0")
    engine.gate = asyncio.Event()
    await scene.publish(1)
    await scene.broke.wait()
    assert "no answer" in str(scene.broken[0][1])
    assert not engine.paused
    await scene.publisher.close()


async def test_T06_a_straggler_delays_neither_the_other_worker_nor_the_sync_beyond_its_limit() -> None:
    scene = Scene("turn_boundary", timeout_s=0.3)
    scene.engine("slow")
    scene.engine("fast")
    scene.notify(TurnDispatched("straggler", 0, "slow", 0))
    scene.notify(TurnDispatched("quick", 0, "fast", 0))
    await scene.publish(1)
    scene.notify(TurnFinished("quick", 0, 5, 0, StopReason.STOP))
    await until(lambda: bool(scene.acknowledged()))
    assert scene.acknowledged()[0] == ("fast", 1), "an idle worker waits for no other"
    assert await scene.publisher.wait_acknowledged(1, PATIENCE_S)
    assert "preempt straggler" in scene.log
    assert [r.preempted for r in scene.records] == [0, 1]
    await scene.publisher.close()


async def test_drain_loads_nowhere_while_a_turn_runs_anywhere() -> None:
    scene = Scene("drain")
    scene.engine("w0")
    scene.engine("w1")
    scene.notify(TurnDispatched("t", 3, "w1", 0))
    await scene.publish(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.acknowledged() == []
    assert scene.log.count("WorkerDraining") == 2
    scene.notify(TurnFinished("t", 3, 5, 0, StopReason.STOP))
    assert await scene.publisher.wait_acknowledged(1, PATIENCE_S)
    assert scene.publisher.versions == {"w0": 1, "w1": 1}
    assert scene.log.index("w0 load 1") < scene.log.index("w0 reset") < scene.log.index("w0 resume")
    await scene.publisher.close()


async def test_a_newer_version_supersedes_one_still_being_loaded() -> None:
    scene = Scene("in_flight")
    engine = scene.engine("w0")
    engine.gate = asyncio.Event()
    engine.faults = [EngineError("v1 was pruned")]
    await scene.publish(1)
    await asyncio.sleep(0)
    await scene.publish(2)
    engine.gate.set()
    assert await scene.publisher.wait_acknowledged(2, PATIENCE_S)
    assert scene.acknowledged() == [("w0", 2)]
    await scene.publisher.close()


async def test_T08_a_worker_that_comes_up_behind_is_brought_up_before_anybody_waits() -> None:
    scene = Scene("drain")
    await scene.publish(5)
    engine = scene.engine("w0")
    assert await scene.publisher.wait_acknowledged(5, PATIENCE_S)
    assert engine.at_version == 5
    await scene.publisher.close()


async def test_a_lost_engine_is_reported_broken_and_removal_is_clean() -> None:
    scene = Scene("in_flight")
    engine = scene.engine("w0")
    engine.faults = [EngineLost("connection refused")]
    await scene.publish(1)
    await scene.broke.wait()
    assert "was lost" in str(scene.broken[0][1])
    await scene.publisher.remove("w0")
    await scene.publisher.remove("w0")
    assert scene.publisher.versions == {}
    assert not await scene.publisher.wait_acknowledged(1, 0.01)


def test_running_turns_follow_the_events() -> None:
    running = RunningTurns()
    running.observe(TurnDispatched("a", 0, "w0", 0))
    running.observe(TurnDispatched("b", 2, "w1", 0))
    assert running.on("w1") == [("b", 2)]
    running.observe(WorkerDown("w1"))
    assert running.on(None) == [("a", 0)]
    running.observe(TurnRequested("a", 0, 10, 0, 16))
    assert running.on(None) == []


async def test_workers_that_are_ready_after_one_drain_are_announced_together() -> None:
    scene = Scene("drain")
    late = scene.engine("late")
    late.gate = asyncio.Event()
    scene.engine("early")
    await scene.publish(1)
    await until(lambda: "early resume" in scene.log)
    assert not scene.acknowledged()
    late.gate.set()
    assert await scene.publisher.wait_acknowledged(1, PATIENCE_S)
    assert [len(events) for events in scene.instants if isinstance(events[0], WorkerAcknowledged)] == [2]
    await scene.publisher.close()


async def test_after_a_drain_a_worker_that_is_ready_does_not_wait_for_a_stuck_one() -> None:
    scene = Scene("drain")
    stuck = scene.engine("stuck")
    stuck.gate = asyncio.Event()
    scene.engine("ready")
    await scene.publish(1)
    await until(lambda: bool(scene.acknowledged()))
    assert scene.acknowledged() == [("ready", 1)]
    await scene.publisher.close()
