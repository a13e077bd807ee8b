"""Loaded into the SDK's own test run: names of the test domain lead to loopback, results are written by test id.

Owns: nothing of the suite: no test is changed. What is excluded (with reasons, by id) is not run.
"""

from __future__ import annotations

import fnmatch
import json
import os
import socket
from typing import Any

import pytest

DOMAIN = os.environ["CONFORMANCE_DOMAIN"]
FRONT = os.environ["CONFORMANCE_FRONT"]
ONLY = os.environ.get("CONFORMANCE_ONLY", "*")
RESULTS = os.environ["CONFORMANCE_RESULTS"]
SERVICE_VARIABLES = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN")
WITHOUT_SERVICE = ("tests/test_*.py::*", "tests/shared/[!g]*", "*/test_config_propagation.py::*")
"""These look at the client alone, and expect the defaults of its addresses."""
_resolve = socket.getaddrinfo


def _getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    if isinstance(name, str) and (name == DOMAIN or name.endswith("." + DOMAIN)):
        return _resolve(FRONT, port, *args, **kwargs)
    return _resolve(host, port, *args, **kwargs)


socket.getaddrinfo = _getaddrinfo


def _write(test: str, outcome: str, seconds: float = 0.0, why: str = "") -> None:
    with open(RESULTS, "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "seconds": round(seconds, 2), "why": why}) + "\n")


@pytest.fixture(autouse=True)
def _no_service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(fnmatch.fnmatchcase(request.node.nodeid, pattern) for pattern in WITHOUT_SERVICE):
        for name in SERVICE_VARIABLES:
            monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.collectonly:
        for item in items:
            _write(item.nodeid, "collected")
        return
    with open(os.environ["CONFORMANCE_EXCLUDED"]) as file:
        excluded = set(json.load(file))
    wanted = [item for item in items if fnmatch.fnmatchcase(item.nodeid, ONLY)]
    for item in wanted:
        if item.nodeid in excluded:
            _write(item.nodeid, "excluded")
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted or item.nodeid in excluded])
    items[:] = [item for item in wanted if item.nodeid not in excluded]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        # The whole module: its tests have no ids.
        _write(report.nodeid, "uncollectable", why=report.longreprtext.strip().splitlines()[-1])


class _Outcomes:
    """One line a test: a failure of its set-up or tear-down is its own."""

    def __init__(self) -> None:
        self._worst: dict[str, tuple[str, float, str]] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, seconds, why = self._worst.get(report.nodeid, ("passed", 0.0, ""))
        if report.failed and outcome != "failed":
            lines = report.longreprtext.strip().splitlines()
            outcome, why = "failed", f"{report.when}: " + " | ".join(lines[-3:])
        elif report.skipped and outcome == "passed":
            outcome, why = "skipped", str(report.longrepr)[:300]
        self._worst[report.nodeid] = (outcome, seconds + report.duration, why)
        if report.when == "teardown":
            outcome, seconds, why = self._worst.pop(report.nodeid)
            _write(report.nodeid, outcome, seconds, why)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Outcomes())
