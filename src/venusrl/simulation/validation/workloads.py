"""The clients of the published measurements, as workloads of single sessions or small groups.

Owns: their shapes, each with its source. Nothing here is fitted to a result.
"""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from venusrl.simulation.scenario import Script, TurnScript
from venusrl.simulation.workloads.claude_code import SAMPLE, sessions, turns


class LongSessions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="long-sessions"):
    """zetxqx, step 6: 80 sessions of 3 turns over a unique preamble of 40,000 words, 80 tokens a turn, 0.3 s between
    turns, starts spread over 10 s. Its default arm computed 14.71M prompt tokens in 240 requests and hit nothing, so a
    prompt has 61,292 tokens on average; the next message has about 25."""

    count: int = 80
    name: Literal["long-sessions"] = "long-sessions"

    @property
    def tasks(self) -> int | None:
        return self.count

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        rng = random.Random(f"long-sessions/{seed}/{ordinal}")
        prompt = 61_292 - 105 + rng.randint(-100, 100)
        turn = TurnScript(80, 0.3, 25)
        return Script(prompt, 0, (turn, turn, turn), setup_s=10 * ordinal / max(1, self.count - 1))


SIZES = (2428, 7071, 6142, 1500, 8000, 3357, 5214, 4285)
"""Of its groups, in the order in which they begin (seed 101)."""


class GroupsOfAgents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="groups-of-agents"):
    """SARPAT: 8 groups of 8, 8 steps; first prompts of 1.5k to 8k nominal tokens (``SIZES``; +-5% within a group), 400
    more a step up to 6,500, 64 generated, tools of 4 to 12 s (the last one included), starts 0.2 s apart.
    A nominal token is 0.82 of a token in the router's own log (g01t2: 6,852 nominal, 5,687 counted)."""

    name: Literal["groups-of-agents"] = "groups-of-agents"

    @property
    def tasks(self) -> int | None:
        return 8

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        rng = random.Random(f"groups-of-agents/{seed}/{ordinal}/{index}")
        nominal, made = SIZES[ordinal] * rng.uniform(0.95, 1.05), []
        prompt = round(0.82 * nominal)
        for _ in range(8):
            grows = nominal < 6500
            nominal += 400 if grows else 0
            # Replies are not kept in the prompt there; here they are, and count as part of its growth.
            made.append(TurnScript(64, rng.uniform(4, 12), round(0.82 * 400) - 64 if grows else 0))
        return Script(prompt, 0, tuple(made), setup_s=0.2 * (8 * ordinal + index), verify_s=rng.uniform(4, 12))


class RecordedSessions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="recorded-sessions", dict=True):
    """Recorded coding sessions one after the other (each used once before any is used again), gaps cut at 10 s as in
    the replays of zetxqx, steps 7 to 13; a session ends after ``max_turns``."""

    count: int
    max_turns: int = 30
    gap_cap_s: float = 10.0
    context_tokens: int = 200_000
    file: str | None = None
    name: Literal["recorded-sessions"] = "recorded-sessions"

    @property
    def tasks(self) -> int | None:
        return self.count

    @cached_property
    def _scripts(self) -> tuple[Script, ...]:
        return tuple(
            Script(
                min(session[0].input_tokens, self.context_tokens - 1),
                0,
                turns(session[: self.max_turns], self.gap_cap_s, self.context_tokens),
                max_turn_tokens=self.context_tokens,
            )
            for session in sessions(Path(self.file) if self.file else SAMPLE)
        )

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        order = list(range(len(self._scripts)))
        random.Random(f"recorded-sessions/{seed}/{ordinal // len(order)}").shuffle(order)
        return self._scripts[order[ordinal % len(order)]]
