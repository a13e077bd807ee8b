"""Which tokens the next forward pass computes.

Owns: the queue of waiting sequences, the running ones and their rows, admission, chunked prefill, preemption.

Must not know: tensors, HTTP, time. KV moves through the ``RowStore`` it is given.

Guarantees:
- Running sequences occupy rows 0..n-1, each the row of its index in ``running``.
- Order is (priority, arrival) everywhere: the first runs to its end whatever comes later, so everything that
  fits the pool ends. When pages run out, the last running one gives way and waits again, keeping its tokens.
- Of sequences that need the same uncached page only one computes it; the others wait and share it.
- What a sequence computed under older weights is never published.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from venusrl.rollout.engines.embedded.pages import Key, Pages
from venusrl.types import SamplingParams


class RowStore(Protocol):
    """Working KV of running sequences, one row each, and the pool of pages behind it."""

    def load(self, row: int, pages: SequenceOf[int]) -> None:
        """Copy ``pages`` to the beginning of ``row``."""
        ...

    def save(self, row: int, positions: SequenceOf[int], pages: SequenceOf[int]) -> None:
        """Copy page-sized pieces of ``row`` (``positions``: their indices, ascending) to ``pages``."""
        ...

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` of row ``source`` to row ``target``."""
        ...


@dataclass(eq=False)
class Sequence:
    """A request and how far it is.

    ``limit``: the length, prompt included, at which it ends. Lower ``priority`` first.
    """

    request_id: str
    tokens: list[int]
    limit: int
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    session: str = ""
    """Whose next turn may continue from it; empty: nobody's."""
    prompt_tokens: int = field(init=False)
    order: int = -1
    row: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose KV is in the row."""
    published: int = 0
    """Leading pages that are in the prefix index."""
    stale: bool = False
    """Whether some of its KV was computed under older weights."""
    cached_tokens: int = 0
    admitted: bool = False
    catching_up: bool = False
    """Admitted, and not yet at its last token."""
    computing: Key | None = None
    """The page that others wait for it to compute."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.order)


class Chunk(NamedTuple):
    """Compute ``tokens[start:end]``; a chunk that ends at the sequence's end samples its next token.

    ``decode``: it is the sequence's last token alone.
    """

    sequence: Sequence
    start: int
    end: int
    decode: bool

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)


class Batcher:
    """``slots``: rows. ``prefill_tokens``: prompt tokens computed in one pass, beside the decoding ones."""

    def __init__(self, pages: Pages, store: RowStore, *, slots: int, prefill_tokens: int) -> None:
        self._pages = pages
        self._store = store
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._arrivals = 0
        self._computing: set[Key] = set()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; it must fit the pool (``limit`` tokens)."""
        sequence.order = self._arrivals
        self._arrivals += 1
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was aborted; what it computed stays in the prefix cache."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def plan(self) -> list[Chunk]:
        """The chunks of the next pass: decoding ones first, by row. Empty when nothing can run."""
        for sequence in sorted(self.running, key=lambda s: s.rank):
            if sequence.row >= 0:
                self._grow(sequence)
        self._admit()
        decodes, prefills = [], []
        budget = self._prefill_tokens
        for sequence in sorted(self.running, key=lambda s: s.rank):
            left = len(sequence.tokens) - sequence.computed
            if left == 1:
                decodes.append(Chunk(sequence, sequence.computed, sequence.computed + 1, True))
            elif budget > 0:
                size = min(left, budget)
                budget -= size
                prefills.append(Chunk(sequence, sequence.computed, sequence.computed + size, False))
        decodes.sort(key=lambda chunk: chunk.sequence.row)
        return decodes + prefills

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in its row now."""
        sequence = chunk.sequence
        sequence.computed = chunk.end
        if not sequence.catching_up:
            return
        self.prefilled_tokens += chunk.end - chunk.start
        if chunk.samples:
            self._publish(sequence)
            self._stop_computing(sequence)
            sequence.catching_up = False

    def reset_cache(self, *, new_weights: bool) -> None:
        """Find nothing computed so far any more. With ``new_weights`` what runs now will not be published either."""
        self._pages.reset()
        self._computing.clear()
        for sequence in self.running:
            sequence.published = 0
            sequence.computing = None
            sequence.stale = sequence.stale or (new_weights and sequence.computed > 0)

    # --- pages and rows -----------------------------------------------------------------------------
    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence the page of its next token, at the cost of those after it in order."""
        while len(sequence.pages) * self._pages.size < len(sequence.tokens):
            page = self._pages.take((), 1)
            if page is not None:
                sequence.pages += page
                continue
            victim = max(self.running, key=lambda s: s.rank)
            self.preemptions += 1
            self._vacate(victim)
            self._enqueue(victim)
            if victim is sequence:
                return

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) == self._slots:
                return
            shared, after = self._pages.match(sequence.salt, sequence.tokens, len(sequence.tokens) - 1)
            if after is not None and after in self._computing:
                continue
            needed = -(-len(sequence.tokens) // self._pages.size)
            table = self._take(shared, needed - len(shared))
            if table is None:
                return  # Smaller ones behind it must not starve it.
            self.waiting.remove(sequence)
            self._occupy(sequence, table, len(shared), after)

    def _take(self, shared: list[int], fresh: int) -> list[int] | None:
        """Pages for a newcomer, leaving one for each running sequence to grow into."""
        idle = sum(self._pages.idle(page) for page in shared)
        if self._pages.available - idle < fresh + len(self.running):
            return None
        return self._pages.take(shared, fresh)

    def _occupy(self, sequence: Sequence, table: list[int], shared: int, after: Key | None) -> None:
        sequence.row = len(self.running)
        sequence.pages = table
        sequence.published = shared
        sequence.computed = shared * self._pages.size
        sequence.catching_up = True
        self.running.append(sequence)
        self._store.load(sequence.row, table[:shared])
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached_tokens = sequence.computed
            self.cached_tokens += sequence.computed
        if after is not None:
            sequence.computing = after
            self._computing.add(after)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self._pages.size
        if sequence.stale or full <= sequence.published:
            return
        written = self._pages.publish(sequence.salt, sequence.tokens, sequence.pages, sequence.published, full)
        sequence.published = full
        if written:
            self._store.save(sequence.row, written, [sequence.pages[position] for position in written])

    def _stop_computing(self, sequence: Sequence) -> None:
        if sequence.computing is not None:
            self._computing.discard(sequence.computing)
            sequence.computing = None

    def _vacate(self, sequence: Sequence) -> None:
        """Publish, let go of the pages, and close the gap with the last row."""
        self._publish(sequence)
        self._stop_computing(sequence)
        if sequence.session:
            self._pages.note(sequence.session, sequence.pages, sequence.published)
        self._pages.release(sequence.pages)
        last = self.running.pop()
        if last is not sequence:
            self._store.move(last.row, sequence.row, last.computed)
            last.row = sequence.row
            self.running[last.row] = last
        sequence.row, sequence.pages, sequence.computed, sequence.published = -1, [], 0, 0
        sequence.stale = False
