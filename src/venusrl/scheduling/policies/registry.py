"""Every policy by name, with the mode of run that belongs to it.

Owns: ``REGISTRY``, ``find``, and what each system that we compare with is known to do outside its order of turns: which
groups a batch takes, how new weights reach the engines, how groups are opened. Must not know: scenarios, recipes.

Fairness: a mode may be stricter than the run's window and staleness bound, never looser; nothing is ever dropped. Where
an original leaves a choice to its user, the more favourable one is taken and the summary says so. Two
liberties are taken with all of them in their favour: prompts are counted exactly (ThunderAgent estimates them from
characters), and tokens of an aborted turn are kept and go on under the new weights (slime's agent layer ends the turn,
ROLL's agentic one asks for it again). docs/baselines.md has the details.

``venus`` with other knowledge of lengths (oracle, constant, shuffled) is the same policy with another predictor: its
options take one, and ``simulation.suites.arms`` names these.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import msgspec

from venusrl.scheduling.config import Consumption, SchedulerConfig
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.concurrency import Concurrency
from venusrl.scheduling.policies.continuum import Continuum
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.policies.rollflash import RollFlash, RollFlashAgentic
from venusrl.scheduling.policies.thunderagent import ThunderAgent
from venusrl.scheduling.policies.venus import Venus

WeightUpdate = Literal["drain", "turn_boundary", "in_flight", "abort"]
AsyncFactors = Literal["any", "integers", "one"]


class UnknownPolicy(ValueError):
    """No policy of that name, or none with that option; the message lists those there are."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way to run. ``source``: where its mode and constants come from.

    ``async_factors``: those it knows; the run's is rounded down to one of them (0, strictly synchronous, always is
    one). ``own_staleness``: its bound is ceil(alpha) however large the run's is.
    """

    name: str
    summary: str
    source: str
    make: Callable[..., Policy]
    weight_update: WeightUpdate = "in_flight"
    consumption: Consumption = "oldest"
    cohorts: bool = False
    async_factors: AsyncFactors = "any"
    own_staleness: bool = False
    window_batches: Decimal | None = None
    """For ``windowed`` consumption: the window, in batches."""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """What ``policy`` takes beside ``concurrency``."""
        return tuple(inspect.signature(self.make).parameters)

    def policy(self, *, concurrency: int | None = None, **options: Any) -> Policy:
        """A fresh policy. ``concurrency``: trajectories alive at once at most; None = as many as the window allows."""
        unknown = sorted(options.keys() - set(self.options))
        if unknown:
            known = ", ".join(("concurrency", *self.options))
            raise UnknownPolicy(f"policy {self.name} has no option {', '.join(unknown)}; it has {known}")
        policy = self.make(**{**self.defaults, **options})
        policy.name = self.name
        return policy if concurrency is None else Concurrency(policy, concurrency)

    def config(self, config: SchedulerConfig) -> SchedulerConfig:
        """The run's numbers as this system would have them."""
        alpha = _rounded(config.async_factor, self.async_factors)
        staleness = math.ceil(alpha) if self.own_staleness or alpha != config.async_factor else config.max_staleness
        window = None if self.window_batches is None else math.ceil(self.window_batches * config.batch_groups)
        return msgspec.structs.replace(
            config,
            consumption_window=window,
            async_factor=alpha,
            max_staleness=min(staleness, config.max_staleness),
            consumption=self.consumption,
            cohorts=self.cohorts,
        )

    def update(self, config: SchedulerConfig) -> WeightUpdate:
        """How new weights reach the engines in a run with this config (as given to, or got from, ``config``)."""
        return "drain" if self.config(config).on_policy else self.weight_update


def _rounded(alpha: Decimal, known: AsyncFactors) -> Decimal:
    if known == "any":
        return alpha
    return min(Decimal(math.floor(alpha)), Decimal(1) if known == "one" else alpha)


def find(name: str) -> Baseline:
    """The policy of that name. Raises UnknownPolicy."""
    if name not in REGISTRY:
        raise UnknownPolicy(f"there is no policy {name!r}; there are {', '.join(REGISTRY)}")
    return REGISTRY[name]


_SLIME = "slime 624b824a: slime/rollout/fully_async_rollout.py, train_async.py"
_ROLL = "ROLL 8eb27cc2: generate_scheduler.py, rollout_scheduler.py, router.py"
_THUNDER = "ThunderAgent a7eef77 and 7ddc861: scheduler/router.py, backend/state.py"
_CONTINUUM = "Continuum, arXiv 2511.02230, as summarised by third parties"

_ALL = (
    Baseline(
        "venus",
        "groups by frontier, KV by value on a ledger, one queue for all workers; weights change in flight",
        "VenusRL's own policy",
        Venus,
    ),
    Baseline(
        "fcfs",
        "turns as they come, session affinity, the engine queues; weights change in flight",
        "VenusRL's own plain baseline",
        Fcfs,
    ),
    Baseline(
        "fcfs-gate",
        "as fcfs, but a turn waits until its worker has a free slot",
        "VenusRL's own plain baseline",
        Fcfs,
        defaults={"gate": True},
    ),
    Baseline(
        "slime",
        "fully asynchronous: no gate, groups train as they complete, every request aborted and every cache flushed at"
        " each new version",
        _SLIME,
        Fcfs,
        weight_update="abort",
        consumption="completion",
    ),
    Baseline(
        "slime-one-step-off",
        "the next batch is generated while this one trains, and new weights wait for it; synchronous below alpha 1",
        _SLIME,
        Fcfs,
        weight_update="drain",
        cohorts=True,
        async_factors="one",
        own_staleness=True,
    ),
    Baseline(
        "windowed-fifo",
        "as fcfs, but a batch takes what completes first among the oldest tasks only",
        "MiniMax arXiv 2605.26494 section 6.2.4; torchtitan PR 3927; NeMo-RL PR 4224",
        Fcfs,
        consumption="windowed",
        window_batches=Decimal("1.5"),
    ),
    Baseline(
        "rollflash",
        "queue scheduling, 128 running requests a worker; a batch takes the oldest; the staleness bound is ceil(alpha)",
        _ROLL,
        RollFlash,
        weight_update="abort",
        own_staleness=True,
    ),
    Baseline(
        "rollflash-agentic",
        "one queue an environment group, environments play one episode at a time on a worker of their own, batches in"
        " the order of tasks; alpha is rounded down to an integer",
        _ROLL,
        RollFlashAgentic,
        weight_update="abort",
        consumption="in_order",
        async_factors="integers",
        own_staleness=True,
    ),
    Baseline(
        "thunderagent",
        "capacity gate by program with its default flags: programs are never released, no decay",
        _THUNDER,
        ThunderAgent,
        defaults={"release": False},
    ),
    Baseline(
        "thunderagent-decay",
        "as thunderagent, with the decay of idle programs' weight",
        _THUNDER,
        ThunderAgent,
        defaults={"release": False, "decay": True},
    ),
    Baseline("thunderagent-release", "as thunderagent, programs are released at their end", _THUNDER, ThunderAgent),
    Baseline(
        "thunderagent-best",
        "as thunderagent, with release and decay",
        _THUNDER,
        ThunderAgent,
        defaults={"decay": True},
    ),
    Baseline(
        "thunderagent-repaired",
        "as thunderagent-best without its known defects, with the settings that the independent study found best",
        f"{_THUNDER}; zetxqx's study, steps 12 to 16",
        ThunderAgent,
        defaults={"decay": True, "faithful": False, "interval_s": 1.0, "half_life_s": 10.0},
    ),
    Baseline(
        "continuum", "KV is kept over a tool call for a time to live; first programs first", _CONTINUUM, Continuum
    ),
)

REGISTRY: Mapping[str, Baseline] = {baseline.name: baseline for baseline in _ALL}
"""By name, in the order that tables show them."""
