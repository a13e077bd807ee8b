"""Who has a sandbox: states in order, and a move that crashes at any instant has exactly one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.sandboxes.host import lifecycle
from venusrl.sandboxes.host.api import State
from venusrl.sandboxes.host.lifecycle import Claim, mend, owner
from venusrl.sandboxes.protocol import SandboxError

STATES: tuple[State, ...] = ("running", "pausing", "paused", "resuming", "moving")
BOTH = {"a", "b"}


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


def at(step: int, epoch: int) -> list[Claim]:
    """What the disks of two hosts hold after ``step`` of a move from a to b."""
    moving, gave = Claim("a", "moving", epoch, "b"), Claim("a", "gave", epoch + 1, "b")
    replica, has = Claim("b", "replica", epoch + 1), Claim("b", "has", epoch + 1)
    return [[Claim("a", "has", epoch)], [moving], [moving, replica], [gave, replica], [gave, has], [has]][step]


def applied(claims: list[Claim], reachable: set[str]) -> list[Claim]:
    held = {claim.host: claim for claim in claims}
    for step in mend(claims, reachable):
        if step.act == "promote":
            held[step.host] = Claim(step.host, "has", step.epoch)
        elif step.act == "take_back":
            # A gift's epoch is one more than the giver's own already.
            own = step.epoch - (held[step.host].kind == "gave")
            held[step.host] = Claim(step.host, "has", own + 2)
        else:
            del held[step.host]
    return list(held.values())


@given(st.integers(0, 5), st.integers(0, 1000))
def test_a_move_that_crashed_has_one_owner_and_mends_once(step: int, epoch: int) -> None:
    claims = at(step, epoch)
    whose = owner(claims)
    assert whose is not None
    assert whose.host == ("a" if step < 3 else "b")
    mended = applied(claims, BOTH)
    assert [(claim.host, claim.kind) for claim in mended] == [(whose.host, "has")]
    assert mend(mended, BOTH) == []


def test_a_gift_is_not_decided_without_its_receiver() -> None:
    assert mend([Claim("a", "gave", 1, "b")], {"a"}) == []
    assert [step.act for step in mend([Claim("a", "gave", 1, "b")], BOTH)] == ["take_back"]


def test_a_host_that_comes_back_with_an_older_epoch_lets_go() -> None:
    steps = mend([Claim("a", "has", 0), Claim("b", "has", 1)], BOTH)
    assert [(step.host, step.act) for step in steps] == [("a", "end")]


def test_a_replica_alone_is_nobodys() -> None:
    assert owner([Claim("b", "replica", 3)]) is None
