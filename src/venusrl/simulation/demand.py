"""What a set of groups asks of the hardware at least, whoever schedules it.

Owns: ``Hardware`` (the fleet as one relaxed machine), ``Demand`` (a group's least use of each resource) and
``fluid_s``, the least time in which the fleet can carry a set of demands. Must not know: policies, the window,
the trainer. The derivation, step by step, is in ``docs/simulation.md``.

Guarantees: every figure errs towards less, so that no schedule of ``engine``'s model can beat it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.scenario import EngineSpec, FleetSpec, SandboxSpec, Script, TrainerSpec

PRICES = tuple(i / 32 for i in range(33))
"""Weights of engine time against KV. Any weight gives a valid bound; a finer grid only finds a better one."""


# --- the hardware -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hardware:
    """The fleet as one machine. ``costs``: those of the first engine; a worker of speed s does in a second at most
    what takes s seconds there. ``fastest``: per coefficient, the least of all engines."""

    costs: EngineCosts
    fastest: EngineCosts
    total_speed: float
    top_speed: float
    kv_total: float
    kv_largest: float
    slots_largest: int


def hardware(fleet: FleetSpec) -> Hardware:
    own = [_scaled(engine) for engine in fleet.engines]
    reference = own[0]
    speeds = [_speed(reference, costs) for costs in own]
    return Hardware(
        costs=_costs(_coefficients(reference)),
        fastest=_costs([min(values) for values in zip(*map(_coefficients, own), strict=True)]),
        total_speed=sum(speeds),
        top_speed=max(speeds),
        kv_total=float(sum(engine.kv_capacity for engine in fleet.engines)),
        kv_largest=float(max(engine.kv_capacity for engine in fleet.engines)),
        slots_largest=max(engine.slots for engine in fleet.engines),
    )


def _coefficients(costs: EngineCosts) -> list[float]:
    return [
        costs.step_base_s,
        costs.step_sequence_s,
        costs.step_kv_token_s,
        costs.prefill_token_s,
        costs.prefill_token_context_s,
    ]


def _costs(coefficients: Sequence[float]) -> EngineCosts:
    return EngineCosts(*coefficients)


def _scaled(engine: EngineSpec) -> EngineCosts:
    return _costs([value / engine.speed for value in _coefficients(engine.costs)])


def _speed(reference: EngineCosts, own: EngineCosts) -> float:
    """The most reference seconds of any kind of work that one second of this worker can be worth."""
    pairs = zip(_coefficients(reference), _coefficients(own), strict=True)
    return max((math.inf if mine == 0 else theirs / mine for theirs, mine in pairs if theirs > 0), default=1.0)


# --- demands ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Demand:
    """One group's least use of everything. Engine seconds are the reference engine's.

    ``engine_s``: prefill of what no cache can hold, and each sampled token's own share of its decode step.
    ``tokens``: sampled. ``own_contexts``: sum over decode steps of the sequence's KV beyond the group's shared prefix.
    ``prefill_kv_s``: token-seconds of KV while prefilling. ``gap_ratios``: tool gaps, by KV token-seconds that holding
    costs per engine second that it saves, ascending; ``gap_hold`` and ``gap_refill`` sum the token-seconds of the
    first i and the engine seconds of the others.
    """

    engine_s: float
    tokens: int
    own_contexts: float
    prefill_kv_s: float
    gap_ratios: tuple[float, ...]
    gap_hold: tuple[float, ...]
    gap_refill: tuple[float, ...]
    started_s: float
    """From its first dispatch to its last verdict, alone on the fastest engine."""
    opened_s: float
    """The same from its opening: set-up included."""
    loaded_s: float
    """The same from its opening when no worker takes it before it has loaded the newest weights."""
    train_s: float
    """Of the trainer, without the fixed part of a step."""
    sandbox_s: float
    """Memory-seconds of sandboxes that no pause can save."""
    setup_s: float


def demand(members: Sequence[Script], machine: Hardware, trainer: TrainerSpec, load_s: float = 0.0) -> Demand:
    """Of one group. ``load_s``: how long a worker takes to load weights."""
    parts = [_trajectory(script, machine) for script in members]
    # Where more is shared than that, other groups may have computed it.
    shared = max(script.shared_prefix if script.branches is None else 0 for script in members)
    gaps = sorted(gap for part in parts for gap in part.gaps)
    refills = list(accumulate((gap.refill_s for gap in reversed(gaps)), initial=0.0))[::-1]
    shared_s = machine.fastest.prefill_s(shared)
    started = _group_latency([part.alone_s for part in parts], shared_s)
    opened = _group_latency([s.setup_s + p.alone_s for s, p in zip(members, parts, strict=True)], shared_s)
    loaded = _group_latency([max(load_s, s.setup_s) + p.alone_s for s, p in zip(members, parts, strict=True)], shared_s)
    lengths = [script.length for script in members]
    return Demand(
        engine_s=machine.costs.prefill_s(shared) + sum(part.engine_s for part in parts),
        tokens=sum(script.generated for script in members),
        own_contexts=sum(part.own_contexts for part in parts),
        prefill_kv_s=sum(part.prefill_kv_s for part in parts),
        gap_ratios=tuple(gap.ratio for gap in gaps),
        gap_hold=tuple(accumulate((gap.hold_kv_s for gap in gaps), initial=0.0)),
        gap_refill=tuple(refills),
        started_s=started,
        opened_s=opened,
        loaded_s=loaded,
        train_s=trainer.step_s(lengths) - trainer.fixed_s,
        sandbox_s=sum(_sandbox_s(script) * script.sandbox_memory for script in members),
        setup_s=sum(script.setup_s for script in members),
    )


def _group_latency(members: Sequence[float], shared_s: float) -> float:
    """The slowest member; and whoever computes the shared prefix needs that and all of its own."""
    return max(max(members), shared_s + min(members))


def _sandbox_s(script: Script) -> float:
    return script.setup_s + script.verify_s + sum(turn.tool_s for turn in script.turns[:-1])


@dataclass(frozen=True, slots=True, order=True)
class _Gap:
    """One tool call: hold the KV through it (``hold_kv_s`` token-seconds more than the prefill would take), or
    prefill again (``refill_s`` engine seconds)."""

    ratio: float
    hold_kv_s: float
    refill_s: float


@dataclass(slots=True)
class _Trajectory:
    engine_s: float = 0.0
    own_contexts: float = 0.0
    prefill_kv_s: float = 0.0
    alone_s: float = 0.0
    gaps: list[_Gap] = field(default_factory=list)


def _trajectory(script: Script, machine: Hardware) -> _Trajectory:
    """Sums over its turns. What it shares is left to others: its own part follows that."""
    costs, fastest, shared = machine.costs, machine.fastest, _shared(script)
    total = _Trajectory()
    last = len(script.turns) - 1
    for number, (turn, (known, context)) in enumerate(zip(script.turns, _prompts(script), strict=True)):
        new = context - known
        prefill_s = costs.prefill_s(new, known)
        total.engine_s += prefill_s
        total.prefill_kv_s += prefill_s * (known - shared + new / 2) / machine.top_speed
        total.alone_s += fastest.prefill_s(new, known)
        steps = turn.generated
        contexts = decode_contexts(context, steps)
        total.engine_s += costs.step_sequence_s * steps + costs.step_kv_token_s * contexts
        total.own_contexts += max(0.0, contexts - shared * steps)
        total.alone_s += (fastest.step_base_s + fastest.step_sequence_s) * steps + fastest.step_kv_token_s * contexts
        if number < last:
            total.alone_s += turn.tool_s
            gap = _gap(context + steps, turn.tool_s, shared, machine)
            if gap is not None:
                total.gaps.append(gap)
    total.alone_s += script.verify_s
    return total


def _shared(script: Script) -> int:
    """Tokens at its beginning that others may compute for it."""
    return script.shared_prefix if script.branches is None else sum(branch.tokens for branch in script.branches)


def _prompts(script: Script) -> Iterator[tuple[int, int]]:
    """Of each turn: tokens of its prompt that a cache may hold by then, and all of them."""
    before, added, shared = 0, script.prompt, _shared(script)
    for turn in script.turns:
        context = before + added
        yield min(context, max(before, shared)), context
        before, added = context + turn.generated, turn.observation


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a trajectory from the request of a turn on. ``alone_s``: at least, its KV at hand, alone on the
    fastest engine. ``engine_s``: reference engine seconds without the fixed part of its ``tokens`` decode steps."""

    alone_s: float
    engine_s: float
    tokens: int


def remaining(script: Script, machine: Hardware) -> tuple[Rest, ...]:
    """For each turn; one more for the end of the last."""
    costs, fastest = machine.costs, machine.fastest
    prompts = list(_prompts(script))
    rests = [Rest(script.verify_s, 0.0, 0)]
    for number in reversed(range(len(script.turns))):
        turn, after, (known, context) = script.turns[number], rests[-1], prompts[number]
        steps = turn.generated
        decode_s = (fastest.step_base_s + fastest.step_sequence_s) * steps
        decode_s += fastest.step_kv_token_s * decode_contexts(context, steps)
        tool_s = turn.tool_s if number + 1 < len(script.turns) else 0.0
        engine_s = costs.prefill_s(context - known, known) + costs.step_sequence_s * steps
        engine_s += costs.step_kv_token_s * decode_contexts(context, steps)
        rests.append(Rest(after.alone_s + decode_s + tool_s, after.engine_s + engine_s, after.tokens + steps))
    return tuple(reversed(rests))


def decode_contexts(context: int, generated: int) -> float:
    """Sum of a sequence's contexts over the decode steps of one turn, from ``context`` on."""
    return generated * context + generated * (generated - 1) / 2


def _gap(context: int, tool_s: float, shared: int, machine: Hardware) -> _Gap | None:
    """None if holding costs nothing, or nothing that a re-prefill would not cost as well."""
    own = context - shared
    if own <= 0:
        return None
    refill_s = machine.costs.prefill_s(own, shared)
    hold_kv_s = own * (tool_s - refill_s / machine.top_speed / 2)
    if hold_kv_s <= 0:
        return None
    return _Gap(hold_kv_s / refill_s if refill_s > 0 else math.inf, hold_kv_s, refill_s)


# --- the fluid bound ------------------------------------------------------------------------------------------
class Prices:
    """Each group's cost, in seconds of the whole fleet, under many weights of engine time against KV.

    For any weight, the sum of the costs of a set of groups is a lower bound on the time that the fleet needs for it.
    """

    def __init__(self, demands: Sequence[Demand], machine: Hardware) -> None:
        self._costs = {
            weight: [
                [price.of(demand) for demand in demands]
                for price in (_Price.by_capacity(machine, weight), _Price.by_slots(machine, weight))
            ]
            for weight in PRICES
        }

    def least_s(self, groups: range, number: int, weights: Sequence[float] = PRICES) -> float:
        """The least time for any ``number`` of these groups."""
        return max(_least([costs[g] for g in groups], number) for weight in weights for costs in self._costs[weight])


def _least(costs: list[float], number: int) -> float:
    return sum(costs) if number >= len(costs) else sum(heapq.nsmallest(number, costs))


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds of the whole fleet that a unit of each resource costs under one weight."""

    engine_s: float
    kv_s: float
    own_context: float
    """A decode step's fixed part, shared by as many sequences as pays best, for each token of context in it."""
    token: float
    threshold: float
    """Gaps of a lower ratio are held."""

    def of(self, demand: Demand) -> float:
        held = bisect_right(demand.gap_ratios, self.threshold)
        return (
            self.engine_s * (demand.engine_s + demand.gap_refill[held])
            + self.kv_s * (demand.prefill_kv_s + demand.gap_hold[held])
            + self.own_context * demand.own_contexts
            + self.token * demand.tokens
        )

    @classmethod
    def by_capacity(cls, machine: Hardware, weight: float) -> _Price:
        """A step's contexts fit the largest KV."""
        return cls._make(machine, weight, steps_least=1 / machine.kv_largest, token=0.0)

    @classmethod
    def by_slots(cls, machine: Hardware, weight: float) -> _Price:
        """A step's sequences fit the slots; the KV that they hold together is left out."""
        engine = weight / machine.total_speed
        token = engine * machine.costs.step_base_s / machine.slots_largest
        return cls._make(machine, weight, steps_least=None, token=token)

    @classmethod
    def _make(cls, machine: Hardware, weight: float, *, steps_least: float | None, token: float) -> _Price:
        engine, kv = weight / machine.total_speed, (1 - weight) / machine.kv_total
        base = kv * machine.costs.step_base_s / machine.top_speed
        if steps_least is not None:
            base += _steps(
                engine * machine.costs.step_base_s, kv * machine.costs.step_kv_token_s / machine.top_speed, steps_least
            )
        return cls(engine, kv, base, token, engine / kv if kv > 0 else math.inf)


def _steps(per_step: float, per_reciprocal: float, least: float) -> float:
    """min over r >= least of per_step * r + per_reciprocal / r: decode steps for each token of context."""
    best = math.sqrt(per_reciprocal / per_step) if per_step > 0 else math.inf
    if math.isinf(best):
        return 0.0
    r = max(least, best)
    return per_step * r + per_reciprocal / r if r > 0 else 0.0


# --- sandboxes ------------------------------------------------------------------------------------------------
def sandboxes_s(demands: Iterable[Demand], spec: SandboxSpec) -> float:
    """The least time for their sandboxes: memory, and set-ups at once."""
    demands = list(demands)
    memory = sum(d.sandbox_s for d in demands) / spec.memory if spec.memory else 0.0
    setups = sum(d.setup_s for d in demands) / spec.setups_at_once if spec.setups_at_once else 0.0
    return max(memory, setups)
