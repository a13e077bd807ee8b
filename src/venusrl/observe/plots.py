"""The reward-curve picture of a run.

Owns: how a history looks as a PNG. Two panels share one reward axis: over trained steps and over running
time. Must not know: where the history came from. Needs no display.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from venusrl.observe.history import EvaluationResult, History, StepPoint
from venusrl.observe.recorder import ObserveError

PLOT_FILE = "reward.png"
_TRAIN, _SAMPLED, _GREEDY, _INK = "#9aa5b1", "#0b6e99", "#d9730d", "#37352f"


def plot_rewards(history: History, path: Path, title: str) -> None:
    """Draw training reward and held-out reward (sampled with 95% interval, greedy) into ``path``."""
    if not history.steps and not history.evaluations:
        raise ObserveError(f"{title}: nothing was trained or evaluated yet, there is no curve to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: only drawing pays for it
    from matplotlib.figure import Figure

    unit, name = (60.0, "minutes") if history.wall_s < 3 * 3600 else (3600.0, "hours")
    figure = Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    _panel(by_step, history, lambda p: float(p.step), lambda e: float(e.version))
    _panel(by_time, history, lambda p: p.wall_s / unit, lambda e: e.wall_s / unit)
    by_step.set_xlabel("trained steps (weight version)")
    by_time.set_xlabel(f"running time, {name}")
    by_step.set_ylabel("mean reward")
    figure.suptitle(title, color=_INK, fontsize=12, fontweight="bold", x=0.01, ha="left")
    handles, labels = by_step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9)
    scratch = path.with_suffix(".tmp.png")
    try:
        figure.savefig(scratch)
        os.replace(scratch, path)
    except OSError as error:
        raise ObserveError(f"cannot write {path}: {error.strerror}") from error


def _panel(axes: Any, history: History, step_x: Any, evaluation_x: Any) -> None:
    points: list[StepPoint] = [p for p in history.steps if "reward/mean" in p.values]
    if points:
        x, y = [step_x(p) for p in points], [p.values["reward/mean"] for p in points]
        axes.plot(x, y, color=_TRAIN, linewidth=0.8, alpha=0.55)
        axes.plot(x, smooth(y), color=_TRAIN, linewidth=2.0, label="training (smoothed)")
    _curve(axes, history.curve("sampled"), evaluation_x, _SAMPLED, "o", "held-out, sampled (95% interval)")
    _curve(axes, history.curve("greedy"), evaluation_x, _GREEDY, "s", "held-out, greedy")
    axes.set_ylim(-0.02, max(1.02, axes.get_ylim()[1]))
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#e3e2e0", linewidth=0.8)
    axes.tick_params(colors=_INK, labelsize=9, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _curve(axes: Any, curve: Sequence[EvaluationResult], x_of: Any, color: str, marker: str, label: str) -> None:
    if not curve:
        return
    x, y = [x_of(e) for e in curve], [e.reward for e in curve]
    axes.plot(x, y, color=color, linewidth=1.8, marker=marker, markersize=5, label=label, zorder=3, clip_on=False)
    if marker == "o":  # one interval is enough to read; two would overlap
        axes.fill_between(x, [e.ci_low for e in curve], [e.ci_high for e in curve], color=color, alpha=0.15, lw=0)


def smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Centred moving mean; the window shrinks at the ends, so nothing is shifted or invented."""
    half = window // 2
    smoothed = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        near = values[i - reach : i + reach + 1]
        smoothed.append(sum(near) / len(near))
    return smoothed
