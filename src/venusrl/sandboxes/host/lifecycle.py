"""The life of one sandbox on one host, as pure rules.

Owns: which state may follow which, what a half-done change means after a restart, and which of several hosts that
claim the same sandbox has it.

Must not know: I/O, clocks, runtimes.

Guarantees: ``owner`` names exactly one host while any has the sandbox; a move that crashed is finished or
undone by ``mend``, whatever the instant, never both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from venusrl.sandboxes.host.api import State
from venusrl.sandboxes.protocol import SandboxError

_ALLOWED: dict[State, frozenset[State]] = {
    "running": frozenset({"pausing", "moving"}),
    "pausing": frozenset({"paused", "running"}),
    "paused": frozenset({"resuming", "moving"}),
    "resuming": frozenset({"running", "paused"}),
    "moving": frozenset({"running", "paused"}),
}
"""A move that succeeds ends the record here; one that fails goes back to what was before."""

LASTING: frozenset[State] = frozenset({"running", "paused"})
"""States that stay until somebody asks; the others are on their way."""


def follow(now: State, then: State) -> State:
    """``then``, if it may follow ``now``."""
    if then not in _ALLOWED[now]:
        raise SandboxError(f"a sandbox that is {now} cannot be {then} next")
    return then


def settled(paused: bool) -> State:
    """What a change that was interrupted has come to, from what the runtime says of the sandbox."""
    return "paused" if paused else "running"


Kind = Literal["has", "moving", "gave", "replica"]
"""``has``: runs or is paused there. ``moving``: the same, about to be given away. ``gave``: given away for good, the
receiver may not know yet. ``replica``: state kept for somebody else."""


class Claim(msgspec.Struct, frozen=True):
    """What one host holds of a sandbox. ``to`` for ``moving`` and ``gave``: the receiver's name.

    Epochs: a sandbox that is moved from epoch e has e + 1 at its receiver; ``gave`` and the receiver's replica say so
    beforehand. A move that is taken back leaves e + 2, so that what it had sent can never be taken for newer. A backup
    has the epoch of what it is a copy of.
    """

    host: str
    kind: Kind
    epoch: int
    to: str = ""


class Mend(msgspec.Struct, frozen=True):
    """What one host must do so that the sandbox is whole again."""

    host: str
    act: Literal["promote", "take_back", "end", "drop_replica"]
    epoch: int


_RANK: dict[Kind, int] = {"has": 3, "moving": 2, "gave": 1, "replica": 0}


def owner(claims: Iterable[Claim]) -> Claim | None:
    """The claim that is the sandbox; None when nobody living has it (a replica alone is for people to recover).

    The largest epoch counts; what was given is the receiver's from the giver's record on, provided that the receiver
    has it.
    """
    listed = list(claims)
    living = [claim for claim in listed if claim.kind != "replica"]
    if not living:
        return None
    best = max(living, key=lambda claim: (claim.epoch, _RANK[claim.kind], claim.host))
    if best.kind == "gave":
        for claim in listed:
            if claim.kind == "replica" and claim.host == best.to and claim.epoch == best.epoch:
                return claim
    return best


def mend(claims: Iterable[Claim], reachable: set[str]) -> list[Mend]:
    """What to do where no move is in progress any more, the owner's own step first.

    ``reachable``: the hosts whose claims are known. Nothing is decided about a gift whose receiver is not among them.
    """
    listed = list(claims)
    chosen = owner(listed)
    if chosen is None or (chosen.kind == "gave" and chosen.to not in reachable):
        return []
    steps: list[Mend] = []
    if chosen.kind == "replica":
        steps.append(Mend(chosen.host, "promote", chosen.epoch))
    elif chosen.kind != "has":
        steps.append(Mend(chosen.host, "take_back", chosen.epoch))
    for claim in listed:
        if claim is chosen:
            continue
        if claim.kind != "replica":
            steps.append(Mend(claim.host, "end", claim.epoch))
        elif claim.epoch < chosen.epoch or chosen.kind == "moving":
            steps.append(Mend(claim.host, "drop_replica", claim.epoch))
    return steps
