"""The tiny model and tasks, once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.system.harness import TrainProcess, write_recipe
from tests.system.tiny import build_model, build_tasks

Recipes = Callable[..., Path]
Start = Callable[..., TrainProcess]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "model": build_model(folder / "model"),
        "tasks": build_tasks(folder / "train", 6, "train"),
        "held_out": build_tasks(folder / "held-out", 4, "held"),
    }


@pytest.fixture
def recipes(tiny: dict[str, Path], tmp_path: Path) -> Recipes:
    def make(name: str = "recipe", **changes: dict[str, Any]) -> Path:
        return write_recipe(tmp_path / f"{name}.toml", tiny["model"], tiny["tasks"], tiny["held_out"], **changes)

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    """Start runs that end with the test."""
    started: list[TrainProcess] = []

    def begin(recipe: Path, run_dir: Path, *arguments: str) -> TrainProcess:
        process = TrainProcess(recipe, run_dir, *arguments)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.end()
