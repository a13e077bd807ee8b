"""The costlier published measurements (see ``tests/integration/test_simulation_validation.py``)."""

from __future__ import annotations

from venusrl.simulation.validation import validate


def test_a_gate_gains_nothing_below_three_quarters_of_the_kv_and_something_above() -> None:
    checks = list(validate(0, ("pressure",)))
    assert [f"{c.figure}: {c.simulated:.3f}, published {c.published}" for c in checks if c.verdict == "FAILS"] == []
