"""How the pictures look: families of arms with a colour and a mark each, axes, legends.

Owns: the palette (Okabe and Ito's, which colour-blind people can tell apart; marks and line styles differ too) and what
all pictures share. Must not know: which figures are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from venusrl.simulation.suites.analysis import CellAnalysis, Entry
from venusrl.simulation.suites.arms import VENUS

OURS, INK, FAINT = "#0072B2", "#2b2b2b", "#e3e2e0"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#8c8c8c")
A_ROW = 10
"""Cells side by side at most; more go into further rows."""


class Family(NamedTuple):
    """Modes of one system. Pictures show the best of them in each cell."""

    label: str
    arms: tuple[str, ...]
    colour: str
    mark: str
    line: str = "-"


FAMILIES = (
    Family("slime", ("slime", "slime-one-step-off"), "#E69F00", "s", "--"),
    Family("ROLL Flash", ("rollflash", "rollflash-agentic"), "#D55E00", "^", ":"),
    Family("Continuum", ("continuum",), "#CC79A7", "v", "-."),
    Family(
        "ThunderAgent",
        ("thunderagent", "thunderagent-decay", "thunderagent-release", "thunderagent-best"),
        "#009E73",
        "o",
        "--",
    ),
    Family("ThunderAgent, repaired", ("thunderagent-repaired",), "#56B4E9", "P", "-"),
    Family("plain FIFO", ("fcfs", "fcfs-gate", "windowed-fifo"), "#8c8c8c", "X", "-."),
)
VENUS_FAMILY = Family("venus", (VENUS,), OURS, "D")
TRUE_LENGTHS = Family("venus, true lengths", ("oracle",), "#000000", "*", ":")


def best(cell: CellAnalysis, family: Family) -> Entry | None:
    """The family's fastest arm that ended."""
    found = [entry for arm in family.arms if (entry := cell.entries.get(arm)) is not None and entry.seeds]
    return min(found, key=lambda entry: entry.time_s, default=None)


def present(cells: Iterable[CellAnalysis], families: Iterable[Family]) -> list[Family]:
    every = list(cells)
    return [family for family in families if any(best(cell, family) for cell in every)]


def panels(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Any, list[Any]]:
    """A figure without a display, and its axes row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: only drawing pays for it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    every = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in every:
        axes.grid(color=FAINT, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=8, length=3)
        axes.xaxis.label.set_size(9)
        axes.yaxis.label.set_size(9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, every


def rows_of(cells: Sequence[CellAnalysis]) -> list[Sequence[CellAnalysis]]:
    """Cells in rows of about equal length."""
    count = -(-len(cells) // A_ROW)
    length = -(-len(cells) // count)
    return [cells[at : at + length] for at in range(0, len(cells), length)]


def cells_below(axes: Any, cells: Sequence[CellAnalysis]) -> None:
    """The cells' names, each with its working set over KV."""
    crowded = len(cells) > 6
    names = [f"{cell.cell}\n({cell.pressure:.2f} x KV)" for cell in cells]
    axes.set_xticks(
        range(len(cells)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center", fontsize=8
    )
    axes.grid(visible=False, axis="x")
    for at in range(1, len(cells)):
        axes.axvline(at - 0.5, color=FAINT, linewidth=0.7)
    axes.set_xlim(-0.5, len(cells) - 0.5)


def legend(figure: Any, handles: Sequence[Any]) -> None:
    """Above all axes, in as many columns as fit the longest name."""
    inches = 0.075 * max((len(handle.get_label()) for handle in handles), default=0) + 0.75
    columns = max(1, int(figure.get_figwidth() / inches))
    place = {"loc": "outside upper center", "ncols": min(len(handles), columns)}
    figure.legend(handles=handles, frameon=False, fontsize=8, handlelength=2.6, **place)


def marked(family: Family) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=family.colour, marker=family.mark, linestyle="", markersize=6, label=family.label)


def lined(family: Family) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=family.colour, linestyle=family.line, linewidth=2, label=family.label)


def patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)
