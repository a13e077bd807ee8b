"""The states of a sandbox on one host, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.sandboxes.host import lifecycle
from venusrl.sandboxes.host.api import State
from venusrl.sandboxes.protocol import SandboxError

STATES: tuple[State, ...] = ("running", "pausing", "paused", "resuming", "moving")


@given(st.lists(st.sampled_from(STATES), max_size=20))
def test_every_path_can_settle(asked: list[State]) -> None:
    now: State = "running"
    for then in asked:
        try:
            now = lifecycle.follow(now, then)
        except SandboxError:
            continue
    if now not in lifecycle.LASTING:
        assert lifecycle.follow(now, lifecycle.settled(True)) == "paused"
        assert lifecycle.follow(now, lifecycle.settled(False)) == "running"


def test_a_running_one_is_not_resumed() -> None:
    with pytest.raises(SandboxError):
        lifecycle.follow("running", "resuming")
