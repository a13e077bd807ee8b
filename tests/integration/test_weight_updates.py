"""New weights at a turn's end, with everything real between the scheduler and an embedded worker's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from tests.integration.engine_processes import KEY, engine_process, reference_logits
from tests.waiting import PATIENCE_S, until

from venusrl.coordinator.host import SchedulerHost
from venusrl.coordinator.publish import PublishFailed, PublishRecord, RunningTurns, WeightPublisher, Weights
from venusrl.rollout.chat import ChatTokenizer
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.launch import EMBEDDED_START_TIMEOUT_S
from venusrl.rollout.gateway import Gateway
from venusrl.rollout.settings import GatewaySettings
from venusrl.rollout.turns import TurnResult
from venusrl.scheduling import actions, events
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.scheduler import Scheduler
from venusrl.testing.tiny_model import build_tiny_model
from venusrl.types import Message, SamplingParams, Segment

WORKER = "w0"
TASK = Message("user", "Count.")
TURN_TOKENS = 300


class Plane:
    """Scheduler, gateway and publisher as a run wires them; the trajectories are the test's."""

    def __init__(self, client: HttpEngineClient, chat: ChatTokenizer) -> None:
        self.client = client
        self.faults: list[Exception] = []
        self.held: list[actions.Hold] = []
        self.records: list[PublishRecord] = []
        config = SchedulerConfig(batch_groups=1, group_size=2, async_factor=Decimal(1), max_staleness=1, max_steps=4)
        self.host = SchedulerHost(Scheduler(config), on_failure=self.faults.append)
        settings = GatewaySettings(SamplingParams(), context_tokens=1024, max_turn_tokens=400, keep_partials=False)
        self.gateway = Gateway({}, chat, self.host.notify, settings=settings)
        self.running = RunningTurns()
        self.publisher = WeightPublisher(
            mode="turn_boundary",
            timeout_s=120.0,
            running=self.running,
            notify=self.host.notify,
            preempt=lambda trajectory, turn: self.gateway.apply(actions.Preempt("weights", trajectory, turn)),
            settle=self.gateway.settled,
            on_broken=self.broken,
            on_record=self.records.append,
        )
        for observe in (self.running.observe, self.acknowledge):
            self.host.tap(observe)
        for kind in (actions.Dispatch, actions.Preempt, actions.CancelTrajectory):
            self.host.route(kind, self.gateway.apply)
        self.host.route(actions.Hold, self.hold)
        self.host.route(actions.OpenGroup, lambda action: None)
        self.host.route(actions.CreateSandbox, lambda action: None)

    def broken(self, name: str, error: PublishFailed) -> None:
        self.faults.append(error)

    def hold(self, action: actions.Hold) -> None:
        self.held.append(action)
        self.gateway.apply(action)

    def acknowledge(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerAcknowledged):
            self.gateway.acknowledge(event.worker, event.version)

    async def begin(self) -> None:
        load = await self.client.load()
        self.gateway.add_worker(WORKER, self.client, 0)
        self.host.notify(events.WorkerUp(WORKER, load.kv_capacity, load.slots, 0))
        self.publisher.add(WORKER, self.client, 0)
        self.host.notify(events.GroupOpened("g", 0, "task", 2))
        for index in range(2):
            self.gateway.register(f"t{index}", "g")
            self.host.notify(events.TrajectoryOpened(f"t{index}", "g", index, 0))

    def turn(self, trajectory: str, *messages: Message, tokens: int = 40) -> asyncio.Task[TurnResult]:
        return asyncio.create_task(self.gateway.turn(trajectory, [TASK, *messages], tokens))


@asynccontextmanager
async def plane(model: Path) -> AsyncIterator[Plane]:
    with engine_process("embedded", model) as server:
        client = HttpEngineClient(server.base_url, KEY)
        await client.wait_ready(EMBEDDED_START_TIMEOUT_S)
        made = Plane(client, ChatTokenizer.load(model))
        await made.begin()
        try:
            yield made
        finally:
            await made.publisher.close()
            await made.gateway.close()
            await client.close()


@pytest.mark.timeout(420)
async def test_new_weights_wait_for_the_end_of_a_turn_and_the_next_turn_for_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    models = [build_tiny_model(tmp_path / f"v{version}", seed=3 + version) for version in range(2)]
    async with plane(models[0]) as p:
        await p.client.pause()  # so that the weights come while the turn runs, however fast the engine is
        first = p.turn("t0", tokens=TURN_TOKENS)
        await until(lambda: bool(p.running.on(WORKER)), "the turn's dispatch")
        await p.publisher.publish(Weights(1, models[1]))
        other = p.turn("t1")
        await until(lambda: bool(p.held), "the second turn's hold")
        await p.client.resume()
        said = await first
        assert not other.done()
        assert [hold.trajectory for hold in p.held] == ["t1"], "no turn begins on a worker that drains"
        assert await p.publisher.wait_acknowledged(1, PATIENCE_S)
        await other
        await p.turn("t0", Message("assistant", said.text), Message("user", "Go on."))
        segments = {name: p.gateway.finish(name).segments for name in ("t0", "t1")}
    assert p.faults == []
    assert [(record.version, record.preempted) for record in p.records] == [(1, 0)]
    assert p.records[0].drain_s > 0, "the weights arrived while the turn ran"
    assert [[span.version for span in segment.spans] for segment in segments["t1"]] == [[1]]
    (whole,) = segments["t0"]
    assert [(span.version, span.end - span.start) for span in whole.spans] == [(0, TURN_TOKENS), (1, 40)]
    for segment in (whole, *segments["t1"]):
        check(segment, models)


def check(segment: Segment, models: list[Path]) -> None:
    """Every sampled token has the log-probability that the weights of its span give it, to the whole context."""
    for span in segment.spans:
        logprobs = torch.log_softmax(reference_logits(models[span.version], segment.token_ids), -1)
        for i in range(span.start, span.end):
            assert segment.logprobs[i] == pytest.approx(float(logprobs[i - 1, segment.token_ids[i]]), abs=1e-3)
