"""``venusrl env top`` and ``list`` on terminals of any size."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from venusrl.cli import env_view

IDS = [f"s{number:019d}" for number in range(40)]


def sandbox(identity: str) -> dict[str, Any]:
    return {
        "id": identity,
        "template": "a-template-of-a-long-name",
        "node": "node-of-a-long-name",
        "runtime": "namespace",
        "state": "running",
        "pausedBy": "",
        "memory": {"total": 123 << 20},
        "ends": 0.0,
        "idle": 5.0,
        "priority": 0.0,
        "mandatory": False,
    }


def overview(nodes: int, templates: int, sandboxes: int) -> dict[str, Any]:
    memory = dict.fromkeys(("capacity", "available", "private", "shared", "paused"), 123 << 30)
    node = {"status": "ready", "sandboxCount": 2, "pausedCount": 1, "cpuUsed": 1.0, "cpus": 2, "pressure": None}
    return {
        "nodes": [{"id": f"node-{number}", "memory": memory, **node} for number in range(nodes)],
        "templates": [
            {"id": f"img-{number:040d}", "sandboxes": 3, "shared": 1 << 30, "private": 0, "nodes": ["node-0"]}
            for number in range(templates)
        ],
        "sandboxes": [sandbox(identity) for identity in IDS[:sandboxes]],
        "snapshots": 2,
        "parked": 1,
    }


def shown(made: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(made)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n").splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 100, 200])
@pytest.mark.parametrize("height", [12, 24, 60])
@pytest.mark.parametrize("counts", [(1, 1, 0), (1, 1, 3), (30, 20, 40)])
def test_it_fits_the_screen(width: int, height: int, counts: tuple[int, int, int]) -> None:
    lines = shown(env_view.top(overview(*counts), width, height), width)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("s0")]
    assert all(line.split()[0] in IDS for line in rows), "an id is not broken"
    if counts[2]:
        assert rows
        assert ("more sandboxes" in "\n".join(lines)) == (len(rows) < counts[2])


def test_the_least_telling_columns_go_first() -> None:
    def heads(width: int | None) -> list[str]:
        made = env_view.sandboxes([sandbox(IDS[0])], width)
        return [str(column.header) for column in made.columns]

    assert len(heads(None)) == 9
    assert heads(1000) == heads(None)
    assert heads(40) == ["sandbox", "state", "memory"]
    assert "priority" not in heads(100)


def test_what_is_printed_for_a_program_is_whole() -> None:
    (_, row) = shown(env_view.sandboxes([sandbox(IDS[0])]), 10_000)
    assert "a-template-of-a-long-name  node-of-a-long-name  namespace" in row
