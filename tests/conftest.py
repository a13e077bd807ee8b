"""What every test starts from: one thread, no network, no leftover settings; and a few shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: the machine is shared and small, and numerics must not depend on its cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
for _name in ("VENUSRL_API_KEY", "VENUSRL_DEBUG"):
    os.environ.pop(_name, None)

# CI repeats the same examples at every run; by hand each run tries new ones. A slow machine is not a failure.
settings.register_profile(
    "venusrl",
    deadline=None,
    database=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("venusrl")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is also the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY
