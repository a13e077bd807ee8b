"""The same attacks where the run is not root: the other tests, run by another user."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.namespaces import as_another_user, python_for_everybody


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with python_for_everybody() as made:
        yield made


@pytest.mark.parametrize("module", ["isolation", "templates"])
def test_without_root(python: str, module: str) -> None:
    with tempfile.TemporaryDirectory(prefix="venusrl-unprivileged-") as home:
        tests = f"tests/integration/test_namespace_{module}.py"
        done = as_another_user([python, "-m", "pytest", tests, "--basetemp", f"{home}/t"], Path(home))
    summary = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, summary
    assert "passed" in summary
    assert "skipped" not in summary
