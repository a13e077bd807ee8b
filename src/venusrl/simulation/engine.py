"""One engine worker as a fluid: continuous batching without a step being simulated.

Owns: the worker's queue, its running sequences, its KV, and how fast everything advances. Must not know: the
scheduler, trajectories beyond their names, the clock (it is told the time, which never decreases).

The model. Every step decodes one token of each decoding sequence and, while prompts wait to be computed, up to
``prefill_chunk`` prompt tokens. A step takes ``EngineCosts.step_s`` of the decoding sequences plus the prefill of its
chunk. So between two changes of composition all sequences advance at the same rate, the batch's KV grows linearly,
and the time for n steps is a quadratic in n: no step needs to be looked at. ``tau`` counts steps; a sequence that
begins to decode n tokens at tau ends at tau + n. Prompts are computed one after the other in order of admission, n
tokens in n / chunk steps; with nothing decoding they take ``EngineCosts.prefill_s``.

KV: a request takes room for its whole prompt when it is admitted (if that leaves the watermark free, idle cache being
evicted for it), then a token a step. When decoding sequences need room and nothing idle is left, the least urgent,
latest request is preempted and queued again at its old place; none of its tokens is lost.

Guarantees: running requests never hold more than the capacity; every submitted request ends once, or is aborted.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.cache import Cache, Node, Path
from venusrl.simulation.requests import Request
from venusrl.simulation.scenario import EngineSpec

_STEP = 1e-6
"""Steps that count as none: far above rounding, far below one. Of prompt tokens, a thousand times that."""


class RequestTooLarge(Exception):
    """A turn needs more KV than its worker has: the scenario is impossible."""


class Totals:
    """What a worker did so far; ``kv_s``, ``resident_s``, ``running_s`` are integrals over time."""

    __slots__ = (
        "aborts",
        "busy_s",
        "cached",
        "decoded",
        "kv_s",
        "paused_s",
        "preemptions",
        "prefill_s",
        "prefilled",
        "resident_s",
        "running_s",
    )

    def __init__(self) -> None:
        self.busy_s = self.paused_s = self.prefill_s = 0.0
        self.kv_s = self.resident_s = self.running_s = 0.0
        self.decoded = self.prefilled = self.cached = self.preemptions = self.aborts = 0


class Engine:
    """See the module. Every method lets time flow to its ``now`` first; after changes, call ``settle``."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.capacity = spec.kv_capacity
        self.costs = _scaled(spec.costs, 1 / spec.speed)
        self.cache = Cache(whole=spec.eviction == "whole", control=spec.kv_control)
        self.totals = Totals()
        self.paused = False
        self.requests: dict[str, Request] = {}
        """Queued and running, by trajectory."""
        self.running = 0
        self._chunk = spec.prefill_chunk
        self._limit = spec.kv_capacity * (1 - spec.watermark)
        self._arrivals = 0
        self._queue: list[tuple[tuple[int, int], int, Request]] = []
        self._prefills: deque[Request] = deque()
        self._ends: list[tuple[float, int, Request]] = []
        self._pushes = 0
        self._now = 0.0
        self._tau = 0.0
        self._decoding = 0
        # Over decoding sequences, sums of (own tokens - tau) and of (context - tau): with decoding * tau added, the KV
        # that is their own, and what a step reads.
        self._own = 0.0
        self._context = 0.0
        self._reserved = 0
        """Own tokens of sequences whose prompt is being computed."""

    # --- what there is ------------------------------------------------------------------------------------
    @property
    def kv_running(self) -> float:
        """Tokens held by running requests."""
        return self._own + self._decoding * self._tau + self._reserved + self.cache.pinned

    @property
    def queued(self) -> int:
        return len(self.requests) - self.running

    # --- time -----------------------------------------------------------------------------------------------
    def advance(self, now: float) -> None:
        """Let everything flow until ``now``."""
        span = now - self._now
        if span <= 0:
            return
        self._now = now
        if self.paused:
            self.totals.paused_s += span
        elif self._decoding:
            self._flow(span, self._steps_in(span))
        elif self.running:
            self._flow(span, 0.0)

    def next_at(self) -> float | None:
        """When something happens by itself next, unless something else does before; None = never."""
        if self.paused or not self.running:
            return None
        if not self._decoding:
            first = self._prefills[0]
            return self._now + first.todo * first.work_s
        return self._now + self._time_for(self._steps_to_change())

    def fire(self, now: float) -> list[Request]:
        """That moment has come: what ended. (Prompts that are computed and preemptions stay inside.)"""
        if self._decoding:
            # By the exact number of steps, whatever rounding says of the time.
            span, self._now = now - self._now, now
            self._flow(span, self._steps_to_change())
        else:
            self.advance(now)
        ended = self._collect()
        while self._prefills and self._prefills[0].todo <= 1e3 * _STEP:
            self._decode(self._prefills.popleft())
        while self._decoding and self._room() <= _STEP * self._decoding:
            self._preempt()
        return ended

    # --- requests -------------------------------------------------------------------------------------------
    def submit(self, request: Request, urgency: int, now: float) -> None:
        """Queue a request; ``settle`` admits it."""
        most = request.context + request.left
        if most > self.capacity:
            raise RequestTooLarge(f"{request.trajectory} needs {most} tokens of KV, {self.name} has {self.capacity}")
        self.advance(now)
        self._arrivals += 1
        request.key = (-urgency if self.spec.priority_queue else 0, self._arrivals)
        if not self.spec.prefix_cache:
            request.branches, request.path, request.shared = (), (), 0
        self.requests[request.trajectory] = request
        self._enqueue(request)

    def abort(self, trajectory: str, now: float) -> Request | None:
        """Stop its request wherever it is: what it generated is kept, its KV idles. None if there is none."""
        self.advance(now)
        request = self.requests.pop(trajectory, None)
        if request is None:
            return None
        self.totals.aborts += 1
        if request.state == "queued":
            request.queued_s += self._now - request.since
        else:
            self._stop(request)
        request.state = "ended"
        return request

    def settle(self, now: float) -> None:
        """After any change: evict what no longer fits and admit what may run."""
        self.advance(now)
        self._evict()
        if self.paused:
            return
        queue = self._queue
        while queue and self.running < self.spec.slots:
            request = queue[0][2]
            if request.state == "queued":
                if not self._fits(request):
                    return
                self._start(request)
                self._evict()
            heapq.heappop(queue)

    def pause(self, now: float) -> None:
        self.advance(now)
        self.paused = True

    def resume(self, now: float) -> None:
        self.advance(now)
        self.paused = False

    def news(self, now: float) -> list[tuple[str, int]]:
        """Tokens that each request decoded since this was last asked; those without any are left out."""
        self.advance(now)
        told = []
        for trajectory, request in self.requests.items():
            tokens = request.generated + (self._decoded(request) if request.state == "decode" else 0)
            if tokens > request.reported:
                told.append((trajectory, tokens - request.reported))
                request.reported = tokens
        return told

    def receive(self, trajectory: str, path: Path, own: int, now: float) -> bool:
        """Take KV from another worker. False, and nothing happens, if it does not fit beside the running requests."""
        self.advance(now)
        if self.kv_running + own + self.cache.newly_pinned(path) > self.capacity:
            return False
        self.cache.insert(trajectory, path, own)
        return True

    def abort_all(self, now: float) -> list[Request]:
        """Abort everything and forget the cache; the requests in order of arrival."""
        self.advance(now)
        requests = sorted(self.requests.values(), key=lambda r: r.key[1])
        for request in requests:
            self.abort(request.trajectory, now)
        self.cache.flush()
        return requests

    # --- the flow -------------------------------------------------------------------------------------------
    def _flow(self, span: float, steps: float) -> None:
        """``steps`` go by in ``span`` seconds; with nothing decoding, prompts alone are computed for as long."""
        totals, decoding, cache = self.totals, self._decoding, self.cache
        held = self._own + decoding * self._tau + self._reserved + cache.pinned + decoding * steps / 2
        if self._prefills:
            first = self._prefills[0]
            tokens = steps * self._chunk if decoding else span / first.work_s
            first.todo = max(0.0, first.todo - tokens)
            totals.prefill_s += tokens * first.work_s
        self._tau += steps
        resident = held + cache.idle
        totals.busy_s += span
        totals.running_s += span * self.running
        totals.kv_s += span * held
        totals.resident_s += span * (resident if resident < self.capacity else self.capacity)

    def _step_s(self) -> float:
        """What the next step takes."""
        costs, decoding = self.costs, self._decoding
        prefill = self._chunk * self._prefills[0].work_s if self._prefills else 0.0
        return costs.step_s(decoding, self._context + decoding * self._tau) + prefill

    def _time_for(self, steps: float) -> float:
        return (self._step_s() + self.costs.step_kv_token_s * self._decoding * steps / 2) * steps

    def _steps_in(self, span: float) -> float:
        """The inverse of ``_time_for``, in the form that does not cancel."""
        first = self._step_s()
        return 2 * span / (first + math.sqrt(first * first + 2 * self.costs.step_kv_token_s * self._decoding * span))

    def _steps_to_change(self) -> float:
        """Until a sequence ends, a prompt is computed, or KV runs out."""
        ends = self._ends
        end, _, first = ends[0]
        while end != first.end or first.state != "decode":
            heapq.heappop(ends)
            end, _, first = ends[0]
        steps = min(end - self._tau, self._room() / self._decoding)
        if self._prefills:
            steps = min(steps, self._prefills[0].todo / self._chunk)
        return max(0.0, steps)

    def _room(self) -> float:
        """Tokens that running requests may still take before one must be preempted."""
        return self.capacity - self.kv_running

    # --- admission ------------------------------------------------------------------------------------------
    def _enqueue(self, request: Request) -> None:
        request.state = "queued"
        request.since = self._now
        self._pushes += 1
        heapq.heappush(self._queue, (request.key, self._pushes, request))

    def _fits(self, request: Request) -> bool:
        if not self.running:
            return True
        after = self.kv_running + request.own
        if after > self._limit:
            return False
        after += self.cache.newly_pinned(request.path)
        # Without any room to grow (watermark 0) it would be preempted at this very instant, for ever.
        return after < self.capacity and after <= self._limit

    def _start(self, request: Request) -> None:
        """Admit: find what is cached, take room for the rest, queue its computation."""
        found = self.cache.occupy(request.trajectory, request.path)
        request.prefix, request.epoch = found.node, self.cache.epoch
        request.lacking, request.missing = found.lacking, request.shared - found.path
        # An engine computes the last token whatever it has cached: it needs its logits.
        cached = min(found.path + found.own, request.context - 1)
        cached -= cached % self.spec.page_tokens
        request.total = request.context - cached
        request.todo = float(request.total)
        request.work_s = self.costs.prefill_s(request.total, cached) / request.total
        request.cached += cached
        request.found = cached if request.found is None else request.found
        self.totals.cached += cached
        self._enter(request, "prefill")
        self.running += 1
        self._reserved += request.own
        self._prefills.append(request)

    def _decode(self, request: Request) -> None:
        """Its prompt is computed."""
        self._count_computed(request)
        self._enter(request, "decode")
        self._reserved -= request.own
        self._decoding += 1
        self._own += request.own - self._tau
        self._context += request.context - self._tau
        request.start, request.end = self._tau, self._tau + request.left
        self._pushes += 1
        heapq.heappush(self._ends, (request.end, self._pushes, request))

    def _enter(self, request: Request, state: Literal["prefill", "decode"]) -> None:
        span = self._now - request.since
        if state == "prefill":
            request.queued_s += span
        else:
            request.prefill_s += span
        request.state, request.since = state, self._now

    def _evict(self) -> None:
        excess = self.kv_running + self.cache.idle - self.capacity
        if excess > 0:
            self.cache.evict(excess)

    # --- ends -----------------------------------------------------------------------------------------------
    def _collect(self) -> list[Request]:
        """The decoding sequences that are done."""
        ended = []
        while self._ends and self._ends[0][0] <= self._tau + _STEP:
            end, _, request = heapq.heappop(self._ends)
            if request.state == "decode" and request.end == end:
                ended.append(request)
        for request in ended:
            self._stop(request, decoded=request.left)
            request.state = "ended"
            del self.requests[request.trajectory]
        return ended

    def _decoded(self, request: Request) -> int:
        """Of an unfinished sequence: tokens since it began to decode; the last one is left to do, so that whoever
        resumes it has something to ask for."""
        return min(request.left - 1, int(self._tau - request.start + _STEP))

    def _preempt(self) -> None:
        running = (r for r in self.requests.values() if r.state != "queued")
        victim = max(running, key=lambda r: r.key)
        self.totals.preemptions += 1
        victim.preemptions += 1
        self._stop(victim, drop=self.spec.preempted_kv == "dropped")
        self._enqueue(victim)

    def _stop(self, request: Request, *, decoded: int | None = None, drop: bool = False) -> None:
        """A running request leaves the batch; its KV idles (``drop``: not what it decoded)."""
        self.running -= 1
        uncomputed: Sequence[tuple[Node, int]] = ()
        if request.state == "decode":
            if decoded is None:
                decoded = self._decoded(request)
            own = request.own + (0 if drop else decoded)
            self._leave_decoding(request)
            self._count_decoded(request, decoded)
        else:
            computed = request.computed
            found = request.own - (request.total - request.missing)
            own = max(0, found + max(0, computed - request.missing))
            uncomputed = self._pass_on(request, computed)
            self._count_computed(request)
            request.prefill_s += self._now - request.since
            self._prefills.remove(request)
            self._reserved -= request.own
        kept = own if self.spec.prefix_cache else 0
        onwards = request.onwards(kept)
        self.cache.vacate(request.trajectory, request.prefix, kept, request.epoch, uncomputed, onwards)
        request.prefix = None
        request.follow()

    def _leave_decoding(self, request: Request) -> None:
        request.decode_s += self._now - request.since
        self._decoding -= 1
        if self._decoding:
            self._own -= request.own - request.start
            self._context -= request.context - request.start
        else:
            self._own = self._context = self._tau = 0.0
            self._ends.clear()

    def _pass_on(self, request: Request, computed: int) -> list[tuple[Node, int]]:
        """What a stopped request did not compute of its path falls to the next ones that wait for it. What falls to
        nobody."""
        left = []
        for node, tokens in request.lacking:
            done = min(computed, tokens)
            computed -= done
            if done < tokens:
                left.append((node, tokens - done))
        return [(node, tokens) for node, tokens in reversed(left) if not self._inherited(request, node, tokens)]

    def _inherited(self, request: Request, node: Node, tokens: int) -> bool:
        for heir in self._prefills:
            if heir is not request and heir.prefix is not None and node in heir.prefix.up():
                heir.total += tokens
                heir.missing += tokens
                heir.todo += tokens
                heir.lacking.insert(0, (node, tokens))
                heir.work_s = self.costs.prefill_s(heir.total, heir.context - heir.total) / heir.total
                return True
        return False

    def _count_decoded(self, request: Request, tokens: int) -> None:
        self.totals.decoded += tokens
        request.generated += tokens
        request.context += tokens
        request.left -= tokens

    def _count_computed(self, request: Request) -> None:
        self.totals.prefilled += request.computed
        request.prefilled += request.computed


def _scaled(costs: EngineCosts, factor: float) -> EngineCosts:
    """The same work at another speed; a transfer is the network's."""
    return msgspec.structs.replace(
        costs,
        step_base_s=costs.step_base_s * factor,
        step_sequence_s=costs.step_sequence_s * factor,
        step_kv_token_s=costs.step_kv_token_s * factor,
        prefill_token_s=costs.prefill_token_s * factor,
        prefill_token_context_s=costs.prefill_token_context_s * factor,
    )
