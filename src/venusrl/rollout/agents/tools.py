"""What a shell command runs, as one name of a small set.

Owns: the set and the reading of a command's first words. Must not know: who asks.

The name says which commands take alike long, so that a history can be kept for each: commands are written by a model,
so everything outside the set is one name, and a command is only looked at, never evaluated.
"""

from __future__ import annotations

import re

OTHER = "other"
_NAMES = """
    awk bash black bundle cargo cat chmod cmake composer conda cp curl diff docker echo eslint export find
    flake8 gcc git go gradle grep head java javac jest kill less ln ls make mkdir mv mvn mypy node npm npx
    patch perl php pip pnpm printf ps pwd pylint pytest python rake rg rm rspec ruby ruff rustc sed sh sleep
    sort sqlite3 stat tail tar tee test touch tox tree tsc unzip uv wc wget which xargs yarn
"""
TOOLS = frozenset(_NAMES.split())
_SAME = {"pip3": "pip", "g++": "gcc", "cc": "gcc", "egrep": "grep", "py.test": "pytest", "vitest": "jest"}
_SEPARATORS = re.compile(r"&&|\|\||;|\n")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*$")
_WRAPPERS = frozenset({"sudo", "time", "env", "nice", "nohup", "exec", "command"})
_VERSIONED = re.compile(r"python\d(?:\.\d+)?$")
_DURATION = re.compile(r"[\d.]+[smhd]?$")
_LOOKED_AT = 2000
"""Characters of a command that are looked at."""


def tool_of(command: str) -> str:
    """The first program that the command runs, not counting changes of directory: one of ``TOOLS``, or ``other``."""
    for part in _SEPARATORS.split(command[:_LOOKED_AT]):
        words = _words(part)
        if words and words[0] not in ("cd", "set", "source", "."):
            return _name(words)
    return OTHER


def _words(part: str) -> list[str]:
    """Without comments, assignments and what only wraps the program."""
    words = part.split()
    if not words or words[0].startswith("#"):
        return []
    while words and (words[0] in _WRAPPERS or _ASSIGNMENT.match(words[0])):
        words = words[1:]
    if words[:1] == ["timeout"]:
        words = words[1:]
        while words and (words[0].startswith("-") or _DURATION.match(words[0])):
            words = words[1:]
    return words


def _name(words: list[str]) -> str:
    name = words[0].rpartition("/")[2]
    name = "python" if _VERSIONED.match(name) else _SAME.get(name, name)
    if name == "python" and words[1:2] == ["-m"] and len(words) > 2:
        module = _SAME.get(words[2], words[2])
        return module if module in TOOLS else name
    return name if name in TOOLS else OTHER
