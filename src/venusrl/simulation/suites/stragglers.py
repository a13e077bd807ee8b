"""What the trainer's idle time went to.

Owns: ``idle_by_phase``. Must not know: policies, suites.

A batch is formed when the last group that it needs is complete, and that group when its last member is. So the idle
time before a step is shared out by what that one trajectory spent its life on, from its opening to its verdict. This
says whose fault the idling was: what a scheduler can change (waiting, prefill that a cache would have saved) or what it
cannot (tools, decoding, verification).
"""

from __future__ import annotations

from collections.abc import Iterable

from venusrl.simulation.results import Result, Step, TrajectoryTrace

PHASES = ("waiting", "prefill", "decode", "tools", "sandbox", "verification")
"""``waiting``: held by the scheduler or in an engine's queue. ``sandbox``: waiting for one and setting it up."""


def idle_by_phase(result: Result) -> dict[str, float]:
    """Seconds, over all steps. Needs ``Scenario.keep_trajectories``; ValueError without."""
    if not result.trajectories:
        raise ValueError(f"{result.scenario}: set keep_trajectories to learn what the trainer waited for")
    members: dict[int, list[TrajectoryTrace]] = {}
    for trajectory in result.trajectories:
        members.setdefault(trajectory.ordinal, []).append(trajectory)
    total = dict.fromkeys(PHASES, 0.0)
    free = 0.0
    for step in result.steps:
        life = _phases(_last(step, members))
        whole = sum(life.values())
        for phase, spent in life.items():
            total[phase] += (step.began_at - free) * spent / whole if whole else 0.0
        free = step.trained_at
    return total


def _last(step: Step, members: dict[int, list[TrajectoryTrace]]) -> TrajectoryTrace:
    ends: Iterable[TrajectoryTrace] = (t for ordinal in step.groups for t in members[ordinal])
    return max(ends, key=lambda t: t.finished_at)


def _phases(t: TrajectoryTrace) -> dict[str, float]:
    spent = (t.held_s + t.queued_s, t.prefill_s, t.decode_s, t.tool_s, t.sandbox_s, t.verify_s)
    return dict(zip(PHASES, spent, strict=True))
