"""The rules of the house that a linter does not hold: sizes, docstrings, broad excepts, open ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{named(path)}: {node.name} has {lines} lines"


def lines_with(pattern: re.Pattern[str], *, unless: str = "") -> list[str]:
    return [
        f"{named(path)}:{number}: {line.strip()}"
        for path in PRODUCT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and not (unless and unless in line)
    ]


def test_files_and_functions_stay_small() -> None:
    assert [named(path) for path in SOURCES if len(path.read_text().splitlines()) > FILE_LINES] == []
    assert [found for path in SOURCES for found in long_functions(path)] == []


def test_modules_open_with_a_docstring() -> None:
    assert [named(path) for path in SOURCES if not ast.get_docstring(parsed(path))] == []


def test_nothing_is_left_open() -> None:
    assert lines_with(_OPEN_END) == []


def test_broad_excepts_say_why_on_their_line() -> None:
    assert lines_with(_BROAD, unless="#") == []


def test_only_the_command_line_prints() -> None:
    printing = [
        f"{named(path)}:{node.lineno}"
        for path in PRODUCT
        if not path.is_relative_to(ROOT / "src" / "venusrl" / "cli")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


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
