"""How close ``venus`` comes to the best schedule of tiny instances."""

from __future__ import annotations

from statistics import mean

from tests.integration.test_simulation_optimum import best, seconds, tiny

INSTANCES = ((2, 1, 3, 0), (2, 1, 3, 1), (2, 1, 3, 2), (3, 1, 1, 0), (3, 1, 1, 1), (2, 2, 2, 0), (2, 2, 2, 1))
MEAN = 1.07
"""The goal is 1.05. Measured with the oracle when this was written: 1.059 (the worst, three groups at once: 1.20)."""


def test_venus_that_knows_the_lengths_is_near_the_optimum() -> None:
    ratios = [seconds("oracle", tiny(*i[:3]), i[3]) / best(*i).time_s for i in INSTANCES]
    assert mean(ratios) <= MEAN
