"""What a suite's records say.

Owns: ``Analysis``: per cell and arm the means, the paired ratios of venus over every other arm, the share of the bound,
the value of prediction, and whether the goals are met. Must not know: tables, pictures, how runs are carried out.

An arm that failed on some seed has no ratio there and is named in ``errors``. Throughput ratios are inverse ratios
of the time until the same groups are trained; where a policy chose other groups of the same set, of tokens a second.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from venusrl.simulation.suites.arms import FAMILY, VENUS
from venusrl.simulation.suites.records import Record, Trace
from venusrl.simulation.suites.statistics import Ratio, paired_ratio

SLIME = ("slime", "fcfs")
"""What "slime-like FIFO" means in the goals: its own mode, and the plain one that spares it the aborts."""
SCARCE = 0.87
"""Working set over KV above which KV counts as scarce: the knee that an independent study measured (0.75 to 0.87)."""
GATED = (
    "fcfs-gate",
    "rollflash",
    "thunderagent",
    "thunderagent-decay",
    "thunderagent-release",
    "thunderagent-best",
    "thunderagent-repaired",
    "continuum",
)


class Entry(msgspec.Struct, frozen=True):
    """One arm in one cell: means over the seeds that ended. ``times_venus``: throughput of venus over this arm's."""

    arm: str
    seeds: int
    concurrency: int | None
    time_s: float = 0.0
    throughput: float = 0.0
    steady_throughput: float = 0.0
    bound_share: float = 0.0
    idle_share: float = 0.0
    hit_rate: float = 0.0
    kv_running: float = 0.0
    group_completion_s: float = 0.0
    longest_hold_s: float = 0.0
    preemptions: float = 0.0
    staleness: dict[int, float] = {}
    """Shares of trajectories."""
    idle_by_reason: dict[str, float] = {}
    """Shares of time."""
    times_venus: Ratio | None = None
    errors: tuple[str, ...] = ()


class CellAnalysis(msgspec.Struct, frozen=True):
    """``pressure``: working set of a full window over the fleet's KV."""

    cell: str
    pressure: float
    binding: str
    bound_s: float
    entries: dict[str, Entry]
    traces: dict[str, Trace]

    @property
    def scarce(self) -> bool:
        return self.pressure > SCARCE


class Analysis(msgspec.Struct, frozen=True):
    suite: str
    cells: list[CellAnalysis]
    tuning: list[tuple[str, str, int | None, float]]
    """Cell, arm, limit tried, mean time: the whole grid."""
    cpu_s: float
    events: int

    def cell(self, name: str) -> CellAnalysis:
        return next(cell for cell in self.cells if cell.cell == name)


def analyse(suite: str, records: Iterable[Record]) -> Analysis:
    """Cells and arms in the order in which they first appear."""
    every = list(records)
    cells: dict[str, list[Record]] = defaultdict(list)
    grid: dict[tuple[str, str, int | None], list[float]] = defaultdict(list)
    for record in every:
        if record.purpose == "measure":
            cells[record.cell].append(record)
        else:
            grid[record.cell, record.arm, record.concurrency].append(
                record.time_s if not record.error else float("inf")
            )
    return Analysis(
        suite=suite,
        cells=[_cell(name, found) for name, found in cells.items()],
        tuning=[(*place, statistics.fmean(times)) for place, times in grid.items()],
        cpu_s=sum(record.cpu_s for record in every),
        events=sum(record.events for record in every),
    )


def _cell(name: str, records: Sequence[Record]) -> CellAnalysis:
    by_arm: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_arm[record.arm].append(record)
    ours = {r.seed: r for r in by_arm.get(VENUS, []) if not r.error}
    good = [r for r in records if not r.error]
    parts = {
        part: statistics.fmean(r.bound_parts[part] for r in good) for part in (good[0].bound_parts if good else ())
    }
    return CellAnalysis(
        cell=name,
        pressure=statistics.fmean(r.pressure for r in good) if good else 0.0,
        binding=max(parts, key=lambda part: parts[part], default=""),
        bound_s=statistics.fmean(r.bound_s for r in good) if good else 0.0,
        entries={arm: _entry(arm, found, ours) for arm, found in by_arm.items()},
        traces={r.arm: r.trace for r in good if r.trace is not None},
    )


def _entry(arm: str, records: Sequence[Record], ours: dict[int, Record]) -> Entry:
    good = [r for r in records if not r.error]
    errors = tuple(f"seed {r.seed}: {r.error}" for r in records if r.error)
    if not good:
        return Entry(arm, 0, records[0].concurrency, errors=errors)
    pairs = [(ours[r.seed], r) for r in good if r.seed in ours]
    ratio = paired_ratio([a.throughput for a, _ in pairs], [b.throughput for _, b in pairs]) if pairs else None

    def mean(name: str) -> float:
        return statistics.fmean(getattr(r, name) for r in good)

    return Entry(
        arm=arm,
        seeds=len(good),
        concurrency=good[0].concurrency,
        time_s=mean("time_s"),
        throughput=mean("throughput"),
        steady_throughput=mean("steady_throughput"),
        bound_share=statistics.fmean(r.bound_s / r.time_s for r in good),
        idle_share=statistics.fmean(r.trainer_idle_s / r.time_s for r in good),
        hit_rate=mean("hit_rate"),
        kv_running=mean("kv_running"),
        group_completion_s=mean("group_completion_s"),
        longest_hold_s=max(r.longest_hold_s for r in good),
        preemptions=mean("preemptions"),
        staleness=_shares([r.staleness for r in good]),
        idle_by_reason=_mean_shares([{k: v / r.time_s for k, v in r.idle_s.items()} for r in good]),
        times_venus=ratio if arm != VENUS else None,
        errors=errors,
    )


def _shares(counts: Sequence[dict[int, int]]) -> dict[int, float]:
    total = sum(sum(found.values()) for found in counts) or 1
    return {lag: sum(found.get(lag, 0) for found in counts) / total for lag in sorted({k for c in counts for k in c})}


def _mean_shares(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    return {k: statistics.fmean(s.get(k, 0.0) for s in shares) for k in sorted({k for s in shares for k in s})}


class Goal(msgspec.Struct, frozen=True):
    """One of the aims in one cell. ``met``: None where single seeds allow no interval."""

    cell: str
    what: str
    figure: float
    wanted: float
    met: bool | None


def goals(analysis: Analysis) -> list[Goal]:
    """What the project set out to show, cell by cell, met or not."""
    found = []
    for cell in analysis.cells:
        found += list(_against_all(cell))
        if cell.scarce:
            found += list(_where_scarce(cell))
        if (ours := cell.entries.get(VENUS)) is not None and ours.seeds:
            wanted = 0.8 if cell.scarce else 0.95
            found.append(Goal(cell.cell, "share of the bound", ours.bound_share, wanted, ours.bound_share >= wanted))
        found += list(_prediction(cell))
    return found


def baselines(cell: CellAnalysis) -> dict[str, Ratio]:
    """Venus over every arm that is not of its family."""
    return {a: e.times_venus for a, e in cell.entries.items() if a not in FAMILY and e.times_venus is not None}


def _against_all(cell: CellAnalysis) -> Iterable[Goal]:
    ratios = baselines(cell)
    if ratios:
        arm, worst = min(ratios.items(), key=lambda item: item[1].low or item[1].mean)
        met = None if worst.low is None else worst.low >= 0.98
        yield Goal(cell.cell, f"lower 95% bound against the best baseline ({arm})", worst.low or worst.mean, 0.98, met)


def _where_scarce(cell: CellAnalysis) -> Iterable[Goal]:
    ratios = baselines(cell)
    fifo = [ratios[a].mean for a in SLIME if a in ratios]
    gated = [ratios[a].mean for a in GATED if a in ratios]
    if fifo:
        yield Goal(cell.cell, "gain over slime-like FIFO where KV is scarce", min(fifo), 2.5, min(fifo) >= 2.5)
    if gated:
        yield Goal(
            cell.cell, "gain over the best gated baseline where KV is scarce", min(gated), 1.3, min(gated) >= 1.3
        )


def _prediction(cell: CellAnalysis) -> Iterable[Goal]:
    constant = cell.entries.get("constant")
    if constant is None or constant.times_venus is None:
        return
    learned = cell.entries.get("learned")
    if learned is not None and learned.times_venus is not None:
        figure = constant.times_venus.mean / learned.times_venus.mean
        yield Goal(cell.cell, "learned over constant prediction", figure, 0.98, figure >= 0.98)
    figure = constant.times_venus.mean
    yield Goal(cell.cell, "sibling heuristic over constant prediction", figure, 0.98, figure >= 0.98)
