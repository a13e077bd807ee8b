"""One turn on its way through an engine worker.

Owns: ``Request``, mutable state that the engine keeps. Must not know: how it advances.
"""

from __future__ import annotations

from typing import Literal

from venusrl.simulation.cache import Node, Path


class Request:
    """``branches``: what its trajectory may share with others, from its first token to its last. ``context``: tokens to
    be in KV before it decodes; ``path``: the branches within it, ``shared`` tokens in all. ``left``: tokens to decode
    still. ``generated``: decoded since it was submitted. The ``_s``: where its time went."""

    __slots__ = (
        "branches",
        "cached",
        "context",
        "decode_s",
        "end",
        "epoch",
        "found",
        "generated",
        "key",
        "lacking",
        "left",
        "missing",
        "path",
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

    def __init__(self, trajectory: str, branches: Path, context: int, left: int) -> None:
        self.trajectory = trajectory
        self.branches = branches
        self.path: Path = ()
        self.shared = 0
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
        """Prompt tokens that it has to compute, of which the first ``missing`` belong to the path."""
        self.missing = 0
        self.lacking: list[tuple[Node, int]] = []
        """Whose they are, in the order of the path."""
        self.todo = 0.0
        """Those not computed yet."""
        self.work_s = 0.0
        """Seconds that each of them takes, on average."""
        # While it decodes:
        self.start = 0.0
        self.end = 0.0
        self.follow()

    @property
    def own(self) -> int:
        """Its tokens beyond the path."""
        return self.context - self.shared

    @property
    def computed(self) -> int:
        """Whole prompt tokens computed so far."""
        return int(self.total - self.todo + 1e-3)

    def onwards(self, own: int) -> Path:
        """The branches that follow its path within that many more tokens."""
        branches, begin = self.branches, len(self.path)
        end, count = begin, len(branches)
        if begin == count:
            return ()
        while end < count and branches[end][1] <= own:
            own -= branches[end][1]
            end += 1
        return branches[begin:end]

    def follow(self) -> None:
        """Its context has grown: so may its path."""
        more = self.onwards(self.context - self.shared)
        if more:
            self.path = (*self.path, *more) if self.path else more
            for _, tokens in more:
                self.shared += tokens
