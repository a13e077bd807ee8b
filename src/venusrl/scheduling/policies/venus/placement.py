"""Which worker a turn enters.

Owns: the price of a turn on a worker. Must not know: who else waits, whether a turn may run there.

The price is the time that the turn's trajectory needs there for a while (prefill of what the worker does not hold, then
some turns of decoding beside all that lives there), so that faster and emptier workers are cheaper; equal prices go to
the worker chosen longest ago. Where costs are not known, the share of slots and KV that is taken stands in.
"""

from __future__ import annotations

from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.ledger import Book
from venusrl.scheduling.policies import PendingTurn

_TURNS = 8
"""Turns ahead that a choice is priced for."""


def price(turn: PendingTurn, group: str, worker: Worker, book: Book, turn_tokens: float, held: int = 0) -> float:
    """Seconds, or a share of the worker where its costs are unknown. ``held``: tokens of its KV that are there."""
    need = book.need(group, turn.prompt_tokens + turn.resumed, turn.shared_prefix) if not held else 0
    sessions = len(book.running) + len(book.idle) + (0 if held else 1)
    if worker.costs is None:
        return (book.used + need) / max(1, book.capacity) + sessions / worker.slots
    computed = need if not held else max(0, turn.prompt_tokens + turn.resumed - held)
    prefill = worker.costs.prefill_s(computed, turn.prompt_tokens + turn.resumed - computed)
    return prefill + _TURNS * turn_tokens * worker.costs.step_s(sessions, book.used + need)


def tie(worker: Worker) -> tuple[int, str]:
    """Among equals: whoever was chosen longest ago."""
    return (worker.chosen, worker.name)
