"""What an agent sees of the model: ask for a turn, get text; the tokens stay behind.

Owns: the ``Turns`` protocol (one door for training through the gateway, for evaluation through one pinned
engine) and its data.

Must not know: who schedules, which engine answers, what the agent does with the text.

Guarantees asked of every implementation: ``turn`` either returns, or raises ``TurnCancelled``,
``EngineError`` or ``TokenizerError``; cancelling it aborts the request at the engine before it returns;
``finish`` gives every token that was sampled, either in a segment or in ``discarded`` with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from venusrl.types import Message, Segment, StopReason


class TurnCancelled(Exception):
    """The trajectory was cancelled while it waited or generated; ``reason`` is a stable code."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the trajectory was cancelled: {reason}")
        self.reason = reason


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling that an agent program asked for. The rollout's pins win; a difference is counted."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    penalties: bool = False
    """Whether a presence, frequency or repetition penalty, or a logit bias, was asked for."""


class TurnResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer. ``text`` is without special tokens. ``version``: weights at the (last) dispatch.

    ``stop`` CONTEXT with no generated token means that the conversation no longer fits the context.
    ``dispatched_at`` is the first dispatch; times are on the run's monotonic clock. ``waited_s``: time that the
    turn was ready but not at an engine (held by the scheduler, or its engine was lost): not the agent's time.
    """

    text: str
    stop: StopReason
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    requested_at: float = 0.0
    dispatched_at: float = 0.0
    finished_at: float = 0.0
    waited_s: float = 0.0
    worker: str = ""
    version: int | None = None
    preemptions: int = 0


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recorded tokens of one trajectory.

    ``start_version``: weight version at the first dispatch, None when nothing was dispatched.
    ``discarded``: sampled tokens in no segment, by reason code. ``counters``: ``forks``, ``rollbacks``,
    ``length_cuts``, ``context_cuts``, ``overrides``, ``preemptions``, ``reissues``...
    """

    segments: list[Segment]
    start_version: int | None
    discarded: dict[str, int]
    counters: dict[str, int]


class Turns(Protocol):
    """Model turns of many trajectories."""

    def register(self, trajectory: str, group: str) -> None:
        """Begin a trajectory. Its turns are taken one at a time."""
        ...

    async def turn(
        self, trajectory: str, messages: Sequence[Message], max_tokens: int, asked: Asked | None = None
    ) -> TurnResult:
        """Answer the whole conversation so far with at most ``max_tokens`` tokens."""
        ...

    def cancel(self, trajectory: str, reason: str) -> None:
        """End the running turn, and any later one, with TurnCancelled; its tokens are discarded for ``reason``."""
        ...

    def finish(self, trajectory: str) -> Rollout:
        """End a trajectory of which no turn runs, and hand out its tokens."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a plain text."""
        ...
