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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A real vLLM takes minutes to start: only its own tier, which asks for the marker, runs it."""
    if "vllm" not in str(config.option.markexpr):
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs a real vLLM, in a tier of its own: make test-vllm"))


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is also the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY
