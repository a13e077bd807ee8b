"""Environment services as tables.

Owns: the rendering of ``/admin/overview``. Pure but for the time of day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from venusrl.cli.output import table

_AROUND = 3
"""Lines of a table beside its rows: its head, how many more there are, an empty one."""
_UNITS = ("B", "K", "M", "G", "T")


def top(overview: dict[str, Any], width: int, height: int) -> RenderableType:
    """As much as there is room for on a screen of so many characters and lines, the most telling first."""
    found = sorted(overview["sandboxes"], key=lambda one: -(one["memory"] or {}).get("total", 0))
    running = sum(one["state"] == "running" for one in found)
    paused = sum(one["state"] == "paused" for one in found)
    head = f"{len(found)} sandboxes: {running} running, {paused} paused; {overview['snapshots']} snapshots"
    if overview["parked"]:
        head += f"; {overview['parked']} requests wait for a sandbox in transit"
    parts: list[RenderableType] = [Text(head, style="bold", no_wrap=True, overflow="ellipsis"), Text()]
    room = height - len(parts)
    listed: list[tuple[str, list[Any], Callable[[list[Any], int], Table], int]] = [
        ("nodes", overview["nodes"], _nodes, height // 4),
        ("templates", overview["templates"], _templates, min(8, height // 5)),
        ("sandboxes", found, sandboxes, height),
    ]
    for what, rows, render, most in listed:
        most = min(most, room - _AROUND if render is sandboxes else room - 2 * _AROUND - 1)
        if most > 0:
            made = _some(what, rows, render, most, width)
            parts += made
            room -= min(len(rows), most) + 1 + len(made) - 1
    return Group(*parts)


def _some(
    what: str, rows: list[Any], render: Callable[[list[Any], int], Table], most: int, width: int
) -> list[RenderableType]:
    """A table of at most so many rows, how many more there are, an empty line."""
    more = [Text(f"... and {len(rows) - most} more {what}", style="dim")] if len(rows) > most else []
    return [render(rows[:most], width), *more, Text()]


def sandboxes(found: list[dict[str, Any]], width: int | None = None) -> Table:
    """One line each, of at most ``width`` characters."""
    rows = []
    now = time.time()
    for one in found:
        memory = one["memory"] or {}
        state = _state(one)
        left = one["ends"] - now
        rows.append(
            (
                one["id"],
                one["template"],
                one["node"],
                one["runtime"],
                state,
                size(memory.get("total", 0)) if one["memory"] else "-",
                "-" if left > 10 * 365 * 86400 else span(max(0.0, left)),
                "-" if one["idle"] is None else span(one["idle"]),
                f"{one['priority']:g}{'!' if one['mandatory'] else ''}",
            )
        )
    columns = ("sandbox", "template", "node", "runtime", "state", "memory", "left", "idle", "priority")
    least = ("priority", "runtime", "idle", "node", "template", "left", "memory")
    return fitting(columns, rows, width, right=("memory", "left", "idle", "priority"), least=least)


def _state(one: dict[str, Any]) -> str:
    """With who paused it, whether a copy of it is kept elsewhere, and whether its node is lost."""
    if one.get("lost"):
        return "lost with its node"
    copy = (one.get("replica") or {}).get("state", "off")
    told = [
        text for text in (one["pausedBy"], {"kept": "copied", "off": "", "none": ""}.get(copy, f"copy: {copy}")) if text
    ]
    return str(one["state"]) + (f" ({', '.join(told)})" if told else "")


def fitting(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    right: Sequence[str] = (),
    least: Sequence[str] = (),
) -> Table:
    """A table whose first column, the ids, is never broken over two lines: they are there to be copied. Columns named
    in ``least`` are left out, the first first, where it would be wider than ``width``."""
    sizes = {name: 2 + max(len(name), *(len(row[at]) for row in rows), 0) for at, name in enumerate(columns)}
    shown = list(columns)
    for name in least:
        if width is not None and sum(sizes[one] for one in shown) - 2 > width:
            shown.remove(name)
    kept = [at for at, name in enumerate(columns) if name in shown]
    made = table(shown, [[row[at] for at in kept] for row in rows], right=right)
    made.columns[0].no_wrap = True
    return made


def _nodes(nodes: list[dict[str, Any]], width: int) -> Table:
    rows = []
    for node in nodes:
        memory = node.get("memory")
        if memory is None:
            rows.append((node["id"], node["status"], *["-"] * 8))
            continue
        rows.append(
            (
                node["id"],
                node["status"],
                f"{node['sandboxCount'] - node['pausedCount']}+{node['pausedCount']}",
                f"{node['cpuUsed']:.1f}/{node['cpus']:g}",
                size(memory["capacity"]),
                size(memory["available"]),
                size(memory["private"]),
                size(memory["shared"]),
                size(memory["paused"]),
                "-" if node["pressure"] is None else f"{node['pressure']:.1f}%",
            )
        )
    columns = ("node", "status", "run+paused", "cpus", "capacity", "free", "private", "shared", "paused", "pressure")
    least = ("cpus", "pressure", "capacity", "paused", "shared", "private", "free")
    return fitting(columns, rows, width, right=columns[2:], least=least)


def _templates(templates: list[dict[str, Any]], width: int) -> Table:
    rows = [
        (one["id"], str(one["sandboxes"]), size(one["shared"]), size(one["private"]), ", ".join(one["nodes"]))
        for one in templates
    ]
    columns = ("template", "sandboxes", "shared", "private", "nodes")
    return fitting(columns, rows, width, right=columns[1:4], least=("nodes", "private", "shared", "sandboxes"))


def size(count: float) -> str:
    """Bytes, short."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f}{unit}" if unit == "B" or count >= 100 else f"{count:.1f}{unit}"
        count /= 1024
    raise AssertionError("unreachable")


def span(seconds: float) -> str:
    """A duration, short."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f}{name}"
    return f"{seconds / 86400:.0f}d"


def ago(when: float) -> str:
    return "never" if not when else f"{span(max(0.0, time.time() - when))} ago"


def how_it_moved(moved: dict[str, Any]) -> str:
    """One line of what a move was like."""
    said = {
        "live": "it moved while it ran",
        "snapshot": "it moved as a snapshot, its processes with it",
        "files": "its files moved, its processes ended",
        "found": "it was there already",
    }[moved["how"]]
    if moved["outage_s"]:
        said += f", and stood still for {1000 * moved['outage_s']:.0f} ms"
    return said + (f" (not live: {moved['why']})" if moved["why"] else "")
