"""A run read back from its events: trained steps, evaluations, sessions, wall time.

Owns: how sessions of a run (it may be stopped, killed, resumed) add up to one history. Time between sessions
does not count; a step that was lost in a crash and trained again counts once, as trained the last time.

Must not know: files, pictures. ``summary`` and ``plots`` read a ``History`` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec


class StepPoint(msgspec.Struct):
    """The trained step that made weight version ``step``; ``wall_s`` is running time since the run began."""

    step: int
    wall_s: float
    values: dict[str, float]


class EvaluationResult(msgspec.Struct, frozen=True):
    """Held-out reward of ``version`` with its 95% interval over tasks. ``wall_s``: when the version was made."""

    version: int
    mode: str
    reward: float
    ci_low: float
    ci_high: float
    tasks: int
    wall_s: float


class History(msgspec.Struct):
    """Everything the summary and the pictures need. ``outcome`` is empty while no session said how it ended."""

    steps: list[StepPoint]
    evaluations: list[EvaluationResult]
    wall_s: float
    sessions: int
    started_at: float | None
    last_event_at: float | None
    outcome: str
    error: str
    values: dict[str, float]
    """The newest value of every metric ever reported."""
    engines: dict[str, dict[str, Any]]
    """What each worker's work takes, as learned last: the fields of ``worker_calibrated``."""

    def series(self, name: str) -> list[float]:
        """A metric over the steps that reported it."""
        return [p.values[name] for p in self.steps if name in p.values]

    def curve(self, mode: str) -> list[EvaluationResult]:
        return [e for e in self.evaluations if e.mode == mode]

    def time_weighted(self, name: str) -> float | None:
        """Mean of a per-step metric, each step weighted by its duration; None when never reported."""
        pairs = [(p.values[name], p.values.get("perf/step_s", 1.0)) for p in self.steps if name in p.values]
        weight = sum(w for _, w in pairs)
        return sum(v * w for v, w in pairs) / weight if weight else None


# Every trained step reports it; lines without it (an evaluation's scalar) do not make a step.
_STEP_MARK = "reward/mean"
_NO_COST = ("t", "kind", "worker")


def read_history(events: Iterable[dict[str, Any]]) -> History:
    """Fold a run's events (in order) into its history."""
    steps: dict[int, StepPoint] = {}
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    history = History([], [], 0.0, 0, None, None, "", "", {}, {})
    closed_s, session_start = 0.0, 0.0
    for event in events:
        t, kind = float(event["t"]), event["kind"]
        if kind == "run_started" or history.started_at is None:
            closed_s, session_start = history.wall_s, t
            history.sessions += 1
            history.outcome = history.error = ""
            history.started_at = t if history.started_at is None else history.started_at
            if "version" in event:
                _forget_after(int(event["version"]), steps, evaluations)
        history.wall_s = closed_s + max(0.0, t - session_start)
        history.last_event_at = t
        if kind == "scalars":
            _add_scalars(event, history, steps)
        elif kind == "evaluation":
            evaluations[int(event["version"]), str(event["mode"])] = {**event, "wall_s": history.wall_s}
        elif kind == "worker_calibrated":
            history.engines[str(event["worker"])] = {k: v for k, v in event.items() if k not in _NO_COST}
        elif kind == "run_finished":
            history.outcome = str(event.get("reason", "finished"))
            history.error = str(event.get("error") or "")
    history.steps = [steps[s] for s in sorted(steps) if _STEP_MARK in steps[s].values]
    made = {p.step: p.wall_s for p in history.steps}
    history.evaluations = [_evaluation(evaluations[key], made) for key in sorted(evaluations)]
    return history


def _forget_after(version: int, steps: dict[int, StepPoint], evaluations: dict[tuple[int, str], Any]) -> None:
    """A session resumed at ``version``: what an earlier one made beyond it was lost with its checkpoint."""
    for step in [s for s in steps if s > version]:
        del steps[step]
    for key in [k for k in evaluations if k[0] > version]:
        del evaluations[key]


def _add_scalars(event: dict[str, Any], history: History, steps: dict[int, StepPoint]) -> None:
    step = int(event["step"])
    values = {str(k): float(v) for k, v in event["values"].items() if v is not None}
    history.values.update(values)
    point = steps.get(step)
    if point is None:
        steps[step] = StepPoint(step, history.wall_s, values)
        return
    if _STEP_MARK in values:
        point.wall_s = history.wall_s
    point.values.update(values)


def _evaluation(event: dict[str, Any], made: dict[int, float]) -> EvaluationResult:
    version, reward = int(event["version"]), _number(event["reward"])
    return EvaluationResult(
        version=version,
        mode=str(event["mode"]),
        reward=reward,
        ci_low=_number(event.get("ci_low"), reward),
        ci_high=_number(event.get("ci_high"), reward),
        tasks=int(event.get("tasks", 0)),
        wall_s=made.get(version, 0.0 if version == 0 else event["wall_s"]),
    )


def _number(value: object, default: float = float("nan")) -> float:
    return float(value) if isinstance(value, int | float) else default
