"""The KV ledger: sums that always agree with what is listed, shared prefixes counted once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from venusrl.scheduling.ledger import Ledger


def test_a_prefix_is_counted_once_a_worker_and_as_long_as_somebody_uses_it() -> None:
    ledger = Ledger()
    ledger.up("w", 1000)
    book = ledger.books["w"]
    ledger.start("a", "g", "w", 150, 100, 20)
    assert (book.used, book.context, book.need("g", 150, 100), book.need("h", 150, 100)) == (170, 150, 50, 150)
    ledger.start("b", "g", "w", 160, 100, 0)
    assert book.used == 230
    ledger.stop("a", 165)
    assert (book.used, ledger.freed_by("a")) == (225, 65)
    assert ledger.drop("b") == "w"
    assert (book.used, ledger.freed_by("a")) == (165, 165)
    ledger.drop("a")
    assert (book.used, book.shared) == (0, {})


def test_kv_lies_on_one_worker_only_and_dies_with_it() -> None:
    ledger = Ledger()
    ledger.up("w", 1000)
    ledger.up("v", 1000)
    ledger.start("a", "g", "w", 100, 0, 0)
    ledger.start("a", "g", "v", 120, 0, 5)
    assert (ledger.books["w"].used, ledger.books["v"].used) == (0, 125)
    ledger.stop("a", 130)
    ledger.move("a", "w")
    assert (ledger.books["w"].used, ledger.books["v"].used) == (130, 0)
    ledger.down("w")
    assert ledger.held("a") is None
    assert ledger.drop("a") is None


def test_what_is_larger_than_a_worker_fits_when_it_is_empty() -> None:
    ledger = Ledger()
    ledger.up("w", 100)
    book = ledger.books["w"]
    assert book.fits(500)
    ledger.start("a", "g", "w", 10, 0, 0)
    assert book.fits(90)
    assert not book.fits(91)
    assert not book.fits(90, limit=0.9)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens, each book equals a recount of what it lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        for name in ("w0", "w1"):
            self.ledger.up(name, 1000)

    names = st.sampled_from([f"t{i}" for i in range(6)])
    workers = st.sampled_from(("w0", "w1"))

    @rule(
        name=names, worker=workers, tokens=st.integers(1, 400), prefix=st.integers(0, 100), reserve=st.integers(0, 50)
    )
    def start(self, name: str, worker: str, tokens: int, prefix: int, reserve: int) -> None:
        self.ledger.start(name, f"g{int(name[1]) % 2}", worker, tokens, prefix, reserve)

    @rule(name=names, tokens=st.integers(1, 500))
    def stop(self, name: str, tokens: int) -> None:
        self.ledger.stop(name, tokens)

    @rule(name=names)
    def drop(self, name: str) -> None:
        freed, held = self.ledger.freed_by(name), self.ledger.held(name)
        before = self.ledger.books[held.worker].used if held is not None else 0
        self.ledger.drop(name)
        if held is not None:
            assert self.ledger.books[held.worker].used == before - freed

    @rule(name=names, worker=workers)
    def move(self, name: str, worker: str) -> None:
        self.ledger.move(name, worker)

    @rule(worker=workers)
    def restart(self, worker: str) -> None:
        self.ledger.up(worker, 1000)
        assert self.ledger.books[worker].used == 0

    @invariant()
    def books_agree(self) -> None:
        seen: set[str] = set()
        for name, book in self.ledger.books.items():
            listed = [*book.running.values(), *book.idle.values()]
            assert seen.isdisjoint(book.running.keys() | book.idle.keys())
            seen |= book.running.keys() | book.idle.keys()
            assert all(h.worker == name and self.ledger.held(h.trajectory) is h for h in listed)
            assert book.used == sum(h.own + h.reserve for h in listed) + sum(s.tokens for s in book.shared.values())
            assert book.context == sum(h.tokens for h in book.running.values())
            for group, shared in book.shared.items():
                users = [h for h in listed if h.group == group]
                assert shared.users == len(users) > 0
                assert shared.tokens >= max(h.prefix for h in users)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
