"""What KV is believed to lie where: the books a policy gates and evicts by.

Owns: per worker, which trajectory's KV is resident and how much of it, a group's shared prefix counted once, and
whether it is decoding (with what its turn may still grow by) or idle. Must not know: why something is kept, engines'
own ways, time.

Guarantees: a trajectory's KV is on at most one worker; ``used`` is always the sum of what is listed; nothing refuses
an entry (whether one fits is asked with ``fits``): a trajectory larger than a worker is allowed to run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Holding:
    """One trajectory's KV. ``own``: tokens beyond the group's shared ``prefix``; ``reserve``: what the running turn
    may add to them."""

    trajectory: str
    group: str
    worker: str
    own: int
    prefix: int
    reserve: int = 0
    running: bool = True

    @property
    def tokens(self) -> int:
        """Context held."""
        return self.own + self.prefix


@dataclass(slots=True)
class Shared:
    """A group's prefix on one worker: ``tokens`` counted once for ``users`` trajectories."""

    tokens: int = 0
    users: int = 0


@dataclass(slots=True)
class Book:
    """One worker. ``used``: tokens of everything listed, reserves included; ``context``: of what is decoding;
    ``idle_own``: of what idles, beyond shared prefixes; ``changes`` grows with each change, so that what is computed
    from the book can be kept."""

    worker: str
    capacity: int
    used: int = 0
    context: int = 0
    idle_own: int = 0
    changes: int = 0
    running: dict[str, Holding] = field(default_factory=dict)
    idle: dict[str, Holding] = field(default_factory=dict)
    shared: dict[str, Shared] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def need(self, group: str, tokens: int, prefix: int) -> int:
        """Tokens that a newcomer with this context adds: the prefix is free where a sibling holds it."""
        shared = self.shared.get(group)
        return tokens if shared is None else tokens - min(prefix, shared.tokens)

    def fits(self, need: int, limit: float = 1.0) -> bool:
        """Whether ``need`` more tokens stay under ``limit`` of the capacity, or the worker is empty: what is larger
        than a worker runs alone."""
        return self.used + need <= limit * self.capacity or not (self.running or self.idle)


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self.books: dict[str, Book] = {}
        self._held: dict[str, Holding] = {}

    def up(self, worker: str, capacity: int) -> None:
        """A worker with nothing on it."""
        self.down(worker)
        self.books[worker] = Book(worker, capacity)

    def down(self, worker: str) -> None:
        """It is gone with all it held."""
        book = self.books.pop(worker, None)
        if book is not None:
            for trajectory in (*book.running, *book.idle):
                del self._held[trajectory]

    def held(self, trajectory: str) -> Holding | None:
        """What it holds, wherever."""
        return self._held.get(trajectory)

    def start(self, trajectory: str, group: str, worker: str, tokens: int, prefix: int, reserve: int) -> Holding:
        """A turn decodes on ``worker`` with ``tokens`` of context. What it held elsewhere is dropped."""
        self.drop(trajectory)
        book = self.books[worker]
        prefix = min(prefix, tokens)
        shared = book.shared.setdefault(group, Shared())
        shared.users += 1
        if prefix > shared.tokens:
            book.used += prefix - shared.tokens
            shared.tokens = prefix
        holding = Holding(trajectory, group, worker, tokens - prefix, prefix, reserve)
        book.running[trajectory] = holding
        book.used += holding.own + reserve
        book.context += holding.tokens
        book.changes += 1
        self._held[trajectory] = holding
        return holding

    def stop(self, trajectory: str, tokens: int) -> Holding | None:
        """Its turn is over with ``tokens`` of context: the KV lies idle. None if nothing of it was known."""
        holding = self._held.get(trajectory)
        if holding is None or not holding.running:
            return holding
        book = self.books[holding.worker]
        del book.running[trajectory]
        book.idle[trajectory] = holding
        book.context -= holding.tokens
        own = max(0, tokens - holding.prefix)
        book.idle_own += own
        book.used += own - holding.own - holding.reserve
        book.changes += 1
        holding.own, holding.reserve, holding.running = own, 0, False
        return holding

    def drop(self, trajectory: str) -> str | None:
        """Its KV is given up. Returns the worker that held it."""
        holding = self._held.pop(trajectory, None)
        if holding is None:
            return None
        book = self.books[holding.worker]
        if holding.running:
            del book.running[trajectory]
            book.context -= holding.tokens
        else:
            del book.idle[trajectory]
            book.idle_own -= holding.own
        book.changes += 1
        book.used -= holding.own + holding.reserve
        shared = book.shared[holding.group]
        shared.users -= 1
        if not shared.users:
            book.used -= shared.tokens
            del book.shared[holding.group]
        return holding.worker

    def freed_by(self, trajectory: str) -> int:
        """Tokens that dropping it would free."""
        holding = self._held.get(trajectory)
        if holding is None:
            return 0
        shared = self.books[holding.worker].shared[holding.group]
        return holding.own + holding.reserve + (shared.tokens if shared.users == 1 else 0)

    def move(self, trajectory: str, worker: str) -> None:
        """Idle KV was copied to another worker."""
        holding = self._held.get(trajectory)
        if holding is not None and not holding.running and worker in self.books:
            tokens, group, prefix = holding.tokens, holding.group, holding.prefix
            self.start(trajectory, group, worker, tokens, prefix, 0)
            self.stop(trajectory, tokens)
