"""What the project set out to show, cell by cell: met or not.

Owns: the aims and how they are judged. Must not know: tables, pictures, how the figures come about.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from venusrl.simulation.suites.analysis import Analysis, CellAnalysis
from venusrl.simulation.suites.arms import FAMILY, VENUS
from venusrl.simulation.suites.forecasts import BEFORE
from venusrl.simulation.suites.statistics import Ratio

SLIME = ("slime", "fcfs")
"""What "slime-like FIFO" means in the goals: its own mode, and the plain one that spares it the aborts."""
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
PLENTY = 0.755
"""Working set over KV up to which no order of turns should matter (0.75, and what sampling the mean context adds)."""
_RECOVERED = 0.9
"""Of the rank correlation before the shift: one step's worth of forecasts has a standard error of about a tenth."""


class Goal(msgspec.Struct, frozen=True):
    """One of the aims in one cell. ``met``: None where single seeds allow no interval. ``against``: the arm that the
    figure is taken against, where that is one of several; ``most``: what the physical limit would gain over that arm,
    so that nothing more can be asked of any policy."""

    cell: str
    what: str
    figure: float
    wanted: float
    met: bool | None
    against: str = ""
    most: float | None = None


def goals(analysis: Analysis) -> list[Goal]:
    """All that can be judged from these arms."""
    judges = (_against_all, _where_scarce, _where_plenty, _of_the_limit, _prediction, _after_a_shift)
    return [goal for cell in analysis.cells for judge in judges for goal in judge(cell)]


def baselines(cell: CellAnalysis) -> dict[str, Ratio]:
    """Venus over every arm that is not of its family."""
    return {a: e.times_venus for a, e in cell.entries.items() if a not in FAMILY and e.times_venus is not None}


def _against_all(cell: CellAnalysis) -> Iterable[Goal]:
    ratios = baselines(cell)
    if ratios:
        arm, worst = min(ratios.items(), key=lambda item: item[1].low or item[1].mean)
        met = None if worst.low is None else worst.low >= 0.98
        yield Goal(cell.cell, "over every baseline, lower bound", worst.low or worst.mean, 0.98, met, arm)


def _where_scarce(cell: CellAnalysis) -> Iterable[Goal]:
    for what, arms, wanted in (("over slime-like FIFO", SLIME, 2.5), ("over the best gate", GATED, 1.3)):
        gains = {a: ratio.mean for a, ratio in baselines(cell).items() if a in arms}
        if cell.scarce and gains:
            least = min(gains, key=lambda a: gains[a])
            most = 1 / cell.entries[least].bound_share
            yield Goal(cell.cell, what, gains[least], wanted, gains[least] >= wanted, least, most)


def _where_plenty(cell: CellAnalysis) -> Iterable[Goal]:
    plain = baselines(cell).get("fcfs")
    if cell.pressure <= PLENTY and plain is not None:
        yield Goal(cell.cell, "no gain where KV is plenty (within 2%)", plain.mean, 1.0, abs(plain.mean - 1) <= 0.02)


def _of_the_limit(cell: CellAnalysis) -> Iterable[Goal]:
    ours = cell.entries.get(VENUS)
    if ours is not None and ours.seeds:
        wanted = 0.8 if cell.scarce else 0.95
        yield Goal(cell.cell, "share of the limit", ours.bound_share, wanted, ours.bound_share >= wanted)


def _prediction(cell: CellAnalysis) -> Iterable[Goal]:
    for what, arm in (("learned over constant lengths", "learned"), ("heuristic over constant lengths", VENUS)):
        entry = cell.entries.get(arm)
        if entry is not None and entry.over_constant is not None:
            figure = entry.over_constant.mean
            yield Goal(cell.cell, what, figure, 0.98, figure >= 0.98)


def _after_a_shift(cell: CellAnalysis) -> Iterable[Goal]:
    for what, arm in (
        ("heuristic ranks one step after the shift", VENUS),
        ("learned ranks one step after the shift", "learned"),
    ):
        ranks = cell.entries[arm].ranks if arm in cell.entries else {}
        if BEFORE in ranks and 1 in ranks:
            wanted = _RECOVERED * ranks[BEFORE]
            yield Goal(cell.cell, what, ranks[1], wanted, ranks[1] >= wanted)
    learned = cell.entries.get("learned")
    if learned is not None and learned.ranks and learned.times_venus is not None:
        figure = 1 / learned.times_venus.mean
        yield Goal(cell.cell, "learned over heuristic after a shift", figure, 1.0, round(figure, 2) >= 1.0)
