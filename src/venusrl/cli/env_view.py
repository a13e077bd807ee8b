"""Environment services as tables.

Owns: the rendering of ``/admin/overview``. Pure but for the time of day.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from venusrl.cli.output import table

_UNITS = ("B", "K", "M", "G", "T")


def top(overview: dict[str, Any], height: int) -> RenderableType:
    """Everything on one screen: nodes and templates whole, as many sandboxes as there is room for."""
    nodes, templates = overview["nodes"], overview["templates"]
    found = sorted(overview["sandboxes"], key=lambda one: -(one["memory"] or {}).get("total", 0))
    room = max(3, height - len(nodes) - min(len(templates), 8) - 10)
    running = sum(one["state"] == "running" for one in found)
    paused = sum(one["state"] == "paused" for one in found)
    head = f"{len(found)} sandboxes: {running} running, {paused} paused; {overview['snapshots']} snapshots"
    if overview["parked"]:
        head += f"; {overview['parked']} requests wait for a sandbox in transit"
    parts: list[RenderableType] = [
        Text(head, style="bold"),
        Text(),
        _nodes(nodes),
        Text(),
        _templates(templates[:8]),
        Text(),
        sandboxes(found[:room]),
    ]
    if len(found) > room:
        parts.append(Text(f"... and {len(found) - room} more", style="dim"))
    return Group(*parts)


def sandboxes(found: list[dict[str, Any]]) -> Table:
    """One line each."""
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
    return whole(table(columns, rows, right=("memory", "left", "idle", "priority")))


def _state(one: dict[str, Any]) -> str:
    """With who paused it, whether a copy of it is kept elsewhere, and whether its node is lost."""
    if one.get("lost"):
        return "lost with its node"
    copy = (one.get("replica") or {}).get("state", "off")
    told = [
        text for text in (one["pausedBy"], {"kept": "copied", "off": "", "none": ""}.get(copy, f"copy: {copy}")) if text
    ]
    return str(one["state"]) + (f" ({', '.join(told)})" if told else "")


def whole(made: Table) -> Table:
    """With its first column, the ids, never broken over two lines: they are there to be copied."""
    made.columns[0].no_wrap = True
    return made


def _nodes(nodes: list[dict[str, Any]]) -> Table:
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
    return table(columns, rows, right=columns[2:])


def _templates(templates: list[dict[str, Any]]) -> Table:
    rows = [
        (one["id"], str(one["sandboxes"]), size(one["shared"]), size(one["private"]), ", ".join(one["nodes"]))
        for one in templates
    ]
    return table(
        ("template", "sandboxes", "shared", "private", "nodes"), rows, right=("sandboxes", "shared", "private")
    )


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
