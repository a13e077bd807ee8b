"""How many events a second the simulator gets through on one core, and what share of it is the scheduler's.

Usage: python benchmarks/simulator_speed.py [--model qwen3-4b|qwen3-32b] [--batch 32] [--alpha 1] [--steps 3]
       [--policy fcfs|venus] [--profile]

An event is either a timer that the simulator's loop popped and acted on (a sequence ended, a prompt was computed, KV
ran out, a tool returned...; void timers do not count) or an event that the real scheduler was told. Time is the CPU
time of the whole run, workload generation included; the scheduler's share is what passes inside ``handle_all``.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import time
from collections.abc import Callable, Iterable
from decimal import Decimal

from venusrl.scheduling.actions import Action
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.events import Event
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.policies.venus import Venus
from venusrl.scheduling.scheduler import Scheduler
from venusrl.simulation.models import MODELS, cluster
from venusrl.simulation.results import Result
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import Scenario
from venusrl.simulation.workloads.openswe import OpenSwe

POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "venus": Venus}


def scenario(model: str, batch: int, alpha: str, steps: int) -> Scenario:
    factor = Decimal(alpha)
    fleet, trainer = cluster(MODELS[model], weight_update="in_flight" if factor else "drain")
    config = SchedulerConfig(batch, 8, factor, math.ceil(factor), max_steps=steps)
    return Scenario(f"{model} B={batch} alpha={alpha}", config, fleet, trainer, OpenSwe())


class Stopwatch:
    """CPU seconds spent in ``Scheduler.handle_all``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def install(self) -> None:
        original = Scheduler.handle_all

        def timed(scheduler: Scheduler, events: Iterable[Event], now: float) -> list[Action]:
            begin = time.process_time()
            answer = original(scheduler, events, now)
            self.seconds += time.process_time() - begin
            return answer

        Scheduler.handle_all = timed  # type: ignore[method-assign, assignment]


def measure(case: Scenario, policy: Policy) -> tuple[Result, float]:
    begin = time.process_time()
    result = simulate(case, policy, 0)
    return result, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-32b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--alpha", default="1")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--policy", default="fcfs", choices=sorted(POLICIES))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    case = scenario(options.model, options.batch, options.alpha, options.steps)
    if options.profile:
        with cProfile.Profile(time.process_time) as profile:
            measure(case, POLICIES[options.policy]())
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    result, seconds = measure(case, POLICIES[options.policy]())
    watch = Stopwatch()
    watch.install()
    _, again = measure(case, POLICIES[options.policy]())
    events = result.events.loop + result.events.scheduler
    print(f"{case.name}, {options.policy}: {result.time_s:.0f} simulated s in {seconds:.1f} s of CPU")
    print(f"{events / seconds:,.0f} events/s ({result.events.loop:,} timers, {result.events.scheduler:,} told)")
    print(f"scheduler: {watch.seconds / again:.0%} of the time; timers alone {result.events.loop / seconds:,.0f}/s")


if __name__ == "__main__":
    main()
