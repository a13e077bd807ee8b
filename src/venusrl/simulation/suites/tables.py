"""A suite's figures as text: the rows of the terminal's table and the report in Markdown.

Owns: how figures are written. Must not know: how they come about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from venusrl.simulation.suites.analysis import Analysis, CellAnalysis, Entry
from venusrl.simulation.suites.arms import FAMILY, OFF, VENUS
from venusrl.simulation.suites.cells import Suite
from venusrl.simulation.suites.forecasts import BEFORE
from venusrl.simulation.suites.goals import Goal, goals
from venusrl.simulation.suites.statistics import Ratio

COLUMNS = ("policy", "limit", "time s", "tokens/s", "steady", "venus is", "95%", "of limit", "idle", "hits", "KV")
RIGHT = COLUMNS[1:]
BRIEF = ("policy", "limit", "time s", "venus is", "95%", "of limit", "idle", "hits")
"""What fits a terminal of 80 columns."""
_FIGURES = (
    "Times are simulated seconds until the same ordered tasks are trained. *limit*: trajectories alive at once, tuned"
    " per cell on other seeds; empty = none. *tokens/s*: trained tokens over the whole run, *steady* without the first"
    " step. *venus is*: its throughput over the row's, geometric mean over seeds, with a 95% interval (Student t on"
    " paired log ratios). *of limit*: share of the physical limit. *idle*: share of time in which the trainer idled."
    " *hits*: share of prompt tokens found in a cache. *KV*: share of the fleet's KV that running turns held, mean over"
    " time."
)


def brief(cell: CellAnalysis) -> list[list[str]]:
    """One row an arm, fastest first, of the columns ``BRIEF``."""
    return [[shown for name, shown in zip(COLUMNS, row(e), strict=True) if name in BRIEF] for e in ranked(cell)]


def ranked(cell: CellAnalysis) -> list[Entry]:
    return sorted(cell.entries.values(), key=lambda entry: entry.time_s if entry.seeds else math.inf)


def row(entry: Entry) -> list[str]:
    """Of the columns ``COLUMNS``."""
    if not entry.seeds:
        return [entry.arm, limit(entry), "failed", *[""] * (len(COLUMNS) - 3)]
    ratio = entry.times_venus
    return [
        entry.arm,
        limit(entry),
        f"{entry.time_s:,.0f}",
        f"{entry.throughput:,.0f}",
        f"{entry.steady_throughput:,.0f}",
        "" if ratio is None else f"{ratio.mean:.2f}x",
        interval(ratio),
        f"{entry.bound_share:.0%}",
        f"{entry.idle_share:.0%}",
        f"{entry.hit_rate:.0%}",
        f"{entry.kv_running:.0%}",
    ]


def limit(entry: Entry) -> str:
    return "" if entry.concurrency is None else str(entry.concurrency)


def interval(ratio: Ratio | None) -> str:
    return "" if ratio is None or ratio.low is None else f"{ratio.low:.2f}..{ratio.high:.2f}"


def report(suite: Suite, analysis: Analysis, command: str, figures: Sequence[str]) -> str:
    """The whole report."""
    parts = [
        f"# {suite.name}: {suite.about}",
        f"`{command}`: {suite.seeds} paired seeds, {analysis.events / 1e6:,.1f} million events, "
        f"{analysis.cpu_s / 60:,.1f} minutes of CPU.",
        _FIGURES,
        *(f"Left out: {name}, which needs {package}." for name, package in suite.left_out.items()),
        *(f"![{name.removesuffix('.png')}]({name})" for name in figures),
        *_goals(goals(analysis)),
    ]
    for cell in analysis.cells:
        parts += _cell(cell)
    parts += _tuning(analysis)
    return "\n\n".join(part for part in parts if part) + "\n"


def _goals(found: Sequence[Goal]) -> Iterable[str]:
    """A row a cell, a column a goal."""
    if not found:
        return
    yield "## Goals"
    yield (
        "Each figure with what was aimed at; bold where that is missed; `?` where a single seed allows no interval;"
        " *the limit*: what the physical limit would gain there, the most that any policy can."
    )
    places = {(goal.cell, goal.what): goal for goal in found}
    aims = list(dict.fromkeys(goal.what for goal in found))
    cells = dict.fromkeys(goal.cell for goal in found)
    lines = [[cell, *(_goal(places.get((cell, aim))) for aim in aims)] for cell in cells]
    yield table(("cell", *aims), lines)


def _goal(goal: Goal | None) -> str:
    if goal is None:
        return ""
    figure = f"{goal.figure:.2f}"
    shown = f"{figure}?" if goal.met is None else figure if goal.met else f"**{figure}**"
    notes = [goal.against] if goal.against else []
    if goal.most is not None:
        notes.append(f"the limit: {goal.most:.2f}")
    return f"{shown} of {goal.wanted:.2f}" + (f" ({', '.join(notes)})" if notes else "")


def _cell(cell: CellAnalysis) -> Iterable[str]:
    yield f"## {cell.cell}"
    kind = "scarce" if cell.scarce else "not scarce"
    yield (
        f"Limit {cell.bound_s:,.0f} s; what binds: {cell.binding}. The working set of a full window is "
        f"{cell.pressure:.2f} times the KV: {kind}."
    )
    yield table(COLUMNS, [row(entry) for entry in ranked(cell)])
    yield _mechanisms(cell)
    yield _ranks(cell)
    yield _idle(cell)
    errors = [f"- {entry.arm}, {error}" for entry in cell.entries.values() for error in entry.errors]
    yield "\n".join(["Failed runs:", "", *errors]) if errors else ""


def _idle(cell: CellAnalysis) -> str:
    """Why the trainer idled, and what the last trajectory of each batch did meanwhile."""
    shown = [e for e in ranked(cell) if e.seeds and e.idle_by_phase and (e.arm == VENUS or e.arm not in FAMILY)]
    if not shown:
        return ""
    phases = list(shown[0].idle_by_phase)
    reasons = sorted({reason for e in shown for reason in e.idle_by_reason})
    lines = [
        [e.arm, *(_percent(e.idle_by_reason.get(r)) for r in reasons), *(_percent(e.idle_by_phase[p]) for p in phases)]
        for e in shown
    ]
    head = table(("policy", *(f"for {reason}" for reason in reasons), *phases), lines)
    return f"Shares of time in which the trainer idled; by what the last trajectory of each batch lived for:\n\n{head}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _ranks(cell: CellAnalysis) -> str:
    """Forecasts after a shift of lengths."""
    shown = [e for e in cell.entries.values() if e.ranks]
    steps = sorted({step for e in shown for step in e.ranks})
    if not shown:
        return ""
    head = ("rank correlation of forecast and true turns", *("before" if s == BEFORE else f"step {s}" for s in steps))
    lines = [[e.arm, *(f"{e.ranks[s]:.2f}" if s in e.ranks else "" for s in steps)] for e in shown]
    return table(head, lines)


def _mechanisms(cell: CellAnalysis) -> str:
    """What venus with everything gains over venus without one thing."""
    lines = [
        [name.removeprefix(OFF), f"{e.times_venus.mean:.3f}x", interval(e.times_venus)]
        for name, e in cell.entries.items()
        if name.startswith(OFF) and e.times_venus is not None
    ]
    return table(("mechanism", "venus over venus without it", "95%"), lines) if lines else ""


def _tuning(analysis: Analysis) -> Iterable[str]:
    if not analysis.tuning:
        return
    yield "## Tuning grid"
    yield "Seconds with each limit on the tuning seeds; the least wins."
    lines: dict[tuple[str, str], list[str]] = {}
    for cell, arm, tried, took in analysis.tuning:
        lines.setdefault((cell, arm), []).append(f"{'none' if tried is None else tried}: {took:,.0f}")
    yield table(("cell", "policy", "limit: seconds"), [[*place, ", ".join(found)] for place, found in lines.items()])


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "| " + " | ".join(columns) + " |"
    return "\n".join([head, "|" + "---|" * len(columns), *("| " + " | ".join(line) + " |" for line in lines)])
