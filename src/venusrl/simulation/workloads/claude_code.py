"""``claude-code``: real coding sessions, resampled into groups.

Owns: the reading of a trace file (format: ``data/README.md``) and how sessions become groups of scripts. The package
ships a sample of 89 of the 710 published sessions; ``file`` names another file of the same format, such as all of them.

- A member of a group is one whole session. Sessions are ordered by number of turns; a member's place in that order is a
  normal score that shares one factor with its group, so the marginal distribution is that of the file and lengths in a
  group correlate by ``rho``.
- The context follows the recorded prompt sizes. A script's context only grows: after a compaction (1.3% of turns shrink
  by more than 1,000 tokens) it stays as it is until the recorded one has caught up.
- A gap that was a person's is replaced by the session's median tool gap; all gaps are cut at ``gap_cap_s``. Recorded
  tool gaps include permission prompts, at a resolution of 1 s.
- What a group shares is unknown; ``shared_prefix`` is the smallest first prompt of the file, which all of them exceed.
- Rewards were not recorded: a coin, independent of everything.
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, median
from typing import NamedTuple

import msgspec

from venusrl.simulation.scenario import Script, TurnScript
from venusrl.simulation.workloads.draws import correlated, stream
from venusrl.simulation.workloads.errors import WorkloadError
from venusrl.simulation.workloads.openswe import SETUP_S, VERIFY_S

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "claude_code_sample.jsonl.gz"
_TOOL_GAP_S = 9.0
"""Median tool gap of all sessions, for one without any."""


class Call(NamedTuple):
    """One recorded model call. ``kind``: s first, t after a tool call, u after a person's message."""

    input_tokens: int
    output_tokens: int
    gap_s: float
    kind: str
    model_s: float


class ClaudeCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="claude-code"):
    """See the module."""

    file: str | None = None
    """None = the shipped sample."""
    gap_cap_s: float = 600.0
    context_tokens: int = 262_144
    max_turns: int = 300
    rho: float = 0.3
    order: int | None = None

    @property
    def name(self) -> str:
        return "claude-code"

    @property
    def tasks(self) -> int | None:
        return self.order

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        known = sessions(Path(self.file) if self.file else SAMPLE)
        common = stream("claude-code task", seed, ordinal).gauss()
        own = stream("claude-code", seed, ordinal, index, attempt)
        place = NormalDist().cdf(correlated(self.rho, common, own.gauss()))
        session = known[min(int(place * len(known)), len(known) - 1)]
        shared = min(s[0].input_tokens for s in known)
        return Script(
            prompt=min(session[0].input_tokens, self.context_tokens - 1),
            shared_prefix=min(shared, self.context_tokens - 1),
            turns=turns(session[: self.max_turns], self.gap_cap_s, self.context_tokens),
            reward=float(own.random() < 0.5),
            setup_s=SETUP_S.at(own.gauss()),
            verify_s=VERIFY_S.at(own.gauss()),
            max_turn_tokens=self.context_tokens,
        )


def turns(session: tuple[Call, ...], gap_cap_s: float, context_tokens: int) -> tuple[TurnScript, ...]:
    """The session as scripted turns, up to the limit of the context."""
    gaps = [call.gap_s for call in session if call.kind == "t"]
    usual = median(gaps) if gaps else _TOOL_GAP_S
    context, made = min(session[0].input_tokens, context_tokens - 1), []
    for call, following in zip(session, [*session[1:], None], strict=True):
        generated = min(max(1, call.output_tokens), context_tokens - context)
        if generated < 1:
            break
        context += generated
        if following is None:
            made.append(TurnScript(generated))
            break
        observation = min(max(0, following.input_tokens - context), context_tokens - context)
        gap = following.gap_s if following.kind == "t" else usual
        made.append(TurnScript(generated, min(gap, gap_cap_s), observation, 0))
        context += observation
    return tuple(made)


@lru_cache(maxsize=4)
def sessions(path: Path) -> tuple[tuple[Call, ...], ...]:
    """The sessions of a trace file, shortest first. Raises WorkloadError."""
    found = []
    try:
        with gzip.open(path, "rt") as lines:
            for line in lines:
                record = json.loads(line)
                calls = tuple(Call(*turn) for turn in record["turns"])
                if calls:
                    found.append((len(calls), int(record["id"]), calls))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path} is no trace file of sessions (one JSON object a line, gzip): {error}") from error
    if not found:
        raise WorkloadError(f"{path} holds no session")
    return tuple(calls for _, _, calls in sorted(found))
