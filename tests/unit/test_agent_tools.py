"""What a command runs, as one name of a small set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.rollout.agents.tools import OTHER, TOOLS, tool_of


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        ("ls -la", "ls"),
        ("cd repo && python -m pytest -q tests", "pytest"),
        ("cd repo\n\n# run it\nPYTHONPATH=. python3.11 run.py", "python"),
        ("/usr/bin/git status", "git"),
        ("timeout -k 5 60 pytest -x", "pytest"),
        ("sudo env A=1 pip3 install x", "pip"),
        ("python - <<'EOF'\nprint(1)\nEOF", "python"),
        ("python -m http.server", "python"),
        ("./configure", OTHER),
        ("evil_$(whoami)", OTHER),
        ("", OTHER),
        ("cd somewhere", OTHER),
        ("timeout 5", OTHER),
    ],
)
def test_the_first_program_names_the_tool(command: str, tool: str) -> None:
    assert tool_of(command) == tool


@given(st.text())
def test_any_command_has_a_name_of_the_set(command: str) -> None:
    assert tool_of(command) in {*TOOLS, OTHER}
