"""The groups of a run and the episodes that fill them.

Owns: carrying out ``OpenGroup``, ``CreateSandbox`` and ``CancelTrajectory``; one supervised task an episode; what
happens to its outcome: on disk before the scheduler hears of it, replaced when infrastructure failed it (a
bounded number of times a place), given up after that; whether a full group trains, is refilled or is closed.

Must not know: how an episode is played, engines, the trainer, which batch a group enters.

Guarantees: every episode that was started ends in exactly one record of the store and one event; a place is
tried again at most ``retries`` times, then its group trains without it if at least ``min_valid`` members are left
and is closed with a reason otherwise, so that no task is tried for ever (T21); a fault outside an episode's
own judgement (a full disk, a bug) ends the run and is never taken for a failed episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from venusrl.coordinator.errors import StoreConflict
from venusrl.coordinator.store import OpenedTrajectory, RunStore, sampled_tokens
from venusrl.scheduling.actions import CancelTrajectory, CreateSandbox, OpenGroup
from venusrl.scheduling.events import (
    Event,
    GroupClosed,
    GroupOpened,
    TaskOrderExhausted,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnDispatched,
    TurnFinished,
)
from venusrl.types import Failure, FailureKind, Task, Trajectory

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0

DISCARDED = "tokens/discarded/"
"""Prefix of a trajectory's metrics that count its discarded tokens by reason."""

Play = Callable[[OpenedTrajectory, Task, "asyncio.Future[str]"], Awaitable[Trajectory]]
"""One episode from its sandbox to its verdict. Whatever goes wrong inside is the trajectory's ``failure``.
Setting the future to a reason ends it early, as cancelled for that reason."""


class EpisodeSettings(msgspec.Struct, frozen=True):
    """``retries``: replacements of one place that infrastructure failed. ``min_valid``: members a group trains with."""

    group_size: int
    retries: int
    min_valid: int = 2


class Facts(msgspec.Struct, frozen=True):
    """What is remembered of a finished trajectory, for metrics."""

    reward: float
    start_version: int
    turns: int
    tokens: int
    truncated: bool

    @classmethod
    def of(cls, trajectory: Trajectory) -> Facts:
        return cls(
            reward=trajectory.reward if trajectory.reward is not None else 0.0,
            start_version=trajectory.start_version if trajectory.start_version is not None else 0,
            turns=len(trajectory.turns),
            tokens=sum(sum(segment.loss_mask) for segment in trajectory.segments),
            truncated=trajectory.truncated,
        )


@dataclass
class LiveGroup:
    """A group that is in no batch yet. ``failures``: infrastructure failures by place."""

    id: str
    ordinal: int
    task: Task
    size: int
    running: dict[str, OpenedTrajectory] = field(default_factory=dict)
    finished: dict[str, Facts] = field(default_factory=dict)
    last_finished: str = ""
    last_at: float = 0.0
    lost: int = 0
    failures: Counter[int] = field(default_factory=Counter)

    @property
    def settled(self) -> bool:
        return not self.running and len(self.finished) + self.lost == self.size


class Episodes:
    """Executes what the scheduler decides about groups (see the module's guarantees)."""

    def __init__(
        self,
        *,
        store: RunStore,
        tasks: Mapping[str, Task],
        play: Play,
        settings: EpisodeSettings,
        notify: Callable[[Event], None],
        refills_left: Callable[[], int],
        cancel_turns: Callable[[str, str], None],
        on_failure: Callable[[Exception], None],
        on_event: Callable[[str, dict[str, object]], None],
        first_backoff_s: float = _FIRST_BACKOFF_S,
    ) -> None:
        """``cancel_turns(trajectory, reason)`` aborts at the gateway; ``on_failure`` ends the run.

        What failed by infrastructure may need a moment: a place's next attempt waits, each time twice as long.
        """
        self.groups: dict[str, LiveGroup] = {}
        self._store = store
        self._tasks = tasks
        self._play = play
        self._settings = settings
        self._notify = notify
        self._refills_left = refills_left
        self._cancel_turns = cancel_turns
        self._on_failure = on_failure
        self._on_event = on_event
        self._first_backoff_s = first_backoff_s
        self._opened: dict[str, LiveGroup] = {}
        self._delays: dict[str, float] = {}
        self._stops: dict[str, asyncio.Future[str]] = {}
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[str, tuple[int, int]] = {}
        self._closing = False
        self.exhausted = False

    def adopt(self, group: LiveGroup) -> None:
        """Go on with a group of an earlier session; its episodes begin when the scheduler asks for their sandboxes."""
        self.groups[group.id] = group
        for trajectory in group.running:
            self._opened[trajectory] = group

    # --- the scheduler's decisions ------------------------------------------------------------------------
    def open_group(self, action: OpenGroup) -> None:
        """Open the next group of the order, or say that there is none."""
        if self._closing:
            return
        opened = self._store.open_group(self._settings.group_size, reissue_of=action.reissue_of)
        if opened is None:
            self.exhausted = True
            self._notify(TaskOrderExhausted())
            return
        group = LiveGroup(opened.id, opened.ordinal, self._tasks[opened.task_id], self._settings.group_size)
        self.groups[group.id] = group
        self._notify(GroupOpened(group.id, group.ordinal, group.task.id, group.size, action.reissue_of))
        for trajectory in opened.trajectories:
            self.open_trajectory(group, trajectory)

    def open_trajectory(self, group: LiveGroup, opened: OpenedTrajectory, delay_s: float = 0.0) -> None:
        """Announce a trajectory; its episode begins when the scheduler asks for its sandbox."""
        group.running[opened.id] = opened
        self._opened[opened.id] = group
        self._delays[opened.id] = delay_s
        self._notify(TrajectoryOpened(opened.id, group.id, opened.index, opened.attempt))

    def create_sandbox(self, action: CreateSandbox) -> None:
        """Begin the episode."""
        group = self._opened.get(action.trajectory)
        if group is None or action.trajectory in self._episodes or self._closing:
            return
        opened = group.running[action.trajectory]
        self._stops[opened.id] = asyncio.get_running_loop().create_future()
        episode = asyncio.create_task(self._run(group, opened), name=f"episode:{opened.id}")
        self._episodes[opened.id] = episode
        episode.add_done_callback(lambda done: self._ended(opened.id, done))

    def cancel(self, action: CancelTrajectory) -> None:
        """The trajectory's group will not train: close it, stop the trajectory."""
        group = self._opened.get(action.trajectory) or self._group_of_finished(action.trajectory)
        if group is not None and self.groups.pop(group.id, None) is not None:
            self._close(group, action.reason)
        self._opened.pop(action.trajectory, None)
        self._stop(action.trajectory, action.reason)

    def observe(self, event: Event) -> None:
        """Keep what a crash would lose countable: the version a trajectory started with, the tokens it cost."""
        if isinstance(event, TurnDispatched) and event.trajectory in self._opened:
            start, tokens = self._progress.get(event.trajectory, (event.version, 0))
            self._progress[event.trajectory] = (start, tokens)
            if not tokens:
                self._store.record_progress(event.trajectory, start, tokens)
        elif isinstance(event, TurnFinished) and event.trajectory in self._progress:
            start, tokens = self._progress[event.trajectory]
            self._progress[event.trajectory] = (start, tokens + event.generated)
            if event.trajectory in self._opened:
                self._store.record_progress(event.trajectory, start, tokens + event.generated)

    def take(self, group_id: str) -> LiveGroup | None:
        """The group enters a batch: forget it, and return what is known of it."""
        return self.groups.pop(group_id, None)

    # --- the life of an episode -----------------------------------------------------------------------------
    @property
    def running(self) -> int:
        return len(self._episodes)

    async def close(self, reason: str, timeout_s: float, *, record: bool = True) -> list[str]:
        """Stop every episode; their places wait for a resumption. Returns the episodes that did not let go in time.

        Without ``record`` the store is left as it is (it may be what failed): recovery will call them crashed.
        Idempotent.
        """
        self._closing = True
        episodes = list(self._episodes.values())
        for trajectory in list(self._episodes):
            self._stop(trajectory, reason)
        stuck: list[str] = []
        if episodes:
            _, pending = await asyncio.wait(episodes, timeout=timeout_s)
            for episode in pending:
                episode.cancel()
            _, pending = await asyncio.wait(pending, timeout=timeout_s) if pending else (set(), set())
            stuck = [task.get_name() for task in pending]
        for trajectory in list(self._opened) if record else ():
            # One that was being written at this very moment may have finished: then it counts.
            with contextlib.suppress(StoreConflict):
                self._store.fail_trajectory(trajectory, Failure(FailureKind.CANCELLED, reason), vacant=True)
        self._opened.clear()
        return stuck

    async def _run(self, group: LiveGroup, opened: OpenedTrajectory) -> None:
        stop = self._stops[opened.id]
        delay = self._delays.pop(opened.id, 0.0)
        if delay:
            await asyncio.wait({stop}, timeout=delay)
        trajectory = await self._play(opened, group.task, stop)
        if opened.id not in self._opened:
            return  # cancelled: its group is closed and counted
        if trajectory.trainable:
            await self._finish(group, opened, trajectory)
        elif not self._closing:
            self._fail(group, opened, trajectory)

    def _stop(self, trajectory: str, reason: str) -> None:
        self._cancel_turns(trajectory, reason)
        stop = self._stops.get(trajectory)
        if stop is not None and not stop.done():
            stop.set_result(reason)

    def _ended(self, trajectory: str, episode: asyncio.Task[None]) -> None:
        del self._episodes[trajectory], self._stops[trajectory]
        self._progress.pop(trajectory, None)
        if episode.cancelled():
            return
        error = episode.exception()
        if isinstance(error, Exception):
            self._on_failure(error)

    async def _finish(self, group: LiveGroup, opened: OpenedTrajectory, trajectory: Trajectory) -> None:
        try:
            # Compressing and syncing a long trajectory takes milliseconds that other turns need.
            await asyncio.to_thread(self._store.finish_trajectory, trajectory)
        except StoreConflict:
            if opened.id not in self._opened:
                return  # cancelled while it was being written
            raise
        if self._opened.pop(opened.id, None) is None:
            return
        self._count_discards(trajectory, None)
        del group.running[opened.id]
        group.finished[opened.id] = Facts.of(trajectory)
        group.last_finished, group.last_at = opened.id, time.monotonic()
        if group.settled and not self._completed(group):
            return
        self._notify(TrajectoryFinished(opened.id))

    def _fail(self, group: LiveGroup, opened: OpenedTrajectory, trajectory: Trajectory) -> None:
        failure = trajectory.failure or Failure(FailureKind.INFRASTRUCTURE, "no_verdict", "the episode had no reward")
        del self._opened[opened.id]
        del group.running[opened.id]
        group.failures[opened.index] += 1
        again = group.failures[opened.index] <= self._settings.retries
        self._store.fail_trajectory(opened.id, failure, vacant=again, transcript=trajectory)
        self._count_discards(trajectory, failure)
        _log.warning("trajectory %s failed (%s): %s", opened.id, failure.reason, failure.message)
        self._on_event(
            "trajectory_failed",
            {"trajectory": opened.id, "reason": failure.reason, "message": failure.message, "replaced": again},
        )
        failed = TrajectoryFailed(opened.id, failure.kind, failure.reason, replaced=again)
        if again:
            replacement = self._store.replace_trajectory(group.id, opened.index)
            self._notify(failed)
            backoff = self._first_backoff_s * 2 ** (group.failures[opened.index] - 1)
            self.open_trajectory(group, replacement, min(_LONGEST_BACKOFF_S, backoff))
            return
        group.lost += 1
        if group.size - group.lost < self._settings.min_valid:
            self.groups.pop(group.id, None)
            self._close(group, "group_too_small")
        elif group.settled and not self._completed(group):
            return
        self._notify(failed)

    def _count_discards(self, trajectory: Trajectory, failure: Failure | None) -> None:
        """Count the tokens that no segment holds; those of a failed trajectory's segments the store counts itself."""
        for name, value in trajectory.metrics.items():
            if name.startswith(DISCARDED):
                reason, tokens = name.removeprefix(DISCARDED), int(value)
                if failure is not None and reason == failure.reason:
                    tokens -= sampled_tokens(trajectory)
                if tokens > 0:
                    self._store.discard(reason, tokens)

    # --- the end of a group ---------------------------------------------------------------------------------
    def _completed(self, group: LiveGroup) -> bool:
        """Every place is settled: the group is complete, unless it is to be refilled."""
        rewards = {facts.reward for facts in group.finished.values()}
        if len(rewards) == 1 and self._refills_left() > 0:
            self.groups.pop(group.id, None)
            self._close(group, "zero_variance")
            self._notify(GroupClosed(group.id, "zero_variance"))
            return False
        self._store.complete_group(group.id)
        return True

    def _close(self, group: LiveGroup, reason: str) -> None:
        """Close a group in the store. Members that still run are stopped by the scheduler's own cancellations."""
        for trajectory in group.running:
            self._opened.pop(trajectory, None)
        self._store.close_group(group.id, reason)
        self._on_event("group_closed", {"group": group.id, "task": group.task.id, "reason": reason})

    def _group_of_finished(self, trajectory: str) -> LiveGroup | None:
        return next((group for group in self.groups.values() if trajectory in group.finished), None)
