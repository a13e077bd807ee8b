"""The rules of the house that a linter does not hold: sizes, docstrings, broad excepts, open ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py") if path.stat().st_size
)
PRODUCT = [path for path in SOURCES if path.is_relative_to(ROOT / "src")]

FUNCTION_LINES = 60
FILE_LINES = 500
README_LINES = 120
_BROAD = re.compile(r"^\s*except(\s+\(?\s*(Exception|BaseException)\b.*)?:")
_OPEN_END = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES
    assert [f"{node.name}: {length(node)} lines" for node in functions(path) if length(node) > FUNCTION_LINES] == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_modules_open_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_nothing_is_left_open_and_broad_excepts_say_why(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line.strip() for line in lines if _OPEN_END.search(line)] == []
    assert [line.strip() for line in lines if _BROAD.match(line) and "#" not in line] == []


@pytest.mark.parametrize("path", PRODUCT, ids=named)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.is_relative_to(ROOT / "src" / "venusrl" / "cli"):
        return
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert [f"line {c.lineno}" for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"] == []


def test_the_readme_is_short_and_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert "make demo" in text
    assert "make test" in text


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    dead = [
        f"{named(document)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert dead == []
