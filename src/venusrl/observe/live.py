"""The run on a terminal: a live panel, or plain lines where there is no terminal.

Owns: how a ``Status`` looks. ``render`` is pure (a status in, something rich can print out); ``LiveView``
shows it. Colour never carries meaning alone; 80 columns are enough.

Must not know: the coordinator. Whoever has a status calls ``update``.

Guarantees: on a pipe each line is whole, useful by itself and rare: a new version, phase, evaluation or
reason to wait, and a sign of life otherwise; the terminal is given back as it was, whatever happens.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from venusrl.observe.status import EvaluationPoint, Status, WorkerStatus

_BARS = "▁▂▃▄▅▆▇█"
_SIGN_OF_LIFE_S = 30.0
_WIDE = 70
"""Columns from which the least needed figures are shown too."""


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` in at most ``width`` characters, on the fixed scale 0..1 (rewards); means when there are more."""
    values = [value for value in values if math.isfinite(value)]
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    buckets = [values[low:high] for low, high in itertools.pairwise(edges)]
    levels = (sum(bucket) / len(bucket) for bucket in buckets)
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(level * len(_BARS))))] for level in levels)


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def render(status: Status, width: int) -> RenderableType:
    """The whole panel for a terminal ``width`` columns wide."""
    inner = width - 4
    parts: list[RenderableType] = [_steps(status, inner), _facts(status, inner)]
    if status.workers:
        parts += [Text(), _workers(status.workers, inner)]
    if status.lines:
        parts += [Text(), *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in status.lines[-4:])]
    title = Text.assemble((" VenusRL ", "bold"), f"· {status.name} · {status.phase or 'starting'} ")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=_HINT, subtitle_align="right", width=width)


_HINT = Text(" Ctrl-C finishes cleanly ", style="dim")


def _steps(status: Status, width: int) -> RenderableType:
    left = ""
    trained = len(status.rewards)  # by this session, whose time ``elapsed_s`` is
    if trained and status.version < status.max_steps and status.phase == "training":
        left = f" · about {clock(status.elapsed_s / trained * (status.max_steps - status.version))} left"
    tail = f"  {status.version}/{status.max_steps} steps · {clock(status.elapsed_s)}{left}"
    row = Table.grid(expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, status.max_steps), completed=status.version, width=max(8, width - len(tail)))
    row.add_row(bar, tail)
    return row


def _facts(status: Status, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("reward", _reward(status, width - 12))
    table.add_row("held out", held_out(status.evaluations) or "not evaluated yet")
    table.add_row("groups", _counts(status.groups) or "none open")
    table.add_row("episodes", _counts(dict(sorted(status.trajectories.items()))) or "none")
    if status.holds:
        table.add_row("held turns", _counts(status.holds))
    table.add_row("trainer", _trainer(status))
    bound = f"max {status.staleness_max} of {status.staleness_bound} allowed"
    table.add_row("staleness", f"mean {status.staleness_mean:.2f} · {bound}")
    discarded = sum(status.discarded.values())
    lost = f" · {discarded:,} discarded ({_counts(status.discarded)})" if discarded else ""
    table.add_row("tokens", f"{status.tokens_per_s:,.0f}/s{lost}")
    return table


def _reward(status: Status, width: int) -> Text:
    recent = [reward for reward in status.rewards if math.isfinite(reward)][-5:]
    if not recent:
        return Text("no step trained yet")
    text = f" {sum(recent) / len(recent):.2f} mean of the last {len(recent)}"
    return Text.assemble((sparkline(status.rewards, max(8, width - len(text))), "cyan"), text)


def held_out(evaluations: Sequence[EvaluationPoint]) -> str:
    """``sampled 0.31 → 0.58 (v40) · greedy 0.35``: first and newest of each mode."""
    shown = []
    for mode in sorted({e.mode for e in evaluations}, reverse=True):  # sampled before greedy
        curve = [e for e in evaluations if e.mode == mode]
        text = f"{mode} {curve[0].reward:.2f}"
        shown.append(text if len(curve) == 1 else f"{text} → {curve[-1].reward:.2f} (v{curve[-1].version})")
    return " · ".join(shown)


def _counts(counts: dict[str, int]) -> str:
    return " · ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _trainer(status: Status) -> str:
    state = status.trainer or "starting"
    because = f" for {status.waiting_for}" if _waits(status) else ""
    return f"{state}{because} · idle {status.trainer_idle_fraction:.0%} of the time"


def _waits(status: Status) -> bool:
    # Once the last step is trained nobody waits for a batch any more, whatever the scheduler's reason.
    return bool(status.waiting_for) and status.version < status.max_steps


def _workers(workers: Sequence[WorkerStatus], width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("worker", "state", "version"):
        table.add_column(name, no_wrap=True)
    figures = ("running", "waiting", "KV", "step")[: 4 if width >= _WIDE else 3]
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for w in workers:
        kv = f"{w.kv_used / w.kv_capacity:.0%} of {w.kv_capacity:,}" if w.kv_capacity else "-"
        state = f"{w.state} (restarts: {w.restarts})" if w.restarts else w.state
        running = f"{w.running}/{w.slots}" if w.slots else f"{w.running}"
        step = "-" if w.step_s is None else f"{1000 * w.step_s:.3g} ms"
        table.add_row(w.name, state, f"v{w.version}", *(running, str(w.waiting), kv, step)[: len(figures)])
    return table


def plain(status: Status) -> str:
    """One line for a log."""
    parts = [f"[{clock(status.elapsed_s)}] {status.phase or 'starting'}", f"step {status.version}/{status.max_steps}"]
    if status.rewards:
        parts.append(f"reward {status.rewards[-1]:.2f}")
    if status.evaluations:
        parts.append(f"held out {held_out(status.evaluations)}")
    parts.append(f"staleness max {status.staleness_max}")
    parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if _waits(status):
        parts.append(f"waiting for {status.waiting_for}")
    return " · ".join(parts)


class LiveView:
    """Shows statuses on ``console`` until closed. ``update`` is cheap and may be called often."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._live: Live | None = None
        self._told: tuple[object, ...] = ()
        self._told_at = -_SIGN_OF_LIFE_S
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def update(self, status: Status) -> None:
        if self._live is not None:
            self._live.update(render(status, self._console.width))
            return
        self._print_new_lines(status)
        told = (status.version, status.phase, len(status.evaluations))
        if told != self._told or self._now() - self._told_at >= _SIGN_OF_LIFE_S:
            self._told, self._told_at = told, self._now()
            self._say(plain(status))

    def note(self, text: str) -> None:
        """Say something beside the view (a Ctrl-C that was heard)."""
        self._say(text)

    def _print_new_lines(self, status: Status) -> None:
        # ``lines`` is a sliding window: what follows the newest line already shown is new.
        known = self._lines
        overlap = next(
            (n for n in range(min(len(known), len(status.lines)), 0, -1) if known[-n:] == status.lines[:n]), 0
        )
        for line in status.lines[overlap:]:
            self._say(f"[{clock(status.elapsed_s)}] {line}")
        self._lines = list(status.lines)

    def _say(self, text: str) -> None:
        # On a pipe a line is never broken; beside the panel it must be, or the panel is drawn askew.
        self._console.print(text, markup=False, highlight=False, soft_wrap=self._live is None)
