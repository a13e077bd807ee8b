"""Every baseline at its best number of live trajectories, chosen cell by cell.

Owns: the grid, and which of its points wins. Must not know: how runs are carried out.

The grid is relative to what the KV holds: the number of trajectories whose mean context fills the fleet once, and
multiples of it, besides no limit at all. Points that the window makes idle are left out, so where KV is not scarce
there is nothing to tune. Seeds are not those that are measured, and the shortest total time wins; ties go to the larger
number. Venus and its kin are not tuned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from venusrl.simulation.suites.arms import Arm
from venusrl.simulation.suites.cells import GROUP, TUNING_SEED, Cell, Suite, mean_context
from venusrl.simulation.suites.records import Record, Run

LEVELS = (0.5, 0.75, 1.0, 1.5, 2.0)
QUICK_LEVELS = (1.0,)
GATES = ("thunderagent",)
"""Arms whose policy limits by itself what lives at once; the quick version does not tune them."""

Tuned = dict[tuple[str, str], int | None]
"""By cell and arm."""


def grid(cell: Cell, *, quick: bool) -> list[int | None]:
    """Limits to try in this cell, no limit first."""
    config, engines = cell.scenario.scheduler, cell.scenario.fleet.engines
    fills = sum(engine.kv_capacity for engine in engines) / mean_context(cell.scenario.workload)
    limits = [max(GROUP, round(level * fills)) for level in (QUICK_LEVELS if quick else LEVELS)]
    return [None, *(limit for limit in limits if limit < config.window * config.group_size)]


def tuning_runs(suite: Suite, *, quick: bool) -> list[Run]:
    """Everything to run before the baselines' limits are known."""
    seeds = [TUNING_SEED] if quick else [TUNING_SEED, TUNING_SEED + 1]
    runs = []
    for cell in suite.cells:
        limits = grid(cell, quick=quick)
        for contestant in suite.arms if suite.tuned and len(limits) > 1 else ():
            if not contestant.ours and not (quick and contestant.policy.startswith(GATES)):
                runs += [
                    Run(cell.name, cell.scenario, limited(contestant, n), s, purpose="tune")
                    for n in limits
                    for s in seeds
                ]
    return runs


def choose(records: Iterable[Record]) -> Tuned:
    """The limit of each tuned arm in each cell: where all seeds ended, and in the least time."""
    times: dict[tuple[str, str], dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    for record in records:
        if record.purpose == "tune":
            took = record.time_s if not record.error else float("inf")
            times[record.cell, record.arm][record.concurrency] += took
    return {place: min(by, key=lambda n: (by[n], -(n or 1 << 30))) for place, by in times.items()}


def limited(contestant: Arm, limit: int | None) -> Arm:
    return msgspec.structs.replace(contestant, concurrency=limit)
