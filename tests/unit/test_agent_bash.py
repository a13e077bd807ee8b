"""The bash agent: what it reads, what it shows, what ends it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.rollout.agents.bash import (
    MALFORMED,
    AgentLimits,
    AgentResult,
    command_of,
    observation_of,
    run_agent,
)
from venusrl.rollout.turns import TurnResult
from venusrl.sandboxes.protocol import CommandResult, SandboxGone
from venusrl.types import EndReason, Message, StopReason, Turn

LIMITS = AgentLimits(max_turns=5, max_turn_tokens=10, max_output_tokens=40, time_s=100.0, observation_bytes=64)
TASK = Message("user", "fix it")


def fenced(command: str) -> str:
    return f"```sh\n{command}\n```"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (fenced("ls"), "ls"),
        ("I look.\n```bash\nls -l\n```\nThen more.", "ls -l"),
        ("```sh\ncat <<'E' > a\nx\nE\n```", "cat <<'E' > a\nx\nE"),
        ("```sh\necho ``\n```", "echo ``"),
        ("```sh\n\n  ls\n```", "\n  ls"),
        ("  ```sh  \nls\n  ```", "ls"),
        ("```python\nprint()\n```\n" + fenced("ls"), "ls"),
        ("```\n```sh\n```\n" + fenced("ls"), "ls"),
        ("", None),
        ("ls", None),
        ("```sh\nls", None),
        ("```sh\n```", None),
        ("```sh\n  \n```", None),
        ("```\nls\n```", None),
        ("```python\nls\n```", None),
        (fenced("ls") + "\n" + fenced("ls"), None),
        (fenced("ls") + "\n```sh\nls", None),
        ("```shell\nls\n```", None),
    ],
)
def test_reads_exactly_one_complete_fence(text: str, command: str | None) -> None:
    assert command_of(text) == command


@given(st.text(st.sampled_from("a`\n sh"), max_size=40))
def test_reading_never_fails_and_never_gives_an_empty_command(text: str) -> None:
    command = command_of(text)
    assert command is None or (command.strip() and command in text)


def result(output: str = "", exit_code: int = 0, *, truncated: int = 0, timed_out: bool = False) -> CommandResult:
    return CommandResult(exit_code, output, truncated, wall_s=1.0, timed_out=timed_out)


@pytest.mark.parametrize(
    ("of", "shown"),
    [
        (result("a\nb\n"), "a\nb"),
        (result(""), "[no output]"),
        (result("\n\n"), "[no output]"),
        (result("no such file\n", 2), "no such file\n[exit code 2]"),
        (result("", 1), "[exit code 1]"),
        (result("half", 137, timed_out=True), "half\n[timed out]\n[exit code 137]"),
        (CommandResult(137, "", 0, 1.0, out_of_memory=True), "[out of memory]\n[exit code 137]"),
        (CommandResult(1, "x", 0, 1.0, out_of_disk=True), "x\n[out of disk]\n[exit code 1]"),
        (result("a" * 40 + "b" * 40), "a" * 32 + "\n[... 16 bytes cut ...]\n" + "b" * 32),
        (result("ab", truncated=7), "a\n[... 7 bytes cut ...]\nb"),
        (result("a\n[... 7 bytes cut ...]\nb", truncated=7), "a\n[... 7 bytes cut ...]\nb"),
        (
            result("a" * 40 + "\n[... 7 bytes cut ...]\n" + "b" * 40, truncated=7),
            "a" * 32 + "\n[... 23 bytes cut ...]\n" + "b" * 32,
        ),
        (result("é" * 40), "é" * 16 + "\n[... 16 bytes cut ...]\n" + "é" * 16),
    ],
)
def test_shows_output_cut_in_the_middle_and_how_it_ended(of: CommandResult, shown: str) -> None:
    assert observation_of(of, 64) == shown


@given(st.text(max_size=200), st.integers(0, 5))
def test_what_is_cut_is_counted_exactly(output: str, before: int) -> None:
    output = output.replace("[", "(").rstrip("\n")
    shown = observation_of(result(output + "!", truncated=before), 64)
    total = len((output + "!").encode()) + before
    if total <= 64 and not before:
        assert shown == output + "!"
        return
    if before or len((output + "!").encode()) > 64:
        head, _, rest = shown.partition("\n[... ")
        count, _, tail = rest.partition(" bytes cut ...]\n")
        assert int(count) + len(head.encode()) + len(tail.encode()) == total
        assert "�" not in shown or "�" in output


class Script:
    """A model that says ``texts`` in turn, each with ``tokens`` tokens in ``seconds`` after ``waited`` in a queue."""

    def __init__(self, *texts: str, tokens: int = 5, seconds: float = 1.0, waited: float = 0.0) -> None:
        self.texts = texts
        self.tokens = tokens
        self.seconds = seconds
        self.waited = waited
        self.stops: dict[int, StopReason] = {}
        self.asked: list[tuple[list[Message], int]] = []
        self.commands: list[tuple[int, str, float]] = []
        self.results: list[CommandResult] = []

    async def model(self, messages: Sequence[Message], max_tokens: int) -> TurnResult:
        index = len(self.asked)
        self.asked.append((list(messages), max_tokens))
        return TurnResult(
            text=self.texts[min(index, len(self.texts) - 1)],
            stop=self.stops.get(index, StopReason.STOP),
            prompt_tokens=100 * (index + 1),
            generated_tokens=min(self.tokens, max_tokens),
            requested_at=0.0,
            finished_at=self.seconds + self.waited,
            waited_s=self.waited,
        )

    async def shell(self, turn: int, command: str, left_s: float) -> CommandResult:
        self.commands.append((turn, command, left_s))
        return self.results.pop(0) if self.results else result("out")

    async def run(self, limits: AgentLimits = LIMITS, transcript: list[Turn] | None = None) -> AgentResult:
        return await run_agent([TASK], self.model, self.shell, limits, transcript)


async def test_runs_commands_shows_results_and_ends_with_submit() -> None:
    script = Script(fenced("ls"), fenced("cat a"), "Done.\n" + fenced(" submit "))
    script.results = [result("a\n"), result("", 1)]
    ended = await script.run()
    assert ended.end is EndReason.SUBMITTED
    assert [command for _, command, _ in script.commands] == ["ls", "cat a"]
    assert script.asked[2][0] == [
        TASK,
        Message("assistant", fenced("ls")),
        Message("user", "a"),
        Message("assistant", fenced("cat a")),
        Message("user", "[exit code 1]"),
    ]
    assert [(t.index, t.observation, t.exit_code) for t in ended.turns] == [
        (0, "a", 0),
        (1, "[exit code 1]", 1),
        (2, "", None),
    ]


async def test_an_answer_without_a_command_costs_a_turn() -> None:
    script = Script("hello", fenced("submit"))
    ended = await script.run()
    assert script.asked[1][0][-1] == Message("user", MALFORMED)
    assert (len(ended.turns), script.commands) == (2, [])


async def test_submit_with_anything_else_is_a_command() -> None:
    script = Script(fenced("submit now"), fenced("submit"))
    await script.run()
    assert [command for _, command, _ in script.commands] == ["submit now"]


async def test_the_cap_on_turns() -> None:
    ended = await Script(fenced("ls")).run()
    assert (ended.end, len(ended.turns)) == (EndReason.MAX_TURNS, 5)


async def test_the_cap_on_tokens_never_asks_for_more_than_is_left() -> None:
    script = Script(fenced("ls"), tokens=9)
    ended = await script.run(AgentLimits(9, 10, 24, 100.0, 64))
    assert [most for _, most in script.asked] == [10, 10, 6]
    assert ended.end is EndReason.MAX_TOKENS
    assert sum(turn.generated_tokens for turn in ended.turns) == 24


async def test_the_cap_on_time_counts_turns_and_tools_but_not_the_queue() -> None:
    script = Script(fenced("ls"), seconds=30.0, waited=1000.0)
    ended = await script.run(AgentLimits(9, 10, 900, 93.0, 64))
    assert [left for _, _, left in script.commands] == [63.0, 32.0, 1.0]
    assert (ended.end, len(ended.turns)) == (EndReason.TIME, 3)


async def test_a_command_that_comes_too_late_does_not_run() -> None:
    script = Script(fenced("ls"), seconds=100.0)
    ended = await script.run()
    assert (ended.end, script.commands, len(ended.turns)) == (EndReason.TIME, [], 1)


async def test_T18_a_context_cut_ends_the_episode_and_runs_nothing() -> None:
    script = Script(fenced("ls"))
    script.stops[1] = StopReason.CONTEXT
    ended = await script.run()
    assert (ended.end, len(script.commands)) == (EndReason.CONTEXT, 1)
    assert ended.turns[-1].stop is StopReason.CONTEXT


async def test_a_length_cut_goes_on() -> None:
    script = Script("```sh\nls", fenced("submit"))
    script.stops[0] = StopReason.LENGTH
    ended = await script.run()
    assert (ended.end, ended.turns[0].observation) == (EndReason.SUBMITTED, MALFORMED)


async def test_T39_a_failure_leaves_the_whole_transcript() -> None:
    script = Script(fenced("ls"))
    transcript: list[Turn] = []

    async def shell(turn: int, command: str, left_s: float) -> CommandResult:
        if turn == 1:
            raise SandboxGone("gone")
        return result("out")

    with pytest.raises(SandboxGone):
        await run_agent([TASK], script.model, shell, LIMITS, transcript)
    assert [(turn.text, turn.observation) for turn in transcript] == [(fenced("ls"), "out"), (fenced("ls"), "")]
