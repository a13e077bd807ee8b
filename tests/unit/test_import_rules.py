"""Imports point one way, the scheduler is pure, and what a user types imports nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "venusrl"

_WORDS = {"types", "clock", "leaving", "recipe", "models"}
"""Plain vocabulary that anything may use (``scheduling`` only the first)."""
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "clock": set(),
    "leaving": set(),
    "recipe": set(),
    "models": {"recipe"},
    "scheduling": {"types"},
    "sandboxes": _WORDS,
    "tasks": {"sandboxes", *_WORDS},
    "observe": {"scheduling", *_WORDS},
    "training": _WORDS,
    "rollout": {"scheduling", "sandboxes", "tasks", *_WORDS},
    "simulation": {"scheduling", "testing", *_WORDS},
    "coordinator": {"scheduling", "sandboxes", "tasks", "observe", "rollout", *_WORDS},
    "cli": {"scheduling", "sandboxes", "tasks", "observe", "rollout", "simulation", "coordinator", *_WORDS},
    "testing": {"scheduling", "sandboxes", "tasks", "observe", "rollout", "coordinator", "training", *_WORDS},
}
"""What each part of the package may import, beside itself."""
DOORS = {"venusrl.training.launch", "venusrl.training.errors", "venusrl.training.demo_policy"}
"""The doors of ``training`` that import no torch: how it is started, what it raises, what it ships."""
EXCEPTIONS = {("training/demo_policy", "tasks")}
"""The demo policy is pre-trained on text about the built-in tasks."""

HEAVY = {"torch", "transformers", "ray", "vllm", "sglang", "deepspeed"}
HEAVY_ALLOWED = ("training/", "rollout/engines/", "testing/")
LIGHT_PARTS = (
    "types",
    "clock",
    "leaving",
    "recipe",
    "models",
    "scheduling",
    "sandboxes",
    "tasks",
    "observe",
    "coordinator",
    "cli",
)

IMPURE = {"time", "random", "secrets", "asyncio", "threading", "os", "socket", "datetime", "logging", "uuid"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every module that the file imports, wherever in it; ``from a import b`` counts as ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} uses a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(path: Path) -> str:
    return ".".join(["venusrl", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    here = part(path)
    if here == "__init__":
        return
    wrong = []
    for name in imported(path):
        root, _, rest = name.partition(".")
        there = rest.split(".")[0]
        is_part = (PACKAGE / there).is_dir() or (PACKAGE / f"{there}.py").is_file()
        if root != "venusrl" or not there or not is_part:
            continue
        permitted = there == here or there in ALLOWED[here]
        through_a_door = here in ("coordinator", "cli") and any(f"{name}.".startswith(f"{door}.") for door in DOORS)
        listed = any(relative(path).startswith(f"{where}/") and there == what for where, what in EXCEPTIONS)
        if not (permitted or through_a_door or listed):
            wrong.append(name)
    assert wrong == []


PURE = [path for place in ("scheduling", "sandboxes/admission") for path in sorted((PACKAGE / place).rglob("*.py"))]


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_what_decides_is_pure(path: Path) -> None:
    """The scheduler and admission: no clock, no randomness, no event loop, no input or output."""
    assert [name for name in imported(path) if name.split(".")[0] in IMPURE] == []
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert called & {"open", "print", "input", "hash", "id"} == set()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_trainer_and_the_engines_import_what_is_heavy(path: Path) -> None:
    if not relative(path).startswith(HEAVY_ALLOWED):
        assert [name for name in imported(path) if name.split(".")[0] in HEAVY] == []


def test_what_a_user_types_imports_nothing_heavy() -> None:
    """Every module of the light parts, imported for real in a fresh process."""
    names = sorted(dotted(path) for path in MODULES if part(path) in LIGHT_PARTS and path.stem != "__main__")
    program = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert sorted({name.split(".")[0] for name in loaded} & HEAVY) == []
    assert "venusrl.scheduling.scheduler" in loaded
