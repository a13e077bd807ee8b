"""What this machine can isolate, for ``venusrl doctor`` and for error messages."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True):
    """One finding. ``mend`` is empty when ``ok``; ``required`` says whether sandboxes work without it."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    required: bool = True


def probe() -> list[Check]:
    """Look at this machine, cheaply and without leaving anything behind (a few hundred milliseconds)."""
    return []
