"""The token truth of one trajectory: what was asked, what was sampled, what will train.

Owns: turning each conversation into prompt ids that reuse every recorded id exactly, and the record of sampled
ids, behaviour log-probabilities and versions. Pure: it is fed conversations and generations.

Must not know: engines, the scheduler, time.

Guarantees: an id that was sampled is never re-encoded; a conversation that extends a recorded one continues it
(only the text after the answer is encoded, separators of the template included); one that was rewritten, by the
agent or by the template, becomes a branch of its own whose shared ids are context only, so that each sampled
token trains at most once; a turn never exceeds its budget however often it is aborted and resumed; a sampled
token that is in no segment is counted under its reason.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec

from venusrl.rollout.chat import ChatTokenizer
from venusrl.rollout.engines.protocol import EngineError, Generation
from venusrl.types import Message, Segment, StopReason, VersionSpan


class MalformedGeneration(EngineError):
    """The engine's answer contradicts itself or the request; it is not recorded."""

    reason = "engine_malformed"


class Ask(msgspec.Struct, frozen=True):
    """What the engine is to be asked for now. ``max_tokens`` 0: nothing is left to generate.

    ``token_ids``: prompt and the ``resumed`` tokens that an aborted attempt already generated.
    """

    token_ids: list[int]
    max_tokens: int
    resumed: int


class Answer(msgspec.Struct, frozen=True):
    """A recorded turn."""

    text: str
    stop: StopReason
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int


class _Mark(msgspec.Struct, frozen=True):
    """Where one recorded turn lies on its branch. ``text_end``: length of the prompt's rendering."""

    messages: int
    text_end: int
    prompt_end: int
    end: int
    answer: str
    stop_id: int | None


class _Branch:
    """One token sequence; ``text`` is the rendering of its newest prompt, of which all older ones are prefixes."""

    def __init__(self) -> None:
        # Packed: a run holds hundreds of these, of a hundred thousand tokens each in the largest recipes.
        self.ids = array("i")
        self.mask = bytearray()
        self.logprobs = array("d")
        self.spans: list[VersionSpan] = []
        self.text = ""
        self.marks: list[_Mark] = []

    def append_context(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.mask.extend(bytes(len(ids)))
        self.logprobs.extend([0.0] * len(ids))

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[VersionSpan]) -> None:
        base = len(self.ids)
        self.ids.extend(ids)
        self.mask.extend(b"\1" * len(ids))
        self.logprobs.extend(logprobs)
        self.spans = _joined([*self.spans, *(VersionSpan(s.version, base + s.start, base + s.end) for s in spans)])

    def cut(self, end: int) -> int:
        """Forget everything from ``end`` on; return how many sampled tokens that were."""
        dropped = sum(self.mask[end:])
        del self.ids[end:], self.mask[end:], self.logprobs[end:]
        self.spans = [VersionSpan(s.version, s.start, min(s.end, end)) for s in self.spans if s.start < end]
        return dropped

    def segment(self) -> Segment:
        mask = [bool(sampled) for sampled in self.mask]
        return Segment(token_ids=self.ids.tolist(), loss_mask=mask, logprobs=self.logprobs.tolist(), spans=self.spans)


class _Open:
    """The turn being generated; it touches its branch only when it is committed."""

    def __init__(self, branch: _Branch, keep: int, suffix: list[int], text: str, messages: int, budget: int) -> None:
        self.branch = branch
        self.prompt = branch.ids[:keep].tolist() + suffix
        self.suffix = suffix
        self.text = text
        self.messages = messages
        self.budget = budget
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.cached = 0
        self.stop = StopReason.ABORT


class Recorder:
    """Records one trajectory (see the module's guarantees): ``begin``, then ``ask`` and ``add`` until the
    generation is no abort, then ``commit``; or ``drop`` at any time."""

    def __init__(self, tokenizer: ChatTokenizer, *, context_tokens: int, keep_partials: bool) -> None:
        """``keep_partials``: an aborted turn resumes from its partial tokens, else it starts from its prompt."""
        self._tokenizer = tokenizer
        self._context = context_tokens
        self._keep_partials = keep_partials
        self._stops = frozenset(tokenizer.stop_token_ids)
        self._branches: list[_Branch] = []
        self._open: _Open | None = None
        self.discarded: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()

    def begin(self, messages: Sequence[Message], max_tokens: int) -> int:
        """Open the next turn and return its prompt's length. Raises TemplateRefused."""
        if self._open is not None:
            raise RuntimeError("a turn is already open")
        text = self._tokenizer.render(messages, add_generation_prompt=True)
        self._open = self._retry(text, len(messages), max_tokens) or self._place(text, messages, max_tokens)
        return len(self._open.prompt)

    @property
    def prompt(self) -> list[int]:
        """The open turn's prompt ids (without partial tokens)."""
        return self._opened().prompt

    def ask(self) -> Ask:
        turn = self._opened()
        return Ask(token_ids=turn.prompt + turn.ids, max_tokens=self._left(turn), resumed=len(turn.ids))

    def add(self, generation: Generation) -> None:
        """Take what the engine answered to the last ``ask``. Raises MalformedGeneration."""
        turn = self._opened()
        _check(generation, self._left(turn))
        if generation.stop is StopReason.ABORT and not self._keep_partials:
            self._discard("partial_rollout_off", len(generation.token_ids) + len(turn.ids))
            turn.ids, turn.logprobs, turn.spans = [], [], []
            return
        if not turn.ids:
            turn.cached = generation.cached_tokens
        base = len(turn.ids)
        turn.ids += generation.token_ids
        turn.logprobs += generation.logprobs
        turn.spans += [VersionSpan(s.version, base + s.start, base + s.end) for s in generation.spans]
        turn.stop = generation.stop

    def commit(self) -> Answer:
        """Close the open turn and record it, a cut one as what it is."""
        turn = self._opened()
        self._open = None
        stop = self._true_stop(turn)
        stop_id = turn.ids[-1] if stop is StopReason.STOP and turn.ids and turn.ids[-1] in self._stops else None
        answer = self._tokenizer.decode(turn.ids[:-1] if stop_id is not None else turn.ids)
        if turn.ids:
            self._record(turn, answer, stop_id)
        return Answer(
            text=answer,
            stop=stop,
            prompt_tokens=len(turn.prompt),
            generated_tokens=len(turn.ids),
            cached_tokens=turn.cached,
        )

    def drop(self, reason: str, unrecorded: int = 0) -> None:
        """Give up the open turn, if any: its tokens, and ``unrecorded`` ones never added, count as discarded."""
        turn, self._open = self._open, None
        self._discard(reason, unrecorded + (len(turn.ids) if turn is not None else 0))

    def segments(self) -> list[Segment]:
        """What trains: every branch with a sampled token, in the order of their last turns."""
        return [branch.segment() for branch in self._branches if branch.spans]

    # --- placing a conversation ---------------------------------------------------------------------------
    def _retry(self, text: str, messages: int, budget: int) -> _Open | None:
        """The newest prompt came again: its answer never arrived. Roll that turn back and take it anew."""
        branch = self._branches[-1] if self._branches else None
        if branch is None or not branch.marks or branch.text != text:
            return None
        mark = branch.marks.pop()
        self.counters["rollbacks"] += 1
        self._discard("response_lost", branch.cut(mark.prompt_end))
        keep = branch.marks[-1].end if branch.marks else 0
        suffix = branch.ids[keep:].tolist()
        branch.cut(keep)
        branch.text = text[: branch.marks[-1].text_end] if branch.marks else ""
        return _Open(branch, keep, suffix, text, messages, budget)

    def _place(self, text: str, messages: Sequence[Message], budget: int) -> _Open:
        """Continue the newest branch that this conversation extends, else fork from the longest shared turn."""
        for branch in reversed(self._branches):
            if branch.marks and (suffix := self._suffix(branch, branch.marks[-1], text, messages)) is not None:
                return _Open(branch, len(branch.ids), suffix, text, len(messages), budget)
        if not self._branches:
            return _Open(_Branch(), 0, self._tokenizer.encode(text), text, len(messages), budget)
        self.counters["forks"] += 1
        shared, suffix = self._fork(text, messages)
        return _Open(shared, len(shared.ids), suffix, text, len(messages), budget)

    def _fork(self, text: str, messages: Sequence[Message]) -> tuple[_Branch, list[int]]:
        """A new branch holding, as context only, the most turns that any branch shares with this conversation."""
        fork, rest = _Branch(), None
        for branch in reversed(self._branches):
            for index in range(len(branch.marks) - 2, -1, -1):
                mark = branch.marks[index]
                if mark.end <= len(fork.ids):
                    break
                suffix = self._suffix(branch, mark, text, messages)
                if suffix is not None:
                    fork, rest = _Branch(), suffix
                    fork.append_context(branch.ids[: mark.end])
                    fork.marks = branch.marks[: index + 1]
                    break
        return fork, self._tokenizer.encode(text) if rest is None else rest

    def _suffix(self, branch: _Branch, mark: _Mark, text: str, messages: Sequence[Message]) -> list[int] | None:
        """Ids that follow the recorded turn ``mark`` in this conversation; None when it is not an extension."""
        if len(messages) <= mark.messages or messages[mark.messages].role != "assistant":
            return None
        content = messages[mark.messages].content
        # Trimmed by the agent or by the template, an answer is still the one that was sampled.
        if content.strip() != mark.answer.strip() or text[: mark.text_end] != branch.text[: mark.text_end]:
            return None
        tail = text[mark.text_end :]
        shown = content if tail.startswith(content) else content.strip()
        tail = tail if tail.startswith(shown) else tail.lstrip()
        if not tail.startswith(shown):
            return None
        rest = tail[len(shown) :]
        if mark.stop_id is None:
            return self._tokenizer.encode(rest)
        closing = self._tokenizer.token(mark.stop_id)
        rest = rest if rest.startswith(closing) else rest.lstrip()
        if not rest.startswith(closing):
            return None
        # Encoded together with the stop token, so that what follows it is split as in the whole text.
        ids = self._tokenizer.encode(rest)
        return ids[1:] if ids[0] == mark.stop_id else None

    # --- recording ------------------------------------------------------------------------------------------
    def _record(self, turn: _Open, answer: str, stop_id: int | None) -> None:
        branch = turn.branch
        if branch in self._branches:
            self._branches.remove(branch)
        self._branches.append(branch)
        branch.append_context(turn.suffix)
        prompt_end = len(branch.ids)
        branch.append_sampled(turn.ids, turn.logprobs, turn.spans)
        branch.text = turn.text
        branch.marks.append(
            _Mark(
                messages=turn.messages,
                text_end=len(turn.text),
                prompt_end=prompt_end,
                end=len(branch.ids),
                answer=answer,
                stop_id=stop_id,
            )
        )

    def _left(self, turn: _Open) -> int:
        room = self._context - len(turn.prompt)
        return max(0, min(turn.budget, room) - len(turn.ids))

    def _true_stop(self, turn: _Open) -> StopReason:
        """A cut names the limit that cut: the turn's budget, or the context when that was nearer."""
        stop = turn.stop
        if stop is not StopReason.STOP and len(turn.ids) >= turn.budget:
            stop = StopReason.LENGTH
        elif stop is StopReason.LENGTH or len(turn.prompt) + len(turn.ids) >= self._context:
            stop = stop if stop is StopReason.STOP else StopReason.CONTEXT
        if stop is StopReason.LENGTH:
            self.counters["length_cuts"] += 1
        elif stop is StopReason.CONTEXT:
            self.counters["context_cuts"] += 1
        return stop

    def _discard(self, reason: str, tokens: int) -> None:
        if tokens:
            self.discarded[reason] += tokens

    def _opened(self) -> _Open:
        if self._open is None:
            raise RuntimeError("no turn is open")
        return self._open


def _check(generation: Generation, asked: int) -> None:
    count = len(generation.token_ids)
    if count > asked:
        raise MalformedGeneration(f"the engine generated {count} tokens where {asked} were asked for")
    if len(generation.logprobs) != count:
        raise MalformedGeneration(f"the engine gave {len(generation.logprobs)} log-probabilities for {count} tokens")
    at = 0
    for span in generation.spans:
        if span.start != at or span.end < span.start:
            raise MalformedGeneration(f"the engine's version spans do not cover its tokens: {generation.spans}")
        at = span.end
    if at != count:
        raise MalformedGeneration(f"the engine's version spans cover {at} of {count} tokens")
    if count == 0 and generation.stop in (StopReason.STOP, StopReason.LENGTH):
        raise MalformedGeneration(f"the engine ended with {generation.stop} and no token")


def _joined(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Adjacent spans of one version become one."""
    joined: list[VersionSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.version == span.version and last.end == span.start:
            joined[-1] = VersionSpan(span.version, last.start, span.end)
        elif span.end > span.start:
            joined.append(span)
    return joined
