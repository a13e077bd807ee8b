"""What a simulated run leaves: aggregates and thinned series, plain and msgspec-encodable.

Owns: ``Result`` and its parts. Must not know: how they are measured (``recorder``), how they are compared or drawn.
"""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One optimizer step. ``formed_at``: its batch was formed; ``began_at``: the trainer turned to it; then trained,
    then its product was published. ``tokens``: sampled tokens trained; ``length``: all tokens trained on."""

    version: int
    groups: tuple[int, ...]
    """Ordinals of its groups' tasks, in the batch's order."""
    formed_at: float
    began_at: float
    trained_at: float
    published_at: float
    tokens: int
    length: int
    mean_staleness: float
    max_staleness: int


class GroupTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trained group. ``started_at``: first token dispatched; ``first_done_at`` and ``completed_at``: its first
    and its last member's verdict."""

    ordinal: int
    opened_at: float
    started_at: float
    first_done_at: float
    completed_at: float
    trained_version: int
    start_version: int
    tokens: int


class TrajectoryTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trained trajectory: where its time went. ``held_s``: in the scheduler's hands; ``queued_s``: in an engine's
    queue; ``prefill_s``, ``decode_s``, ``tool_s``, ``sandbox_s`` (waiting for it and set-up), ``verify_s``."""

    ordinal: int
    index: int
    turns: int
    generated: int
    length: int
    start_version: int
    staleness: int
    opened_at: float
    finished_at: float
    held_s: float
    longest_hold_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    tool_s: float
    sandbox_s: float
    verify_s: float
    prefilled: int
    """Prompt tokens computed for it."""
    cached: int
    """Prompt tokens found in a cache."""


class SizeClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenth of the trained trajectories by length: how long the scheduler or an engine's queue let them wait in
    all, and how long the scheduler held one of their turns."""

    count: int
    mean_length: float
    mean_wait_s: float
    mean_longest_hold_s: float
    longest_hold_s: float
    mean_span_s: float
    """From opening to verdict."""


class Blocked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stretch during which the trainer idled for one reason (the code that ``Scheduler.waiting_for`` begins with)."""

    begin: float
    end: float
    reason: str


class Holds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Turns the scheduler held for one reason."""

    count: int
    total_s: float
    longest_s: float


class EngineTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker over the whole run. ``decode_tokens`` counts what was decoded, ``prefill_tokens`` what was computed
    of prompts (again, where it had been evicted), ``cached_tokens`` what was found. ``busy_s``: something ran."""

    name: str
    busy_s: float
    paused_s: float
    prefill_s: float
    decode_tokens: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int
    aborts: int
    migrated_in: int
    migrated_tokens: int
    deaths: int
    mean_running: float
    mean_kv: float
    """Mean share of the KV held by running requests."""
    mean_resident: float
    """Mean share of the KV with anything useful or not in it."""


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thinned time series, all of one length. KV as shares of the fleet's capacity."""

    at: list[float]
    running: list[int]
    queued: list[int]
    held: list[int]
    in_tool: list[int]
    live: list[int]
    kv_running: list[float]
    kv_resident: list[float]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events: ``loop`` popped by the simulator, ``scheduler`` handled by the scheduler."""

    loop: int
    scheduler: int


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module. ``time_s``: until the last batch is trained (not published: nothing waits for that)."""

    scenario: str
    policy: str
    seed: int
    ended: str
    time_s: float
    trained_tokens: int
    trained_length: int
    steps: list[Step]
    groups: list[GroupTrace]
    by_size: list[SizeClass]
    """Shortest first."""
    trajectories: list[TrajectoryTrace]
    """Empty unless ``Scenario.keep_trajectories``."""
    trainer_busy_s: float
    trainer_idle_s: float
    blocked: list[Blocked]
    holds: dict[str, Holds]
    engines: list[EngineTotals]
    staleness: dict[int, int]
    """Trained trajectories by staleness."""
    failures: dict[str, int]
    """Trajectories that did not train, by reason."""
    wasted_tokens: int
    """Sampled by those."""
    series: Series
    events: Counts

    @property
    def throughput(self) -> float:
        """Trained (sampled) tokens a second over the whole run."""
        return self.trained_tokens / self.time_s if self.time_s else 0.0

    @property
    def steady_throughput(self) -> float:
        """The same without the first step (the fill of the pipe); equals ``throughput`` for runs of one step."""
        if len(self.steps) < 2:
            return self.throughput
        span = self.steps[-1].trained_at - self.steps[0].trained_at
        return sum(step.tokens for step in self.steps[1:]) / span if span else 0.0

    @property
    def prefill_tokens(self) -> int:
        return sum(engine.prefill_tokens for engine in self.engines)

    @property
    def cached_tokens(self) -> int:
        return sum(engine.cached_tokens for engine in self.engines)

    @property
    def decode_tokens(self) -> int:
        return sum(engine.decode_tokens for engine in self.engines)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in a cache."""
        total = self.prefill_tokens + self.cached_tokens
        return self.cached_tokens / total if total else 0.0

    @property
    def preemptions(self) -> int:
        """By engines, for want of KV."""
        return sum(engine.preemptions for engine in self.engines)
