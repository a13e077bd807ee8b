"""The physical limit of a scenario: no schedule trains its groups sooner.

Owns: ``bound`` and ``Bound``. Joins what the fleet can carry (``demand``) with the trainer, the sandboxes and the
window's chain of versions. Must not know: policies. The derivation is in ``docs/simulation.md``; a test holds every
policy against it.

Guarantees: for every policy and the same seed, ``simulate(...).time_s >= bound(...).time_s``. What the bound cannot
speak about (groups that are dropped, refilled or shrink) raises ``NoBound``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from venusrl.simulation.demand import Demand, Prices, demand, hardware, sandboxes_s
from venusrl.simulation.scenario import Scenario


class NoBound(ValueError):
    """The scenario leaves open which trajectories train, so that there is no fixed set to bound."""


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds until the last batch is trained, at least. ``parts``: the same if only one thing were scarce:
    ``compute`` (engine time alone), ``kv`` (token-seconds alone), ``fluid`` (both), ``trainer``, ``window`` (the
    chain of versions and slowest members, nothing else scarce), ``sandboxes``."""

    time_s: float
    trained_tokens: int
    """Sampled tokens of the groups that train; with a choice of groups, the most."""
    parts: dict[str, float]

    @property
    def throughput(self) -> float:
        """Trained (sampled) tokens a second, at most."""
        return self.trained_tokens / self.time_s if self.time_s else math.inf

    @property
    def binding(self) -> str:
        """The part that alone comes closest."""
        return max(self.parts, key=lambda name: self.parts[name])


def bound(scenario: Scenario, seed: int) -> Bound:
    """The least time for this realisation of the workload. Costs about as much as drawing its scripts."""
    _check(scenario)
    machine = hardware(scenario.fleet)
    load_s = scenario.fleet.load_s if scenario.failures.worker_mtbf_s is None else 0.0
    demands = [
        demand(
            [scenario.workload.script(seed, ordinal, index, 0) for index in range(scenario.scheduler.group_size)],
            machine,
            scenario.trainer,
            load_s,
        )
        for ordinal in range(_Steps.of(scenario).groups)
    ]
    return _Chain(scenario, demands, load_s).bound(Prices(demands, machine))


def _check(scenario: Scenario) -> None:
    config, failures = scenario.scheduler, scenario.failures
    if config.deadline != "wait":
        raise NoBound('groups may be dropped: set deadline = "wait"')
    if config.zero_variance_refills:
        raise NoBound("zero-variance groups are refilled: set zero_variance_refills = 0")
    if failures.sandbox_rate:
        raise NoBound("attempts fail and are replaced: set failures.sandbox_rate = 0")


class _Steps(msgspec.Struct, frozen=True):
    """How many groups there are, and how many are trained after k + 1 steps."""

    steps: int
    batch: int
    groups: int

    @classmethod
    def of(cls, scenario: Scenario) -> _Steps:
        config, tasks = scenario.scheduler, scenario.workload.tasks
        batch, steps = config.batch_groups, config.max_steps
        if tasks is not None:
            possible = math.ceil(tasks / batch) if config.short_last_batch else tasks // batch
            steps = possible if steps is None else min(steps, possible)
        if steps is None or steps < 1:
            raise NoBound("the scenario trains nothing")
        wanted = steps * batch
        full = config.max_steps is not None and config.max_steps * batch <= (tasks or wanted)
        return cls(steps, batch, wanted if full or tasks is None else tasks)

    def trained(self, step: int) -> int:
        return min((step + 1) * self.batch, self.groups)


class _Chain:
    """The recursion over steps: when a batch can be complete, begun, trained; when its product can be published."""

    def __init__(self, scenario: Scenario, demands: Sequence[Demand], load_s: float) -> None:
        self._count = _Steps.of(scenario)
        self._window = scenario.scheduler.window
        self._staleness = scenario.scheduler.max_staleness
        self._sandboxes = scenario.sandboxes
        self._trainer = scenario.trainer
        self._demands = demands
        self._load_s = load_s

    def bound(self, prices: Prices) -> Bound:
        everything, number = range(len(self._demands)), self._count.trained(self._count.steps - 1)
        sandboxes = self._sandboxes_s() if number == len(self._demands) else 0.0
        last = self._train_s(self._count.steps - 1, self._count.steps - 1)
        parts = {
            "compute": prices.least_s(everything, number, weights=(1.0,)) + last,
            "kv": prices.least_s(everything, number, weights=(0.0,)) + last,
            "fluid": prices.least_s(everything, number) + last,
            "trainer": self._train_s(0, self._count.steps - 1) + self._blocked_s(0, self._count.steps - 1),
            "window": max(self._run(None), self._turnover_s()),
            "sandboxes": sandboxes + last,
        }
        time_s = max(self._run(prices), *parts.values())
        tokens = heapq.nlargest(number, (d.tokens for d in self._demands))
        return Bound(time_s=time_s, trained_tokens=sum(tokens), parts=parts)

    # --- the recursion ------------------------------------------------------------------------------------
    def _run(self, prices: Prices | None) -> float:
        """When the last step is trained; ``prices`` None = as if engines were never shared."""
        begin: list[float] = []
        published = [0.0]
        for step in range(self._count.steps):
            ready = max(self._ready(step, version, published, prices) for version in range(step + 1))
            if step > self._staleness:
                ready = max(ready, published[step - self._staleness] + self._load_s + self._started_s(step))
            for before, began in enumerate(begin):
                ready = max(ready, began + self._train_s(before, step - 1) + self._blocked_s(before, step))
            begin.append(ready)
            trained = max(
                began + self._train_s(before, step) + self._blocked_s(before, step)
                for before, began in enumerate(begin)
            )
            published.append(trained + self._trainer.publish_s)
        return published[-1] - self._trainer.publish_s

    def _ready(self, step: int, version: int, published: Sequence[float], prices: Prices | None) -> float:
        """When the batches up to ``step`` can be complete, from the groups that open at ``version`` or later."""
        groups = self._opened(version, step)
        number = self._count.trained(step) - groups.start
        if number <= 0:
            return 0.0
        latencies = (self._demands[g].loaded_s if version else self._demands[g].opened_s for g in groups)
        alone = heapq.nsmallest(number, latencies)[-1]
        together = prices.least_s(groups, number) + (self._load_s if version else 0.0) if prices is not None else 0.0
        return published[version] + max(alone, together)

    def _opened(self, version: int, step: int) -> range:
        """Groups that open no earlier than the publication of ``version`` and may be in a batch up to ``step``."""
        first = self._window + (version - 1) * self._count.batch if version else 0
        return range(min(first, len(self._demands)), min(self._window + step * self._count.batch, len(self._demands)))

    def _started_s(self, step: int) -> float:
        """The slowest member of this step's batch, at least."""
        candidates = (self._demands[g].started_s for g in self._opened(0, step))
        return heapq.nsmallest(self._count.trained(step) - step * self._count.batch, candidates)[-1]

    # --- the trainer ----------------------------------------------------------------------------------------
    def _train_s(self, first: int, last: int) -> float:
        """The least trainer time for steps ``first``..``last``."""
        steps = last - first + 1
        if steps <= 0:
            return 0.0
        reach, ripe = self._opened(0, last), self._opened(first, last)
        number = self._count.trained(last) - first * self._count.batch
        of_all = sum(heapq.nsmallest(number, (self._demands[g].train_s for g in reach)))
        spared = len(reach) - self._count.trained(last)
        of_ripe = sum(heapq.nsmallest(len(ripe) - spared, (self._demands[g].train_s for g in ripe)))
        return steps * self._trainer.fixed_s + max(of_all, of_ripe)

    def _blocked_s(self, first: int, last: int) -> float:
        """Publications between the beginnings of two steps, where the trainer waits for them."""
        return (last - first) * self._trainer.publish_s if self._trainer.publish_blocks else 0.0

    # --- staleness ------------------------------------------------------------------------------------------
    def _turnover_s(self) -> float:
        """A batch's members start at most S versions before it, so that the slowest of each batch overlaps with at most
        S other batches; summed over all batches, the slowest grouped together."""
        steps, batch = self._count.steps, self._count.batch
        number = self._count.trained(steps - 1)
        slowest = sorted(heapq.nsmallest(number, (d.started_s for d in self._demands)))
        ends = [min((step + 1) * batch, number) - 1 for step in range(steps)]
        loads = max(0, steps - 1 - self._staleness) * self._load_s
        work = sum(slowest[end] for end in ends) + self._train_s(0, steps - 1) + steps * self._trainer.publish_s + loads
        overlap = min(self._staleness + 1, steps)
        cycle = min(self._train_s(step, step) for step in range(steps)) + self._blocked_s(0, 1)
        return (work + cycle * sum(range(overlap))) / overlap - self._trainer.publish_s

    def _sandboxes_s(self) -> float:
        return sandboxes_s(self._demands, self._sandboxes)
