"""A suite's pictures.

Owns: what is drawn of an analysis: speed-up by cell, share of the limit, where the time went, time lines of the trainer
and of the KV, staleness, ablation, value of prediction, forecasts after a shift. Must not know: how figures come about,
colours and marks (``look``). Needs no display.

Guarantees: what was not measured is not drawn; ``draw`` names the files that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from venusrl.simulation.suites import look
from venusrl.simulation.suites.analysis import Analysis, CellAnalysis, Entry
from venusrl.simulation.suites.arms import FAMILY, OFF, VENUS
from venusrl.simulation.suites.forecasts import BEFORE
from venusrl.simulation.suites.look import FAMILIES, INK, OURS, PALETTE, TRUE_LENGTHS, VENUS_FAMILY
from venusrl.simulation.suites.statistics import Ratio
from venusrl.simulation.suites.stragglers import PHASES

REASONS = {
    "groups": ("#E69F00", "idle: too few groups are complete"),
    "mandatory": ("#D55E00", "idle: for a group at its staleness limit"),
    "weights": ("#CC79A7", "idle: workers load weights"),
    "sandboxes": ("#009E73", "idle: no sandboxes"),
    "engine": ("#8c8c8c", "idle: no worker"),
}
_PHASES = dict(zip(PHASES, ("#D55E00", "#E69F00", "#56B4E9", "#c9c9c9", "#009E73", "#CC79A7"), strict=True))
_SHADES = ("#dceaf3", "#9cc5de", "#4b93bf", "#0b4f7c")
_NAMES = {VENUS: "venus (sibling heuristic)", "learned": "learned", "shuffled": "shuffled", "oracle": "true lengths"}


def draw(analysis: Analysis, folder: Path) -> list[str]:
    """Every picture there are figures for. Returns the names of the files."""
    pictures: tuple[tuple[str, Callable[[Analysis], Any]], ...] = (
        ("speedup.png", speedup),
        ("bound.png", bound_share),
        ("where.png", where_time_went),
        ("timeline.png", timeline),
        ("kv.png", kv_occupancy),
        ("staleness.png", staleness),
        ("prediction.png", prediction),
        ("drift.png", ranks),
        ("ablation.png", ablation),
    )
    written = []
    for name, make in pictures:
        figure = make(analysis)
        if figure is not None:
            figure.savefig(folder / name)
            written.append(name)
    return written


def speedup(analysis: Analysis) -> Any:
    """Venus over the best arm of each family, cell by cell, with intervals."""
    families = look.present(analysis.cells, FAMILIES)
    if not families or not any(_has(cell, VENUS) for cell in analysis.cells):
        return None
    rows = look.rows_of(analysis.cells)
    figure, every = look.panels(len(rows), 1, max(7.0, 1.35 * len(rows[0]) + 1.5), 0.6 + 3.4 * len(rows), sharey=True)
    for axes, cells in zip(every, rows, strict=True):
        for place, family in enumerate(families):
            found = [(at, look.best(cell, family)) for at, cell in enumerate(cells)]
            points = [(at, e.times_venus) for at, e in found if e is not None and e.times_venus is not None]
            _intervals(axes, points, _beside(place, len(families)), family.colour, family.mark)
        axes.axhline(1.0, color=INK, linewidth=0.9)
        look.cells_below(axes, cells)
        _factors(axes)
        axes.set_ylabel("training throughput of venus,\ntimes that of the baseline")
    look.legend(figure, [look.marked(family) for family in families])
    return figure


def bound_share(analysis: Analysis) -> Any:
    """How near each family's best arm comes to what is physically possible."""
    families = look.present(analysis.cells, (*FAMILIES, TRUE_LENGTHS, VENUS_FAMILY))
    rows = look.rows_of(analysis.cells)
    figure, every = look.panels(len(rows), 1, max(7.0, 1.35 * len(rows[0]) + 1.5), 0.8 + 3.2 * len(rows), sharey=True)
    for axes, cells in zip(every, rows, strict=True):
        for place, family in enumerate(families):
            points = [(at, e.bound_share) for at, cell in enumerate(cells) if (e := look.best(cell, family))]
            shift = _beside(place, len(families))
            x, y = [at + shift for at, _ in points], [share for _, share in points]
            axes.scatter(x, y, color=family.colour, marker=family.mark, s=34)
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        look.cells_below(axes, cells)
        axes.set_ylabel("share of the physical limit")
    look.legend(figure, [look.marked(family) for family in families])
    return figure


def where_time_went(analysis: Analysis) -> Any:
    """Each family's time against that of venus, split into training and what each batch's last trajectory did."""
    cells = [c for c in analysis.cells if _has(c, VENUS) and c.entries[VENUS].idle_by_phase][: look.A_ROW]
    if not cells:
        return None
    families = look.present(cells, (VENUS_FAMILY, *FAMILIES, TRUE_LENGTHS))
    figure, every = _bars(cells, families)
    for axes, cell in zip(every, cells, strict=True):
        for line, family in enumerate(families):
            entry = look.best(cell, family)
            if entry is not None:
                _split(axes, line, entry, entry.time_s / cell.entries[VENUS].time_s)
        axes.axvline(1.0, color=INK, linewidth=0.9)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    names = {"waiting": "waiting its turn", "prefill": "prefill", "decode": "decoding", "tools": "in tools"}
    names |= {"sandbox": "sandbox set-up", "verification": "being verified"}
    handles = [look.patch(OURS, "training"), *(look.patch(_PHASES[phase], names[phase]) for phase in PHASES)]
    look.legend(figure, handles)
    figure.supxlabel("time, against that of venus; idle time split by the life of each batch's last trajectory", size=9)
    return figure


def _bars(cells: Sequence[CellAnalysis], families: Sequence[look.Family]) -> tuple[Any, list[Any]]:
    """A panel a cell with a line for each family, at most three panels side by side."""
    columns = min(3, len(cells))
    rows = -(-len(cells) // columns)
    height = 0.7 + rows * (0.7 + 0.24 * len(families))
    figure, every = look.panels(rows, columns, 1.6 + 3.1 * columns, height, sharey=True)
    for axes, cell in zip(every, cells, strict=False):
        axes.set_title(cell.cell, fontsize=9, color=INK)
        axes.set_yticks(range(len(families)), [family.label for family in families])
    every[0].invert_yaxis()
    for axes in every[len(cells) :]:
        axes.set_visible(False)
    return figure, every[: len(cells)]


def _split(axes: Any, line: int, entry: Entry, length: float) -> None:
    left = 0.0
    idle = sum(entry.idle_by_phase.values())
    parts = [(OURS, 1.0 - idle), *((_PHASES[p], entry.idle_by_phase.get(p, 0.0)) for p in PHASES)]
    for colour, share in parts:
        axes.barh(line, share * length, left=left, height=0.72, color=colour)
        left += share * length


def timeline(analysis: Analysis) -> Any:
    """When the trainer worked, and why not, in the cell where KV is scarcest."""
    cell = _most_telling(analysis)
    if cell is None:
        return None
    drawn = _drawn(cell)
    figure, (axes,) = look.panels(1, 1, 9.5, 0.42 * len(drawn) + 1.5)
    seen: dict[str, None] = {}
    for line, (_, entry) in enumerate(drawn):
        trace = cell.traces[entry.arm]
        axes.broken_barh([(b / 3600, (e - b) / 3600) for b, e in trace.steps], (line - 0.36, 0.72), color=OURS, lw=0)
        for begin, end, reason in trace.blocked:
            seen.setdefault(reason)
            span = (begin / 3600, (end - begin) / 3600)
            axes.broken_barh([span], (line - 0.36, 0.72), color=_reason(reason)[0], lw=0)
    axes.set_yticks(range(len(drawn)), [label for label, _ in drawn])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"simulated hours ({cell.cell}, seed 0)")
    look.legend(figure, [look.patch(OURS, "training"), *(look.patch(*_reason(reason)) for reason in seen)])
    return figure


def kv_occupancy(analysis: Analysis) -> Any:
    """Share of the KV that running requests hold, over time, in the same cell."""
    cell = _most_telling(analysis)
    if cell is None:
        return None
    figure, (axes,) = look.panels(1, 1, 9.5, 3.6)
    shown = [family for family in (*FAMILIES, VENUS_FAMILY) if _traced(cell, family)]
    for family in shown:
        entry = look.best(cell, family)
        assert entry is not None
        trace = cell.traces[entry.arm]
        width = 2.2 if family is VENUS_FAMILY else 1.2
        hours = [at / 3600 for at in trace.at]
        axes.plot(hours, _smooth(trace.kv_running), color=family.colour, linestyle=family.line, linewidth=width)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.set_xlabel(f"simulated hours ({cell.cell}, seed 0)")
    axes.set_ylabel("fleet's KV held by running turns")
    look.legend(figure, [look.lined(family) for family in shown])
    return figure


def staleness(analysis: Analysis) -> Any:
    """Trained trajectories by staleness, for the cells that allow any."""
    cells = [c for c in analysis.cells if any(any(e.staleness) for e in c.entries.values())][:6]
    if not cells:
        return None
    families = look.present(cells, (VENUS_FAMILY, *FAMILIES))
    lags = sorted({lag for c in cells for e in c.entries.values() for lag in e.staleness})
    figure, every = _bars(cells, families)
    for axes, cell in zip(every, cells, strict=True):
        for line, family in enumerate(families):
            entry = look.best(cell, family)
            shares = [entry.staleness.get(lag, 0.0) if entry is not None else 0.0 for lag in lags]
            for place, lag in enumerate(lags):
                axes.barh(line, shares[place], left=sum(shares[:place]), height=0.72, color=_shade(lag))
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    look.legend(figure, [look.patch(_shade(lag), f"staleness {lag}") for lag in lags])
    figure.supxlabel("share of the trained trajectories", size=9)
    return figure


def prediction(analysis: Analysis) -> Any:
    """What knowing lengths is worth: the family's throughput over that of constant lengths."""
    kinds = [arm for arm in FAMILY if arm != "constant" and any(_worth(c, arm) for c in analysis.cells)]
    cells = [c for c in analysis.cells if any(_worth(c, arm) for arm in kinds)]
    if not cells:
        return None
    rows = look.rows_of(cells)
    figure, every = look.panels(len(rows), 1, max(7.0, 1.35 * len(rows[0]) + 1.5), 0.6 + 3.0 * len(rows), sharey=True)
    marks = dict(zip(FAMILY, ("D", "s", "", "X", "*"), strict=True))
    colours = {VENUS: OURS, "learned": "#E69F00", "shuffled": "#8c8c8c", "oracle": "#000000"}
    for axes, some in zip(every, rows, strict=True):
        for place, arm in enumerate(kinds):
            points = [(at, ratio) for at, cell in enumerate(some) if (ratio := _worth(cell, arm))]
            _intervals(axes, points, _beside(place, len(kinds)), colours[arm], marks[arm])
        axes.axhline(1.0, color=INK, linewidth=0.9)
        look.cells_below(axes, some)
        _factors(axes)
        axes.set_ylabel("throughput, times that\nwith constant lengths")
    handles = [look.marked(look.Family(_NAMES[arm], (arm,), colours[arm], marks[arm])) for arm in kinds]
    look.legend(figure, handles)
    return figure


def ranks(analysis: Analysis) -> Any:
    """Rank correlation of forecast and true lengths, by steps since the shift."""
    cells = [c for c in analysis.cells if any(e.ranks for e in c.entries.values())]
    if not cells:
        return None
    figure, every = look.panels(1, len(cells), 1.0 + 3.6 * len(cells), 3.4, sharey=True)
    styles = {VENUS: (OURS, "D", "-"), "learned": ("#E69F00", "s", "--"), "constant": ("#8c8c8c", "X", ":")}
    for axes, cell in zip(every, cells, strict=True):
        for arm, (colour, mark, line) in styles.items():
            found = cell.entries[arm].ranks if arm in cell.entries else {}
            axes.plot(list(found), list(found.values()), color=colour, marker=mark, linestyle=line, linewidth=1.4)
        axes.axvline(BEFORE + 0.5, color=INK, linewidth=0.9)
        axes.axhline(0.0, color=INK, linewidth=0.5)
        steps = sorted({step for arm in styles if arm in cell.entries for step in cell.entries[arm].ranks})
        axes.set_xticks(steps, ["before" if step == BEFORE else str(step) for step in steps])
        axes.set_title(cell.cell, fontsize=9, color=INK)
        axes.set_xlabel("since the shift: ended trajectories, in steps")
    every[0].set_ylabel("rank correlation of forecast\nand true remaining turns")
    shown = {arm: style for arm, style in styles.items() if any(arm in c.entries for c in cells)}
    names = _NAMES | {"constant": "constant lengths"}
    look.legend(figure, [look.marked(look.Family(names[a], (a,), c, m)) for a, (c, m, _) in shown.items()])
    return figure


def ablation(analysis: Analysis) -> Any:
    """What each mechanism gives: venus over venus without it."""
    switches = list(dict.fromkeys(arm for cell in analysis.cells for arm in cell.entries if arm.startswith(OFF)))
    if not switches:
        return None
    figure, (axes,) = look.panels(1, 1, 7.5, 0.4 * len(switches) * max(1, len(analysis.cells) / 2) + 1.5)
    marks = ("D", "s", "o", "^", "v", "P", "X", "*")
    for place, cell in enumerate(analysis.cells):
        shift = _beside(place, len(analysis.cells))
        found = [(i, e.times_venus) for i, a in enumerate(switches) if (e := cell.entries.get(a)) and e.times_venus]
        colour, mark = PALETTE[place % len(PALETTE)], marks[place % len(marks)]
        y, x = [i + shift for i, _ in found], [ratio.mean - 1 for _, ratio in found]
        axes.errorbar(x, y, xerr=_errors([ratio for _, ratio in found]), fmt=mark, color=colour, capsize=2, ms=5)
    axes.set_yticks(range(len(switches)), [arm.removeprefix(OFF).replace("_", " ") for arm in switches])
    axes.invert_yaxis()
    axes.axvline(0.0, color=INK, linewidth=0.9)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.0%}")
    axes.set_xlabel("throughput that the mechanism adds")
    shown = [
        look.Family(cell.cell, (), PALETTE[place % len(PALETTE)], marks[place % len(marks)])
        for place, cell in enumerate(analysis.cells)
    ]
    look.legend(figure, [look.marked(family) for family in shown])
    return figure


# --- parts ---------------------------------------------------------------------------------------------------
def _has(cell: CellAnalysis, arm: str) -> bool:
    return arm in cell.entries and cell.entries[arm].seeds > 0


def _worth(cell: CellAnalysis, arm: str) -> Ratio | None:
    return cell.entries[arm].over_constant if arm in cell.entries else None


def _beside(place: int, count: int) -> float:
    """Where the ``place``-th of ``count`` points stands about a whole number."""
    return 0.7 * ((place + 0.5) / count - 0.5)


def _intervals(axes: Any, points: Sequence[tuple[int, Ratio]], shift: float, colour: str, mark: str) -> None:
    ratios = [ratio for _, ratio in points]
    x, y = [at + shift for at, _ in points], [ratio.mean for ratio in ratios]
    axes.errorbar(x, y, yerr=_errors(ratios), fmt=mark, color=colour, ms=5, elinewidth=1.1, capsize=2)


def _errors(ratios: Sequence[Ratio]) -> list[list[float]]:
    return [[r.mean - (r.low or r.mean) for r in ratios], [(r.high or r.mean) - r.mean for r in ratios]]


def _factors(axes: Any) -> None:
    """A logarithmic axis with plain factors, so that twice and half are as far from 1."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}x")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _most_telling(analysis: Analysis) -> CellAnalysis | None:
    """The traced cell under the highest pressure."""
    return max((c for c in analysis.cells if c.traces), key=lambda c: c.pressure, default=None)


def _traced(cell: CellAnalysis, family: look.Family) -> bool:
    entry = look.best(cell, family)
    return entry is not None and entry.arm in cell.traces


def _drawn(cell: CellAnalysis) -> list[tuple[str, Entry]]:
    """Venus and the best arm of each family, with the name under which it is drawn."""
    found = [(f.label, look.best(cell, f)) for f in (VENUS_FAMILY, *FAMILIES) if _traced(cell, f)]
    return [(label, entry) for label, entry in found if entry is not None]


def _smooth(values: Sequence[float], reach: int = 4) -> list[float]:
    out = []
    for i in range(len(values)):
        near = values[max(0, i - reach) : i + reach + 1]
        out.append(sum(near) / len(near))
    return out


def _reason(reason: str) -> tuple[str, str]:
    return REASONS.get(reason, ("#56B4E9", f"idle: {reason}"))


def _shade(lag: int) -> str:
    return _SHADES[min(lag, len(_SHADES) - 1)]
