"""Workloads: where the trajectories of a simulated run come from (see ``scenario.Workload``).

Owns: the names under which users ask for one. ``replay`` is made of recorded groups instead (``replay.replay``).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from venusrl.simulation.scenario import Workload
from venusrl.simulation.workloads.claude_code import ClaudeCode
from venusrl.simulation.workloads.drift import Drift
from venusrl.simulation.workloads.errors import WorkloadError
from venusrl.simulation.workloads.mini_swe import MiniSwe
from venusrl.simulation.workloads.openswe import OpenSwe
from venusrl.simulation.workloads.short import Short
from venusrl.simulation.workloads.synthetic import Synthetic

__all__ = ["WORKLOADS", "WorkloadError", "make_workload"]

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "openswe": OpenSwe,
    "mini-swe": MiniSwe,
    "claude-code": ClaudeCode,
    "short": Short,
    "drift": Drift,
    "synthetic": Synthetic,
}


def make_workload(name: str, **options: object) -> Workload:
    """The workload of that name, some of its parameters changed. Raises WorkloadError on an unknown name or option."""
    if name not in WORKLOADS:
        raise WorkloadError(f"there is no workload {name!r}; there are: {', '.join(sorted(WORKLOADS))}")
    try:
        return msgspec.convert(options, WORKLOADS[name])  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise WorkloadError(f"workload {name}: {error}") from error
