"""The bash agent: one fenced command a turn, its output back, ``submit`` ends.

Owns: reading a command out of an answer, showing a command's result, the loop with its caps.

Must not know: engines, tokens' ids, sandboxes, verdicts.

Guarantees: it ends, by ``submit`` or by exactly one named cap; only what is in a complete fence runs, and nothing of
an answer that the context cut; whatever is cut from an observation is said in it; the transcript is complete up
to the moment of any failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from venusrl.rollout.turns import TurnResult
from venusrl.sandboxes.protocol import CommandResult
from venusrl.types import EndReason, Message, StopReason, Turn

MALFORMED = "[expected one ```sh block]"
NO_OUTPUT = "[no output]"
SUBMIT = "submit"
_LANGUAGES = ("sh", "bash")

Model = Callable[[Sequence[Message], int], Awaitable[TurnResult]]
"""Conversation and most tokens in, answer out."""
Shell = Callable[[int, str, float], Awaitable[CommandResult]]
"""Turn index, command and the seconds left for it in, result out."""


class AgentLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Caps of one episode. ``time_s`` counts the agent's own time: commands, and turns while at an engine."""

    max_turns: int
    max_turn_tokens: int
    max_output_tokens: int
    time_s: float
    observation_bytes: int


class AgentResult(msgspec.Struct, frozen=True):
    end: EndReason
    turns: list[Turn]


def command_of(text: str) -> str | None:
    """The command of an answer with exactly one complete sh (or bash) fence; None otherwise."""
    commands: list[str] = []
    block: list[str] = []
    language: str | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if language is None:
            if mark.startswith("```"):
                language, block = mark[3:].strip(), []
        elif mark == "```":
            if language in _LANGUAGES:
                commands.append("\n".join(block))
            language = None
        else:
            block.append(line)
    if language in _LANGUAGES or len(commands) != 1 or not commands[0].strip():
        return None
    return commands[0]


def observation_of(result: CommandResult, limit_bytes: int) -> str:
    """What the agent sees of a command: its output, cut in the middle if long, and how it ended unless well."""
    output = result.output.rstrip("\n")
    lines = [_shortened(output, limit_bytes, result.truncated_bytes)] if output or result.truncated_bytes else []
    for happened, note in (
        (result.timed_out, "[timed out]"),
        (result.out_of_memory, "[out of memory]"),
        (result.out_of_disk, "[out of disk]"),
    ):
        if happened:
            lines.append(note)
    if result.exit_code != 0:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or NO_OUTPUT


def _shortened(output: str, limit_bytes: int, already_cut: int) -> str:
    """``output`` within the limit. What the sandbox cut before is counted in, and its own mark shows only once."""
    if already_cut:
        unmarked = output.replace(_mark(already_cut), "", 1)
        if unmarked != output and len(unmarked.encode()) <= limit_bytes:
            return output
        output = unmarked
    raw = output.encode()
    if len(raw) <= limit_bytes and not already_cut:
        return output
    keep = min(limit_bytes, len(raw))
    # Half a character at the edge of a cut is dropped, and counted with the cut.
    start = raw[: keep - keep // 2].decode(errors="ignore")
    end = raw[len(raw) - keep // 2 :].decode(errors="ignore")
    return start + _mark(len(raw) - len(start.encode()) - len(end.encode()) + already_cut) + end


def _mark(cut_bytes: int) -> str:
    return f"\n[... {cut_bytes} bytes cut ...]\n"


async def run_agent(
    conversation: Sequence[Message],
    model: Model,
    shell: Shell,
    limits: AgentLimits,
    transcript: list[Turn] | None = None,
) -> AgentResult:
    """Drive one episode from its opening messages. ``transcript`` gets each turn as it ends.

    Errors of ``model`` and ``shell`` go to the caller.
    """
    turns: list[Turn] = [] if transcript is None else transcript
    messages = list(conversation)
    tokens, time_s = 0, 0.0
    while True:
        cap = _cap(limits, len(turns), tokens, time_s)
        if cap is not None:
            return AgentResult(cap, turns)
        answer = await model(messages, min(limits.max_turn_tokens, limits.max_output_tokens - tokens))
        tokens += answer.generated_tokens
        time_s += answer.finished_at - answer.requested_at - answer.waited_s
        command = command_of(answer.text)
        end = _end(answer, command, time_s, limits)
        if end is not None:
            turns.append(_turn(len(turns), answer, "", None))
            return AgentResult(end, turns)
        result: CommandResult | None = None
        observation = "" if command is not None else MALFORMED
        try:
            if command is not None:
                result = await shell(len(turns), command, limits.time_s - time_s)
                time_s += result.wall_s
                observation = observation_of(result, limits.observation_bytes)
        finally:
            turns.append(_turn(len(turns), answer, observation, result))
        messages += [Message("assistant", answer.text), Message("user", observation)]


def _cap(limits: AgentLimits, turns: int, tokens: int, time_s: float) -> EndReason | None:
    """The cap that forbids another turn, if any."""
    if tokens >= limits.max_output_tokens:
        return EndReason.MAX_TOKENS
    if time_s >= limits.time_s:
        return EndReason.TIME
    if turns >= limits.max_turns:
        return EndReason.MAX_TURNS
    return None


def _end(answer: TurnResult, command: str | None, time_s: float, limits: AgentLimits) -> EndReason | None:
    """Why this answer is the last, if it is."""
    if answer.stop is StopReason.CONTEXT:
        return EndReason.CONTEXT
    if command is not None and command.strip() == SUBMIT:
        return EndReason.SUBMITTED
    if command is not None and time_s >= limits.time_s:
        return EndReason.TIME
    return None


def _turn(index: int, answer: TurnResult, observation: str, result: CommandResult | None) -> Turn:
    return Turn(
        index=index,
        prompt_tokens=answer.prompt_tokens,
        generated_tokens=answer.generated_tokens,
        cached_tokens=answer.cached_tokens,
        stop=answer.stop,
        text=answer.text,
        observation=observation,
        requested_at=answer.requested_at,
        dispatched_at=answer.dispatched_at,
        finished_at=answer.finished_at,
        tool_s=result.wall_s if result is not None else 0.0,
        exit_code=result.exit_code if result is not None else None,
        worker=answer.worker,
        preemptions=answer.preemptions,
    )
