"""The token truth: cases T03, T04, T13, T14, T15, T17, T18, and that no sampled token is lost or trains twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from venusrl.rollout.chat import ChatTokenizer, TemplateRefused
from venusrl.rollout.engines.protocol import Generation
from venusrl.rollout.recorder import Answer, MalformedGeneration, Recorder
from venusrl.testing.chat import CHATML, THINKING, answer, toy_chat
from venusrl.types import Message, Segment, StopReason, VersionSpan

CHAT = toy_chat()
STOP = CHAT.stop_token_ids[0]
TASK = Message("user", "fix the file")


def generation(ids: Sequence[int], stop: StopReason = StopReason.STOP, version: int = 0, cached: int = 0) -> Generation:
    spans = [VersionSpan(version, 0, len(ids))] if ids else []
    return Generation(list(ids), [-0.5] * len(ids), spans, stop, cached)


def recorder(chat: ChatTokenizer = CHAT, *, context: int = 4096, keep_partials: bool = True) -> Recorder:
    return Recorder(chat, context_tokens=context, keep_partials=keep_partials)


def play(record: Recorder, messages: list[Message], text: str, chat: ChatTokenizer = CHAT, version: int = 0) -> Answer:
    """One turn answered with ``text``."""
    record.begin(messages, 512)
    record.add(generation(answer(chat, text), version=version))
    return record.commit()


def letters(text: str) -> list[int]:
    """``text`` in ids that no encoding of it gives: only a recorder that keeps sampled ids shows them again."""
    return [token for letter in text for token in CHAT.encode(letter)]


def sampled(segment: Segment) -> list[int]:
    return [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]


def trained(record: Recorder) -> int:
    return sum(len(sampled(segment)) for segment in record.segments())


def check_segment(segment: Segment) -> None:
    """Spans cover exactly the sampled positions; context has no log-probability."""
    covered = [False] * len(segment.token_ids)
    for span in segment.spans:
        assert not any(covered[span.start : span.end])
        covered[span.start : span.end] = [True] * (span.end - span.start)
    assert covered == segment.loss_mask
    assert len(segment.logprobs) == len(segment.token_ids)
    assert all(logprob == 0.0 for logprob, mask in zip(segment.logprobs, segment.loss_mask, strict=True) if not mask)


# --- T14: separators -------------------------------------------------------------------------------------
def check_incremental_is_full(contents: list[tuple[str, str]], chat: ChatTokenizer, *, ids: bool = True) -> None:
    """``ids`` False: only the text is the same (an answer that begins with a line end was sampled as such, while
    the whole text would be encoded with the template's own line end in one token)."""
    record = recorder(chat, context=1 << 20)
    messages = [TASK]
    for said, observed in contents:
        play(record, messages, said, chat)
        messages += [Message("assistant", said), Message("user", observed)]
    record.begin(messages, 16)
    full = chat.render(messages, True)
    assert chat.decode(record.prompt, special=True) == full
    assert record.prompt == chat.encode(full) or not ids
    record.drop("test")
    assert len(record.segments()) == 1
    check_segment(record.segments()[0])
    assert record.counters["forks"] == 0


def test_T14_incremental_ids_equal_the_full_rendering() -> None:
    contents = [("```sh\nls\n```", "a b\n\n"), ("the end\n", "\n[no output]"), ("```sh\nsubmit\n```", "x")]
    check_incremental_is_full(contents, CHAT)


PIECES = st.sampled_from(["a", "b", " ", "\n", "`", "<|", "assistant\n", "\n\n", "the file", "é", "🜁", "  sed"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS.filter(bool), TEXTS), min_size=1, max_size=4))
def test_T14_whatever_the_messages_say(contents: list[tuple[str, str]]) -> None:
    check_incremental_is_full(contents, CHAT, ids=not any(said.startswith("\n") for said, _ in contents))


def test_T14_without_a_special_separator_the_sampled_ids_still_stand() -> None:
    """A template in plain words: the sampled ids are reused and the text after them is what the template says."""
    plain = ChatTokenizer(
        CHAT._tokenizer,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
        "{% endif %}",
        stop_token_ids=[STOP],
    )
    record = recorder(plain)
    record.begin([TASK], 64)
    record.add(generation(plain.encode(" the end"), StopReason.LENGTH))
    said = record.commit().text
    messages = [TASK, Message("assistant", said), Message("user", "go on")]
    record.begin(messages, 64)
    assert plain.decode(record.prompt) == plain.render(messages, True).replace("assistant:  the", "assistant: the")


# --- extension, trimming, forks -----------------------------------------------------------------------------
def test_a_retokenized_answer_is_never_used() -> None:
    """The ids that were sampled are kept although the text would be encoded otherwise."""
    odd = letters("the file")
    assert odd != CHAT.encode("the file")
    record = recorder()
    record.begin([TASK], 64)
    record.add(generation([*odd, STOP]))
    said = record.commit().text
    assert said == "the file"
    record.begin([TASK, Message("assistant", said), Message("user", "x")], 64)
    prompt = CHAT.encode(CHAT.render([TASK], True))
    assert record.prompt[len(prompt) : len(prompt) + len(odd)] == odd


def test_an_agent_that_trims_its_own_answer_has_not_rewritten_history() -> None:
    record = recorder()
    play(record, [TASK], "\n the end \n")
    record.begin([TASK, Message("assistant", "the end"), Message("user", "x")], 64)
    assert record.counters["forks"] == 0
    assert CHAT.decode(record.prompt).endswith("\n the end \n\nuser\nx\nassistant\n")


def test_T15_a_template_that_strips_forks_and_each_token_trains_once() -> None:
    chat = toy_chat(THINKING)
    record = recorder(chat)
    first = play(record, [TASK], "<think>hm</think>the end", chat)
    messages = [TASK, Message("assistant", first.text), Message("user", "go on")]
    play(record, messages, "<think>so</think>submit", chat)
    segments = record.segments()
    assert len(segments) == 2
    assert record.counters["forks"] == 1
    assert [chat.decode(sampled(s)) for s in segments] == ["<think>hm</think>the end", "<think>so</think>submit"]
    assert segments[1].token_ids[: -len(sampled(segments[1]))] == chat.encode(chat.render(messages, True))
    for segment in segments:
        check_segment(segment)


def test_T15_without_a_thought_nothing_is_stripped_and_nothing_forks() -> None:
    chat = toy_chat(THINKING)
    check_incremental_is_full([("ls", "a"), ("cat a", "b"), ("submit", "")], chat)


def play_odd(record: Recorder, messages: list[Message], text: str) -> list[Message]:
    """A turn answered with ``text`` in odd ids; the conversation that follows from it."""
    record.begin(messages, 512)
    record.add(generation([*letters(text), STOP]))
    said = record.commit().text
    return [*messages, Message("assistant", said), Message("user", "seen")]


def has(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


def test_a_fork_shares_the_longest_recorded_part_as_context_only() -> None:
    record = recorder()
    one = play_odd(record, [TASK], "the file")
    two = play_odd(record, one, "an answer")
    play_odd(record, two, "the end")
    rewritten = [*two[:-1], Message("user", "the history changed")]
    play(record, rewritten, "fourth")
    straight, fork = record.segments()
    assert CHAT.decode(sampled(straight)) == "the filean answerthe end"
    assert CHAT.decode(sampled(fork)) == "fourth"
    for text in ("the file", "an answer"):
        assert has(fork.token_ids, letters(text))
    assert CHAT.decode(fork.token_ids, special=True) == CHAT.render(rewritten, True) + "fourth<|im_end|>"


def test_a_fork_shares_with_the_branch_that_has_most_in_common() -> None:
    record = recorder()
    one = play_odd(record, [TASK], "the file")
    play_odd(record, play_odd(record, one, "an answer"), "sed")
    other = [*one[:-1], Message("user", "another way")]
    play_odd(record, play_odd(record, other, "cat file"), "assistant")
    play(record, [*other, Message("assistant", "cat file"), Message("user", "changed")], "last")
    fork = record.segments()[-1]
    assert has(fork.token_ids, letters("cat file"))
    assert has(fork.token_ids, letters("the file"))


def test_a_changed_beginning_of_the_same_length_is_noticed() -> None:
    record = recorder()
    play(record, [TASK], "ls")
    play(record, [Message("user", "fix_the_file"), Message("assistant", "ls"), Message("user", "x")], "ok")
    assert len(record.segments()) == 2


def test_two_interleaved_conversations_are_two_segments() -> None:
    record = recorder()
    one, two = [Message("user", "one")], [Message("user", "two")]
    for step in range(3):
        for conversation in (one, two):
            said = play(record, list(conversation), f"answer {step}").text
            conversation += [Message("assistant", said), Message("user", f"next {step}")]
    assert len(record.segments()) == 2
    assert record.counters["forks"] == 1
    assert [len(s.spans) for s in record.segments()] == [3, 3]


def test_an_answer_that_went_on_differently_is_not_an_extension() -> None:
    record = recorder()
    play(record, [TASK], "the")
    play(record, [TASK, Message("assistant", "the end"), Message("user", "x")], "ok")
    assert [CHAT.decode(sampled(s)) for s in record.segments()] == ["the", "ok"]


# --- T17: a lost response -----------------------------------------------------------------------------------
def test_T17_a_retry_after_a_lost_response_rolls_back_one_turn() -> None:
    record = recorder()
    play(record, [TASK], "first")
    messages = [TASK, Message("assistant", "first"), Message("user", "x")]
    lost = play(record, messages, "never arrived")
    play(record, messages, "second")
    play(record, [*messages, Message("assistant", "second"), Message("user", "y")], "third")
    (segment,) = record.segments()
    assert CHAT.decode(sampled(segment)) == "firstsecondthird"
    assert segment.token_ids[: len(segment.token_ids) - len(answer(CHAT, "third"))] == CHAT.encode(
        CHAT.render([*messages, Message("assistant", "second"), Message("user", "y")], True)
    )
    assert record.counters["rollbacks"] == 1
    assert record.discarded == {"response_lost": lost.generated_tokens}
    check_segment(segment)


def test_T17_a_retry_of_the_first_turn_starts_over() -> None:
    record = recorder()
    play(record, [TASK], "lost")
    play(record, [TASK], "kept")
    (segment,) = record.segments()
    assert CHAT.decode(sampled(segment)) == "kept"


# --- T13, T04, T03: aborts and versions -----------------------------------------------------------------------
def test_T13_resume_budget() -> None:
    record = recorder()
    record.begin([TASK], 10)
    ids = answer(CHAT, "abcdefghijklm")
    record.add(generation(ids[:4], StopReason.ABORT))
    ask = record.ask()
    assert (ask.max_tokens, ask.resumed) == (6, 4)
    assert ask.token_ids == record.prompt + ids[:4]
    record.add(generation(ids[4:10], StopReason.LENGTH))
    result = record.commit()
    assert (result.generated_tokens, result.stop) == (10, StopReason.LENGTH)


def test_T13_an_abort_exactly_at_the_budget_leaves_nothing_to_ask() -> None:
    record = recorder()
    record.begin([TASK], 4)
    record.add(generation(CHAT.encode("abcd"), StopReason.ABORT))
    assert record.ask().max_tokens == 0
    assert record.commit().stop is StopReason.LENGTH


def test_T13_an_engine_that_exceeds_what_was_asked_is_at_fault() -> None:
    record = recorder()
    record.begin([TASK], 4)
    with pytest.raises(MalformedGeneration, match="5 tokens where 4"):
        record.add(generation(CHAT.encode("abcde")))


def test_T04_with_partial_rollouts_off_a_retry_starts_pristine_with_one_version() -> None:
    record = recorder(keep_partials=False)
    record.begin([TASK], 10)
    pristine = record.ask()
    for version in (2, 4):
        record.add(generation(CHAT.encode("ab"), StopReason.ABORT, version))
        assert record.ask() == pristine
    record.add(generation(answer(CHAT, "the end"), version=6))
    record.commit()
    (segment,) = record.segments()
    assert {span.version for span in segment.spans} == {6}
    assert record.discarded == {"partial_rollout_off": 4}


def test_T03_spans_keep_the_version_of_every_token() -> None:
    record = recorder()
    ids = answer(CHAT, "the file")
    record.begin([TASK], 64)
    record.add(generation(ids[:2], StopReason.ABORT, version=0))
    record.add(
        Generation(
            ids[2:],
            [-0.1] * (len(ids) - 2),
            [VersionSpan(0, 0, 1), VersionSpan(1, 1, len(ids) - 2)],
            StopReason.STOP,
        )
    )
    record.commit()
    (segment,) = record.segments()
    start = len(segment.token_ids) - len(ids)
    assert segment.spans == [VersionSpan(0, start, start + 3), VersionSpan(1, start + 3, start + len(ids))]
    check_segment(segment)


# --- T18: cuts -----------------------------------------------------------------------------------------------
def test_T18_a_full_context_is_said_and_nothing_is_cut_silently() -> None:
    first = len(CHAT.encode(CHAT.render([TASK], True)))
    record = recorder(context=first + 16)
    play(record, [TASK], "ls")
    messages = [TASK, Message("assistant", "ls"), Message("user", "ab")]
    prompt = record.begin(messages, 64)
    ask = record.ask()
    assert prompt + ask.max_tokens == first + 16
    record.add(generation([5] * ask.max_tokens, StopReason.LENGTH))
    cut = record.commit()
    assert cut.stop is StopReason.CONTEXT
    third = [*messages, Message("assistant", cut.text), Message("user", "and on")]
    record.begin(third, 64)
    assert record.ask().max_tokens == 0
    full = record.commit()
    assert (full.stop, full.generated_tokens, full.text) == (StopReason.CONTEXT, 0, "")
    (segment,) = record.segments()
    assert len(sampled(segment)) == len(answer(CHAT, "ls")) + ask.max_tokens
    assert len(segment.token_ids) == first + 16
    assert record.counters["context_cuts"] == 2
    assert not record.discarded


def test_T18_a_turn_that_ends_on_the_last_place_of_the_context_ended_by_itself() -> None:
    ids = answer(CHAT, "ls")
    record = recorder(context=len(CHAT.encode(CHAT.render([TASK], True))) + len(ids))
    record.begin([TASK], 64)
    record.add(generation(ids))
    assert record.commit().stop is StopReason.STOP


def test_T18_a_length_cut_is_a_length_cut_and_the_conversation_goes_on() -> None:
    record = recorder()
    record.begin([TASK], 3)
    record.add(generation(CHAT.encode("abc"), StopReason.LENGTH))
    cut = record.commit()
    assert (cut.stop, cut.text) == (StopReason.LENGTH, "abc")
    messages = [TASK, Message("assistant", "abc"), Message("user", "x")]
    record.begin(messages, 3)
    assert record.prompt == CHAT.encode(CHAT.render(messages, True))
    assert record.counters["length_cuts"] == 1


def test_T18_an_engine_with_a_smaller_context_cuts_by_context() -> None:
    record = recorder()
    record.begin([TASK], 10)
    record.add(generation(CHAT.encode("abc"), StopReason.LENGTH))
    assert record.commit().stop is StopReason.CONTEXT


# --- faults and the rest ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "broken",
    [
        Generation([1, 2], [-0.1], [VersionSpan(0, 0, 2)], StopReason.STOP),
        Generation([1, 2], [-0.1, -0.1], [VersionSpan(0, 0, 1)], StopReason.STOP),
        Generation([1, 2], [-0.1, -0.1], [VersionSpan(0, 1, 2)], StopReason.STOP),
        Generation([1, 2], [-0.1, -0.1], [VersionSpan(0, 0, 2), VersionSpan(1, 1, 2)], StopReason.STOP),
        Generation([], [], [], StopReason.STOP),
    ],
)
def test_an_answer_that_contradicts_itself_is_not_recorded(broken: Generation) -> None:
    record = recorder()
    record.begin([TASK], 10)
    with pytest.raises(MalformedGeneration):
        record.add(broken)
    assert record.ask().resumed == 0


def test_a_dropped_turn_leaves_no_trace_but_its_count() -> None:
    record = recorder()
    play(record, [TASK], "first")
    before = record.segments()
    record.begin([TASK, Message("assistant", "first"), Message("user", "x")], 10)
    record.add(generation(CHAT.encode("ab"), StopReason.ABORT))
    record.drop("engine_lost", unrecorded=3)
    record.drop("engine_lost")
    assert record.segments() == before
    assert record.discarded == {"engine_lost": 3 + len(CHAT.encode("ab"))}


def test_a_refused_conversation_leaves_the_recorder_usable() -> None:
    chat = toy_chat("{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + CHATML)
    record = recorder(chat)
    with pytest.raises(TemplateRefused):
        record.begin([Message("tool", "x")], 10)
    assert play(record, [TASK], "ok", chat).text == "ok"


def test_only_the_first_attempt_of_a_turn_tells_what_was_cached() -> None:
    record = recorder()
    record.begin([TASK], 10)
    record.add(generation(CHAT.encode("ab"), StopReason.ABORT, cached=7))
    record.add(generation([STOP], cached=99))
    assert record.commit().cached_tokens == 7


class Conservation(RuleBasedStateMachine):
    """Random agents and engines: every sampled token trains once or is counted, budgets and contexts hold."""

    @initialize(keep=st.booleans(), context=st.integers(40, 200), strip=st.booleans())
    def start(self, keep: bool, context: int, strip: bool) -> None:
        self.chat = toy_chat(THINKING) if strip else CHAT
        self.record = recorder(self.chat, context=context, keep_partials=keep)
        self.context = context
        self.messages = [TASK]
        self.history: list[list[Message]] = []
        self.sampled = 0
        self.version = 0

    @rule(
        texts=st.lists(
            st.sampled_from(["ls", "<think>x</think>y", " the end\n", "a<|im_start|>b"]), min_size=1, max_size=3
        ),
        budget=st.integers(1, 30),
        aborts=st.lists(st.integers(0, 5), max_size=3),
        outcome=st.sampled_from(["commit", "commit", "commit", "drop"]),
    )
    def turn(self, texts: list[str], budget: int, aborts: list[int], outcome: str) -> None:
        self.record.begin(self.messages, budget)
        whole = answer(self.chat, "".join(texts))
        for cut in aborts:
            self._generate(whole, StopReason.ABORT, cut)
        if outcome == "drop":
            self.record.drop("dropped")
            return
        ask = self.record.ask()
        if ask.max_tokens > 0:
            rest = whole[ask.resumed :] or [STOP]
            stop = StopReason.STOP if len(rest) <= ask.max_tokens else StopReason.LENGTH
            self._generate(whole, stop, ask.max_tokens)
        result = self.record.commit()
        assert result.generated_tokens <= budget
        assert result.prompt_tokens + result.generated_tokens <= max(self.context, result.prompt_tokens)
        self.history.append(list(self.messages))
        self.messages = [*self.messages, Message("assistant", result.text), Message("user", "seen")]

    def _generate(self, whole: list[int], stop: StopReason, most: int) -> None:
        ask = self.record.ask()
        ids = (whole[ask.resumed :] or [STOP])[: min(most, ask.max_tokens)]
        self.sampled += len(ids)
        self.record.add(generation(ids, stop, self.version))
        self.version += 1

    @rule()
    def lose_the_answer(self) -> None:
        if self.history:
            self.messages = self.history[-1]

    @rule(drop=st.integers(1, 4))
    def rewrite(self, drop: int) -> None:
        self.messages = (
            [TASK, *self.messages[1 + drop :]] if drop % 2 else self.messages[: max(1, len(self.messages) - drop)]
        )

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        if not hasattr(self, "record"):
            return
        assert trained(self.record) + sum(self.record.discarded.values()) == self.sampled
        for segment in self.record.segments():
            check_segment(segment)
            assert segment.loss_mask[-1]


Conservation.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestConservation = Conservation.TestCase
