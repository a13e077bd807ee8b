"""The ``venus`` policy in whole runs: bounded waiting, no turn lost or sent twice, the ledger in bounds, determinism.

``VirtualRun`` checks the scheduler's promises at every event with its own books, and that something trains in the end.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.actions import Action, Dispatch, FinishRun, Hold
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.events import Event, TurnRequested
from venusrl.scheduling.policies.venus import Venus, VenusConfig
from venusrl.scheduling.scheduler import Scheduler
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, FailureSpec, FleetSpec, SandboxSpec, Scenario, TrainerSpec
from venusrl.simulation.workloads.openswe import OpenSwe
from venusrl.testing.virtual_run import VirtualRun, Workload

ALPHAS = ("0", "0.5", "1", "1.5", "2")
SWITCHES = tuple(name for name in VenusConfig.__struct_fields__ if isinstance(getattr(VenusConfig(), name), bool))

PREFILL = EngineCosts(0.1, 0.1, 1e-3, 1e-3, 1e-6)
TRANSFER = EngineCosts(0.1, 0.1, 1e-3, 1e-2, 1e-6, transfer_token_s=1e-6)


class Watched(Scheduler):
    """Looks at the ledger after every event."""

    def handle(self, event: Event, now: float) -> list[Action]:
        answer = super().handle(event, now)
        assert isinstance(self.policy, Venus)
        for book in self.policy.room.ledger.books.values():
            listed = [*book.running.values(), *book.idle.values()]
            largest = max((h.tokens + h.reserve for h in listed), default=0)
            assert book.used - largest <= book.capacity
        return answer


def config(alpha: str, extra: int = 0, **changes: Any) -> SchedulerConfig:
    staleness = math.ceil(Decimal(alpha)) + extra
    defaults: dict[str, Any] = {"batch_groups": 3, "group_size": 3, "max_steps": 4, "max_dead_groups": 10_000}
    return SchedulerConfig(async_factor=Decimal(alpha), max_staleness=staleness, **(defaults | changes))


@st.composite
def workloads(draw: st.DrawFn, *, drain: bool) -> Workload:
    return Workload(
        turns=(1, draw(st.integers(1, 6))),
        tool_s=(0.1, draw(st.sampled_from((2.0, 60.0)))),
        stragglers=draw(st.sampled_from((0.0, 0.1))),
        failures=draw(st.sampled_from((0.0, 0.2))),
        train_s=draw(st.sampled_from((0.1, 60.0))),
        publish_s=draw(st.sampled_from((0.0, 30.0))),
        workers=draw(st.integers(1, 3)),
        slots=draw(st.sampled_from((1, 4, 64))),
        deaths_every_s=draw(st.sampled_from((None, 60.0))),
        drain=drain,
        kv=draw(st.sampled_from((150, 700, 3000))),
        growth=(0, draw(st.sampled_from((10, 100, 300)))),
        costs=draw(st.sampled_from((None, PREFILL, TRANSFER))),
    )


def _every_turn_went_once(run: VirtualRun) -> None:
    """Each request is dispatched once or withdrawn with its trajectory; whoever is held is waiting."""
    waiting: set[str] = set()
    for _, event, answer in run.log:
        if isinstance(event, TurnRequested):
            waiting.add(event.trajectory)
        for action in answer:
            if isinstance(action, Dispatch):
                waiting.remove(action.trajectory)
            elif isinstance(action, Hold):
                assert action.trajectory in waiting
            assert action.reason
    assert {e.name for e in run.episodes.values() if e.waiting and not e.over} <= waiting


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    alpha=st.sampled_from(ALPHAS),
    extra=st.integers(0, 1),
    off=st.sets(st.sampled_from(SWITCHES), max_size=3),
    patience=st.sampled_from((1.0, 30.0)),
    seed=st.integers(0, 2**16),
)
def test_every_run_reaches_its_end_whatever_is_switched_off(
    data: st.DataObject, alpha: str, extra: int, off: set[str], patience: float, seed: int
) -> None:
    workload = data.draw(workloads(drain=alpha == "0"))
    settings_ = VenusConfig(
        **dict.fromkeys(off, False),
        displace_after_s=patience,
        claim_after_s=2 * patience,
        preempt_after_s=2 * patience,
        ageing_s=10 * patience,
    )
    run = VirtualRun(Watched(config(alpha, extra), Venus(settings_)), workload, seed).run()
    assert run.ended == FinishRun("max_steps")
    assert set(run.cancelled) <= {"group_too_small", "group_closed"}
    _every_turn_went_once(run)


def test_the_same_events_give_the_same_actions() -> None:
    workload = Workload(turns=(1, 6), kv=500, growth=(10, 90), failures=0.1, deaths_every_s=50.0)
    first, second = (VirtualRun(Scheduler(config("1", 1), Venus()), workload, seed=3).run() for _ in range(2))
    assert first.log == second.log
    again = Scheduler(config("1", 1), Venus())
    assert [tuple(again.handle(event, now)) for now, event, _ in first.log] == [answer for *_, answer in first.log]


def test_short_of_sandboxes_and_of_workers_that_last_the_run_still_ends() -> None:
    """In the simulator, which refuses what cannot be: a pause of a sandbox that is not there, a turn sent twice..."""
    engines = tuple(EngineSpec(f"w{i}", 60_000, 64, EngineCosts(0.014, 5e-5, 2.5e-7, 2.8e-4, 9e-9)) for i in range(2))
    scenario = Scenario(
        "short",
        config("1", batch_groups=2, group_size=4, max_steps=2),
        FleetSpec(engines, load_s=2.0),
        TrainerSpec(fixed_s=5.0, publish_s=5.0),
        OpenSwe(length=0.1, max_turns=30),
        sandboxes=SandboxSpec(memory=9.0),
        failures=FailureSpec(sandbox_rate=0.05, worker_mtbf_s=600.0),
    )
    first, second = (simulate(scenario, Venus(), seed=1) for _ in range(2))
    assert first == second
    assert len(first.steps) == 2
