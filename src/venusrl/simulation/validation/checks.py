"""One published measurement against its simulation.

Owns: ``Check``. Must not know: what is measured.
"""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``published`` as its source gives it; the simulated figure should lie in ``low``..``high``, a band that was set
    before the simulation was run. ``known_gap``: why it does not, where that is known; such a check does not fail."""

    case: str
    figure: str
    source: str
    published: str
    simulated: float
    low: float
    high: float
    known_gap: str = ""

    @property
    def holds(self) -> bool:
        return self.low <= self.simulated <= self.high

    @property
    def verdict(self) -> str:
        """``holds``, ``gap`` (does not, and why is known) or ``FAILS``."""
        return "holds" if self.holds else "gap" if self.known_gap else "FAILS"
