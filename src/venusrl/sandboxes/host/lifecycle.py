"""The life of one sandbox on one host, as pure rules.

Owns: which state may follow which, and what a half-done change means after a restart. Which of several hosts has a
sandbox is the manager's to say (``manager/fencing.py``).

Must not know: I/O, clocks, runtimes.
"""

from __future__ import annotations

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
