"""A run at one instant, for the live view.

Owns: how the parts' states add up to one ``Status``. Must not know: how it is drawn.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from venusrl.coordinator.steps import Meter, Steps
from venusrl.coordinator.workers import EnginePool
from venusrl.observe.status import EvaluationPoint, Status, WorkerStatus
from venusrl.recipe import Recipe
from venusrl.scheduling.scheduler import Scheduler

_LINES = 8
_FAILURES_EVERY_S = 10.0


class Notes:
    """The last notable events in words, oldest first. Failures of one reason are told together."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.lines: deque[str] = deque(maxlen=_LINES)
        self._now = now
        self._untold: Counter[str] = Counter()
        self._told_at: dict[str, float] = {}

    def add(self, kind: str, fields: dict[str, object]) -> None:
        if kind == "trajectory_failed":
            self._add_failure(str(fields["reason"]), _short(fields["message"]))
        elif kind in _TOLD:
            said = " · ".join(f"{name} {_short(value)}" for name, value in fields.items() if value not in ("", None))
            self.lines.append(f"{kind.replace('_', ' ')}: {said}")

    def _add_failure(self, reason: str, message: str) -> None:
        self._untold[reason] += 1
        now = self._now()
        if now - self._told_at.get(reason, -math.inf) < _FAILURES_EVERY_S:
            return
        self._told_at[reason] = now
        self.lines.append(f"failed: {self._untold.pop(reason)} x {reason}{': ' if message else ''}{message}")


_TOLD = frozenset({"worker_up", "worker_down", "trainer_down", "group_closed", "evaluation", "recovered"})


def _short(value: object) -> str:
    """One line of it: the first, and of a longer text the last, where a child's log says why."""
    if isinstance(value, float):
        return f"{value:.3f}"
    lines = [line.strip() for line in str(value).splitlines() if line.strip()]
    if len(lines) < 2:
        return lines[0][:120] if lines else ""
    return f"{lines[0].partition(';')[0][:80]}: {lines[-1][:120]}"


class Sources(msgspec.Struct, frozen=True):
    """Where a status comes from."""

    recipe: Recipe
    scheduler: Scheduler
    pool: EnginePool
    steps: Steps
    meter: Meter
    notes: Notes


def status(
    sources: Sources,
    *,
    phase: str,
    elapsed_s: float,
    trainer: str,
    evaluations: Iterable[EvaluationPoint],
    discarded: dict[str, int],
) -> Status:
    """One snapshot."""
    recipe, steps = sources.recipe, sources.steps
    seen = sources.scheduler.snapshot()
    doing = Counter(live.doing for live in sources.scheduler.live.values())
    return Status(
        name=recipe.run.name,
        version=max(seen.version, len(steps.rewards)),
        max_steps=recipe.training.steps,
        phase=phase,
        elapsed_s=elapsed_s,
        groups=seen.states,
        trajectories=dict(doing.most_common()),
        waiting_for="" if seen.training is not None else seen.waiting_for,
        holds=seen.holds,
        staleness_mean=seen.staleness_mean,
        staleness_max=max(steps.staleness_max, seen.staleness_max),
        staleness_bound=recipe.schedule.staleness_bound,
        rewards=list(steps.rewards),
        evaluations=list(evaluations),
        tokens_per_s=sources.meter.rate(),
        trainer=trainer or ("training" if seen.training is not None else "waiting"),
        trainer_idle_fraction=steps.idle_fraction,
        workers=[_worker(sources.pool, name, seen.version) for name in sources.pool.workers],
        discarded=discarded,
        lines=list(sources.notes.lines),
    )


def _worker(pool: EnginePool, name: str, version: int) -> WorkerStatus:
    worker = pool.workers[name]
    load, costs = worker.load, worker.costs
    return WorkerStatus(
        name=name,
        state=worker.state,
        version=pool.versions.get(name, version),
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        slots=load.slots if load else 0,
        kv_used=load.kv_used if load else 0,
        kv_capacity=load.kv_capacity if load else 0,
        restarts=worker.restarts,
        step_s=costs.step_s(max(1, load.running), load.kv_used) if costs and load else None,
    )
