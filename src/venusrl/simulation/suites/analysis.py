"""What a suite's records say.

Owns: ``Analysis``: per cell and arm the means, the paired ratios of venus over every other arm, the share of the bound,
the value of prediction. Must not know: goals, tables, pictures, how runs are carried out.

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

SCARCE = 0.87
"""Working set over KV above which KV counts as scarce: the knee that an independent study measured (0.75 to 0.87)."""


class Entry(msgspec.Struct, frozen=True):
    """One arm in one cell: means over the seeds that ended. ``times_s``: each seed's time. ``times_venus``: throughput
    of venus over this arm's; ``over_constant``: this arm's over that of constant lengths."""

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
    kv_resident: float = 0.0
    prefill_tokens: float = 0.0
    group_completion_s: float = 0.0
    longest_hold_s: float = 0.0
    preemptions: float = 0.0
    staleness: dict[int, float] = {}
    """Shares of trajectories."""
    idle_by_reason: dict[str, float] = {}
    """Shares of time."""
    idle_by_phase: dict[str, float] = {}
    """Shares of time, by what each batch's last trajectory spent its life on."""
    holds_s: dict[str, float] = {}
    """Seconds for which the scheduler held turns, of all trajectories together, by reason."""
    ranks: dict[int, float] = {}
    """Rank correlation of forecast lengths, by steps since a shift."""
    times_s: dict[int, float] = {}
    times_venus: Ratio | None = None
    over_constant: Ratio | None = None
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
    ours, constant = ({r.seed: r for r in by_arm.get(name, []) if not r.error} for name in (VENUS, "constant"))
    good = [r for r in records if not r.error]
    parts = {
        part: statistics.fmean(r.bound_parts[part] for r in good) for part in (good[0].bound_parts if good else ())
    }
    return CellAnalysis(
        cell=name,
        pressure=statistics.fmean(r.pressure for r in good) if good else 0.0,
        binding=max(parts, key=lambda part: parts[part], default=""),
        bound_s=statistics.fmean(r.bound_s for r in good) if good else 0.0,
        entries={arm: _entry(arm, found, ours, constant) for arm, found in by_arm.items()},
        traces={r.arm: r.trace for r in good if r.trace is not None},
    )


def _entry(arm: str, records: Sequence[Record], ours: dict[int, Record], constant: dict[int, Record]) -> Entry:
    good = [r for r in records if not r.error]
    errors = tuple(f"seed {r.seed}: {r.error}" for r in records if r.error)
    if not good:
        return Entry(arm, 0, records[0].concurrency, errors=errors)

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
        kv_resident=mean("kv_resident"),
        prefill_tokens=mean("prefill_tokens"),
        group_completion_s=mean("group_completion_s"),
        longest_hold_s=max(r.longest_hold_s for r in good),
        preemptions=mean("preemptions"),
        staleness=_shares([r.staleness for r in good]),
        idle_by_reason=_means([_over(r.idle_s, r.time_s) for r in good]),
        idle_by_phase=_means([_over(r.idle_phases_s, r.time_s) for r in good]),
        holds_s=_means([r.holds_s for r in good]),
        ranks=_mean_ranks([r.ranks for r in good]),
        times_s={r.seed: r.time_s for r in good},
        times_venus=_paired([(ours[r.seed], r) for r in good if r.seed in ours]) if arm != VENUS else None,
        over_constant=_paired([(r, constant[r.seed]) for r in good if r.seed in constant]) if arm in FAMILY else None,
        errors=errors,
    )


def _shares(counts: Sequence[dict[int, int]]) -> dict[int, float]:
    total = sum(sum(found.values()) for found in counts) or 1
    return {lag: sum(found.get(lag, 0) for found in counts) / total for lag in sorted({k for c in counts for k in c})}


def _paired(pairs: Sequence[tuple[Record, Record]]) -> Ratio | None:
    return paired_ratio([a.throughput for a, _ in pairs], [b.throughput for _, b in pairs]) if pairs else None


def _over(seconds: dict[str, float], whole_s: float) -> dict[str, float]:
    return {k: v / whole_s for k, v in seconds.items()}


def _means(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each key over all; a key that is missing somewhere counts as 0 there."""
    return {k: statistics.fmean(f.get(k, 0.0) for f in found) for k in sorted({k for f in found for k in f})}


def _mean_ranks(found: Sequence[dict[int, float]]) -> dict[int, float]:
    """Of the seeds that have it."""
    steps = sorted({step for ranks in found for step in ranks})
    return {step: statistics.fmean(ranks[step] for ranks in found if step in ranks) for step in steps}
