"""A suite's pictures.

Owns: how an analysis looks: speed-up by cell, time lines of the trainer and of the KV, staleness, share of the bound,
ablation, value of prediction. Must not know: how figures come about. Needs no display.

Guarantees: what was not measured is not drawn; ``draw`` names the files that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from venusrl.simulation.suites.analysis import Analysis, CellAnalysis, Entry
from venusrl.simulation.suites.arms import FAMILY, OFF, VENUS

OURS, INK, FAINT = "#0b6e99", "#37352f", "#e3e2e0"
OTHERS = ("#9aa5b1", "#d9730d", "#ad5fae", "#448361", "#c29343", "#d44c47", "#787774", "#5b97bd")
REASONS = {
    "groups": "#d9730d",
    "mandatory": "#d44c47",
    "weights": "#c29343",
    "sandboxes": "#448361",
    "engine": "#787774",
}
_FAMILIES = ("slime", "rollflash", "thunderagent", "continuum", "fcfs-gate", "windowed-fifo", "fcfs")
"""Speed-ups are drawn against the best arm of each family (its name begins so)."""


def draw(analysis: Analysis, folder: Path) -> list[str]:
    """Every picture there are figures for. Returns the names of the files."""
    pictures: tuple[tuple[str, Callable[[Analysis], Any]], ...] = (
        ("speedup.png", speedup),
        ("bound.png", bound_share),
        ("timeline.png", timeline),
        ("kv.png", kv_occupancy),
        ("staleness.png", staleness),
        ("prediction.png", prediction),
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
    bars: list[tuple[str, list[Entry | None]]] = []
    for family in _FAMILIES:
        entries = [_best(cell, family) for cell in analysis.cells]
        if any(entry is not None for entry in entries):
            bars.append((family, entries))
    if not bars:
        return None
    figure, axes = _figure(max(7.0, 1.3 * len(analysis.cells) + 2), 4.2)
    width = 0.8 / len(bars)
    for place, (family, entries) in enumerate(bars):
        drawn = [(at, e.times_venus) for at, e in enumerate(entries) if e is not None and e.times_venus is not None]
        x = [at - 0.4 + width * (place + 0.5) for at, _ in drawn]
        means = [ratio.mean for _, ratio in drawn]
        errors = [[r.mean - (r.low or r.mean) for _, r in drawn], [(r.high or r.mean) - r.mean for _, r in drawn]]
        axes.bar(x, means, width * 0.92, color=OTHERS[place % len(OTHERS)], label=f"over {family}")
        axes.errorbar(x, means, yerr=errors, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
    axes.axhline(1.0, color=INK, linewidth=0.9)
    _cells_below(axes, analysis.cells)
    axes.set_ylabel("training throughput of venus,\ntimes that of the baseline")
    figure.legend(loc="outside upper center", ncols=min(len(bars), 7), frameon=False, fontsize=8)
    return figure


def bound_share(analysis: Analysis) -> Any:
    """How near each arm comes to what is physically possible."""
    figure, axes = _figure(max(7.0, 1.1 * len(analysis.cells) + 2), 4.2)
    shown = [VENUS, *(a for a in _arms(analysis) if a not in FAMILY and not a.startswith(OFF))]
    for place, arm in enumerate(shown):
        points = [(i, c.entries[arm].bound_share) for i, c in enumerate(analysis.cells) if _has(c, arm)]
        colour = OURS if arm == VENUS else OTHERS[place % len(OTHERS)]
        style = {"marker": "D", "s": 52, "zorder": 3} if arm == VENUS else {"marker": "o", "s": 20}
        axes.scatter([x for x, _ in points], [y for _, y in points], color=colour, label=arm, **style)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    _cells_below(axes, analysis.cells)
    axes.set_ylabel("share of the physical limit")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def timeline(analysis: Analysis) -> Any:
    """Who blocked the trainer, and when, in the cell where that differs most."""
    cell = _most_telling(analysis)
    if cell is None:
        return None
    arms = _drawn_arms(cell)
    figure, axes = _figure(9.5, 0.5 * len(arms) + 1.6)
    seen: dict[str, None] = {}
    for line, arm in enumerate(arms):
        trace = cell.traces[arm]
        axes.broken_barh([(b, e - b) for b, e in trace.steps], (line - 0.4, 0.8), color=OURS)
        for begin, end, reason in trace.blocked:
            seen.setdefault(reason)
            axes.broken_barh([(begin, end - begin)], (line - 0.4, 0.8), color=_reason_colour(reason, seen), alpha=0.75)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel(f"simulated seconds, {cell.cell}, seed 0")
    handles = [_patch(OURS, "training"), *(_patch(_reason_colour(r, seen), f"idle: {r}") for r in seen)]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5), frameon=False, fontsize=8)
    return figure


def kv_occupancy(analysis: Analysis) -> Any:
    """Share of the KV that running requests hold, over time."""
    cell = _most_telling(analysis)
    if cell is None:
        return None
    figure, axes = _figure(9.5, 3.6)
    for place, arm in enumerate(_drawn_arms(cell)):
        trace = cell.traces[arm]
        colour, width = (OURS, 2.0) if arm == VENUS else (OTHERS[place % len(OTHERS)], 1.0)
        axes.plot(trace.at, _smooth(trace.kv_running), color=colour, linewidth=width, label=arm)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.set_xlabel(f"simulated seconds, {cell.cell}, seed 0")
    axes.set_ylabel("KV of running requests")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def staleness(analysis: Analysis) -> Any:
    """Trained trajectories by staleness, for the cells that allow any."""
    cells = [c for c in analysis.cells if any(len(e.staleness) > 1 or any(e.staleness) for e in c.entries.values())][:6]
    if not cells:
        return None
    figure, grid = _figure(2.6 * len(cells) + 1, 4.0, columns=len(cells), share=True)
    for axes, cell in zip(grid, cells, strict=True):
        arms = [a for a in _drawn_arms(cell, traced=False) if _has(cell, a)]
        left = [0.0] * len(arms)
        for lag in sorted({lag for a in arms for lag in cell.entries[a].staleness}):
            shares = [cell.entries[a].staleness.get(lag, 0.0) for a in arms]
            axes.barh(arms, shares, left=left, color=_shade(lag), label=str(lag) if axes is grid[-1] else None)
            left = [x + share for x, share in zip(left, shares, strict=True)]
        axes.set_title(cell.cell, fontsize=9, color=INK)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    grid[0].invert_yaxis()
    handles = [_patch(_shade(lag), f"staleness {lag}") for lag in range(3)]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def prediction(analysis: Analysis) -> Any:
    """What knowing lengths is worth: the family's throughput over that of ``constant``."""
    kinds = [arm for arm in FAMILY if arm != "constant" and any(_has(c, arm) for c in analysis.cells)]
    cells = [c for c in analysis.cells if all(_has(c, arm) for arm in ("constant", *kinds))]
    if len(kinds) < 2 or not cells:
        return None
    figure, axes = _figure(max(7.0, 1.1 * len(cells) + 2), 3.8)
    width = 0.8 / len(kinds)
    for place, arm in enumerate(kinds):
        x = [at - 0.4 + width * (place + 0.5) for at in range(len(cells))]
        worth = [c.entries["constant"].time_s / c.entries[arm].time_s - 1 for c in cells]
        axes.bar(x, worth, width * 0.92, color=OURS if arm == VENUS else OTHERS[place], label=arm)
    axes.axhline(0.0, color=INK, linewidth=0.9)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:+.0%}")
    _cells_below(axes, cells)
    axes.set_ylabel("throughput against constant prediction")
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False, fontsize=8)
    return figure


def ablation(analysis: Analysis) -> Any:
    """What each mechanism gives: venus over venus without it."""
    switches = [arm for arm in _arms(analysis) if arm.startswith(OFF)]
    if not switches:
        return None
    figure, axes = _figure(7.5, 0.42 * len(switches) * max(1, len(analysis.cells) / 2) + 1.6)
    height = 0.8 / len(analysis.cells)
    for place, cell in enumerate(analysis.cells):
        drawn = [(i, e.times_venus) for i, a in enumerate(switches) if (e := cell.entries.get(a)) and e.times_venus]
        y = [i - 0.4 + height * (place + 0.5) for i, _ in drawn]
        gains = [ratio.mean - 1 for _, ratio in drawn]
        errors = [[r.mean - (r.low or r.mean) for _, r in drawn], [(r.high or r.mean) - r.mean for _, r in drawn]]
        axes.barh(y, gains, height * 0.92, xerr=errors, color=OTHERS[place], ecolor=INK, label=cell.cell)
    axes.set_yticks(range(len(switches)), [arm.removeprefix(OFF) for arm in switches])
    axes.invert_yaxis()
    axes.axvline(0.0, color=INK, linewidth=0.9)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.0%}")
    axes.set_xlabel("throughput that the mechanism adds")
    figure.legend(loc="outside upper center", ncols=min(4, len(analysis.cells)), frameon=False, fontsize=8)
    return figure


# --- parts ---------------------------------------------------------------------------------------------------
def _figure(width: float, height: float, *, columns: int = 1, share: bool = False) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: only drawing pays for it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, sharey=share)
    for each in [axes] if columns == 1 else axes:
        each.grid(axis="both" if columns == 1 else "x", color=FAINT, linewidth=0.7)
        each.set_axisbelow(True)
        each.tick_params(colors=INK, labelsize=8, length=3)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    # One column is a list too where panels are asked for.
    return figure, [axes] if share and columns == 1 else axes


def _cells_below(axes: Any, cells: Sequence[CellAnalysis]) -> None:
    names = [f"{cell.cell}\nKV x{cell.pressure:.2f}" for cell in cells]
    axes.set_xticks(
        range(len(cells)), names, rotation=35 if len(cells) > 7 else 0, ha="right" if len(cells) > 7 else "center"
    )


def _arms(analysis: Analysis) -> list[str]:
    return list(dict.fromkeys(arm for cell in analysis.cells for arm in cell.entries))


def _has(cell: CellAnalysis, arm: str) -> bool:
    return arm in cell.entries and cell.entries[arm].seeds > 0


def _best(cell: CellAnalysis, family: str) -> Entry | None:
    exact = family in ("fcfs", "fcfs-gate", "windowed-fifo")
    found = [
        e
        for a, e in cell.entries.items()
        if e.seeds and e.times_venus and (a == family if exact else a.startswith(family))
    ]
    return min(found, key=lambda e: e.time_s, default=None)


def _drawn_arms(cell: CellAnalysis, *, traced: bool = True) -> list[str]:
    """Venus, and the best arm of each family."""
    best = [entry.arm for family in _FAMILIES if (entry := _best(cell, family)) is not None]
    return [a for a in dict.fromkeys([VENUS, *best]) if (not traced or a in cell.traces) and a in cell.entries]


def _most_telling(analysis: Analysis) -> CellAnalysis | None:
    """The traced cell under the highest pressure."""
    return max((c for c in analysis.cells if c.traces), key=lambda c: c.pressure, default=None)


def _smooth(values: Sequence[float], reach: int = 4) -> list[float]:
    out = []
    for i in range(len(values)):
        near = values[max(0, i - reach) : i + reach + 1]
        out.append(sum(near) / len(near))
    return out


def _reason_colour(reason: str, seen: dict[str, None]) -> str:
    return REASONS.get(reason) or OTHERS[list(seen).index(reason) % len(OTHERS)]


def _shade(lag: int) -> str:
    return ("#cfe3ec", "#6aa9c6", OURS, "#084c6b")[min(lag, 3)]


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)
