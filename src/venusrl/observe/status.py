"""What the live view shows: one snapshot of a run as plain data.

Owns: the struct only. The coordinator fills it (``Coordinator.status()``), ``live.py`` draws it. Every count
is of now; every field has a neutral default, so that a half-started run can be shown.
"""

from __future__ import annotations

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine worker. ``state``: starting, serving, paused, restarting, down. Tokens and sequences."""

    name: str
    state: str
    version: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    kv_used: int = 0
    kv_capacity: int = 0
    restarts: int = 0
    step_s: float | None = None
    """What a decode step takes at this load, as learned from its turns; None = not known yet."""


class EvaluationPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished evaluation of ``version``. ``mode``: sampled or greedy."""

    version: int
    mode: str
    reward: float


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run at one instant.

    ``version`` is the current weight version, which is also the number of trained steps.
    """

    name: str
    version: int
    max_steps: int
    phase: str = ""
    """What the run does as a whole: starting, training, evaluating, and how it stops."""
    elapsed_s: float = 0.0
    groups: dict[str, int] = {}
    """Open groups by state, in the order to show them: waiting, running, complete, training."""
    trajectories: dict[str, int] = {}
    """Live trajectories by what they do: held, generating, tool, verifying, finished."""
    waiting_for: str = ""
    """Why the trainer has no batch; empty while it trains."""
    holds: dict[str, int] = {}
    """Held turns by reason."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness_bound: int = 0
    rewards: list[float] = []
    """Mean training reward of each step that this session trained, oldest first."""
    evaluations: list[EvaluationPoint] = []
    tokens_per_s: float = 0.0
    trainer: str = ""
    """waiting, training, restarting, down."""
    trainer_idle_fraction: float = 0.0
    workers: list[WorkerStatus] = []
    discarded: dict[str, int] = {}
    """Discarded tokens by reason, over the whole run."""
    lines: list[str] = []
    """Recent notable events for people, oldest first."""
