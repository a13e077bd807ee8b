"""The scheduler's state as plain data, for people and for records.

Owns: ``SchedulerSnapshot`` and its parts. Must not know: how they are computed (``scheduler.py``).
"""

from __future__ import annotations

import msgspec


class GroupView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One outstanding group. ``state``: waiting (no turn dispatched), running, complete, training.

    ``start`` and ``last_admissible`` are weight versions, None until a turn is dispatched. ``mandatory``: the
    quota forces it into the next batch; ``at_deadline``: it trains in the next batch or never.
    """

    group: str
    task: str
    ordinal: int
    size: int
    finished: int
    state: str
    start: int | None
    last_admissible: int | None
    mandatory: bool
    at_deadline: bool


class WorkerView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine worker that is up. ``running``: turns it was given and has not answered; ``sessions``:
    trajectories that live on it."""

    worker: str
    version: int
    slots: int
    running: int
    sessions: int
    draining: bool


class SchedulerSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the live view shows of the scheduler."""

    version: int
    """Weights in use: the newest published version."""
    next_version: int
    """n: the version that the next batch to be formed trains."""
    training: int | None
    """The version whose batch is with the trainer."""
    outstanding: int
    """Groups opened (or asked for) whose batch's version is not published yet; never above ``window``."""
    window: int
    opening: int
    """Groups asked for and not yet there."""
    states: dict[str, int]
    """Outstanding groups by state: waiting, running, complete, training."""
    groups: list[GroupView]
    trajectories: dict[str, int]
    """Unfinished trajectories by what they do: starting, held, generating, tool, verifying; and finished ones."""
    workers: list[WorkerView]
    holds: dict[str, int]
    """Held turns by reason."""
    staleness_mean: float
    """Of started, untrained groups, if they trained in the next batch: n - start."""
    staleness_max: int
    waiting_for: str
    """Why no batch forms now, as ``code: text``; the code is one of ``done``, ``failed``, ``training``, ``engine``,
    ``weights``, ``sandboxes``, ``groups``, ``mandatory``."""
    refills_left: int
    """Zero-variance groups that may still be replaced before the next batch."""
    retired: dict[str, int]
    """Groups given up, by reason, over the scheduler's life."""
    consecutive_dead_groups: int
    late_events: int
    """Events about trajectories and groups that were already gone (a cancelled turn's answer...)."""
