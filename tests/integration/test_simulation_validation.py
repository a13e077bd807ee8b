"""Published measurements that the simulator reproduces, no constant tuned to them (the costlier: tests/system)."""

from __future__ import annotations

import pytest

from venusrl.simulation.validation import CASES, Check, validate


@pytest.mark.parametrize("case", ["oversubscribed", "starvation", "order"])
def test_published_figures_lie_in_their_bands(case: str) -> None:
    checks = list(validate(0, (case,)))
    assert [f"{c.figure}: {c.simulated:.3f}, published {c.published}" for c in checks if c.verdict == "FAILS"] == []
    assert sum(c.holds for c in checks) >= len(checks) - 2


def test_a_check_outside_its_band_fails_unless_the_reason_is_known() -> None:
    check = Check("case", "figure", "source", "1.0", 2.0, 0.9, 1.1)
    assert (check.holds, check.verdict) == (False, "FAILS")
    assert Check("case", "figure", "source", "1.0", 2.0, 0.9, 1.1, known_gap="why").verdict == "gap"
    assert Check("case", "figure", "source", "1.0", 1.0, 0.9, 1.1).verdict == "holds"


def test_every_case_is_run_and_an_unknown_one_is_an_error() -> None:
    assert set(CASES) == {"oversubscribed", "starvation", "order", "pressure"}
    with pytest.raises(KeyError):
        list(validate(0, ("nothing",)))
