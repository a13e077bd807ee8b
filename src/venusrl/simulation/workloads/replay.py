"""``replay``: the trajectories of a recorded run, again.

Owns: how recorded trajectories (``types``) become scripts. Must not know: where they are stored.

Lengths, tool times, set-up and verification times are as recorded, and where the tokens are kept, so is what the
trajectories have in common; engine and queueing times are not kept, the simulation makes its own. A replacement
(``attempt`` > 0) is another member of the same group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import msgspec

from venusrl.simulation.scenario import Branch, Script, TurnScript
from venusrl.simulation.workloads.branches import Line, branches
from venusrl.simulation.workloads.errors import WorkloadError
from venusrl.types import Group, Trajectory


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="replay"):
    """See the module. ``groups``: scripts of each recorded group, in the order of tasks. ``seed`` changes nothing."""

    groups: tuple[tuple[Script, ...], ...]

    @property
    def name(self) -> str:
        return "replay"

    @property
    def tasks(self) -> int | None:
        return len(self.groups)

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        group = self.groups[ordinal]
        return group[(index + attempt) % len(group)]


def replay(groups: Iterable[Group]) -> Replay:
    """The recorded groups as a workload. Raises WorkloadError when there are none."""
    ordered = sorted(groups, key=lambda g: g.ordinal)
    members = [[t for t in group.trajectories if t.turns] for group in ordered]
    members = [played for played in members if played]
    if not members:
        raise WorkloadError("there is no finished trajectory with a turn to replay")
    lines = [_line(t) for played in members for t in played]
    known = all(line.tokens for line in lines)
    common: Iterator[tuple[Branch, ...] | None] = iter(branches(lines)) if known else repeat(None)
    return Replay(tuple(_scripts(played, common) for played in members))


def _scripts(members: list[Trajectory], common: Iterator[tuple[Branch, ...] | None]) -> tuple[Script, ...]:
    shared = min(t.turns[0].prompt_tokens for t in members)
    return tuple(_script(t, shared, next(common)) for t in members)


def _line(trajectory: Trajectory) -> Line:
    """Its tokens up to where its history was rewritten: what follows another history is not what it was recorded as."""
    tokens = trajectory.segments[0].token_ids if trajectory.segments else []
    ends: list[int] = []
    for turn in trajectory.turns:
        end = turn.prompt_tokens + turn.generated_tokens
        if end > len(tokens) or not turn.generated_tokens or turn.prompt_tokens < (ends[-1] if ends else 1):
            break
        ends += (turn.prompt_tokens, end)
    return Line(tokens[: ends[-1]] if ends else [], ends)


def _script(trajectory: Trajectory, shared: int, common: tuple[Branch, ...] | None) -> Script:
    turns, context = [], trajectory.turns[0].prompt_tokens
    for turn, following in zip(trajectory.turns, [*trajectory.turns[1:], None], strict=True):
        context += max(1, turn.generated_tokens)
        # A history that was rewritten is shorter than what it replaces; a script's context only grows.
        observation = 0 if following is None else max(0, following.prompt_tokens - context)
        turns.append(TurnScript(max(1, turn.generated_tokens), turn.tool_s, observation, turn.exit_code))
        context += observation
    first = trajectory.turns[0]
    return Script(
        prompt=first.prompt_tokens,
        shared_prefix=shared,
        turns=tuple(turns),
        reward=trajectory.reward or 0.0,
        setup_s=max(0.0, first.requested_at - trajectory.started_at),
        verify_s=trajectory.verify_s,
        branches=common,
    )
