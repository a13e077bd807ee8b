"""One episode, from the sandbox's creation to the verdict.

Owns: the order of an episode, its deadline, the classification of whatever goes wrong, the sandbox's end.

Must not know: who opened the trajectory, what the scheduler makes of its events, where it is stored.

Guarantees: it ends before its deadline plus a bounded teardown; its sandbox is killed however it ends; a failure is
classified here, once: the agent's own doing keeps its verdict, sandbox, engine and verifier faults are
infrastructure, a cancellation is a cancellation; every sampled token is in a segment that may train or counted
in ``metrics`` under ``tokens/discarded/<reason>``. A fault of the program is none of these: it is raised.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from venusrl import tasks as venus_tasks
from venusrl.clock import Clock, SystemClock
from venusrl.recipe import Recipe
from venusrl.rollout.agents.bash import AgentLimits, observation_of, run_agent
from venusrl.rollout.agents.tools import tool_of
from venusrl.rollout.chat import TokenizerError
from venusrl.rollout.engines.protocol import EngineError
from venusrl.rollout.turns import Rollout, TurnCancelled, TurnResult, Turns
from venusrl.rollout.waiting import done_within, to_the_end
from venusrl.sandboxes.protocol import CommandResult, Limits, SandboxDenied, SandboxError, Sandboxes
from venusrl.scheduling import events
from venusrl.tasks import TaskError, Verdict
from venusrl.types import EndReason, Failure, FailureKind, Message, StopReason, Task, Trajectory, Turn

T = TypeVar("T")

_KILL_S = 30.0
_TEARDOWN_S = 90.0
_SHORTEST_RETRY_S = 0.05
_CLASSIFIED = (SandboxError, EngineError, TokenizerError, TaskError, TurnCancelled, OSError)
_CUT = (StopReason.LENGTH, StopReason.CONTEXT)
_CUT_ENDS = (EndReason.MAX_TOKENS, EndReason.CONTEXT)


class EpisodeStuck(RuntimeError):
    """A cancelled episode did not let go: some component broke its promise to end when cancelled."""


class EpisodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which trajectory this is."""

    id: str
    group_id: str
    task: Task
    index: int
    attempt: int = 0


class EpisodeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every limit of an episode, in force as it stands here; nobody else sets another.

    ``deadline_s`` covers everything; ``sandbox_wait_s`` only the wait while the node denies.
    """

    agent: AgentLimits
    sandbox: Limits
    sandbox_wait_s: float
    deadline_s: float
    system_prompt: str = ""

    @classmethod
    def of(cls, recipe: Recipe, task: Task) -> EpisodeLimits:
        """A recipe's limits, and the task's own where it is stricter."""
        agent, sandbox = recipe.agent, recipe.sandbox
        return cls(
            agent=AgentLimits(
                max_turns=agent.max_turns,
                max_turn_tokens=agent.max_turn_tokens,
                max_output_tokens=agent.max_output_tokens,
                time_s=min(agent.max_time_s, task.agent_timeout_s),
                observation_bytes=agent.observation_bytes,
            ),
            sandbox=Limits(
                memory_mib=sandbox.memory_mib,
                pids=sandbox.pids,
                cpus=sandbox.cpus,
                disk_mib=sandbox.disk_mib,
                output_bytes=sandbox.output_bytes,
                command_timeout_s=sandbox.command_timeout_s,
            ),
            sandbox_wait_s=sandbox.wait_s,
            deadline_s=agent.deadline_s,
            system_prompt=agent.system_prompt,
        )


class TaskSide(Protocol):
    """The two moments when a task meets its sandbox; the module ``venusrl.tasks`` is one."""

    async def prepare(self, sandboxes: Sandboxes, sandbox: str, task: Task) -> None: ...

    async def verify(self, sandboxes: Sandboxes, sandbox: str, task: Task) -> Verdict: ...


async def run_episode(
    spec: EpisodeSpec,
    turns: Turns,
    sandboxes: Sandboxes,
    limits: EpisodeLimits,
    notify: Callable[[events.Event], None],
    clock: Clock | None = None,
    *,
    stop: asyncio.Future[str] | None = None,
    tasks: TaskSide = venus_tasks,
) -> Trajectory:
    """Run ``spec`` to its end and return it, failed or not.

    Setting ``stop`` to a reason cancels it, with the transcript so far; cancelling this call tears everything
    down and raises. Raises EpisodeStuck, and whatever is a fault of the program.
    """
    episode = _Episode(spec, turns, sandboxes, limits, notify, clock or SystemClock(), tasks)
    turns.register(spec.id, spec.group_id)
    life = asyncio.create_task(episode.live(), name=f"episode:{spec.id}")
    try:
        failure = await episode.watch(life, stop)
        if failure is not None:
            turns.cancel(spec.id, failure.reason)
            await to_the_end(episode.tear_down(life))
    except asyncio.CancelledError:
        await to_the_end(episode.tear_down(life))
        turns.finish(spec.id)
        raise
    return episode.trajectory(life, failure, turns.finish(spec.id))


class _Episode:
    def __init__(
        self,
        spec: EpisodeSpec,
        turns: Turns,
        sandboxes: Sandboxes,
        limits: EpisodeLimits,
        notify: Callable[[events.Event], None],
        clock: Clock,
        tasks: TaskSide,
    ) -> None:
        self.spec = spec
        self.turns = turns
        self.sandboxes = sandboxes
        self.limits = limits
        self.notify = notify
        self.clock = clock
        self.tasks = tasks
        self.started_at = clock.monotonic()
        self.transcript: list[Turn] = []
        self.end = EndReason.FAILED
        self.verdict: Verdict | None = None
        self.seconds: dict[str, float] = defaultdict(float)
        self.counters: Counter[str] = Counter()

    # --- watching -----------------------------------------------------------------------------------------------
    async def watch(self, life: asyncio.Task[None], stop: asyncio.Future[str] | None) -> Failure | None:
        """Wait for the episode's end, a stop or the deadline; the latter two are failures that end it."""
        timer = asyncio.create_task(self.clock.sleep(self.limits.deadline_s))
        try:
            await asyncio.wait(
                {life, timer} | ({stop} if stop is not None else set()), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            timer.cancel()
        if life.done():
            return None
        if stop is not None and stop.done():
            return Failure(FailureKind.CANCELLED, stop.result())
        waited = f"the episode was not over after {self.limits.deadline_s:g} s (agent.deadline_s)"
        return Failure(FailureKind.INFRASTRUCTURE, "episode_deadline", waited)

    async def tear_down(self, life: asyncio.Task[None]) -> None:
        """Cancel what still runs and wait for it to let go. Raises EpisodeStuck."""
        life.cancel()
        if not await done_within(life, self.clock, _TEARDOWN_S):
            raise EpisodeStuck(f"episode {self.spec.id} did not end within {_TEARDOWN_S:g} s of its cancellation")

    # --- living -------------------------------------------------------------------------------------------------
    async def live(self) -> None:
        """Sandbox, task, agent, verdict. Raises what went wrong."""
        sandbox = await self._timed("sandbox", self._create())
        try:
            await self._timed("prepare", self.tasks.prepare(self.sandboxes, sandbox, self.spec.task))
            agent = await run_agent(
                self._opening(),
                self._model,
                lambda turn, command, left_s: self._shell(sandbox, turn, command, left_s),
                self.limits.agent,
                self.transcript,
            )
            self.end = agent.end
            if any(turn.generated_tokens for turn in agent.turns):
                await self._timed("verify", self._verify(sandbox))
        finally:
            await to_the_end(self._kill(sandbox))

    async def _timed(self, phase: str, work: Awaitable[T]) -> T:
        begun = self.clock.monotonic()
        try:
            return await work
        finally:
            self.seconds[phase] += self.clock.monotonic() - begun

    async def _create(self) -> str:
        task, begun = self.spec.task, self.clock.monotonic()
        while True:
            try:
                sandbox = await self.sandboxes.create(
                    task.template, self.limits.sandbox, {"trajectory": self.spec.id, "task": task.id}
                )
            except SandboxDenied as denied:
                left = begun + self.limits.sandbox_wait_s - self.clock.monotonic()
                if left <= 0:
                    raise
                self.counters["sandbox_denials"] += 1
                self.notify(events.SandboxDenied(self.spec.id, denied.retry_after_s))
                await self.clock.sleep(min(max(denied.retry_after_s, _SHORTEST_RETRY_S), left))
            else:
                self.notify(events.SandboxReady(self.spec.id))
                return sandbox

    def _opening(self) -> list[Message]:
        instruction = Message("user", self.spec.task.instruction)
        prompt = self.limits.system_prompt
        return [Message("system", prompt), instruction] if prompt else [instruction]

    async def _model(self, messages: Sequence[Message], max_tokens: int) -> TurnResult:
        result = await self.turns.turn(self.spec.id, messages, max_tokens)
        self.seconds["held"] += result.waited_s
        self.seconds["model"] += result.finished_at - result.requested_at - result.waited_s
        return result

    async def _shell(self, sandbox: str, turn: int, command: str, left_s: float) -> CommandResult:
        timeout_s = min(self.limits.sandbox.command_timeout_s, left_s)
        self.notify(events.ToolStarted(self.spec.id, turn, tool_of(command)))
        result = await self._timed("tool", self.sandboxes.run(sandbox, command, timeout_s=timeout_s))
        shown = observation_of(result, self.limits.agent.observation_bytes)
        self.notify(events.ToolFinished(self.spec.id, turn, self.turns.count_tokens(shown), result.exit_code))
        return result

    async def _verify(self, sandbox: str) -> None:
        self.notify(events.VerificationStarted(self.spec.id))
        self.verdict = await self.tasks.verify(self.sandboxes, sandbox, self.spec.task)
        if self.verdict.failure is None:
            self.notify(events.VerificationFinished(self.spec.id, self.verdict.reward))

    async def _kill(self, sandbox: str) -> None:
        """Kill, for a bounded time. What a node cannot kill now it reaps when the sandbox's lease ends."""
        kill = asyncio.create_task(self.sandboxes.kill(sandbox), name=f"kill:{sandbox}")
        if not await done_within(kill, self.clock, _KILL_S):
            kill.cancel()
            self.counters["sandbox_kill_timeouts"] += 1
            return
        try:
            kill.result()
        except SandboxError:
            self.counters["sandbox_kill_failures"] += 1

    # --- the outcome ----------------------------------------------------------------------------------------------
    def trajectory(self, life: asyncio.Task[None], failure: Failure | None, rollout: Rollout) -> Trajectory:
        """What became of it. Raises what is no failure of an episode but a fault of the program."""
        error = None if life.cancelled() else life.exception()
        if error is not None and not isinstance(error, _CLASSIFIED):
            raise error
        if failure is None and life.cancelled():
            failure = Failure(FailureKind.CANCELLED, "cancelled", "something inside the episode was cancelled")
        elif failure is None:
            failure = self._failure_of_the_end() if error is None else _failure_of(error)
        valid = failure is None or failure.kind is FailureKind.POLICY
        return Trajectory(
            id=self.spec.id,
            group_id=self.spec.group_id,
            task_id=self.spec.task.id,
            index=self.spec.index,
            attempt=self.spec.attempt,
            start_version=rollout.start_version,
            segments=rollout.segments,
            turns=self.transcript,
            reward=self.verdict.reward if valid and self.verdict is not None else None,
            end=self.end,
            failure=failure,
            truncated=any(turn.stop in _CUT for turn in self.transcript) or self.end in _CUT_ENDS,
            started_at=self.started_at,
            finished_at=self.clock.monotonic(),
            verify_s=self.seconds["verify"],
            metrics=self._metrics(rollout, failure if not valid else None),
        )

    def _failure_of_the_end(self) -> Failure | None:
        """The verdict's own failure, or the cap that the agent ran into."""
        if self.verdict is None:
            return Failure(FailureKind.INFRASTRUCTURE, "prompt_too_long", "the first prompt leaves no room to answer")
        if self.verdict.failure is not None:
            return self.verdict.failure
        if self.end is EndReason.SUBMITTED:
            return None
        return Failure(FailureKind.POLICY, self.end.value)

    def _metrics(self, rollout: Rollout, failure: Failure | None) -> dict[str, float]:
        """Seconds by phase, counters, and every sampled token that will not train by its reason."""
        discarded = Counter(rollout.discarded)
        if failure is not None:
            discarded[failure.reason] += sum(sum(segment.loss_mask) for segment in rollout.segments)
        return {
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
            **{f"count/{name}": float(value) for name, value in (self.counters + Counter(rollout.counters)).items()},
            **{f"tokens/discarded/{reason}": float(tokens) for reason, tokens in discarded.items() if tokens},
        }


def _failure_of(error: BaseException) -> Failure:
    """Classify an error that ended an episode."""
    if isinstance(error, TurnCancelled):
        return Failure(FailureKind.CANCELLED, error.reason)
    if isinstance(error, TaskError | OSError):
        reason = "task_error" if isinstance(error, TaskError) else "os_error"
    else:
        reason = str(getattr(error, "reason", "infrastructure"))
    return Failure(FailureKind.INFRASTRUCTURE, reason, f"{type(error).__name__}: {error}")
