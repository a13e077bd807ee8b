"""Requests at one engine, as samples of what it did and how long that took.

Owns: who ran beside whom, and for how long. Must not know: the clock (it is told the time, which never decreases),
engines, tokens' contents.

The form of a sample follows from continuous batching: all running sequences decode in the same steps, so a request's
time is its own number of steps, each with the batch and the KV of that moment, and the prompts that were computed
meanwhile, its own and the others'. How many tokens a neighbour made and how much of its prompt was computed is known
when it ends; so a request is looked at when all that ran beside it have ended. Beyond its slots an engine queues, most
urgent and then oldest first, which is followed here: a request's time begins when it leaves that queue. Requests that
met a pause or an unknown end are neighbours only.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from venusrl.scheduling.calibration.fit import CostFit, Estimate, Sample

_EVERY_S = 0.1
"""At most one sample in so many seconds: enough to learn from, cheap beside many short requests."""
_MOST = 1024
"""Requests kept while a long one runs; beyond that the older ones are given up."""


@dataclass(slots=True)
class _Turn:
    prompt: int
    begun: float
    ended: float | None = None
    cached: int = 0
    generated: int = 0
    clean: bool = True
    """Whether it says something of the engine's speed."""

    @property
    def computed(self) -> int:
        return max(0, self.prompt - self.cached)

    @property
    def attended(self) -> float:
        return self.computed * (self.cached + self.computed / 2)


class TurnLog:
    """See the module. ``slots``: requests that run at once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: deque[_Turn] = deque()
        """In order of their beginnings: those that run, those not yet looked at, and their neighbours."""
        self._live: dict[str, _Turn] = {}
        """Those that run."""
        self._queue: list[tuple[int, int, str, int]] = []
        """Those that wait inside the engine: urgency (negated), arrival, name, prompt."""
        self._arrivals = 0
        self._fit = CostFit()
        self._sampled_at = float("-inf")

    @property
    def estimate(self) -> Estimate | None:
        return self._fit.estimate

    def begin(self, request: str, prompt: int, now: float, urgency: int = 0) -> None:
        """A request with a prompt of so many tokens was sent."""
        self._arrivals += 1
        insort(self._queue, (-urgency, self._arrivals, request, prompt))
        self._start(now)

    def end(self, request: str, cached: int, generated: int, now: float, *, clean: bool = True) -> None:
        """It was answered. ``clean``: by itself and with its whole work known (not aborted)."""
        turn = self._live.pop(request, None)
        if turn is None:
            self._leave_queue(request)
            return
        turn.ended, turn.cached, turn.generated = now, min(cached, turn.prompt), generated
        turn.clean = turn.clean and clean
        self._start(now)
        self._look()

    def lose(self, request: str, now: float) -> None:
        """Nobody knows what the engine did for it: neither it nor what ran beside it counts."""
        self.disturb()
        self.end(request, 0, 0, now, clean=False)

    def disturb(self) -> None:
        """Something held up the engine (a pause, new weights): what runs now does not count."""
        for turn in self._live.values():
            turn.clean = False

    def _start(self, now: float) -> None:
        while self._queue and len(self._live) < self._slots:
            _, _, request, prompt = self._queue.pop(0)
            turn = self._live[request] = _Turn(prompt, now)
            self._turns.append(turn)

    def _leave_queue(self, request: str) -> None:
        """It ended before its time: aborted, or the engine does not run as many, or not in this order."""
        kept = [entry for entry in self._queue if entry[2] != request]
        if len(kept) < len(self._queue):
            self._queue = kept
            self.disturb()

    def _look(self) -> None:
        """Sample those whose neighbours have all ended; forget those that are nobody's neighbour any more."""
        open_since = min((turn.begun for turn in self._live.values()), default=float("inf"))
        ready = [(t.ended, t) for t in self._turns if t.clean and t.ended is not None and t.ended <= open_since]
        for ended, turn in sorted(ready, key=lambda one: one[0]):
            turn.clean = False
            if ended - self._sampled_at >= _EVERY_S and turn.generated > 0:
                self._sampled_at = ended
                self._fit.add(self._sample(turn, ended))
        waiting = [t.begun for t in self._turns if t.ended is None or t.clean]
        first = min(waiting, default=float("inf"))
        self._turns = deque((t for t in self._turns if t.ended is None or t.ended > first), maxlen=_MOST)

    def _sample(self, turn: _Turn, ended: float) -> Sample:
        token_s, context_s = self._fit.prefill_s
        decoded = read = prefilled = attended = 0.0
        done_at = float("-inf")
        for other in self._turns:
            if other.ended is None or other.begun >= ended:
                continue
            # Prompts are computed one after the other, in order of arrival.
            begins = max(other.begun, done_at)
            done_at = begins + token_s * other.computed + context_s * other.attended
            if other.ended <= turn.begun:
                continue
            share = _share(begins, done_at, turn.begun, ended)
            prefilled += share * other.computed
            attended += share * other.attended
            part = _share(min(done_at, other.ended), other.ended, turn.begun, ended)
            decoded += part * other.generated
            read += part * other.generated * (other.prompt + other.generated / 2)
        return Sample(ended - turn.begun, turn.generated, decoded, read, prefilled, attended)


def _share(first: float, last: float, begin: float, end: float) -> float:
    """How much of ``first``..``last`` lies within ``begin``..``end``; an instant lies in it or not."""
    if last <= first:
        return 1.0 if begin <= first <= end else 0.0
    return max(0.0, min(last, end) - max(first, begin)) / (last - first)
