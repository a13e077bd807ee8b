"""A suite's figures as text: the rows of the terminal's table and the report in Markdown.

Owns: how figures are written. Must not know: how they come about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from venusrl.simulation.suites.analysis import Analysis, CellAnalysis, Entry, Goal, goals
from venusrl.simulation.suites.arms import FAMILY, OFF, VENUS
from venusrl.simulation.suites.cells import Suite
from venusrl.simulation.suites.statistics import Ratio

COLUMNS = (
    "cell",
    "policy",
    "limit",
    "time s",
    "tokens/s",
    "steady",
    "venus is",
    "95%",
    "of bound",
    "idle",
    "hits",
    "KV",
)
RIGHT = COLUMNS[2:]


def rows(analysis: Analysis) -> list[list[str]]:
    """One row an arm and cell, fastest first."""
    return [row(cell.cell, entry) for cell in analysis.cells for entry in ranked(cell)]


def ranked(cell: CellAnalysis) -> list[Entry]:
    return sorted(cell.entries.values(), key=lambda entry: entry.time_s if entry.seeds else math.inf)


def row(cell: str, entry: Entry) -> list[str]:
    if not entry.seeds:
        return [cell, entry.arm, limit(entry), "failed", *[""] * (len(COLUMNS) - 4)]
    ratio = entry.times_venus
    return [
        cell,
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
        f"{analysis.cpu_s / 60:,.1f} minutes of CPU. Times are simulated seconds until the same ordered tasks are"
        " trained; `venus is`: its throughput over the row's, geometric mean over seeds, with a 95% interval (Student t"
        " on paired log ratios); `of bound`: the physical limit's share; `limit`: trajectories alive at once, tuned per"
        " cell on other seeds, empty = none.",
        *(f"Left out: {name}, which needs {package}." for name, package in suite.left_out.items()),
        *(f"![{name.removesuffix('.png')}]({name})" for name in figures),
        "## Goals",
        table(("cell", "goal", "figure", "wanted", "met"), [_goal(goal) for goal in goals(analysis)]),
    ]
    for cell in analysis.cells:
        parts += _cell(cell)
    parts += _tuning(analysis)
    return "\n\n".join(part for part in parts if part) + "\n"


def _goal(goal: Goal) -> list[str]:
    met = "no interval" if goal.met is None else "yes" if goal.met else "**no**"
    return [goal.cell, goal.what, f"{goal.figure:.2f}", f"{goal.wanted:.2f}", met]


def _cell(cell: CellAnalysis) -> Iterable[str]:
    yield f"## {cell.cell}"
    kind = "scarce" if cell.scarce else "not scarce"
    yield (
        f"Bound {cell.bound_s:,.0f} s, binding: {cell.binding}. The working set of a full window is "
        f"{cell.pressure:.2f} times the KV: {kind}."
    )
    yield table(COLUMNS[1:], [row("", entry)[1:] for entry in ranked(cell)])
    yield _mechanisms(cell)
    idle = [
        [
            e.arm,
            *(f"{share:.0%} {reason}" for reason, share in sorted(e.idle_by_reason.items(), key=lambda i: -i[1])[:3]),
        ]
        for e in ranked(cell)
        if e.seeds and (e.arm == VENUS or e.arm not in FAMILY)
    ]
    yield (
        "What the idle trainer waited for: " + "; ".join(f"{r[0]}: {', '.join(r[1:]) or 'nothing'}" for r in idle) + "."
    )
    errors = [f"- {entry.arm}, {error}" for entry in cell.entries.values() for error in entry.errors]
    yield "\n".join(["Failed runs:", "", *errors]) if errors else ""


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
