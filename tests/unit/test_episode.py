"""One episode: its order, its end, and whose fault a failure is. Cases T18, T19, T29, T30, T36, T38, T39, T44."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from venusrl.recipe import resolve
from venusrl.rollout.agents.bash import AgentLimits
from venusrl.rollout.direct import DirectTurns
from venusrl.rollout.engines.protocol import GenerateRequest, Generation
from venusrl.rollout.episode import EpisodeLimits, EpisodeSpec, EpisodeStuck, run_episode
from venusrl.rollout.settings import GatewaySettings
from venusrl.sandboxes.protocol import CommandResult, Limits, SandboxDenied, SandboxError, Sandboxes, SandboxGone
from venusrl.scheduling.events import Event, ToolFinished, ToolStarted
from venusrl.tasks import TaskError, Verdict
from venusrl.testing.chat import answer, toy_chat, turn_start
from venusrl.testing.clock import VirtualClock
from venusrl.testing.engine import FakeEngine, ScriptedModel
from venusrl.testing.sandboxes import FakeCall, FakeSandboxes
from venusrl.types import EndReason, Failure, FailureKind, SamplingParams, StopReason, Task, Trajectory

CHAT = toy_chat()
TASK = Task(id="task", instruction="fix the file", directory="/nowhere")
SPEC = EpisodeSpec(id="t0", group_id="g0", task=TASK, index=3, attempt=1)
LIMITS = EpisodeLimits(
    agent=AgentLimits(max_turns=4, max_turn_tokens=64, max_output_tokens=256, time_s=1000.0, observation_bytes=256),
    sandbox=Limits(command_timeout_s=20.0),
    sandbox_wait_s=60.0,
    deadline_s=2000.0,
)


def fenced(command: str) -> str:
    return f"```sh\n{command}\n```"


class Judge:
    """A task's two moments, scripted."""

    def __init__(self) -> None:
        self.verdict: Verdict | Callable[[], Awaitable[Verdict]] | Exception = Verdict(1.0, "ok")
        self.prepared: list[str] = []
        self.verified: list[str] = []

    async def prepare(self, sandboxes: Sandboxes, sandbox: str, task: Task) -> None:
        self.prepared.append(sandbox)
        await sandboxes.write(sandbox, {"a.py": b"x"})

    async def verify(self, sandboxes: Sandboxes, sandbox: str, task: Task) -> Verdict:
        self.verified.append(sandbox)
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict if isinstance(self.verdict, Verdict) else await self.verdict()


class Stage:
    """Everything an episode needs; ``play`` runs one and lets virtual time pass."""

    def __init__(self, *texts: str, context: int = 2048, **sandboxes: Any) -> None:
        self.clock = VirtualClock()
        model = ScriptedModel(
            [answer(CHAT, text) for text in texts or (fenced("ls"), fenced("submit"))], turn_start(CHAT)
        )
        self.engine = FakeEngine(model, pace=lambda: self.clock.sleep(0.1))
        settings = GatewaySettings(
            sampling=SamplingParams(stop_token_ids=CHAT.stop_token_ids),
            context_tokens=context,
            max_turn_tokens=64,
            turn_reissues=1,
            abort_grace_s=5.0,
        )
        self.turns = DirectTurns(self.engine, 0, CHAT, self.clock, settings=settings)
        self.sandboxes = FakeSandboxes(**sandboxes)
        self.judge = Judge()
        self.events: list[Event] = []
        self.stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def begin(self, limits: EpisodeLimits = LIMITS) -> asyncio.Task[Trajectory]:
        return asyncio.create_task(
            run_episode(
                SPEC,
                self.turns,
                self.sandboxes,
                limits,
                self.events.append,
                self.clock,
                stop=self.stop,
                tasks=self.judge,
            )
        )

    async def play(self, limits: EpisodeLimits = LIMITS, seconds: float = 3000.0) -> Trajectory:
        episode = self.begin(limits)
        await self.clock.run_for(seconds)
        assert episode.done()
        self.check_nothing_left()
        return await episode

    def check_nothing_left(self) -> None:
        assert self.sandboxes.alive == []
        assert self.sandboxes.running == 0
        assert self.engine.running == []


def trained(trajectory: Trajectory) -> int:
    return sum(sum(segment.loss_mask) for segment in trajectory.segments)


async def test_an_episode_from_sandbox_to_verdict() -> None:
    stage = Stage(script={"ls": "a.py\n"})
    trajectory = await stage.play()
    assert [type(event).__name__ for event in stage.events] == [
        "SandboxReady",
        "ToolStarted",
        "ToolFinished",
        "VerificationStarted",
        "VerificationFinished",
    ]
    assert ToolStarted("t0", 0, "ls") in stage.events
    assert ToolFinished("t0", 0, len(CHAT.encode("a.py")), 0) in stage.events
    assert (trajectory.id, trajectory.group_id, trajectory.index, trajectory.attempt) == ("t0", "g0", 3, 1)
    assert (trajectory.end, trajectory.reward, trajectory.failure) == (EndReason.SUBMITTED, 1.0, None)
    assert (trajectory.start_version, trajectory.truncated, trajectory.trainable) == (0, False, True)
    assert [(turn.text, turn.observation) for turn in trajectory.turns] == [
        (fenced("ls"), "a.py"),
        (fenced("submit"), ""),
    ]
    assert len(trajectory.segments) == 1
    assert trained(trajectory) == sum(turn.generated_tokens for turn in trajectory.turns)
    assert stage.judge.prepared == stage.judge.verified == stage.sandboxes.killed
    assert not any(name.startswith("tokens/") for name in trajectory.metrics)


async def test_a_system_prompt_opens_the_conversation_when_there_is_one() -> None:
    stage = Stage()
    limits = EpisodeLimits(LIMITS.agent, LIMITS.sandbox, 60.0, 2000.0, system_prompt="Be brief.")
    trajectory = await stage.play(limits)
    assert CHAT.decode(trajectory.segments[0].token_ids).startswith("system\nBe brief.")


async def test_limits_are_the_recipes_and_the_tasks_own_where_stricter() -> None:
    recipe = resolve({"run": {"name": "x"}, "model": {"path": "m"}, "training": {"steps": 1}})
    strict = Task(id="t", instruction="", directory="", agent_timeout_s=5.0)
    assert EpisodeLimits.of(recipe, strict).agent.time_s == 5.0
    assert EpisodeLimits.of(recipe, TASK).agent.time_s == recipe.agent.max_time_s
    assert EpisodeLimits.of(recipe, TASK).deadline_s == recipe.agent.deadline_s


# --- the policy's own doing keeps its verdict ---------------------------------------------------------------
async def test_T19_running_out_of_turns_is_a_policy_failure_that_is_still_judged() -> None:
    stage = Stage(fenced("ls"))
    stage.judge.verdict = Verdict(0.5, "")
    trajectory = await stage.play()
    assert trajectory.failure == Failure(FailureKind.POLICY, "max_turns")
    assert (trajectory.reward, trajectory.end, trajectory.trainable) == (0.5, EndReason.MAX_TURNS, True)


async def test_T19_a_command_that_times_out_is_an_observation() -> None:
    stage = Stage(script={"ls": CommandResult(137, "", 0, 20.0, timed_out=True)})
    stage.judge.verdict = Verdict(0.0, "")
    trajectory = await stage.play()
    assert trajectory.turns[0].observation == "[timed out]\n[exit code 137]"
    assert (trajectory.failure, trajectory.reward, trajectory.trainable) == (None, 0.0, True)


async def test_the_time_cap_limits_the_last_command_and_keeps_the_verdict() -> None:
    stage = Stage(fenced("ls"), script={"ls": CommandResult(137, "", 0, 30.0, timed_out=True)})
    limits = EpisodeLimits(AgentLimits(4, 64, 256, 10.0, 256), LIMITS.sandbox, 60.0, 2000.0)
    trajectory = await stage.play(limits)
    assert trajectory.failure == Failure(FailureKind.POLICY, "time")
    assert trajectory.reward == 1.0
    first = stage.sandboxes.commands[0].timeout_s
    assert first is not None
    assert 0 < first < 10.0 < LIMITS.sandbox.command_timeout_s


async def test_T18_a_full_context_is_a_policy_failure_marked_truncated() -> None:
    prompt = len(CHAT.encode(f"<|im_start|>user\n{TASK.instruction}<|im_end|>\n<|im_start|>assistant\n"))
    stage = Stage(fenced("ls"), context=prompt + 32)
    trajectory = await stage.play()
    assert trajectory.failure == Failure(FailureKind.POLICY, "context")
    assert (trajectory.truncated, trajectory.reward) == (True, 1.0)
    assert trajectory.turns[-1].stop is StopReason.CONTEXT
    assert trajectory.metrics["count/context_cuts"] == 1


# --- infrastructure -----------------------------------------------------------------------------------------
async def test_T19_a_sandbox_that_dies_is_infrastructure_and_its_tokens_are_counted() -> None:
    def script(call: FakeCall) -> None:
        raise SandboxGone("the node lost it")

    stage = Stage(script=script)
    trajectory = await stage.play()
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.reason) == (FailureKind.INFRASTRUCTURE, "sandbox_gone")
    assert "the node lost it" in trajectory.failure.message
    assert (trajectory.reward, trajectory.trainable, trajectory.end) == (None, False, EndReason.FAILED)
    assert len(trajectory.turns) == 1
    assert trajectory.metrics["tokens/discarded/sandbox_gone"] == trajectory.turns[0].generated_tokens


async def test_T19_a_lost_engine_is_infrastructure() -> None:
    stage = Stage()
    stage.engine.crash("killed")
    trajectory = await stage.play()
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.reason) == (FailureKind.INFRASTRUCTURE, "engine_lost")
    assert trajectory.start_version == 0
    assert not trajectory.trainable


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Verdict(0.0, "", Failure(FailureKind.INFRASTRUCTURE, "verifier_crashed", "x")), "verifier_crashed"),
        (SandboxGone("x"), "sandbox_gone"),
        (TaskError("tests/ is gone"), "task_error"),
        (OSError(28, "No space left on device"), "os_error"),
    ],
)
async def test_T19_a_verifier_without_a_verdict_is_infrastructure(verdict: Verdict | Exception, reason: str) -> None:
    stage = Stage()
    stage.judge.verdict = verdict
    trajectory = await stage.play()
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.reason) == (FailureKind.INFRASTRUCTURE, reason)
    assert (trajectory.reward, trajectory.trainable) == (None, False)
    assert trajectory.metrics[f"tokens/discarded/{reason}"] == trained(trajectory) > 0


async def test_a_task_that_cannot_be_prepared_is_infrastructure() -> None:
    stage = Stage()
    stage.sandboxes.fail_next(SandboxError("disk full"))
    trajectory = await stage.play()
    assert trajectory.failure is not None
    assert trajectory.failure.reason == "sandbox_error"
    assert (trajectory.segments, trajectory.turns, trajectory.start_version) == ([], [], None)


async def test_a_prompt_too_long_to_answer_is_the_configurations_fault() -> None:
    trajectory = await Stage(context=8).play()
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.reason) == (FailureKind.INFRASTRUCTURE, "prompt_too_long")


# --- waiting for a sandbox ----------------------------------------------------------------------------------
async def test_a_denied_sandbox_is_waited_for() -> None:
    stage = Stage(max_sandboxes=1)
    other = await stage.sandboxes.create("host", Limits(), {})
    episode = stage.begin()
    await stage.clock.run_for(2.5)
    assert [type(event).__name__ for event in stage.events] == ["SandboxDenied"] * 3
    await stage.sandboxes.kill(other)
    await stage.clock.run_for(100)
    assert (await episode).metrics["count/sandbox_denials"] == 3


async def test_a_sandbox_denied_for_too_long_is_infrastructure() -> None:
    stage = Stage(max_sandboxes=0)
    trajectory = await stage.play(EpisodeLimits(LIMITS.agent, LIMITS.sandbox, 2.5, 2000.0))
    assert trajectory.failure is not None
    assert trajectory.failure.reason == SandboxDenied.reason
    assert trajectory.metrics["seconds/sandbox"] == 2.5


# --- cancellation and deadline ------------------------------------------------------------------------------
async def test_T30_a_stop_reaches_engine_and_sandbox_and_keeps_the_transcript() -> None:
    stage = Stage(fenced("ls"), fenced("cat a.py"))
    episode = stage.begin()
    await stage.clock.run_for(1.3)
    assert stage.engine.running
    stage.stop.set_result("stale")
    await stage.clock.run_for(0.5)
    trajectory = await episode
    stage.check_nothing_left()
    assert trajectory.failure == Failure(FailureKind.CANCELLED, "stale")
    assert len(trajectory.turns) == 1
    lost = {name: count for name, count in trajectory.metrics.items() if name.startswith("tokens/discarded/")}
    assert list(lost) == ["tokens/discarded/stale"]
    assert lost["tokens/discarded/stale"] > trajectory.turns[0].generated_tokens
    assert (trajectory.reward, trajectory.trainable) == (None, False)


async def test_T30_a_trajectory_cancelled_at_the_gateway_is_cancelled() -> None:
    stage = Stage()
    episode = stage.begin()
    await stage.clock.run_for(0.3)
    stage.turns.cancel("t0", "stale")
    await stage.clock.run_for(2)
    assert (await episode).failure == Failure(FailureKind.CANCELLED, "stale")
    stage.check_nothing_left()


async def test_T30_cancelling_the_call_tears_everything_down() -> None:
    async def forever(call: FakeCall) -> None:
        await asyncio.get_running_loop().create_future()

    stage = Stage(script=forever)
    episode = stage.begin()
    await stage.clock.run_for(5)
    assert stage.sandboxes.running == 1
    episode.cancel()
    await stage.clock.run_for(1)
    with pytest.raises(asyncio.CancelledError):
        await episode
    stage.check_nothing_left()
    stage.turns.register("t0", "g0")


async def test_T36_a_stop_during_create_leaves_no_sandbox() -> None:
    stage: Stage

    async def slow() -> None:
        await stage.clock.sleep(10)

    stage = Stage(before_create=slow)
    episode = stage.begin()
    await stage.clock.run_for(1)
    stage.stop.set_result("shutdown")
    await stage.clock.run_for(20)
    assert (await episode).failure == Failure(FailureKind.CANCELLED, "shutdown")
    stage.check_nothing_left()


async def test_T38_the_deadline_of_the_whole_episode_is_real() -> None:
    async def forever() -> Verdict:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody answers")

    stage = Stage()
    stage.judge.verdict = forever
    episode = stage.begin()
    await stage.clock.run_for(LIMITS.deadline_s - 0.1)
    assert not episode.done()
    await stage.clock.run_for(0.2)
    trajectory = await episode
    stage.check_nothing_left()
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.reason) == (FailureKind.INFRASTRUCTURE, "episode_deadline")
    assert trajectory.end is EndReason.SUBMITTED
    assert trajectory.metrics["tokens/discarded/episode_deadline"] == trained(trajectory)


class Stubborn(FakeSandboxes):
    """Its ``kill`` hangs."""

    async def kill(self, sandbox: str) -> None:
        await asyncio.get_running_loop().create_future()


async def test_T45_a_kill_that_hangs_is_given_up_and_counted() -> None:
    stage = Stage()
    stage.sandboxes = Stubborn()
    episode = stage.begin()
    await stage.clock.run_for(100)
    trajectory = await episode
    assert trajectory.reward == 1.0
    assert trajectory.metrics["count/sandbox_kill_timeouts"] == 1


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_T30_a_kill_in_progress_is_not_cut_off(how: str) -> None:
    class Slow(FakeSandboxes):
        async def kill(self, sandbox: str) -> None:
            await stage.clock.sleep(10)
            await super().kill(sandbox)

    stage = Stage()
    stage.sandboxes = Slow()
    episode = stage.begin()
    await stage.clock.run_for(1)
    while not stage.judge.verified:
        await stage.clock.run_for(0.1)
    await stage.clock.run_for(1)
    assert not episode.done()
    if how == "stop":
        stage.stop.set_result("shutdown")
    else:
        episode.cancel()
    await stage.clock.run_for(20)
    assert episode.done()
    assert len(stage.sandboxes.killed) == 1


async def test_a_kill_that_fails_does_not_change_the_verdict() -> None:
    class Failing(FakeSandboxes):
        async def kill(self, sandbox: str) -> None:
            raise SandboxError("cgroup busy")

    stage = Stage()
    stage.sandboxes = Failing()
    episode = stage.begin()
    await stage.clock.run_for(100)
    assert (await episode).metrics["count/sandbox_kill_failures"] == 1


async def test_T45_a_component_that_ignores_cancellation_is_named() -> None:
    class Deaf(FakeSandboxes):
        async def run(self, sandbox: str, command: str, **options: Any) -> CommandResult:
            while True:
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    if released:
                        raise

    released: list[bool] = []
    stage = Stage()
    stage.sandboxes = Deaf()
    episode = stage.begin()
    await stage.clock.run_for(5)
    stage.stop.set_result("shutdown")
    await stage.clock.run_for(200)
    with pytest.raises(EpisodeStuck, match="t0"):
        await episode
    released.append(True)
    for task in asyncio.all_tasks():
        if task.get_name() == "episode:t0":
            task.cancel()
            await asyncio.wait([task])


async def test_a_fault_of_the_program_is_raised_and_still_cleans_up() -> None:
    stage = Stage()
    stage.judge.verdict = KeyError("bug")
    episode = stage.begin()
    await stage.clock.run_for(100)
    with pytest.raises(KeyError, match="bug"):
        await episode
    stage.check_nothing_left()


async def test_a_generation_in_progress_at_the_deadline_lets_go_of_the_engine() -> None:
    class Slow(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            await stage.clock.sleep(5000)
            return await super().generate(request)

    stage = Stage()
    stage.turns.use(Slow(lambda prompt: [1], pace=lambda: stage.clock.sleep(1)))
    limits = EpisodeLimits(LIMITS.agent, LIMITS.sandbox, 60.0, 100.0)
    trajectory = await stage.play(limits, seconds=200)
    assert trajectory.failure is not None
    assert trajectory.failure.reason == "episode_deadline"
