"""Published measurements against their simulation: what ``venusrl simulate validation`` shows.

Owns: ``validate``. The measurements are others', their workloads are described in public, the engines' costs follow
from public shapes; no constant is tuned to a result. What does not reproduce is written down in
``docs/simulation.md`` and, in short, in the check itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from venusrl.simulation.validation.cases import CASES
from venusrl.simulation.validation.checks import Check

__all__ = ["CASES", "Check", "validate"]


def validate(seed: int = 0, cases: tuple[str, ...] = tuple(CASES)) -> Iterator[Check]:
    """The checks of these cases, one after the other as they are simulated. Raises KeyError for an unknown case."""
    for name in cases:
        yield from CASES[name](seed)
