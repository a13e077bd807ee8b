"""Scheduler, gateway and episodes together, on virtual time: engines die, weights change, trajectories are cancelled.

The fakes stand in for engines and sandboxes only; everything between them is the real thing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from decimal import Decimal

import pytest

from venusrl.coordinator.host import SchedulerHost
from venusrl.rollout.agents.bash import AgentLimits
from venusrl.rollout.episode import EpisodeLimits, EpisodeSpec, run_episode
from venusrl.rollout.gateway import Gateway
from venusrl.rollout.settings import GatewaySettings
from venusrl.sandboxes.protocol import Limits, Sandboxes
from venusrl.scheduling import actions, events
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.scheduler import Scheduler
from venusrl.tasks import Verdict
from venusrl.testing.chat import answer, toy_chat, turn_start
from venusrl.testing.clock import VirtualClock
from venusrl.testing.engine import FakeEngine, ScriptedModel
from venusrl.testing.sandboxes import FakeSandboxes
from venusrl.types import FailureKind, SamplingParams, Task, Trajectory

CHAT = toy_chat()
TEXTS = ("```sh\ncat a.py\n```", "```sh\nsed -i s/a/b/ a.py\n```", "```sh\nsubmit\n```")
LIMITS = EpisodeLimits(AgentLimits(8, 64, 512, 1e6, 256), Limits(), 60.0, 1e5)


class Judge:
    async def prepare(self, sandboxes: Sandboxes, sandbox: str, task: Task) -> None:
        await sandboxes.write(sandbox, {"a.py": b"a"})

    async def verify(self, sandboxes: Sandboxes, sandbox: str, task: Task) -> Verdict:
        return Verdict(1.0, "")


class Plane:
    """A coordinator in a few lines: it executes actions, trains in no time, and never touches a token."""

    def __init__(self, *, keep_partials: bool, steps: int = 4) -> None:
        self.clock = VirtualClock()
        self.failures: list[Exception] = []
        config = SchedulerConfig(
            batch_groups=2, group_size=2, async_factor=Decimal("1.5"), max_staleness=2, max_steps=steps
        )
        self.host = SchedulerHost(Scheduler(config), now=self.clock.monotonic, on_failure=self.failures.append)
        settings = GatewaySettings(
            sampling=SamplingParams(stop_token_ids=CHAT.stop_token_ids),
            context_tokens=1024,
            max_turn_tokens=64,
            keep_partials=keep_partials,
            turn_reissues=6,
        )
        self.gateway = Gateway({}, CHAT, self.host.notify, self.clock, settings=settings)
        self.sandboxes = FakeSandboxes()
        self.engines: dict[str, FakeEngine] = {}
        self.episodes: dict[str, asyncio.Task[None]] = {}
        self.done: dict[str, Trajectory] = {}
        self.batches: list[actions.FormBatch] = []
        self.groups = 0
        self.version = 0
        self.finished = asyncio.Event()
        for kind in (actions.Dispatch, actions.Hold, actions.Preempt, actions.CancelTrajectory):
            self.host.route(kind, self.gateway.apply)
        self.host.route(actions.OpenGroup, self.open_group)
        self.host.route(actions.CreateSandbox, self.start_episode)
        self.host.route(actions.FormBatch, self.form_batch)
        self.host.route(actions.FinishRun, lambda action: self.finished.set())

    def worker(self, name: str) -> FakeEngine:
        script = ScriptedModel([answer(CHAT, text) for text in TEXTS], turn_start(CHAT))
        engine = FakeEngine(script, version=self.version, pace=lambda: self.clock.sleep(0.5))
        self.engines[name] = engine
        self.gateway.add_worker(name, engine, self.version)
        self.host.notify(events.WorkerUp(name, kv_capacity=1 << 16, slots=64, version=self.version))
        return engine

    def lose(self, name: str) -> None:
        self.engines.pop(name).crash()
        self.gateway.remove_worker(name)
        self.host.notify(events.WorkerDown(name))

    def open_group(self, action: actions.OpenGroup) -> None:
        group = f"g{self.groups}"
        self.host.notify(events.GroupOpened(group, self.groups, f"task{self.groups}", 2, action.reissue_of))
        self.groups += 1
        for index in range(2):
            self.host.notify(events.TrajectoryOpened(f"{group}/{index}", group, index, 0))

    def start_episode(self, action: actions.CreateSandbox) -> None:
        if action.trajectory not in self.episodes:
            self.episodes[action.trajectory] = asyncio.create_task(self.play(action.trajectory))

    async def play(self, name: str) -> None:
        group, _, rest = name.partition("/")
        task = Task(id=group, instruction=f"fix {group}", directory="/nowhere")
        spec = EpisodeSpec(name, group, task, int(rest[0]), rest.count("+"))
        trajectory = await run_episode(
            spec, self.gateway, self.sandboxes, LIMITS, self.host.notify, self.clock, tasks=Judge()
        )
        self.done[name] = trajectory
        if trajectory.trainable:
            self.host.notify(events.TrajectoryFinished(name))
            return
        assert trajectory.failure is not None
        self.host.notify(events.TrajectoryFailed(name, trajectory.failure.kind, trajectory.failure.reason, True))
        self.host.notify(events.TrajectoryOpened(f"{name}+", group, spec.index, spec.attempt + 1))

    def form_batch(self, action: actions.FormBatch) -> None:
        self.batches.append(action)
        self.host.notify(events.BatchTrained(action.version))
        self.version = action.version + 1
        self.host.notify(events.VersionPublished(self.version))

    async def publish(self) -> None:
        """In flight: every worker at the newest version, its requests kept."""
        for name, engine in self.engines.items():
            if await engine.version() != self.version:
                await engine.pause()
                await engine.load_weights("w", self.version)
                await engine.resume()
                self.gateway.acknowledge(name, self.version)
                self.host.notify(events.WorkerAcknowledged(name, self.version))

    async def close(self) -> None:
        for episode in self.episodes.values():
            episode.cancel()
        closing = asyncio.gather(*self.episodes.values(), self.gateway.close(), return_exceptions=True)
        await self.clock.run_for(200.0)
        await closing

    def check_tokens(self) -> None:
        """Of every trajectory: spans in the order of versions, from its start on, staleness within the bound."""
        trained_by = {group: batch.version for batch in self.batches for group in batch.groups}
        for trajectory in self.done.values():
            for segment in trajectory.segments:
                versions = [span.version for span in segment.spans]
                assert versions == sorted(versions)
                assert trajectory.start_version is not None
                assert versions[0] >= trajectory.start_version
            if trajectory.trainable and trajectory.group_id in trained_by:
                assert trajectory.start_version is not None
                assert trained_by[trajectory.group_id] - trajectory.start_version <= 2


@pytest.mark.parametrize("keep_partials", [True, False])
async def test_a_run_with_dying_engines_and_changing_weights_trains_to_its_end(keep_partials: bool) -> None:
    plane = Plane(keep_partials=keep_partials)
    plane.worker("w0")
    plane.worker("w1")
    for round_ in range(400):
        if plane.finished.is_set() or plane.failures:
            break
        await plane.clock.run_for(3.0)
        await plane.publish()
        if round_ % 5 == 2:
            plane.lose("w1")
            await plane.clock.run_for(1.0)
            plane.worker("w1")
    await plane.close()
    assert plane.failures == []
    assert [batch.version for batch in plane.batches] == [0, 1, 2, 3]
    trained = [group for batch in plane.batches for group in batch.groups]
    assert len(set(trained)) == len(trained) == 8
    plane.check_tokens()
    counts = Counter[str]()
    for trajectory in plane.done.values():
        assert trajectory.failure is None
        assert trajectory.turns[-1].text == TEXTS[-1]
        counts.update({name: int(value) for name, value in trajectory.metrics.items() if name.startswith("count/")})
    assert counts["count/reissues"] > 0
    assert plane.sandboxes.alive == []
    assert all(engine.cross_version_hits == 0 for engine in plane.engines.values())
    assert not any(engine.running for engine in plane.engines.values())


async def test_a_trajectory_cancelled_by_the_scheduler_lets_go_everywhere() -> None:
    plane = Plane(keep_partials=True)
    engine = plane.worker("w0")
    await plane.clock.run_for(2.0)
    plane.gateway.apply(actions.CancelTrajectory("stale", "g0/0"))
    await plane.clock.run_for(2.0)
    assert plane.done["g0/0"].failure is not None
    assert plane.done["g0/0"].failure.kind is FailureKind.CANCELLED
    assert not any(request.startswith("g0/0-") for request in engine.running)
    await plane.close()
    assert engine.running == []
    assert plane.sandboxes.alive == []
