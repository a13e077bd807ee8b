"""What a turn costs on a worker.

Owns: the price of entering a worker, and of a turn there. Must not know: who else waits, whether a turn may run there.

The price is the time that the turn's trajectory needs there for a while (prefill of what the worker does not hold, then
some turns of decoding beside all that lives there), so that faster and emptier workers are cheaper; equal prices go to
the worker chosen longest ago. Where costs are not known, the share of slots and KV that is taken stands in.
"""

from __future__ import annotations

from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.ledger import Book
from venusrl.scheduling.policies import PendingTurn

_TURNS = 8
"""Turns ahead that an entry is priced for."""


def price(turn: PendingTurn, worker: Worker, book: Book, turn_tokens: float) -> float:
    """Of entering: seconds, or a share of the worker where its costs are unknown."""
    tokens = turn.prompt_tokens + turn.resumed
    need = book.need(turn.group, tokens, turn.shared_prefix)
    if worker.costs is None:
        return (book.used + need) / max(1, book.capacity) + len(worker.sessions) / worker.slots
    prefill = worker.costs.prefill_s(need, tokens - need)
    return prefill + _TURNS * turn_s(turn, worker, book, turn_tokens, 0)


def turn_s(turn: PendingTurn, worker: Worker, book: Book, turn_tokens: float, held: int) -> float:
    """Of decoding a turn beside all that lives there. ``held``: tokens of it that are there already."""
    if worker.costs is None:
        return 0.0
    tokens = turn.prompt_tokens + turn.resumed
    sessions = len(book.running) + len(book.idle) + (0 if held else 1)
    return turn_tokens * worker.costs.step_s(sessions, book.used - held + tokens)


def tie(worker: Worker) -> tuple[int, str]:
    """Among equals: whoever was chosen longest ago."""
    return (worker.chosen, worker.name)
