"""The best schedule of a tiny instance, by search.

Owns: ``optimum``: branch and bound over what a policy may do with turns, each branch played by the simulator itself.
Must not know: any other policy.

The decision set: at any event, any turn that waits may go to any worker that may take it (more than fits: the engine
queues it), in any order, or wait until the next turn ends or new weights arrive anywhere. It knows all lengths. Left
out: preemption, KV transfers, hints on eviction, pacing; so a policy that uses them may in principle do better.

Guarantees: ``complete`` means that no such schedule is faster by more than ``tolerance``. The number of branches
grows exponentially: six trajectories of a few turns are about what it can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec

from venusrl.scheduling import events as ev
from venusrl.scheduling.actions import Dispatch, Hold
from venusrl.scheduling.events import Event
from venusrl.scheduling.fleet import Worker
from venusrl.scheduling.policies import Decision, PendingTurn, Policy, View
from venusrl.simulation.demand import Rest, hardware, remaining
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import Scenario

_FREEING = (ev.TurnFinished, ev.TrajectoryFinished, ev.TrajectoryFailed, ev.VersionPublished, ev.WorkerAcknowledged)


_NOTHING = Rest(0.0, 0.0, 0)


class Optimum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best schedule found. ``branches``: runs played. ``complete``: all others are known to be no better."""

    time_s: float
    branches: int
    complete: bool


class _Hopeless(Exception):
    """This branch cannot beat the best one."""


def optimum(
    scenario: Scenario,
    seed: int,
    *,
    start_s: float = float("inf"),
    max_branches: int = 20_000,
    tolerance: float = 1e-6,
) -> Optimum:
    """Search the decision set. ``start_s``: a time known to be reachable; only better schedules are looked for."""
    best, branches = start_s, 0
    prefix: list[int] | None = []
    while prefix is not None and branches < max_branches:
        searcher = _Searcher(scenario, seed, prefix, best * (1 - tolerance))
        branches += 1
        with suppress(_Hopeless):
            best = min(best, simulate(scenario, searcher, seed).time_s)
        prefix = searcher.next_prefix()
    return Optimum(time_s=best, branches=branches, complete=prefix is None)


class _Searcher(Policy):
    """Plays the choices of ``prefix``, then the first option each time; remembers how many there were."""

    name = "optimum"

    def __init__(self, scenario: Scenario, seed: int, prefix: list[int], limit_s: float) -> None:
        self._scenario = scenario
        self._seed = seed
        self._machine = hardware(scenario.fleet)
        self._limit_s = limit_s
        self._choices = prefix
        self._options: list[int] = []
        self._waiting: dict[str, PendingTurn] = {}
        self._parked: set[str] = set()
        self._used: set[str] = set()
        self._turn: dict[str, int] = {}
        """Next turn of each live trajectory, as far as requested."""
        self._rests: dict[str, tuple[Rest, ...]] = {}
        self._single = len(scenario.fleet.engines) == 1

    def next_prefix(self) -> list[int] | None:
        """The choices of the next branch in depth-first order; None when there is none."""
        taken = [*self._choices, *([0] * len(self._options))][: len(self._options)]
        while taken:
            if taken[-1] + 1 < self._options[len(taken) - 1]:
                return [*taken[:-1], taken[-1] + 1]
            taken.pop()
        return None

    # --- the policy -----------------------------------------------------------------------------------------
    def observe(self, event: Event, view: View) -> None:
        if isinstance(event, _FREEING):
            self._parked.clear()
        if isinstance(event, ev.TrajectoryFinished):
            self._turn.pop(event.trajectory, None)

    def add(self, turn: PendingTurn) -> None:
        self._waiting[turn.trajectory] = turn
        self._turn[turn.trajectory] = turn.turn

    def remove(self, trajectory: str) -> None:
        self._waiting.pop(trajectory, None)
        self._parked.discard(trajectory)
        self._turn.pop(trajectory, None)

    def decide(self, view: View) -> Iterator[Decision]:
        self._prune(view)
        last: tuple[str, str] | None = None
        while True:
            options = list(self._dispatches(view, last))
            if not options:
                return
            may_wait = any(view.doing(trajectory) == "generating" for trajectory in self._turn)
            choice = self._choose(len(options) + may_wait)
            if choice == len(options):
                for trajectory in [t for t in self._waiting if t not in self._parked]:
                    self._parked.add(trajectory)
                    yield Hold("searched", trajectory, self._waiting[trajectory].turn)
                return
            turn, worker = options[choice]
            last = (turn.trajectory, worker.name)
            del self._waiting[turn.trajectory]
            self._used.add(worker.name)
            yield Dispatch("searched", turn.trajectory, turn.turn, worker.name, 0)

    def _dispatches(self, view: View, last: tuple[str, str] | None) -> Iterator[tuple[PendingTurn, Worker]]:
        """At home first. Of moments at which nothing passes in between, one order of independent dispatches."""
        for trajectory in sorted(self._waiting):
            turn = self._waiting[trajectory]
            if trajectory in self._parked or view.held(turn) is not None:
                continue
            home = view.home(trajectory)
            for worker in sorted(self._distinct(view), key=lambda w: (w is not home, len(w.running), w.name)):
                swapped = last is not None and trajectory < last[0] and worker.name != last[1]
                if not swapped and view.refusal(turn, worker) is None:
                    yield turn, worker

    def _distinct(self, view: View) -> Iterator[Worker]:
        """The workers, but of equal ones that were never used only the first."""
        fresh = set()
        for worker in view.workers.values():
            kind = (worker.kv_capacity, worker.slots, worker.version, worker.costs)
            if worker.name in self._used:
                yield worker
            elif kind not in fresh:
                fresh.add(kind)
                yield worker

    def _choose(self, options: int) -> int:
        """Decisions without alternatives are none."""
        if options == 1:
            return 0
        self._options.append(options)
        number = len(self._options) - 1
        return self._choices[number] if number < len(self._choices) else 0

    # --- the bound -------------------------------------------------------------------------------------------
    def _prune(self, view: View) -> None:
        """What is not sent yet has to be done: by each trajectory alone, and by the fleet for all of them."""
        rests = [
            self._rest(view, trajectory, turn + (trajectory not in self._waiting))
            for trajectory, turn in self._turn.items()
        ]
        if not rests:
            return
        tokens = [rest.tokens for rest in rests]
        steps = max(tokens) if self._single else sum(tokens) / len(tokens)
        together = sum(rest.engine_s for rest in rests) + steps * self._machine.costs.step_base_s
        least_s = max(max(rest.alone_s for rest in rests), together / self._machine.total_speed)
        if view.now + least_s >= self._limit_s:
            raise _Hopeless

    def _rest(self, view: View, trajectory: str, turn: int) -> Rest:
        if trajectory not in self._rests:
            group = view.group(trajectory)
            if group is None:
                return _NOTHING
            script = self._scenario.workload.script(
                self._seed, group.ordinal, group.members[trajectory].index, attempt=0
            )
            self._rests[trajectory] = remaining(script, self._machine)
        return self._rests[trajectory][turn]
