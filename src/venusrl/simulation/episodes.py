"""The trajectories of a simulated run: from their group's opening to their verdict.

Owns: groups and members, the course of each trajectory along its script, failures and replacements. Must not know:
how engines advance, who orders turns.

Guarantees: events are reported as a real run reports them; a dispatch that was not asked for, or that breaks the
rules of versions, is a ``PolicyFault``; a trajectory that ends in any way leaves no request and no sandbox behind.
"""

from __future__ import annotations

import random
from typing import Literal

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.scheduler import ZERO_VARIANCE
from venusrl.simulation.core import Core
from venusrl.simulation.episode import Episode, GroupRun
from venusrl.simulation.fleet import Fleet
from venusrl.simulation.recorder import Recorder
from venusrl.simulation.requests import Request
from venusrl.simulation.sandboxes import PolicyFault, Sandboxes
from venusrl.simulation.scenario import Scenario
from venusrl.types import FailureKind, StopReason

REISSUED_ATTEMPT = 1000
"""Attempts of a reissued group are other samples than those of the group it stands for."""


class Episodes:
    """See the module. ``Turns`` of the fleet."""

    def __init__(self, core: Core, scenario: Scenario, seed: int, recorder: Recorder) -> None:
        self.live: dict[str, Episode] = {}
        """Trajectories whose group is in no batch and not given up."""
        self.groups: dict[str, GroupRun] = {}
        self.fleet = Fleet(core, scenario.fleet, scenario.failures, seed, self)
        self.sandboxes = Sandboxes(core, scenario.sandboxes, self._sandbox_ready)
        self._core = core
        self._scenario = scenario
        self._seed = seed
        self._recorder = recorder
        self._tasks = 0
        self._opened = 0
        core.carry_out.update(
            {
                act.OpenGroup: self._open_group,
                act.Dispatch: self._dispatch,
                act.Hold: self._hold,
                act.Preempt: self._preempt,
                act.CancelTrajectory: self._cancel,
                act.PauseSandbox: self._pause,
            }
        )

    # --- opening ----------------------------------------------------------------------------------------------
    def _open_group(self, action: act.OpenGroup) -> None:
        core, again = self._core, action.reissue_of
        if again is None:
            if self._scenario.workload.tasks is not None and self._tasks >= self._scenario.workload.tasks:
                core.report(ev.TaskOrderExhausted())
                return
            task, reissues, name = self._tasks, 0, f"g{self._tasks}"
            self._tasks += 1
        else:
            # "g12", "g12.r1", "g12.r2"...
            stem, _, times = again.partition(".r")
            task, reissues = int(stem[1:]), int(times or 0) + 1
            name = f"{stem}.r{reissues}"
        size = self._scenario.scheduler.group_size
        group = self.groups[name] = GroupRun(name, task, reissues, core.now)
        core.report(ev.GroupOpened(name, self._opened, f"task-{task}", size, again))
        self._opened += 1
        for index in range(size):
            self._open_trajectory(group, index, 0)

    def _open_trajectory(self, group: GroupRun, index: int, attempt: int) -> None:
        name = f"{group.name}/{index}.{attempt}"
        number = attempt + REISSUED_ATTEMPT * group.reissues
        script = self._scenario.workload.script(self._seed, group.task, index, number)
        episode = Episode(name, group, index, script, self._core.now)
        self._fate(episode, number)
        group.members[index] = self.live[name] = episode
        self.sandboxes.expect(name, script.sandbox_memory, script.setup_s)
        self._core.report(ev.TrajectoryOpened(name, group.name, index, attempt))

    def _fate(self, episode: Episode, attempt: int) -> None:
        rate = self._scenario.failures.sandbox_rate
        if rate:
            draw = random.Random(f"{self._seed}/failure/{episode.group.task}/{episode.index}/{attempt}")
            if draw.random() < rate:
                episode.fails_at = draw.randrange(len(episode.script.turns))

    # --- turns --------------------------------------------------------------------------------------------------
    def _request(self, episode: Episode) -> None:
        episode.state = "held"
        self._recorder.requested(episode, self._core.now)
        script = episode.script
        self._core.report(
            ev.TurnRequested(
                episode.name,
                episode.turn,
                episode.prompt,
                script.shared_prefix,
                script.max_turn_tokens,
                episode.resumed,
            )
        )

    def _hold(self, action: act.Hold) -> None:
        episode = self.live.get(action.trajectory)
        if episode is not None and episode.state == "held":
            self._recorder.hold(episode, action.reason, self._core.now)

    def _dispatch(self, action: act.Dispatch) -> None:
        episode = self.live.get(action.trajectory)
        if episode is None or episode.state != "held" or action.turn != episode.turn:
            raise PolicyFault(f"dispatched what was not asked for: {action}")
        script, now = episode.script, self._core.now
        left = script.turns[episode.turn].generated - episode.resumed
        context = episode.prompt + episode.resumed
        request = Request(episode.name, episode.branches, context, left)
        version = self.fleet.submit(request, action.worker, action.urgency)
        self._recorder.dispatched(episode, now)
        episode.state = "engine"
        self._check_version(episode, version)
        self._core.report(ev.TurnDispatched(episode.name, episode.turn, action.worker, version))

    def _check_version(self, episode: Episode, version: int) -> None:
        published = self.fleet.published
        if episode.start is None:
            if version != published:
                raise PolicyFault(f"{episode.name} starts with version {version}, published is {published}")
            episode.start, episode.started_at = version, self._core.now
        elif version < episode.start:
            raise PolicyFault(f"{episode.name} started with version {episode.start} and goes to {version}")

    def turn(self, trajectory: str) -> int:
        return self.live[trajectory].turn

    def finished(self, request: Request) -> None:
        """Its turn's tokens are there."""
        episode = self.live[request.trajectory]
        self._take(episode, request)
        script, turn = episode.script, episode.turn
        generated = script.turns[turn].generated
        stop = StopReason.LENGTH if generated >= script.max_turn_tokens else StopReason.STOP
        episode.turn += 1
        episode.resumed = 0
        episode.prompt += generated
        episode.state = "tool"
        self._core.report(ev.TurnFinished(episode.name, turn, request.generated, request.found or 0, stop))
        if episode.state == "tool":
            self._after_turn(episode, turn)

    def _after_turn(self, episode: Episode, turn: int) -> None:
        if episode.fails_at == turn:
            self._fail(episode)
        elif episode.turn < len(episode.script.turns):
            self._core.report(ev.ToolStarted(episode.name, turn))
            self._work(episode, "tool", episode.script.turns[turn].tool_s)
        else:
            self._core.report(ev.VerificationStarted(episode.name))
            self._work(episode, "verify", episode.script.verify_s)

    def _preempt(self, action: act.Preempt) -> None:
        request = self.fleet.withdraw(action.trajectory)
        if request is None:
            raise PolicyFault(f"{action.trajectory} is preempted and runs nowhere")
        self.aborted(request)

    def aborted(self, request: Request) -> None:
        """Its tokens so far are kept; the rest is asked for again."""
        episode = self.live[request.trajectory]
        self._take(episode, request)
        episode.resumed += request.generated
        turn = episode.turn
        self._core.report(ev.TurnFinished(episode.name, turn, request.generated, request.found or 0, StopReason.ABORT))
        self._request(episode)

    def _take(self, episode: Episode, request: Request) -> None:
        episode.generated += request.generated
        episode.prefilled += request.prefilled
        episode.cached += request.cached
        episode.queued_s += request.queued_s
        episode.prefill_s += request.prefill_s
        episode.decode_s += request.decode_s

    # --- what needs the sandbox -----------------------------------------------------------------------------------
    def _sandbox_ready(self, trajectory: str) -> None:
        episode = self.live.get(trajectory)
        if episode is None:
            return
        if episode.state == "sandbox":
            episode.sandbox_s += self._core.now - episode.opened_at
            self._request(episode)
        elif episode.left_s is not None:
            self._run(episode, episode.left_s)

    def _work(self, episode: Episode, state: Literal["tool", "verify"], seconds: float) -> None:
        """A tool call or the verification, as soon as the sandbox is there."""
        episode.state = state
        if self.sandboxes.demand(episode.name):
            self._run(episode, seconds)
        else:
            episode.left_s = seconds

    def _run(self, episode: Episode, seconds: float) -> None:
        episode.left_s = None
        episode.work = self._core.later(seconds, self._work_ends, episode)

    def _pause(self, action: act.PauseSandbox) -> None:
        if not self.sandboxes.pause(action.trajectory):
            return
        episode = self.live[action.trajectory]
        if episode.state in ("tool", "verify") and episode.work is not None:
            episode.left_s = episode.work.when - self._core.now
            self._stop_work(episode)
            # Its processes stand still until it is resumed; nobody else may know that it must be.
            self.sandboxes.demand(episode.name)

    def _stop_work(self, episode: Episode) -> None:
        if episode.work is not None:
            episode.work.cancel()
            episode.work = None

    def _work_ends(self, episode: Episode) -> None:
        self._core.worked()
        episode.work = None
        if episode.state == "verify":
            episode.verify_s += episode.script.verify_s
            self._finish(episode)
            return
        turn = episode.turn - 1
        done = episode.script.turns[turn]
        episode.tool_s += done.tool_s
        episode.prompt += done.observation
        self._core.report(ev.ToolFinished(episode.name, turn, done.observation, done.exit_code))
        if episode.state == "tool":
            self._request(episode)

    # --- ends ---------------------------------------------------------------------------------------------------
    def _finish(self, episode: Episode) -> None:
        core = self._core
        self.sandboxes.release(episode.name)
        self.fleet.forget(episode.name)
        episode.state = "finished"
        episode.finished_at = core.now
        core.report(ev.VerificationFinished(episode.name, episode.script.reward))
        if episode.name not in self.live:
            return
        if self._refilled(episode):
            core.report(ev.GroupClosed(episode.group.name, ZERO_VARIANCE))
        else:
            core.report(ev.TrajectoryFinished(episode.name))

    def _refilled(self, last: Episode) -> bool:
        """Whether its group has no variance and may be replaced."""
        members = last.group.members.values()
        return (
            self._core.scheduler.refills_left > 0
            and all(member.state == "finished" for member in members)
            and len({member.script.reward for member in members}) == 1
        )

    def _fail(self, episode: Episode) -> None:
        """Its sandbox died."""
        attempt = int(episode.name.rpartition(".")[2])
        replaced = attempt + 1 < self._scenario.failures.max_attempts
        self._end(episode, "sandbox_died")
        group = episode.group
        if not replaced:
            group.lost += 1
            del group.members[episode.index]
            if not group.members:
                del self.groups[group.name]
        failed = ev.TrajectoryFailed(episode.name, FailureKind.INFRASTRUCTURE, "sandbox_died", replaced)
        self._core.report(failed)
        if replaced and group.name in self.groups:
            self._open_trajectory(group, episode.index, attempt + 1)

    def _cancel(self, action: act.CancelTrajectory) -> None:
        episode = self.live.get(action.trajectory)
        if episode is None:
            return
        self.groups.pop(episode.group.name, None)
        request = self.fleet.withdraw(episode.name)
        if request is not None:
            self._take(episode, request)
        self._end(episode, action.reason)
        self._core.report(ev.TrajectoryFailed(episode.name, FailureKind.CANCELLED, action.reason, replaced=False))

    def _end(self, episode: Episode, reason: str) -> None:
        """It will not train."""
        episode.state = "over"
        self._stop_work(episode)
        self.sandboxes.release(episode.name)
        self.fleet.forget(episode.name)
        del self.live[episode.name]
        self._recorder.lost(episode, reason)

    def collect(self, action: act.FormBatch) -> list[int]:
        """The groups of a batch leave for the trainer: the lengths of their trajectories."""
        lengths: list[int] = []
        for name in action.groups:
            group = self.groups.pop(name)
            members = list(group.members.values())
            for episode in members:
                self._check_trainable(episode, action.version)
                del self.live[episode.name]
                lengths.append(episode.script.length)
            self._recorder.trained(group, members, action.version)
        return lengths

    def _check_trainable(self, episode: Episode, version: int) -> None:
        config = self._scenario.scheduler
        start = episode.start
        if episode.state != "finished" or start is None or version - start > config.max_staleness:
            raise PolicyFault(f"{episode.name} is {episode.state}, started at {start}, and is to train at {version}")
        if episode.generated != episode.script.generated:
            raise PolicyFault(f"{episode.name} has {episode.generated} tokens of {episode.script.generated}")
