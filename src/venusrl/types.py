"""The domain's words as plain data.

Owns: the structs that cross module and process boundaries (task, group, trajectory, turn, batch,
version span, failure). They carry no behaviour beyond trivial derived properties, import nothing
of VenusRL, and encode to JSON or msgpack with msgspec as they are.

Must not know: clocks, engines, sandboxes, torch.

Guarantees: every struct is immutable unless its docstring says otherwise; unknown fields fail at
decoding, so a store or a peer of another release is noticed rather than misread.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailureKind(StrEnum):
    """Whose fault a failure is; decided once, at the boundary where it happened."""

    POLICY = "policy"
    """The agent's own doing (bad command, ran out of turns). Keeps its reward and trains."""
    INFRASTRUCTURE = "infrastructure"
    """Sandbox, engine or network. Never trained, never in a baseline; replaced by a fresh sample."""
    CANCELLED = "cancelled"
    """Stale or shut down. Never trained."""


class StopReason(StrEnum):
    """Why a turn's generation ended. A length cut is never a normal end."""

    STOP = "stop"
    """The model sampled a stop token."""
    LENGTH = "length"
    """The turn's max_tokens was reached."""
    CONTEXT = "context"
    """The engine's context window was full."""
    ABORT = "abort"
    """Aborted by the scheduler or by a cancelled client; tokens so far are kept."""


class EndReason(StrEnum):
    """Why a trajectory ended."""

    SUBMITTED = "submitted"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    TIME = "time"
    FAILED = "failed"


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A classified failure: the kind, a short stable reason code, and the human text."""

    kind: FailureKind
    reason: str
    """Stable code, for histograms: ``sandbox_died``, ``engine_lost``, ``stale``, ``shutdown``..."""
    message: str = ""


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampled tokens ``start:end`` (half-open, indices into the owner's tokens) come from ``version``."""

    version: int
    start: int
    end: int


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message as the chat template sees it."""

    role: str
    content: str


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One problem: instruction, environment, verifier.

    ``directory`` is a Harbor-shaped task directory (instruction.md, task.toml, environment/, tests/,
    solution/); everything else is read from it by ``venusrl.tasks``.
    """

    id: str
    instruction: str
    directory: str
    family: str = ""
    template: str = "host"
    agent_timeout_s: float = 600.0
    verifier_timeout_s: float = 120.0
    metadata: dict[str, str] = {}


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training sample: a token sequence of which the sampled positions train.

    ``loss_mask[i]`` is true iff ``token_ids[i]`` was sampled by the policy; ``logprobs[i]`` is then its
    behaviour log-probability (natural log, at the actual sampling temperature and top-p), else 0.0.
    ``spans`` index ``token_ids`` and cover exactly the sampled positions. A trajectory has more than one
    segment only when an agent rewrote its history; a token trains in at most one of them.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    spans: list[VersionSpan]


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model call and the tool call that followed it (times in seconds on the run's clock)."""

    index: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    stop: StopReason
    text: str
    observation: str = ""
    requested_at: float = 0.0
    dispatched_at: float = 0.0
    finished_at: float = 0.0
    tool_s: float = 0.0
    exit_code: int | None = None
    worker: str = ""
    preemptions: int = 0


class Trajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished or failed episode.

    ``start_version`` is the weight version at its first token's dispatch, None when no turn was
    dispatched. ``reward`` is None unless a verifier gave a verdict (or a policy failure fixed it).
    """

    id: str
    group_id: str
    task_id: str
    index: int
    attempt: int
    start_version: int | None
    segments: list[Segment]
    turns: list[Turn]
    reward: float | None
    end: EndReason
    failure: Failure | None = None
    truncated: bool = False
    started_at: float = 0.0
    finished_at: float = 0.0
    verify_s: float = 0.0
    metrics: dict[str, float] = {}

    @property
    def trainable(self) -> bool:
        """Whether this trajectory may enter a batch and a baseline."""
        ok = self.failure is None or self.failure.kind is FailureKind.POLICY
        return ok and self.reward is not None and self.start_version is not None


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trajectories sampled from one task that train together (failed ones already replaced)."""

    id: str
    task_id: str
    ordinal: int
    """Position in the run's order of tasks, from 0; unique."""
    start_version: int
    trajectories: list[Trajectory]


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The groups of one optimizer step. Training it turns weight version ``version`` into version + 1."""

    id: str
    version: int
    groups: list[Group]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine samples; pinned by the rollout, never by the agent. ``temperature`` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
