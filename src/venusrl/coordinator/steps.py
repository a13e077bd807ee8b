"""The steps of a run: batches formed, trained, published and measured.

Owns: carrying out ``FormBatch`` (recorded before anybody sees it), what follows from a trainer's report (recorded,
published to the workers, evaluated when due), and the figures of each step.

Must not know: how the trainer is talked to, how weights reach a worker, how an evaluation is played.

Guarantees: a report that was heard before changes nothing but where the weights are; a version is protected from
pruning before its evaluation is asked for; every step's figures are written once, under the version it made.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from venusrl.coordinator.episodes import Episodes, Facts
from venusrl.coordinator.host import SchedulerHost
from venusrl.coordinator.publish import PublishRecord, Weights
from venusrl.coordinator.store import BatchRecord, RunStore, TrainedReport
from venusrl.observe.recorder import RunRecorder
from venusrl.scheduling.actions import FormBatch
from venusrl.scheduling.events import BatchTrained, Event, TurnFinished


class Meter:
    """Tokens generated, from the events; rates over the steps and over the last seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.tokens = 0
        self._marks: list[tuple[float, int]] = [(now(), 0)]

    def observe(self, event: Event) -> None:
        if isinstance(event, TurnFinished):
            self.tokens += event.generated

    def rate(self, window_s: float = 10.0) -> float:
        """Tokens a second over about the last ``window_s``; call it regularly."""
        now = self._now()
        self._marks.append((now, self.tokens))
        while len(self._marks) > 2 and now - self._marks[1][0] >= window_s:
            self._marks.pop(0)
        since, before = self._marks[0]
        return (self.tokens - before) / max(now - since, 1e-9)


class FormedBatch(msgspec.Struct, frozen=True):
    """What is remembered of a batch until it is trained. ``critical_s``: coordinator's share of its critical path;
    None for one that an earlier session formed."""

    version: int
    members: tuple[Facts, ...]
    critical_s: float | None


class _Mark(msgspec.Struct):
    """Where the previous step ended."""

    at: float
    tokens: int


class Steps:
    """See the module. ``on_version(weights)`` starts the publication of a new version."""

    def __init__(
        self,
        *,
        store: RunStore,
        host: SchedulerHost,
        episodes: Episodes,
        recorder: RunRecorder,
        meter: Meter,
        batch_ready: Callable[[], None],
        on_version: Callable[[Weights], None],
        on_due: Callable[[int], None],
    ) -> None:
        """``batch_ready`` wakes the trainer; ``on_due(version)`` asks for an evaluation if one is due."""
        self.rewards: list[float] = []
        self.idle_fraction = 0.0
        self.staleness_max = 0
        self._store = store
        self._host = host
        self._episodes = episodes
        self._recorder = recorder
        self._meter = meter
        self._batch_ready = batch_ready
        self._on_version = on_version
        self._on_due = on_due
        self._formed: dict[int, FormedBatch] = {}
        self._mark = _Mark(time.monotonic(), meter.tokens)
        self._published_at: dict[int, float] = {}

    def resume(self, pending: Sequence[BatchRecord]) -> None:
        """Remember what the live view shows of earlier sessions, and their batches that are still to be trained."""
        for batch in pending:
            self._formed[batch.version] = FormedBatch(batch.version, stored_members(self._store, batch.version), None)
        self.rewards = [v.metrics.get("reward/mean", float("nan")) for v in self._store.versions() if v.version > 0]
        self.staleness_max = self._store.totals().staleness_max

    # --- a batch ----------------------------------------------------------------------------------------------
    def form(self, action: FormBatch) -> None:
        """Record the batch, then wake the trainer."""
        begun = time.monotonic()
        self._store.form_batch(action.version, action.groups)
        groups = [group for name in action.groups if (group := self._episodes.take(name)) is not None]
        waits = {t: self._host.critical.take(t) for group in groups for t in group.finished}
        # The batch waited for what finished last: its own waits, and the commit, are on the critical path.
        last = max((group.last_at, group.last_finished) for group in groups)[1] if groups else ""
        self._batch_ready()
        self._formed[action.version] = FormedBatch(
            version=action.version,
            members=tuple(facts for group in groups for facts in group.finished.values()),
            critical_s=waits.get(last, 0.0) + time.monotonic() - begun,
        )
        self._recorder.event("batch_formed", version=action.version, groups=list(action.groups))

    def trained(self, report: TrainedReport, news: bool) -> None:
        """A step is over and recorded. ``news``: it had not been heard of before."""
        if not news:
            self._recorder.event("trained_again", version=report.version, batch=report.batch_id)
            return
        self._published_at[report.version] = time.monotonic()
        self._on_due(report.version)
        self._host.notify(BatchTrained(report.version - 1))
        self._on_version(Weights(report.version, Path(report.model_path)))
        self._recorder.scalars(report.version, self._figures(report))

    def acknowledged(self, record: PublishRecord) -> None:
        """A worker serves a version: how long that took since it was trained."""
        since = self._published_at.get(record.version)
        if since is not None:
            self._recorder.scalars(record.version, {"perf/publish_s": time.monotonic() - since})
        self._recorder.event("published", **msgspec.structs.asdict(record))

    # --- figures ----------------------------------------------------------------------------------------------
    def _figures(self, report: TrainedReport) -> dict[str, float]:
        now, tokens = time.monotonic(), self._meter.tokens
        step_s = max(now - self._mark.at, 1e-9)
        formed = self._formed.pop(report.version - 1)  # every batch is remembered, or there would be no report
        figures = step_figures(formed.version, formed.members, report.metrics)
        figures["rollout/tokens_per_s"] = (tokens - self._mark.tokens) / step_s
        if formed.critical_s is not None:
            figures["perf/coordinator_critical_fraction"] = formed.critical_s / step_s
        self.staleness_max = max(self.staleness_max, int(figures["rollout/staleness_max"]))
        figures.setdefault("perf/step_s", step_s)
        discarded = self._store.discarded_tokens()
        figures |= {f"tokens/discarded/{reason}": float(count) for reason, count in discarded.items()}
        stats = self._host.stats()
        figures["perf/coordinator_cpu_s"] = stats.cpu_s
        figures["perf/coordinator_loop_lag_mean_s"] = stats.loop_lag_mean_s
        self._mark = _Mark(now, tokens)
        self.rewards.append(figures["reward/mean"])
        self.idle_fraction = figures.get("perf/trainer_idle_fraction", self.idle_fraction)
        return figures


def stored_members(store: RunStore, version: int) -> tuple[Facts, ...]:
    """The trajectories of the batch that trains ``version``, read back."""
    batch = store.batch_for(version)
    groups = batch.groups if batch is not None else []
    return tuple(Facts.of(trajectory) for group in groups for trajectory in group.trajectories)


def step_figures(version: int, members: Sequence[Facts], reported: Mapping[str, float]) -> dict[str, float]:
    """What the trajectories of the batch that trained ``version`` were like, and what its trainer reported."""
    staleness = [version - facts.start_version for facts in members]
    return {
        "reward/mean": sum(facts.reward for facts in members) / len(members),
        **reported,
        "rollout/staleness_mean": sum(staleness) / len(staleness),
        "rollout/staleness_max": float(max(staleness)),
        "rollout/turns_mean": sum(facts.turns for facts in members) / len(members),
        "rollout/truncated_fraction": sum(facts.truncated for facts in members) / len(members),
        "rollout/tokens_mean": sum(facts.tokens for facts in members) / len(members),
        "train/trajectories": float(len(members)),
        "train/tokens": float(sum(facts.tokens for facts in members)),
    }


def failure_histogram(failures: dict[str, int]) -> str:
    """``kind/reason`` counts as one line for people, most frequent first."""
    counts = Counter(failures)
    return ", ".join(f"{reason} x {count}" for reason, count in counts.most_common()) or "no failure was recorded"
