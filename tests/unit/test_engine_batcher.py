"""The embedded engine's decisions, against a store that knows which token every KV entry stands for."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from venusrl.rollout.engines.embedded.batcher import Batcher, Chunk, Sequence
from venusrl.rollout.engines.embedded.pages import Pages
from venusrl.types import SamplingParams

SIZE = 4
Entry = tuple[int, tuple[int, ...]]
"""KV of one token: the weights that computed it, and all tokens up to it."""


class Store:
    """A row store of entries instead of tensors."""

    def __init__(self, rows: int, pages: int) -> None:
        self.rows: list[list[Entry]] = [[] for _ in range(rows)]
        self.pages: list[list[Entry]] = [[] for _ in range(pages)]

    def load(self, row: int, pages: SequenceOf[int]) -> None:
        self.rows[row] = [entry for page in pages for entry in self.pages[page]]

    def save(self, row: int, positions: SequenceOf[int], pages: SequenceOf[int]) -> None:
        for position, page in zip(positions, pages, strict=True):
            self.pages[page] = self.rows[row][position * SIZE : (position + 1) * SIZE]
            assert len(self.pages[page]) == SIZE

    def move(self, source: int, target: int, tokens: int) -> None:
        self.rows[target] = self.rows[source][:tokens]


class Bench:
    """A batcher driven like the engine drives it."""

    def __init__(self, pages: int, slots: int, prefill_tokens: int) -> None:
        self.pages = Pages(pages, SIZE)
        self.store = Store(slots, pages)
        self.batcher = Batcher(self.pages, self.store, slots=slots, prefill_tokens=prefill_tokens)
        self.weights = 0
        self.live: list[Sequence] = []

    def add(self, tokens: list[int], new: int, *, priority: int = 0, salt: str = "", session: str = "") -> Sequence:
        name, limit = f"s{len(self.live)}", len(tokens) + new
        sequence = Sequence(name, list(tokens), limit, SamplingParams(), priority, salt, session)
        self.batcher.add(sequence)
        self.live.append(sequence)
        return sequence

    def step(self) -> list[Chunk]:
        chunks = self.batcher.plan()
        for chunk in chunks:
            self.compute(chunk)
        for chunk in chunks:
            if chunk.samples:
                sequence = chunk.sequence
                sequence.tokens.append(sum(sequence.tokens) % 3)
                if len(sequence.tokens) >= sequence.limit:
                    self.end(sequence)
        return chunks

    def compute(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        row = self.store.rows[sequence.row]
        assert len(row) >= chunk.start, "the KV before a chunk is in the row"
        entries = [(self.weights, tuple(sequence.tokens[: i + 1])) for i in range(chunk.start, chunk.end)]
        self.store.rows[sequence.row] = row[: chunk.start] + entries
        self.batcher.computed(chunk)

    def end(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.batcher.remove(sequence)

    def drain(self, limit: int = 10_000) -> int:
        steps = 0
        while self.live:
            assert self.step(), "live sequences always make progress"
            steps += 1
            assert steps < limit
        return steps


def test_a_group_computes_its_shared_prompt_once() -> None:
    bench = Bench(pages=200, slots=8, prefill_tokens=64)
    prompt = list(range(30))
    members = [bench.add(prompt, 5) for _ in range(8)]
    bench.drain()
    assert members[0].cached_tokens == 0
    assert [m.cached_tokens for m in members[1:]] == [28] * 7
    assert bench.batcher.prefilled_tokens == 30 + 7 * 2


def test_a_later_turn_finds_generated_tokens() -> None:
    bench = Bench(pages=50, slots=2, prefill_tokens=64)
    first = bench.add([5, 6, 7, 8, 9], 8)
    bench.drain()
    second = bench.add([*first.tokens, 1, 1, 1], 4)
    bench.drain()
    assert second.cached_tokens == 12
    assert bench.add(first.tokens, 1, salt="other").cached_tokens == 0


def test_when_pages_run_out_the_last_gives_way_and_all_end() -> None:
    bench = Bench(pages=8, slots=4, prefill_tokens=64)
    first = bench.add([1] * 8, 20)
    others = [bench.add([i] * 4, 16) for i in range(2, 5)]
    while first in bench.live:
        assert first in [chunk.sequence for chunk in bench.step()]
    bench.drain()
    assert bench.batcher.preemptions > 0
    assert all(len(s.tokens) == s.limit for s in [first, *others])


def test_urgent_sequences_go_first_and_nobody_is_passed_by_smaller_ones() -> None:
    bench = Bench(pages=6, slots=4, prefill_tokens=64)
    bench.add([1] * 8, 12)
    bench.step()
    large = bench.add([2] * 16, 4)
    small = bench.add([3] * 4, 3)
    urgent = bench.add([4] * 4, 1, priority=-1)
    bench.step()
    assert urgent not in bench.live, "the urgent one fits beside the running one"
    assert bench.batcher.waiting == [large, small]
    order = []
    while bench.live:
        order += [s for s in (large, small) if s.row >= 0 and s not in order]
        bench.step()
    assert order == [large, small]


def test_long_prompts_are_computed_in_pieces_beside_decoding() -> None:
    bench = Bench(pages=100, slots=4, prefill_tokens=10)
    running = bench.add([1, 2], 30)
    bench.step()
    bench.add([3] * 35, 2)
    sizes = []
    for _ in range(4):
        chunks = bench.step()
        assert chunks[0].sequence is running
        assert chunks[0].decode
        sizes.append(chunks[1].end - chunks[1].start)
    assert sizes == [10, 10, 10, 5]


def test_T07_nothing_computed_under_old_weights_is_found() -> None:
    bench = Bench(pages=100, slots=4, prefill_tokens=64)
    running = bench.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 30)
    bench.step()
    bench.weights = 1
    bench.batcher.reset_cache(new_weights=True)
    bench.drain()
    again = bench.add(running.tokens, 4)
    bench.drain()
    assert again.cached_tokens == 0
    later = bench.add(running.tokens, 1)
    bench.drain()
    assert later.cached_tokens > 0, "what the new weights computed is"


def test_a_plain_reset_forgets_but_what_runs_is_found_again_from_its_start() -> None:
    bench = Bench(pages=100, slots=4, prefill_tokens=64)
    running = bench.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 20)
    bench.step()
    bench.batcher.reset_cache(new_weights=False)
    assert bench.pages.match("", running.tokens, 8)[0] == []
    bench.drain()
    later = bench.add(running.tokens, 1)
    bench.drain()
    assert later.cached_tokens == 28


def test_a_newcomer_leaves_the_running_ones_room_to_grow() -> None:
    bench = Bench(pages=5, slots=4, prefill_tokens=64)
    first = bench.add([1] * 8, 4)
    bench.step()
    assert len(first.pages) == 2
    bench.add([2] * 8, 3)
    bench.step()
    assert [s.tokens[0] for s in bench.batcher.running] == [1], "two free pages, one of them for the first to grow into"
    bench.drain()
    assert bench.batcher.preemptions == 0


def test_the_same_content_twice_is_kept_once() -> None:
    pages = Pages(8, SIZE)
    tokens = list(range(8))
    one, other = pages.take((), 2), pages.take((), 2)
    assert one is not None
    assert other is not None
    assert pages.publish("", tokens, one, 0, 2) == [0, 1]
    assert pages.publish("", tokens, other, 0, 2) == []
    assert other == one
    assert pages.held == 2
    pages.release(one)
    assert pages.held == 2
    pages.release(other)
    assert pages.available == 8


def test_eviction_takes_a_chain_from_its_end() -> None:
    pages = Pages(3, SIZE)
    tokens = list(range(12))
    table = pages.take((), 3)
    assert table is not None
    pages.publish("", tokens, table, 0, 3)
    pages.release(table)
    for left in (2, 1, 0):
        assert pages.take((), 1) == [table[left]]
        assert pages.match("", tokens, 12)[0] == table[:left]


def cached(bench: Bench, sequence: Sequence) -> int:
    return len(bench.pages.match("", sequence.tokens, len(sequence.tokens))[0])


def conversations(pages: int, count: int = 3) -> tuple[Bench, list[Sequence]]:
    """Three pages of each session idle, the last session's used last, all with one first page."""
    bench = Bench(pages, slots=8, prefill_tokens=64)
    made = []
    for number in range(count):
        made.append(bench.add([9, 9, 9, 9, number, 1, 1, 1, number, 2, 2, 2], 1, session=f"t{number}"))
        bench.drain()
    return bench, made


def test_what_a_dismissed_session_alone_used_goes_first() -> None:
    bench, (first, second, third) = conversations(pages=7)
    bench.pages.dismiss("t2")
    assert bench.pages.take((), 2)
    assert [cached(bench, s) for s in (first, second, third)] == [3, 3, 1], "the shared page stays for the others"
    bench.pages.dismiss("t2")
    bench.pages.dismiss("nobody")


def test_a_retained_session_goes_last_but_keeps_nobody_from_running() -> None:
    bench, (first, second, third) = conversations(pages=7)
    bench.pages.retain("t0")
    assert bench.pages.take((), 4)
    assert [cached(bench, s) for s in (first, second, third)] == [3, 1, 1]
    assert bench.pages.take((), 3), "soft: its room is there when nothing else is"
    assert cached(bench, first) == 0
    assert bench.pages.available == 0


def test_a_wish_ends_with_the_next_turn_of_its_session() -> None:
    bench, (first, second, _) = conversations(pages=9)
    bench.pages.retain("t0")
    again = bench.add(first.tokens[:12], 1, session="t0")
    bench.drain()
    bench.pages.retain("t1")
    assert bench.pages.take((), 6)
    assert cached(bench, second) == 3
    assert cached(bench, again) == 1


def test_wishes_do_not_outlive_the_content_they_meant() -> None:
    bench, _ = conversations(pages=7)
    bench.pages.retain("t0")
    bench.batcher.reset_cache(new_weights=True)
    bench.pages.dismiss("t0")
    assert bench.pages.available == 7
    other = bench.add([5] * 12, 1, session="t9")
    bench.drain()
    bench.pages.retain("t0")
    assert bench.pages.take((), 7)
    assert cached(bench, other) == 0


class BatcherMachine(RuleBasedStateMachine):
    """Random traffic: KV is always that of the right tokens, and never of two versions in the cache."""

    @initialize(pages=st.integers(8, 24), slots=st.integers(1, 5), prefill=st.integers(1, 20))
    def start(self, pages: int, slots: int, prefill: int) -> None:
        self.bench = Bench(pages, slots, prefill)
        self.capacity = pages * SIZE

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=10),
        new=st.integers(1, 10),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "x"]),
        session=st.sampled_from(["", "a", "b", "c"]),
    )
    def add(self, shared: int, own: list[int], new: int, priority: int, salt: str, session: str) -> None:
        if shared + len(own) + new <= self.capacity and len(self.bench.live) < 12:
            tokens = [0, 1, 2, 0, 2, 1, 1, 0, 0, 2, 2, 1][:shared] + own
            self.bench.add(tokens, new, priority=priority, salt=salt, session=session)

    @rule(session=st.sampled_from("abc"), retain=st.booleans())
    def wish(self, session: str, retain: bool) -> None:
        (self.bench.pages.retain if retain else self.bench.pages.dismiss)(session)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            assert bool(self.bench.step()) == bool(self.bench.live) or not self.bench.live

    @precondition(lambda self: bool(self.bench.live))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.end(data.draw(st.sampled_from(self.bench.live)))

    @rule(new_weights=st.booleans())
    def reset(self, new_weights: bool) -> None:
        self.bench.weights += new_weights
        self.bench.batcher.reset_cache(new_weights=new_weights)

    @invariant()
    def rows_are_dense_and_right(self) -> None:
        bench = self.bench
        assert [s.row for s in bench.batcher.running] == list(range(len(bench.batcher.running)))
        for sequence in bench.batcher.running:
            row = bench.store.rows[sequence.row][: sequence.computed]
            assert [tokens for _, tokens in row] == [tuple(sequence.tokens[: i + 1]) for i in range(sequence.computed)]
            assert sequence.stale or all(weights == bench.weights for weights, _ in row)

    @invariant()
    def pages_add_up(self) -> None:
        bench = self.bench
        held = {page for sequence in bench.batcher.running for page in sequence.pages}
        assert bench.pages.held == len(held)
        assert all(not s.pages for s in bench.batcher.waiting)

    @invariant()
    def no_cached_page_is_out_of_reach(self) -> None:
        """Every page in the index hangs below another one that is there, or below a salt."""
        pages = self.bench.pages
        for page, (before, _) in pages._keys.items():
            assert isinstance(before, str) or before in pages._keys
            assert (pages._references[page] > 0) + (page in pages._evictable) + (page in pages._kept) == 1

    @invariant()
    def found_pages_are_of_these_tokens_and_weights(self) -> None:
        bench = self.bench
        for sequence in bench.live:
            found, _ = bench.pages.match(sequence.salt, sequence.tokens, len(sequence.tokens))
            entries = [entry for page in found for entry in bench.store.pages[page]]
            expected = [(bench.weights, tuple(sequence.tokens[: i + 1])) for i in range(len(entries))]
            assert entries == expected

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()
            assert self.bench.pages.held == 0


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(max_examples=25, stateful_step_count=25)


@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=16), max_size=12), st.integers(4, 8))
@settings(max_examples=25)
def test_taking_all_pages_evicts_every_chain_tail_first(contents: list[list[int]], count: int) -> None:
    pages = Pages(count, SIZE)
    for tokens in contents:
        full = len(tokens) // SIZE
        shared, _ = pages.match("", tokens, len(tokens))
        table = pages.take(shared, full - len(shared))
        if table is None:
            continue
        pages.publish("", tokens, table, len(shared), full)
        pages.release(table)
        assert len(pages.match("", tokens, len(tokens))[0]) == full
    taken = [pages.take((), 1) for _ in range(count)]
    assert None not in taken
    assert pages.available == 0
    assert all(pages.match("", tokens, len(tokens))[0] == [] for tokens in contents)
