"""Which of several copies of a sandbox is the sandbox, as pure functions.

Owns: the rule of epochs and fences.

Must not know: the store, HTTP, how copies came to be.

A host counts a copy's epoch up with every move. A record's ``fence`` is the smallest epoch that is still the sandbox:
it is raised, on disk, before a copy is made of kept state on another host, far above whatever a lost host can have.

Guarantees: ``owner`` names one host or none, the same whatever the order of the copies; a copy below the fence never
owns again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

STEP = 1 << 20
"""What a fence rises by: more than a host's own changes of epoch can come to."""


def owner(host: str, fence: int, copies: Mapping[str, int]) -> str:
    """Of the hosts in ``copies`` (with their epochs) the one that has the sandbox, ``host`` being where it was; "" =
    none of these."""
    valid = {name: epoch for name, epoch in copies.items() if epoch >= fence}
    return max(valid, key=lambda name: (valid[name], name == host, name)) if valid else ""


def raised(fence: int, epochs: Iterable[int]) -> int:
    """The next fence, above it and all of ``epochs``."""
    return max([fence, *epochs]) + STEP
