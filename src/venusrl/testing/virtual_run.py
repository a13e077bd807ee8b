"""A whole run around a scheduler, in virtual time and without tokens: for tests of schedulers and policies.

Owns: scripted trainer, engine workers and episodes that report to a ``Scheduler`` as the real ones do, faults included,
and an independent check of what the scheduler promises. Must not know: how the scheduler decides; it keeps its own
books and uses none of ``scheduling.window`` or ``scheduling.quota``.

Guarantees: the same arguments give the same run, event by event. A broken promise raises ``PromiseBroken`` at once.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.scheduler import Scheduler
from venusrl.testing.clock import VirtualClock
from venusrl.types import FailureKind, StopReason


class PromiseBroken(AssertionError):
    """The scheduler did what it promises never to do."""


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How trajectories, trainer and engines behave. Pairs are uniform ranges; probabilities are per trajectory."""

    turns: tuple[int, int] = (1, 4)
    turn_s: tuple[float, float] = (1.0, 5.0)
    tool_s: tuple[float, float] = (0.1, 2.0)
    verify_s: tuple[float, float] = (0.1, 1.0)
    sandbox_s: tuple[float, float] = (0.0, 1.0)
    stragglers: float = 0.0
    straggler_factor: float = 20.0
    failures: float = 0.0
    """Ends in an infrastructure failure instead of a verdict."""
    hangs: float = 0.0
    """Does not return from its last turn before its time is up."""
    cap_s: float = 1000.0
    """The time cap of a hung trajectory."""
    retries: int = 2
    train_s: float = 5.0
    publish_s: float = 0.5
    load_s: tuple[float, float] = (0.1, 0.5)
    workers: int = 2
    slots: int = 16
    drain: bool = False
    """Weights are loaded when the worker's turns have ended, instead of under them."""
    deaths_every_s: float | None = None
    """Mean time between deaths of a worker."""
    restart_s: float = 3.0
    tasks: int | None = None
    """Length of the task order; None = endless."""
    kv: int = 10_000
    """Tokens that each worker says it holds."""
    costs: EngineCosts | None = None
    """What each worker says that its work takes."""
    prompt: int = 100
    growth: tuple[int, int] = (0, 0)
    """Tokens by which a turn lengthens the context."""


@dataclass(slots=True)
class Episode:
    """One trajectory as it really went. ``fate``: ends, fails or hangs. ``versions``: its tokens' oldest and newest."""

    name: str
    group: str
    index: int
    attempt: int
    turns: int
    slow: float
    fate: str
    turn: int = 0
    start: int | None = None
    versions: tuple[int, int] | None = None
    waiting: bool = False
    running_on: str | None = None
    run: int = 0
    ends_at: float = 0.0
    left_s: float | None = None
    """What is left of a turn that a death or the scheduler cut off: its tokens so far are kept."""
    context: int = 0
    resumed: int = 0
    aborts: int = 0
    over: bool = False
    finished: bool = False


@dataclass(slots=True)
class Engine:
    """One worker: FIFO queue in front of its slots."""

    name: str
    version: int
    up: bool = True
    life: int = 0
    loading: bool = False
    running: set[str] = field(default_factory=set)
    queue: deque[str] = field(default_factory=deque)


class TrainedBatch(msgspec.Struct, frozen=True):
    """What a batch was made of: its groups, and the staleness of each of its trajectories."""

    version: int
    groups: tuple[str, ...]
    staleness: list[int]


class VirtualRun:
    """See the module. ``run`` to the end, then look at the fields."""

    def __init__(self, scheduler: Scheduler, workload: Workload, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.workload = workload
        self.clock = VirtualClock()
        self.engines = {f"w{i}": Engine(f"w{i}", 0) for i in range(workload.workers)}
        self.episodes: dict[str, Episode] = {}
        self.groups: dict[str, dict[int, str]] = {}
        """Untrained open groups: index -> its latest trajectory."""
        self.prompts: dict[str, int] = {}
        """Groups whose first prompts are of another length than the workload says."""
        self.lost: Counter[str] = Counter()
        self.pending_batches: dict[int, tuple[str, ...]] = {}
        self.batches: list[TrainedBatch] = []
        self.published = 0
        self.trained = 0
        self.cancelled: Counter[str] = Counter()
        self.dispatched: Counter[str] = Counter()
        self.log: list[tuple[float, ev.Event, tuple[act.Action, ...]]] = []
        self.ended: act.FinishRun | act.FailRun | None = None
        self._random = random.Random(seed)
        self._tasks = 0
        self._queue: deque[ev.Event] = deque()
        self._busy = False
        self._ordinals = 0
        self._progress_at = 0.0

    # --- the loop --------------------------------------------------------------------------------------
    def run(self, patience_s: float = 20_000.0) -> VirtualRun:
        """Until the scheduler ends the run. Raises PromiseBroken, also for a deadlock: nothing trained for so long."""
        self.report(ev.VersionPublished(0))
        for engine in self.engines.values():
            self.report(self._up(engine))
        self._schedule_death()
        self._tick()
        while self.ended is None:
            now, timer = self.clock.monotonic(), self.clock.next_timer
            if timer is None or timer - self._progress_at > patience_s:
                raise PromiseBroken(f"deadlock at {now:.1f} s: {self.scheduler.waiting_for()}")
            self.clock.advance(timer - now)
        return self

    def report(self, event: ev.Event) -> None:
        """Tell the scheduler and carry out what it answers, one event after the other."""
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        while self._queue and self.ended is None:
            event = self._queue.popleft()
            answer = self.scheduler.handle(event, self.clock.monotonic())
            self.log.append((self.clock.monotonic(), event, tuple(answer)))
            for action in answer:
                self._carry_out(action)
            self._check_bounds()
        self._busy = False

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.OpenGroup():
                self._check_window()
                self._open_group(action)
            case act.CreateSandbox(trajectory=name):
                self._later(self._between(self.workload.sandbox_s), self._begin, self.episodes[name])
            case act.Dispatch():
                self._dispatch(action)
            case act.FormBatch():
                self._form(action)
            case act.CancelTrajectory(trajectory=name):
                self._cancel(self.episodes[name], action.reason)
            case act.FinishRun() | act.FailRun():
                self.ended = action
            case act.Preempt(trajectory=name):
                self._preempt(self.episodes[name], action)
            case act.Migrate(trajectory=name, worker=worker):
                self._later(0.5, self._moved, self.episodes[name], worker)
            case act.Hold() | act.RetainKV() | act.ReleaseKV():
                pass
            case _:
                raise PromiseBroken(f"nobody carries out {action}")

    def _later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.clock.call_at(self.clock.monotonic() + seconds, lambda: call(*args))

    def _between(self, bounds: tuple[float, float]) -> float:
        return self._random.uniform(*bounds)

    def _tick(self) -> None:
        self.report(ev.Tick())
        self._later(1.0, self._tick)

    # --- groups and episodes ---------------------------------------------------------------------------
    def _open_group(self, action: act.OpenGroup) -> None:
        if action.reissue_of is None:
            if self.workload.tasks is not None and self._tasks >= self.workload.tasks:
                self.report(ev.TaskOrderExhausted())
                return
            self._tasks += 1
        ordinal, self._ordinals = self._ordinals, self._ordinals + 1
        name = f"g{self._tasks}" if action.reissue_of is None else f"{action.reissue_of}'"
        size = self.scheduler.config.group_size
        self.groups[name] = {}
        self.report(ev.GroupOpened(name, ordinal, f"task-{name}", size, action.reissue_of))
        for index in range(size):
            self._open_trajectory(name, index, 0)

    def _open_trajectory(self, group: str, index: int, attempt: int) -> None:
        draw, load = self._random.random(), self.workload
        fate = "hangs" if draw < load.hangs else "fails" if draw < load.hangs + load.failures else "ends"
        slow = load.straggler_factor if self._random.random() < load.stragglers else 1.0
        episode = Episode(
            f"{group}/{index}.{attempt}", group, index, attempt, self._random.randint(*load.turns), slow, fate
        )
        episode.context = self.prompts.get(group, load.prompt)
        self.episodes[episode.name] = episode
        self.groups.setdefault(group, {})[index] = episode.name
        self.report(ev.TrajectoryOpened(episode.name, group, index, attempt))

    def _begin(self, episode: Episode) -> None:
        if not episode.over:
            self.report(ev.SandboxReady(episode.name))
            self._request(episode)

    def _request(self, episode: Episode) -> None:
        if episode.over:
            return
        episode.waiting = True
        prompt, shared = episode.context, self.workload.prompt // 2
        self.report(ev.TurnRequested(episode.name, episode.turn, prompt, shared, 100, episode.resumed))

    def _after_turn(self, episode: Episode) -> None:
        if episode.over:
            return
        if episode.turn < episode.turns:
            self.report(ev.ToolStarted(episode.name, episode.turn - 1))
            self._later(self._between(self.workload.tool_s), self._request, episode)
        elif episode.fate == "fails":
            self._fail(episode)
        else:
            self.report(ev.VerificationStarted(episode.name))
            self._later(self._between(self.workload.verify_s), self._finish, episode)

    def _finish(self, episode: Episode) -> None:
        if episode.over:
            return
        episode.over = episode.finished = True
        self.report(ev.VerificationFinished(episode.name, 1.0))
        self.report(ev.TrajectoryFinished(episode.name))

    def _fail(self, episode: Episode) -> None:
        episode.over = True
        replaced = episode.attempt < self.workload.retries
        self.lost[episode.group] += not replaced
        del self.groups[episode.group][episode.index]
        if not self.groups[episode.group]:
            del self.groups[episode.group]
        self.report(ev.TrajectoryFailed(episode.name, FailureKind.INFRASTRUCTURE, "sandbox_died", replaced))
        if replaced:
            self._open_trajectory(episode.group, episode.index, episode.attempt + 1)

    def _cancel(self, episode: Episode, reason: str) -> None:
        self.cancelled[reason] += 1
        self.groups.pop(episode.group, None)
        self._leave_engine(episode)
        episode.over, episode.finished, episode.waiting = True, False, False
        self.report(ev.TrajectoryFailed(episode.name, FailureKind.CANCELLED, reason, replaced=False))

    # --- engines -----------------------------------------------------------------------------------------
    def _dispatch(self, action: act.Dispatch) -> None:
        episode, engine = self.episodes[action.trajectory], self.engines[action.worker]
        if not episode.waiting or not engine.up or action.turn != episode.turn:
            raise PromiseBroken(f"dispatched what was not requested: {action}")
        episode.waiting = False
        self.dispatched[action.worker] += 1
        if episode.start is None:
            if engine.version != self.published:
                raise PromiseBroken(f"{episode.name} starts at {engine.version}, published is {self.published}")
            episode.start = engine.version
        elif engine.version < episode.start:
            raise PromiseBroken(f"{episode.name} started at {episode.start} and goes to version {engine.version}")
        episode.running_on = engine.name
        self._sampled(episode, engine.version)
        self.report(ev.TurnDispatched(episode.name, episode.turn, engine.name, engine.version))
        engine.queue.append(episode.name)
        self._feed(engine)

    def _sampled(self, episode: Episode, version: int) -> None:
        oldest, newest = episode.versions or (version, version)
        episode.versions = (min(oldest, version), max(newest, version))

    def _feed(self, engine: Engine) -> None:
        while engine.queue and len(engine.running) < self.workload.slots:
            name = engine.queue.popleft()
            episode = self.episodes[name]
            engine.running.add(name)
            episode.run += 1
            seconds = episode.left_s if episode.left_s is not None else self._turn_seconds(episode)
            episode.ends_at, episode.left_s = self.clock.monotonic() + seconds, None
            self._later(seconds, self._turn_ends, episode, engine, episode.run)

    def _turn_seconds(self, episode: Episode) -> float:
        hangs = episode.fate == "hangs" and episode.turn + 1 == episode.turns
        return self.workload.cap_s if hangs else self._between(self.workload.turn_s) * episode.slow

    def _turn_ends(self, episode: Episode, engine: Engine, run: int) -> None:
        if episode.running_on != engine.name or episode.run != run:
            return
        self._sampled(episode, engine.version)
        self._leave_engine(episode)
        turn, episode.turn, episode.resumed = episode.turn, episode.turn + 1, 0
        if self.workload.growth != (0, 0):
            episode.context += self._random.randint(*self.workload.growth)
        self.report(ev.TurnFinished(episode.name, turn, 10, self._cached(episode), StopReason.STOP))
        self._after_turn(episode)

    def _preempt(self, episode: Episode, action: act.Preempt) -> None:
        if episode.running_on is None or action.turn != episode.turn:
            raise PromiseBroken(f"preempted what does not run: {action}")
        if episode.name in self.engines[episode.running_on].running:
            episode.left_s = episode.ends_at - self.clock.monotonic()
        self._leave_engine(episode)
        episode.aborts += 1
        episode.resumed = min(9, episode.resumed + 1)
        cached = self._cached(episode)
        self.report(ev.TurnFinished(episode.name, episode.turn, episode.resumed, cached, StopReason.ABORT))
        self._request(episode)

    def _cached(self, episode: Episode) -> int:
        """All that an engine can have found, or now and then nothing of it."""
        return 0 if self._random.random() < 0.1 else episode.context

    def _moved(self, episode: Episode, worker: str) -> None:
        if not episode.over:
            arrived = episode.running_on is None and self.engines[worker].up
            self.report(ev.KVTransferred(episode.name, worker, episode.context if arrived else 0))

    def _leave_engine(self, episode: Episode) -> None:
        if episode.running_on is None:
            return
        engine = self.engines[episode.running_on]
        episode.running_on = None
        engine.running.discard(episode.name)
        if episode.name in engine.queue:
            engine.queue.remove(episode.name)
        self._feed(engine)
        self._load_if_idle(engine)

    def _up(self, engine: Engine) -> ev.WorkerUp:
        return ev.WorkerUp(engine.name, self.workload.kv, self.workload.slots, engine.version, self.workload.costs)

    def _schedule_death(self) -> None:
        if self.workload.deaths_every_s is not None:
            self._later(self._random.expovariate(1 / self.workload.deaths_every_s), self._die)

    def _die(self) -> None:
        self._schedule_death()
        alive = [e for e in self.engines.values() if e.up]
        if not alive:
            return
        engine = self._random.choice(alive)
        engine.up, engine.loading = False, False
        engine.life += 1
        victims = [self.episodes[name] for name in [*engine.running, *engine.queue]]
        victims.sort(key=lambda e: e.name)
        for episode in victims:
            if episode.name in engine.running:
                episode.left_s = episode.ends_at - self.clock.monotonic()
        engine.running.clear()
        engine.queue.clear()
        self.report(ev.WorkerDown(engine.name))
        for episode in victims:
            episode.running_on = None
            self._request(episode)
        self._later(self.workload.restart_s, self._restart, engine)

    def _restart(self, engine: Engine) -> None:
        engine.up, engine.version = True, self.published
        self.report(self._up(engine))

    # --- trainer and weights -------------------------------------------------------------------------------
    def _form(self, action: act.FormBatch) -> None:
        self._check_batch(action)
        members = [self.episodes[t] for name in action.groups for t in self.groups.pop(name).values()]
        staleness = [action.version - e.start for e in members if e.start is not None]
        self.batches.append(TrainedBatch(action.version, action.groups, staleness))
        self._progress_at = self.clock.monotonic()
        self.pending_batches[action.version] = action.groups
        self._later(self.workload.train_s, self._train, action.version)

    def _train(self, version: int) -> None:
        self.trained = version + 1
        self._later(self.workload.publish_s, self._publish, version + 1)
        self.report(ev.BatchTrained(version))

    def _publish(self, version: int) -> None:
        if self.scheduler.window.publication_waits or version != self.published + 1:
            self._later(0.1, self._publish, version)
            return
        self.published = version
        self.pending_batches.pop(version - 1)
        self.report(ev.VersionPublished(version))
        for engine in self.engines.values():
            if self.workload.drain and engine.up:
                self.report(ev.WorkerDraining(engine.name))
                self._load_if_idle(engine)
            elif engine.up:
                self._load(engine)

    def _load_if_idle(self, engine: Engine) -> None:
        behind = engine.version < self.published
        if self.workload.drain and engine.up and behind and not (engine.loading or engine.running or engine.queue):
            self._load(engine)

    def _load(self, engine: Engine) -> None:
        engine.loading = True
        self._later(self._between(self.workload.load_s), self._loaded, engine, engine.life, self.published)

    def _loaded(self, engine: Engine, life: int, version: int) -> None:
        if engine.life != life or not engine.up:
            return
        engine.loading = False
        if version > engine.version:
            engine.version = version
            self.report(ev.WorkerAcknowledged(engine.name, version))
        self._load_if_idle(engine)

    # --- promises --------------------------------------------------------------------------------------------
    def _check_window(self) -> None:
        config = self.scheduler.config
        limit = math.floor((1 + Fraction(config.async_factor)) * config.batch_groups)
        outstanding = len(self.groups) + sum(len(groups) for groups in self.pending_batches.values())
        if outstanding >= limit:
            raise PromiseBroken(f"{outstanding} groups are outstanding of {limit} and one more is opened")
        if config.max_steps is not None:
            trainable = (config.max_steps - self._next_version()) * config.batch_groups
            if len(self.groups) >= trainable:
                raise PromiseBroken(
                    f"{len(self.groups)} groups are open, only {trainable} can train, one more is opened"
                )

    def _check_batch(self, action: act.FormBatch) -> None:
        config = self.scheduler.config
        if action.version != self._next_version() or self.trained != action.version:
            raise PromiseBroken(f"{action} is not the trainer's next batch")
        if len(set(action.groups)) != config.batch_groups and not config.short_last_batch:
            raise PromiseBroken(f"{action} does not hold {config.batch_groups} groups")
        for name in action.groups:
            members = [self.episodes[t] for t in self.groups[name].values()]
            if len(members) + self.lost[name] != config.group_size or not all(e.finished for e in members):
                raise PromiseBroken(f"group {name} of {action} is not complete")
            for episode in members:
                self._check_member(episode, action.version)

    def _check_member(self, episode: Episode, version: int) -> None:
        config = self.scheduler.config
        if episode.start is None or version - episode.start > config.max_staleness:
            raise PromiseBroken(f"{episode.name} started at {episode.start} and trains at {version}")
        if config.async_factor == 0 and episode.versions != (version, version):
            raise PromiseBroken(f"{episode.name} has tokens of {episode.versions} and trains on-policy at {version}")

    def _check_bounds(self) -> None:
        """N_j <= (j + 1) * B for every j >= -1, counted anew from what really happened."""
        config, n = self.scheduler.config, self._next_version()
        spare: Counter[int] = Counter()
        for members in self.groups.values():
            starts = [s for s in (self.episodes[t].start for t in members.values()) if s is not None]
            if starts:
                spare[min(starts) + config.max_staleness - n] += 1
        total = 0
        for level in sorted(spare):
            total += spare[level]
            if total > max(0, level + 1) * config.batch_groups:
                raise PromiseBroken(f"{total} groups must train within {level + 1} batches of {config.batch_groups}")

    def _next_version(self) -> int:
        return max([self.trained, *(v + 1 for v in self.pending_batches)])
