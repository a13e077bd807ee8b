"""The loop: one simulated run from beginning to end.

Owns: ``simulate``. Must not know: which policy it runs.
"""

from __future__ import annotations

from venusrl.scheduling.policies import Policy
from venusrl.simulation.results import Result
from venusrl.simulation.scenario import Scenario


class SimulationStuck(Exception):
    """Nothing can happen any more, or nothing comes of what happens; says what is held and why."""


class RequestTooLarge(Exception):
    """A turn needs more KV than its worker has: the scenario is impossible."""


def simulate(scenario: Scenario, policy: Policy, seed: int) -> Result:
    """Run ``policy`` (fresh: it keeps state) on ``scenario``. Deterministic in its arguments.

    Raises SimulationStuck or RequestTooLarge.
    """
    raise SimulationStuck(f"{scenario.name}: the loop is being built ({policy.name}, {seed})")
