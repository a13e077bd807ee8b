"""What is written down while a simulated run goes on, and the ``Result`` made of it.

Owns: hold times, traces, sampled series, why the trainer idled. Must not know: how anything is decided. It changes
nothing in the run.

The series are sampled at a fixed interval that doubles whenever there are twice as many points as asked for. Why the
trainer idles is asked when it may have changed (a batch trained, a version arrived, enough groups complete) and at
every sample.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from venusrl.simulation.core import Core
from venusrl.simulation.episode import Episode, GroupRun
from venusrl.simulation.fleet import Server
from venusrl.simulation.results import (
    Blocked,
    Counts,
    EngineTotals,
    GroupTrace,
    Holds,
    Result,
    Series,
    SizeClass,
    Step,
    TrajectoryTrace,
)
from venusrl.simulation.scenario import Scenario
from venusrl.simulation.trainer import Trainer, Training

_FIRST_INTERVAL_S = 10.0
_CLASSES = 10


class _Hold:
    __slots__ = ("count", "longest_s", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_s = self.longest_s = 0.0


class Recorder:
    """See the module."""

    def __init__(self, core: Core, scenario: Scenario) -> None:
        self._core = core
        self._scenario = scenario
        self._holds: dict[str, _Hold] = {}
        self._failures: Counter[str] = Counter()
        self._wasted = 0
        self._groups: list[GroupTrace] = []
        self._by_version: dict[int, list[Episode]] = {}
        self._blocked: list[Blocked] = []
        self._since = 0.0
        self._why = ""
        self._seen: tuple[bool, int, bool] | None = None
        self._interval_s = _FIRST_INTERVAL_S
        self._points: list[tuple[float, tuple[float, ...]]] = []

    # --- as it happens --------------------------------------------------------------------------------------
    def requested(self, episode: Episode, now: float) -> None:
        """Its turn was asked for."""
        episode.held_since = episode.hold_since = now
        episode.hold = ""

    def hold(self, episode: Episode, reason: str, now: float) -> None:
        """The scheduler holds its turn for ``reason`` from now on."""
        self._close_hold(episode, now)
        episode.hold, episode.hold_since = reason, now

    def dispatched(self, episode: Episode, now: float) -> None:
        self._close_hold(episode, now)
        span = now - episode.held_since
        episode.held_s += span
        episode.longest_hold_s = max(episode.longest_hold_s, span)

    def _close_hold(self, episode: Episode, now: float) -> None:
        span = now - episode.hold_since
        if not episode.hold and span <= 0:
            return
        hold = self._holds.setdefault(episode.hold or "unsaid", _Hold())
        hold.count += 1
        hold.total_s += span
        hold.longest_s = max(hold.longest_s, span)

    def lost(self, episode: Episode, reason: str) -> None:
        """It will not train."""
        self._failures[reason] += 1
        self._wasted += episode.generated

    def trained(self, group: GroupRun, members: Sequence[Episode], version: int) -> None:
        """A group enters the batch of ``version``."""
        starts = [e.start for e in members if e.start is not None]
        self._by_version.setdefault(version, []).extend(members)
        self._groups.append(
            GroupTrace(
                ordinal=group.task,
                opened_at=group.opened_at,
                started_at=min(e.started_at for e in members),
                first_done_at=min(e.finished_at for e in members),
                completed_at=max(e.finished_at for e in members),
                trained_version=version,
                start_version=min(starts),
                tokens=sum(e.script.generated for e in members),
            )
        )

    # --- samples ----------------------------------------------------------------------------------------------
    def watch(self, live: Mapping[str, Episode], servers: Sequence[Server], trainer: Trainer) -> None:
        """Begin to sample."""
        self._live, self._servers, self._trainer = live, servers, trainer
        self._core.after_timer.append(self._look)
        self._sample()

    def _sample(self) -> None:
        now = self._core.now
        states = Counter(episode.state for episode in self._live.values())
        capacity = running = queued = 0
        held = resident = 0.0
        for server in self._servers:
            engine = server.engine
            engine.advance(now)
            capacity += engine.capacity
            running += engine.running
            queued += engine.queued
            held += engine.kv_running
            resident += min(engine.capacity, engine.kv_running + engine.cache.idle)
        row = (running, queued, states["held"], states["tool"], len(self._live), held / capacity, resident / capacity)
        self._points.append((now, row))
        if len(self._points) >= 2 * self._scenario.series_points:
            del self._points[1::2]
            self._interval_s *= 2
        self._blame()
        self._core.later(self._interval_s, self._sample)

    def _look(self) -> None:
        """Whether something changed that the trainer may wait for."""
        window = self._core.scheduler.window
        enough = len(window.complete) >= self._scenario.scheduler.batch_groups
        state = (enough, window.published, self._trainer.idle)
        if state != self._seen:
            self._seen = state
            self._blame()

    def _blame(self) -> None:
        why = self._core.scheduler.waiting_for().partition(":")[0] if self._trainer.idle else ""
        if why == self._why:
            return
        self._close_blame()
        self._why, self._since = why, self._core.now

    def _close_blame(self) -> None:
        if self._why and self._core.now > self._since:
            self._blocked.append(Blocked(self._since, self._core.now, self._why))

    # --- the result -------------------------------------------------------------------------------------------
    def result(self, policy: str, seed: int) -> Result:
        core, scenario, trainer = self._core, self._scenario, self._trainer
        self._close_blame()
        steps = [self._step(training) for training in trainer.steps]
        episodes = [(e, t.version) for t in trainer.steps for e in self._by_version[t.version]]
        lags = Counter(version - e.start for e, version in episodes if e.start is not None)
        time_s = steps[-1].trained_at if steps else core.now
        traces = [_trace(e, version) for e, version in episodes]
        ended = core.ended
        return Result(
            scenario=scenario.name,
            policy=policy,
            seed=seed,
            ended="" if ended is None else ended.reason,
            time_s=time_s,
            trained_tokens=sum(step.tokens for step in steps),
            trained_length=sum(step.length for step in steps),
            steps=steps,
            groups=self._groups,
            by_size=_classes(traces),
            trajectories=traces if scenario.keep_trajectories else [],
            trainer_busy_s=trainer.busy_s,
            trainer_idle_s=sum(b.end - b.begin for b in self._blocked),
            blocked=self._blocked,
            holds={why: Holds(h.count, h.total_s, h.longest_s) for why, h in sorted(self._holds.items())},
            engines=[_totals(server, core.now) for server in self._servers],
            staleness=dict(sorted(lags.items())),
            failures=dict(sorted(self._failures.items())),
            wasted_tokens=self._wasted,
            series=self._series(),
            events=Counts(core.popped, core.handled),
        )

    def _step(self, training: Training) -> Step:
        members = self._by_version[training.version]
        lags = [training.version - e.start for e in members if e.start is not None]
        return Step(
            version=training.version,
            groups=tuple(g.ordinal for g in self._groups if g.trained_version == training.version),
            formed_at=training.formed_at,
            began_at=training.began_at,
            trained_at=training.trained_at,
            published_at=training.published_at or training.trained_at,
            tokens=sum(e.script.generated for e in members),
            length=sum(training.lengths),
            mean_staleness=sum(lags) / len(lags),
            max_staleness=max(lags),
        )

    def _series(self) -> Series:
        at = [when for when, _ in self._points]
        columns = list(zip(*(row for _, row in self._points), strict=True))
        running, queued, held, in_tool, live = ([int(x) for x in column] for column in columns[:5])
        return Series(at, running, queued, held, in_tool, live, list(columns[5]), list(columns[6]))


def _trace(episode: Episode, version: int) -> TrajectoryTrace:
    start = episode.start or 0
    return TrajectoryTrace(
        ordinal=episode.group.task,
        index=episode.index,
        turns=len(episode.script.turns),
        generated=episode.generated,
        length=episode.script.length,
        start_version=start,
        staleness=version - start,
        opened_at=episode.opened_at,
        finished_at=episode.finished_at,
        held_s=episode.held_s,
        longest_hold_s=episode.longest_hold_s,
        queued_s=episode.queued_s,
        prefill_s=episode.prefill_s,
        decode_s=episode.decode_s,
        tool_s=episode.tool_s,
        sandbox_s=episode.sandbox_s,
        verify_s=episode.verify_s,
        prefilled=episode.prefilled,
        cached=episode.cached,
    )


def _classes(traces: Sequence[TrajectoryTrace]) -> list[SizeClass]:
    """Tenths of the trajectories by length, shortest first."""
    ordered = sorted(traces, key=lambda t: t.length)
    bounds = [len(ordered) * i // _CLASSES for i in range(_CLASSES + 1)]
    parts = [ordered[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [
        SizeClass(
            count=len(part),
            mean_length=sum(t.length for t in part) / len(part),
            mean_wait_s=sum(t.held_s + t.queued_s for t in part) / len(part),
            mean_longest_hold_s=sum(t.longest_hold_s for t in part) / len(part),
            longest_hold_s=max(t.longest_hold_s for t in part),
            mean_span_s=sum(t.finished_at - t.opened_at for t in part) / len(part),
        )
        for part in parts
        if part
    ]


def _totals(server: Server, now: float) -> EngineTotals:
    engine = server.engine
    engine.advance(now)
    totals, span = engine.totals, max(now, 1e-9)
    return EngineTotals(
        name=engine.name,
        busy_s=totals.busy_s,
        paused_s=totals.paused_s,
        prefill_s=totals.prefill_s,
        decode_tokens=totals.decoded,
        prefill_tokens=totals.prefilled,
        cached_tokens=totals.cached,
        preemptions=totals.preemptions,
        aborts=totals.aborts,
        migrated_in=len(server.migrated),
        migrated_tokens=sum(server.migrated),
        deaths=server.life,
        mean_running=totals.running_s / span,
        mean_kv=totals.kv_s / span / engine.capacity,
        mean_resident=totals.resident_s / span / engine.capacity,
    )
