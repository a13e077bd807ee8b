"""One run: what shapes it, and what is kept of it.

Owns: ``Run`` and its key, ``Record`` (one JSON line), and carrying a run out. Must not know: which runs are compared.

Guarantees: runs of equal key give equal records (but for ``cpu_s``): the key is a hash of the scenario, the arm, the
seed and the code that decides (everything of ``scheduling`` and ``simulation`` but the suites). A run that fails
leaves a record too, with its error; nothing is left out.
"""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

import venusrl
from venusrl.simulation.bound import bound
from venusrl.simulation.results import Result
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import Scenario
from venusrl.simulation.suites.arms import Arm, predictor, prepare
from venusrl.simulation.suites.cells import mean_context
from venusrl.simulation.suites.forecasts import Ranks
from venusrl.simulation.suites.stragglers import idle_by_phase
from venusrl.simulation.truth import TrueLengths
from venusrl.simulation.workloads.drift import Drift


class Run(msgspec.Struct, frozen=True):
    """One simulation to do. ``trace``: keep the time lines, for the figures. ``purpose``: measure or tune."""

    cell: str
    scenario: Scenario
    arm: Arm
    seed: int
    trace: bool = False
    purpose: str = "measure"

    @property
    def key(self) -> str:
        shape = [_code(), self.scenario, self.arm, self.seed, self.trace]
        return hashlib.blake2b(msgspec.json.encode(shape), digest_size=12).hexdigest()


class Trace(msgspec.Struct, frozen=True):
    """Time lines of one run, thinned."""

    at: list[float]
    kv_running: list[float]
    kv_resident: list[float]
    running: list[int]
    held: list[int]
    queued: list[int]
    blocked: list[tuple[float, float, str]]
    """Begin, end and reason of the trainer's idle stretches."""
    steps: list[tuple[float, float]]
    """Begin and end of the trainer's steps."""


class Record(msgspec.Struct, frozen=True):
    """What is kept of a run. Times in simulated seconds; ``idle_s`` by reason; ``kv_*`` are means over time of shares
    of the fleet's capacity."""

    key: str
    cell: str
    arm: str
    seed: int
    purpose: str = "measure"
    error: str = ""
    concurrency: int | None = None
    time_s: float = 0.0
    steps: int = 0
    throughput: float = 0.0
    steady_throughput: float = 0.0
    trained_tokens: int = 0
    trainer_busy_s: float = 0.0
    trainer_idle_s: float = 0.0
    idle_s: dict[str, float] = {}
    idle_phases_s: dict[str, float] = {}
    """By what each batch's last trajectory spent its life on: see ``stragglers``."""
    ranks: dict[int, float] = {}
    """Where lengths shift and the policy forecasts them: rank correlation by steps since the shift (``forecasts``)."""
    hit_rate: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    migrations: int = 0
    kv_running: float = 0.0
    kv_resident: float = 0.0
    staleness: dict[int, int] = {}
    group_completion_s: float = 0.0
    longest_hold_s: float = 0.0
    holds_s: dict[str, float] = {}
    pressure: float = 0.0
    """Working set of a full window over the fleet's KV."""
    bound_s: float = 0.0
    bound_parts: dict[str, float] = {}
    events: int = 0
    cpu_s: float = 0.0
    trace: Trace | None = None


def execute(run: Run) -> Record:
    """Carry the run out; a failure of it becomes the record's error."""
    began = time.process_time()
    try:
        facts = _facts(run.scenario, run.seed)
        scenario, policy = prepare(run.arm, run.scenario, run.seed)
        # What takes a hundred times the least possible will not end.
        scenario = msgspec.structs.replace(scenario, max_sim_s=100 * facts.bound_s + 1e5, keep_trajectories=True)
        ranks = _ranks(run)
        result = simulate(scenario, policy, run.seed, ranks)
    except Exception as error:  # noqa: BLE001 - one contestant's fault must not take the others' results
        return Record(run.key, run.cell, run.arm.name, run.seed, run.purpose, f"{type(error).__name__}: {error}")
    found = _record(run, result, facts, time.process_time() - began)
    return found if ranks is None else msgspec.structs.replace(found, ranks=ranks.correlations())


def _ranks(run: Run) -> Ranks | None:
    """Who scores the forecasts: for our own policies, where lengths shift."""
    workload, config = run.scenario.workload, run.scenario.scheduler
    if not isinstance(workload, Drift) or not run.arm.ours:
        return None
    truth = TrueLengths(workload, run.seed)
    step = config.batch_groups * config.group_size
    return Ranks(predictor(run.arm, run.scenario, run.seed), truth, shift=workload.at, step=step)


def _record(run: Run, result: Result, facts: Facts, cpu_s: float) -> Record:
    idle: dict[str, float] = {}
    for stretch in result.blocked:
        idle[stretch.reason] = idle.get(stretch.reason, 0.0) + stretch.end - stretch.begin
    spans = [group.completed_at - group.opened_at for group in result.groups]
    return Record(
        key=run.key,
        cell=run.cell,
        arm=run.arm.name,
        seed=run.seed,
        purpose=run.purpose,
        concurrency=run.arm.concurrency,
        time_s=result.time_s,
        steps=len(result.steps),
        throughput=result.throughput,
        steady_throughput=result.steady_throughput,
        trained_tokens=result.trained_tokens,
        trainer_busy_s=result.trainer_busy_s,
        trainer_idle_s=result.trainer_idle_s,
        idle_s=idle,
        idle_phases_s=idle_by_phase(result),
        hit_rate=result.hit_rate,
        prefill_tokens=result.prefill_tokens,
        decode_tokens=result.decode_tokens,
        preemptions=result.preemptions,
        migrations=sum(engine.migrated_in for engine in result.engines),
        kv_running=_mean([engine.mean_kv for engine in result.engines]),
        kv_resident=_mean([engine.mean_resident for engine in result.engines]),
        staleness=result.staleness,
        group_completion_s=_mean(spans),
        longest_hold_s=max((hold.longest_s for hold in result.holds.values()), default=0.0),
        holds_s={reason: hold.total_s for reason, hold in result.holds.items()},
        pressure=facts.pressure,
        bound_s=facts.bound_s,
        bound_parts=facts.bound_parts,
        events=result.events.loop + result.events.scheduler,
        cpu_s=cpu_s,
        trace=_trace(result) if run.trace else None,
    )


def _trace(result: Result) -> Trace:
    series = result.series
    return Trace(
        at=series.at,
        kv_running=series.kv_running,
        kv_resident=series.kv_resident,
        running=series.running,
        held=series.held,
        queued=series.queued,
        blocked=[(b.begin, b.end, b.reason) for b in result.blocked],
        steps=[(step.began_at, step.trained_at) for step in result.steps],
    )


@cache
def _code() -> str:
    """A hash of the code that decides a run's outcome."""
    root = Path(venusrl.__file__).parent
    files = [*(root / "scheduling").rglob("*.py"), *(root / "simulation").rglob("*.py"), root / "types.py"]
    found = hashlib.blake2b(digest_size=12)
    for file in sorted(files):
        if "suites" not in file.relative_to(root).parts:
            found.update(file.read_bytes())
    return found.hexdigest()


class Facts(NamedTuple):
    """What holds for every arm."""

    bound_s: float
    bound_parts: dict[str, float]
    pressure: float


_FACTS: dict[tuple[bytes, int], Facts] = {}


def _facts(scenario: Scenario, seed: int) -> Facts:
    """Of the scenario as it stands for every arm; the last few are kept, since a process meets each one often."""
    key = (msgspec.json.encode(scenario), seed)
    if key not in _FACTS:
        if len(_FACTS) >= 16:
            _FACTS.clear()
        found, config = bound(scenario, seed), scenario.scheduler
        working_set = config.window * config.group_size * mean_context(scenario.workload)
        pressure = working_set / sum(engine.kv_capacity for engine in scenario.fleet.engines)
        _FACTS[key] = Facts(found.time_s, found.parts, pressure)
    return _FACTS[key]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
