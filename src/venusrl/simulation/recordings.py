"""Recorded trajectories as a predictor replays them: from a run's groups, or from a trace file.

Owns: both conversions. Must not know: predictors, where a run keeps its groups.

A trace file holds one JSON object a line: ``{"id": ..., "turns": [[input_tokens, output_tokens, gap_s, kind,
model_s], ...]}``, where ``gap_s`` is the time since the previous answer and ``kind`` says what it was: ``s`` the first
call, ``t`` a tool call, ``u`` a person (whose time is left out). Optional: ``group`` and ``task`` name what sessions
belong together. May be gzipped.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from venusrl.scheduling.predictor.replay import Recorded, RecordedGroup, RecordedTurn
from venusrl.types import Group, Trajectory

_TURN = tuple[int, int, float, str, float]


class RecordingError(ValueError):
    """A trace file cannot be read or holds nothing; the message says where and why."""


class _Session(msgspec.Struct):
    id: int | str
    turns: list[_TURN]
    group: str = ""
    task: str = ""


def of_run(groups: Iterable[Group]) -> list[RecordedGroup]:
    """A run's groups in the order of its tasks; trajectories without a turn are passed over."""
    found = []
    for group in sorted(groups, key=lambda g: g.ordinal):
        members = tuple(_member(t) for t in group.trajectories if t.turns)
        if members:
            found.append(RecordedGroup(group.id, group.task_id, members))
    return found


def _member(trajectory: Trajectory) -> Recorded:
    turns = []
    for turn, following in zip(trajectory.turns, [*trajectory.turns[1:], None], strict=True):
        grown = 0 if following is None else following.prompt_tokens - turn.prompt_tokens - turn.generated_tokens
        model_s = max(0.0, turn.finished_at - turn.dispatched_at)
        turns.append(RecordedTurn(turn.generated_tokens, model_s, turn.tool_s, max(0, grown), turn.exit_code))
    return Recorded(trajectory.id, trajectory.turns[0].prompt_tokens, tuple(turns), trajectory.verify_s)


def of_trace(path: Path) -> list[RecordedGroup]:
    """The sessions of a trace file, in its order. Raises RecordingError."""
    decoder = msgspec.json.Decoder(_Session)
    groups: dict[str, tuple[str, list[Recorded]]] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            session = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RecordingError(f"{path}, line {number}: {error}") from error
        if session.turns:
            group = session.group or str(session.id)
            members = groups.setdefault(group, (session.task or group, []))[1]
            members.append(_session(f"{group}/{session.id}", session.turns))
    if not groups:
        raise RecordingError(f"{path} holds no session with a turn")
    return [RecordedGroup(name, task, tuple(members)) for name, (task, members) in groups.items()]


def _session(name: str, calls: list[_TURN]) -> Recorded:
    turns = []
    for (given, generated, _, _, model_s), after in zip(calls, [*calls[1:], None], strict=True):
        tool_s = after[2] if after is not None and after[3] == "t" else 0.0
        observed = 0 if after is None else max(0, after[0] - given - generated)
        turns.append(RecordedTurn(max(1, generated), max(0.0, model_s), max(0.0, tool_s), observed))
    return Recorded(name, calls[0][0], tuple(turns))


def _lines(path: Path) -> list[bytes]:
    try:
        raw = path.read_bytes()
        return [line for line in (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).splitlines() if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
