"""What the scheduler costs with 10,000 live trajectories: events a second on one core, and the slow ones.

Every trajectory plays turns: request, dispatch, end, tool. KV holds about a third of them, so that most wait and the
policy must choose. The rate is counted in CPU time of the thread, whatever else the machine does; the slowest events
are by the clock (asking for the CPU time of each would cost more than handling it).

    python benchmarks/scheduler_speed.py [fcfs|venus] [--groups 625] [--workers 64] [--events 60000]
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Iterator
from decimal import Decimal

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.policies.venus import Venus
from venusrl.scheduling.scheduler import Scheduler
from venusrl.types import StopReason

COSTS = EngineCosts(0.0143, 5e-5, 5.6e-8, 6.6e-5, 2.1e-9)
POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "venus": Venus}
GROUP = 8


class Play:
    """The world around the scheduler: turns of about 4 s, tools of about 5 s, contexts that grow, finite episodes."""

    def __init__(self, policy: Policy, batch: int, workers: int, seed: int = 0) -> None:
        config = SchedulerConfig(batch, GROUP, Decimal(1), 1)
        self.scheduler = Scheduler(config, policy)
        self.spent: list[float] = []
        self.now = 0.0
        self.published = 0
        self.tick_at: float | None = None
        self._random = random.Random(seed)
        self._timers: list[tuple[float, int, ev.Event]] = []
        self._count = 0
        self._contexts: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._opened = 0
        live = config.window * GROUP
        self.capacity = int(live / 3 * 30_000 / workers)
        self._tell(ev.VersionPublished(0))
        for index in range(workers):
            self._tell(ev.WorkerUp(f"w{index}", self.capacity, 512, 0, COSTS))

    def run(self, events: int) -> None:
        """Until that many events were handled."""
        while len(self.spent) < events:
            wake = self.scheduler.wake_at
            if wake is not None and wake < self._timers[0][0]:
                self.now = max(self.now, wake)
                self._tell(ev.Tick())
                continue
            self.now, _, event = heapq.heappop(self._timers)
            self._happen(event)

    def _later(self, seconds: float, event: ev.Event) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._count, event))

    def _tell(self, event: ev.Event) -> None:
        begun = time.perf_counter()
        answer = self.scheduler.handle(event, self.now)
        self.spent.append(time.perf_counter() - begun)
        for action in answer:
            for follow in self._carry_out(action):
                self._tell(follow)

    def _carry_out(self, action: act.Action) -> Iterator[ev.Event]:
        match action:
            case act.OpenGroup():
                name, self._opened = f"g{self._opened}", self._opened + 1
                yield ev.GroupOpened(name, self._opened, name, GROUP)
                for index in range(GROUP):
                    trajectory = f"{name}/{index}"
                    self._left[trajectory] = self._random.randint(5, 120)
                    self._contexts[trajectory] = self._random.randint(2_000, 30_000)
                    self._turns[trajectory] = 0
                    yield ev.TrajectoryOpened(trajectory, name, index, 0)
                    self._later(self._random.uniform(0, 60), ev.SandboxReady(trajectory))
            case act.Dispatch(trajectory=name, turn=turn, worker=worker):
                yield ev.TurnDispatched(name, turn, worker, self.published)
                tokens = self._random.randint(50, 500)
                self._later(tokens * 0.02, ev.TurnFinished(name, turn, tokens, 0, StopReason.STOP))
            case act.FormBatch(version=version):
                self._later(30.0, ev.BatchTrained(version))
            case act.CancelTrajectory() | act.FailRun():
                raise RuntimeError(f"nobody should have to {action}")
            case _:
                pass

    def _happen(self, event: ev.Event) -> None:
        self._tell(event)
        match event:
            case ev.SandboxReady(trajectory=name) | ev.ToolFinished(trajectory=name):
                self._tell(ev.TurnRequested(name, self._turns[name], self._contexts[name], 2_000, 4_096))
            case ev.TurnFinished(trajectory=name, turn=turn, generated=generated):
                self._turns[name] += 1
                self._contexts[name] += generated + 400
                if self._turns[name] >= self._left[name]:
                    self._tell(ev.VerificationStarted(name))
                    self._later(5.0, ev.TrajectoryFinished(name))
                else:
                    self._tell(ev.ToolStarted(name, turn))
                    self._later(self._random.expovariate(0.2), ev.ToolFinished(name, turn, 400, 0))
            case ev.BatchTrained(version=version):
                self.published = version + 1
                self._tell(ev.VersionPublished(version + 1))
                for worker in list(self.scheduler.workers):
                    self._tell(ev.WorkerAcknowledged(worker, version + 1))
            case _:
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", choices=sorted(POLICIES), default="venus", nargs="?")
    parser.add_argument("--groups", type=int, default=625, help="of a batch; twice as many are live, of 8 each")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--events", type=int, default=60_000)
    options = parser.parse_args()
    play = Play(POLICIES[options.policy](), options.groups, options.workers)
    play.run(options.events // 3)
    cold, begun = len(play.spent), time.thread_time()
    play.run(options.events)
    cpu_s = time.thread_time() - begun
    warm = sorted(play.spent[cold:])
    report = {
        "policy": options.policy,
        "live": len(play.scheduler.live),
        "events": len(warm),
        "events_per_cpu_s": round(len(warm) / cpu_s),
        "p50_us": round(warm[len(warm) // 2] * 1e6, 1),
        "p99_ms": round(warm[len(warm) * 99 // 100] * 1e3, 3),
        "max_ms": round(warm[-1] * 1e3, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
