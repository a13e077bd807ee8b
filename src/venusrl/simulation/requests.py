"""One turn on its way through an engine worker.

Owns: ``Request``, mutable state that the engine keeps. Must not know: how it advances.
"""

from __future__ import annotations

from typing import Literal

from venusrl.simulation.cache import Node


class Request:
    """``context``: tokens to be in KV before it decodes; its first ``shared`` ones are its group's. ``left``: tokens
    to decode still. ``generated``: decoded since it was submitted. The ``_s``: where its time went."""

    __slots__ = (
        "cached",
        "context",
        "decode_s",
        "end",
        "epoch",
        "found",
        "generated",
        "group",
        "key",
        "left",
        "missing",
        "preemptions",
        "prefill_s",
        "prefilled",
        "prefix",
        "queued_s",
        "reported",
        "shared",
        "since",
        "start",
        "state",
        "todo",
        "total",
        "trajectory",
        "work_s",
    )

    def __init__(self, trajectory: str, group: str, shared: int, context: int, left: int) -> None:
        self.trajectory = trajectory
        self.group = group
        self.shared = shared
        self.context = context
        self.left = left
        self.generated = 0
        self.reported = 0
        """Of those and of what it has decoded since: already told to the scheduler."""
        self.state: Literal["queued", "prefill", "decode", "ended"] = "queued"
        self.key = (0, 0)
        """Lower is served first and preempted last: urgency, then arrival."""
        self.since = 0.0
        """When it came into its state."""
        self.queued_s = self.prefill_s = self.decode_s = 0.0
        self.preemptions = 0
        self.cached = 0
        self.prefilled = 0
        """As it was admitted, again after each preemption; ``found``: cached the first time."""
        self.found: int | None = None
        # From admission on:
        self.prefix: Node | None = None
        self.epoch = 0
        self.total = 0
        """Prompt tokens that it has to compute, of which the first ``missing`` belong to the prefix."""
        self.missing = 0
        self.todo = 0.0
        """Those not computed yet."""
        self.work_s = 0.0
        """Seconds that each of them takes, on average."""
        # While it decodes:
        self.start = 0.0
        self.end = 0.0

    @property
    def own(self) -> int:
        """Its tokens beyond the prefix."""
        return self.context - self.shared

    @property
    def computed(self) -> int:
        """Whole prompt tokens computed so far."""
        return int(self.total - self.todo + 1e-3)
