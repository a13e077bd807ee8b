"""Whoever talks to a sandbox while it is paused and resumed sees a pause, and no error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.env_server import connection, served
from tests.waiting import PATIENCE_S

e2b = pytest.importorskip("e2b", reason="the E2B SDK is not installed: install the dev extra")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with served(tmp_path_factory.mktemp("parked") / "state") as server:
        yield connection(server)


def test_a_command_that_is_followed_goes_on_after_a_pause(options: dict[str, Any]) -> None:
    """Its process is frozen with it; nothing of its output is lost or told twice."""
    sandbox = e2b.Sandbox.create("host", timeout=300, **options)
    command = "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i; sleep 0.05; done"
    going = sandbox.commands.run(command, background=True, timeout=0)
    told: list[str] = []
    following = threading.Thread(target=lambda: told.append(going.wait().stdout))
    following.start()
    for _ in range(3):
        time.sleep(0.2)
        sandbox.pause()
        sandbox.connect(timeout=300)
    following.join(PATIENCE_S)
    assert told, "the follower got an error, or nothing"
    assert told[0].split() == [str(number) for number in range(1, 61)]


def test_requests_wait_while_it_is_resumed_by_traffic(options: dict[str, Any], tmp_path: Path) -> None:
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    sandbox = e2b.Sandbox.create("host", timeout=300, lifecycle=lifecycle, **options)
    sandbox.files.write("/tmp/note", "kept")
    sandbox.commands.run("sleep 1000", background=True)
    failures: list[Exception] = []

    def ask() -> None:
        try:
            assert sandbox.files.read("/tmp/note") == "kept"
        except Exception as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    for _ in range(3):
        sandbox.pause()
        asking = [threading.Thread(target=ask) for _ in range(4)]
        for one in asking:
            one.start()
        for one in asking:
            one.join(PATIENCE_S)
            assert not one.is_alive(), "it still waits for its answer"
    assert failures == []
