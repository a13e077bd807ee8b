"""What is simulated, as plain data: fleet, trainer, sandboxes, failures, and the workload's contract.

Owns: ``Scenario`` and its parts, ``Script`` (one trajectory as it will go) and the ``Workload`` protocol. Must not
know: policies, how the simulator works. Times are in seconds, KV and lengths in tokens, memory in any one unit.

Guarantees: a scenario that exists is consistent, and is encodable with msgspec when its workload is a msgspec
struct (they all should be: their fields are what a result is keyed by).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import msgspec

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts

WeightUpdate = Literal["drain", "turn_boundary", "in_flight", "abort"]


# --- the workload ---------------------------------------------------------------------------------------
class TurnScript(NamedTuple):
    """One turn: tokens the model generates, then a tool call of ``tool_s`` whose result is ``observation`` tokens.

    The tool call of a trajectory's last turn does not happen: its three fields are ignored (leave them 0, 0, 0).
    """

    generated: int
    tool_s: float = 0.0
    observation: int = 0
    exit_code: int | None = 0


class Branch(NamedTuple):
    """A stretch of tokens that several trajectories have in common, after others that they have in common. ``name``:
    the same for all of them, and for them alone."""

    name: int
    tokens: int


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trajectory as it will go, whoever schedules it.

    The prompt of turn k is ``prompt`` + generated and observation tokens of the turns before it. Its leading
    ``shared_prefix`` tokens are the same for the whole group (so they must be equal for all members of a group).
    """

    prompt: int
    """Tokens of the first prompt, the shared ones included."""
    shared_prefix: int
    turns: tuple[TurnScript, ...]
    reward: float = 0.0
    setup_s: float = 0.0
    """From the start of its sandbox's creation until the first turn can be requested."""
    verify_s: float = 0.0
    """From the end of the last turn to the verdict; the sandbox is held meanwhile."""
    sandbox_memory: float = 1.0
    max_turn_tokens: int = 131072
    """What ``TurnRequested.max_tokens`` says; a turn that generates that many stops with ``LENGTH``."""
    branches: tuple[Branch, ...] | None = None
    """What it has in common with other trajectories, as an engine's cache would share it, from its first token on; None
    where nobody knows: the shared prefix, with its group."""

    def __post_init__(self) -> None:
        if not self.turns or any(turn.generated < 1 for turn in self.turns):
            raise ValueError("a script has at least one turn, and every turn generates at least one token")
        if not 0 <= self.shared_prefix <= self.prompt or self.prompt < 1:
            raise ValueError("shared_prefix must lie in 0..prompt, and prompt must be at least 1")
        if self.branches:
            tokens = [branch.tokens for branch in self.branches]
            if min(tokens) < 1 or sum(tokens) > self.length:
                raise ValueError("branches have at least one token each, and no more than the trajectory in all")

    @property
    def generated(self) -> int:
        """Sampled tokens of the whole trajectory."""
        return sum(turn.generated for turn in self.turns)

    @property
    def length(self) -> int:
        """Tokens of the whole trajectory when its last turn ends: what is trained on, and the most KV it needs."""
        return self.prompt + self.generated + sum(turn.observation for turn in self.turns[:-1])


class Workload(Protocol):
    """Where trajectories come from. Implementations are frozen msgspec structs of their parameters."""

    @property
    def name(self) -> str: ...

    @property
    def tasks(self) -> int | None:
        """Length of the task order; None = endless."""
        ...

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        """The trajectory of the ``ordinal``-th task's ``index``-th member, ``attempt`` > 0 for replacements.

        A pure function of its arguments (draw from a generator seeded by a hash of them): it is called in any order
        and more than once.
        """
        ...


# --- the fleet --------------------------------------------------------------------------------------------
class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One inference server, as ``engine`` models it."""

    name: str
    kv_capacity: int
    slots: int
    """Sequences that are prefilled or decoded at once."""
    costs: EngineCosts
    speed: float = 1.0
    """Divides every duration of ``costs`` (``WorkerUp.costs`` tells the scheduler the result)."""
    prefill_chunk: int = 2048
    """Prompt tokens that share a step with the decoding sequences. Large = prefill first, decoding stalls meanwhile."""
    watermark: float = 0.01
    """Share of the KV that must stay free when a waiting request is admitted."""
    priority_queue: bool = True
    """Waiting requests by urgency, then arrival; and the least urgent is preempted first. Else by arrival alone."""
    prefix_cache: bool = True
    """Whether KV of ended turns is kept (LRU) for the requests that extend them."""
    kv_control: bool = False
    """Whether ``RetainKV`` and ``ReleaseKV`` order eviction (released, then plain, then retained; LRU in each)."""
    eviction: Literal["tail", "whole"] = "tail"
    """Of the least recently used sequence: its last tokens as needed, or all of it."""
    preempted_kv: Literal["evictable", "dropped"] = "evictable"
    """What becomes of a sequence that the engine preempts for want of KV: its cache stays until others need the
    room (vLLM), or what it decoded in this turn is dropped at once (SGLang's retraction)."""
    page_tokens: int = 1
    """The cache finds whole pages of so many tokens. 1: what a page's end costs is left out."""

    def __post_init__(self) -> None:
        counts = (self.kv_capacity, self.slots, self.prefill_chunk, self.page_tokens)
        if min(counts) < 1 or self.speed <= 0:
            raise ValueError(
                f"engine {self.name}: kv_capacity, slots, prefill_chunk, page_tokens and speed must be positive"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"engine {self.name}: watermark must lie in [0, 1)")


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine workers and how new weights reach them.

    ``weight_update``: ``drain`` (no turn runs anywhere while weights change; on-policy), ``turn_boundary`` (none runs
    on that worker), ``in_flight`` (paused, kept, resumed), ``abort`` (every request on every worker is aborted, its
    tokens so far are kept and it is asked for again; caches are flushed whatever ``stale_kv`` says; as slime does).
    ``load_s``: how long one worker stands still to take a version. ``stale_kv``: whether KV of older versions may be
    reused by later requests.
    """

    engines: tuple[EngineSpec, ...]
    weight_update: WeightUpdate = "in_flight"
    stale_kv: Literal["keep", "flush"] = "keep"
    load_s: float = 0.0
    measure_every_s: float | None = None
    """Send ``WorkerMeasured`` for every worker that often."""

    def __post_init__(self) -> None:
        if not self.engines or len({engine.name for engine in self.engines}) != len(self.engines):
            raise ValueError("a fleet has at least one engine, and their names differ")


# --- trainer, sandboxes, failures --------------------------------------------------------------------------
class TrainerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step on trajectories of L_i tokens takes fixed_s + token_s * sum(L_i) + attention_s * sum(L_i^2) / 2.

    Then the new version travels for ``publish_s`` before it is published; with ``publish_blocks`` the trainer takes
    no next batch meanwhile.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    attention_s: float = 0.0
    publish_s: float = 0.0
    publish_blocks: bool = True

    def step_s(self, lengths: list[int]) -> float:
        linear = self.token_s * sum(lengths)
        return self.fixed_s + linear + self.attention_s * sum(n * n for n in lengths) / 2


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory for sandboxes. A sandbox is created when memory and a set-up slot are free, highest priority first."""

    memory: float | None = None
    """None = unlimited."""
    setups_at_once: int | None = None
    pause_s: float = 0.5
    resume_s: float = 0.5
    retry_after_s: float = 5.0
    """What ``SandboxDenied`` says. A denied sandbox stays asked for: it is created as soon as its turn comes."""


class FailureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong. ``sandbox_rate``: share of attempts that end, at a random turn, in an infrastructure failure;
    they are replaced ``max_attempts`` - 1 times, then the group shrinks. ``worker_mtbf_s``: mean time between deaths
    of each worker, back ``worker_restart_s`` later with the version then current and an empty cache."""

    sandbox_rate: float = 0.0
    max_attempts: int = 3
    worker_mtbf_s: float | None = None
    worker_restart_s: float = 120.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One experiment but for policy and seed. It ends when ``scheduler.max_steps`` steps are trained, or nothing more
    of the task order can be."""

    name: str
    scheduler: SchedulerConfig
    fleet: FleetSpec
    trainer: TrainerSpec
    workload: Workload
    sandboxes: SandboxSpec = SandboxSpec()
    failures: FailureSpec = FailureSpec()
    max_sim_s: float = 1e8
    """Simulated time after which the run counts as stuck."""
    patience_s: float = 86_400.0
    """So does one in which no sequence, tool, sandbox or trainer gets anywhere for so long."""
    series_points: int = 400
    """Time series of the result have between this many points and twice as many."""
    keep_trajectories: bool = False
    """Whether the result lists every trained trajectory."""

    def __post_init__(self) -> None:
        if self.scheduler.max_steps is None and self.workload.tasks is None:
            raise ValueError("a scenario ends: set scheduler.max_steps or a workload with a finite order of tasks")
