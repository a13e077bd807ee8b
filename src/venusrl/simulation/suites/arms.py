"""The contestants: how each one runs in a given scenario.

Owns: ``Arm`` (a policy, its predictor, its options, its limit of concurrency), the names of arms, and what an arm
changes in a scenario (consumption, window, sync: what its original does). Must not know: cells, seeds' results.

Guarantees: every arm meets the same workload, fleet, trainer and window or a stricter one, and drops nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.registry import REGISTRY, find
from venusrl.scheduling.policies.venus import Venus, VenusConfig
from venusrl.scheduling.predictor import Predictor
from venusrl.scheduling.predictor.arms import Constant, Oracle, Shuffled
from venusrl.scheduling.predictor.learned import Learned
from venusrl.scheduling.predictor.siblings import Limits, Siblings
from venusrl.simulation.scenario import Scenario
from venusrl.simulation.truth import TrueLengths

PredictorName = Literal["siblings", "learned", "constant", "shuffled", "oracle"]
VENUS = "venus"
FAMILY: dict[str, PredictorName] = {
    VENUS: "siblings",
    "learned": "learned",
    "constant": "constant",
    "shuffled": "shuffled",
    "oracle": "oracle",
}
"""The same policy with better and worse knowledge of what is left."""
SWITCHES = tuple(name for name, kind in VenusConfig.__annotations__.items() if kind in (bool, "bool"))
"""The mechanisms that an ablation switches off, one at a time."""
OFF = "venus-without-"


class UnknownArm(ValueError):
    """There is no arm of that name; the message lists those there are."""


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a scenario. ``concurrency``: trajectories alive at once at most; None = no limit of its own."""

    name: str
    policy: str
    predictor: PredictorName | None = None
    venus: VenusConfig | None = None
    options: dict[str, bool | int | float | str] = {}
    concurrency: int | None = None

    @property
    def ours(self) -> bool:
        return self.policy == VENUS


def names() -> tuple[str, ...]:
    """All arms but those of the ablation."""
    return (*(name for name in REGISTRY if name not in FAMILY), *FAMILY)


def missing(contestant: Arm) -> str:
    """The package that this arm needs and that is not installed; empty if there is none."""
    needs = "lightgbm" if contestant.predictor == "learned" else ""
    return needs if needs and importlib.util.find_spec(needs) is None else ""


def arm(name: str) -> Arm:
    """The arm of that name. Raises UnknownArm."""
    if name in FAMILY:
        return Arm(name, VENUS, FAMILY[name])
    if name.startswith(OFF) and name.removeprefix(OFF) in SWITCHES:
        config = msgspec.convert({name.removeprefix(OFF): False}, VenusConfig)
        return Arm(name, VENUS, FAMILY[VENUS], config)
    if name in REGISTRY:
        return Arm(name, name)
    raise UnknownArm(f"there is no policy {name!r}; there are {', '.join(names())}, {OFF}SWITCH")


def prepare(contestant: Arm, scenario: Scenario, seed: int) -> tuple[Scenario, Policy]:
    """The scenario as this arm runs it, and a fresh policy for it."""
    mode = find(contestant.policy)
    if contestant.ours:
        policy: Policy = Venus(contestant.venus, predictor(contestant, scenario, seed))
    else:
        policy = mode.policy(concurrency=contestant.concurrency, **contestant.options)
    policy.name = contestant.name
    config = mode.config(scenario.scheduler)
    fleet = msgspec.structs.replace(scenario.fleet, weight_update=mode.update(scenario.scheduler))
    return msgspec.structs.replace(scenario, scheduler=config, fleet=fleet), policy


def predictor(contestant: Arm, scenario: Scenario, seed: int) -> Predictor:
    """A fresh one of the kind that this arm asks."""
    limits = Limits(
        max_turns=getattr(scenario.workload, "max_turns", None),
        max_tokens=getattr(scenario.workload, "max_output_tokens", None),
        max_context=getattr(scenario.workload, "context_tokens", None),
    )
    makers: dict[PredictorName, Callable[[], Predictor]] = {
        "siblings": lambda: Siblings(limits),
        "learned": lambda: Learned(limits),
        "constant": lambda: Constant(limits),
        "shuffled": lambda: Shuffled(Siblings(limits), salt=str(seed)),
        "oracle": lambda: Oracle(TrueLengths(scenario.workload, seed), limits),
    }
    assert set(makers) == set(get_args(PredictorName))
    return makers[contestant.predictor or "siblings"]()
