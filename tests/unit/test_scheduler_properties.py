"""Whole runs in virtual time: the promises hold whatever happens, and pacing does what it is for (case T05).

``VirtualRun`` checks at every event, with its own books: the window, N_j <= (j + 1) * B, the staleness and
completeness of every batch, the version each token comes from, one dispatch a request, and progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.actions import Dispatch, FinishRun, FormBatch, Hold
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.events import Event, TurnRequested
from venusrl.scheduling.policies import PendingTurn, View
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.scheduler import Scheduler
from venusrl.scheduling.window import EventError
from venusrl.testing.virtual_run import PromiseBroken, VirtualRun, Workload

ALPHAS = ("0", "0.5", "1", "1.5", "2", "3")


def config(alpha: str, extra: int = 0, **changes: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "batch_groups": 4,
        "group_size": 3,
        "async_factor": Decimal(alpha),
        "max_staleness": math.ceil(Decimal(alpha)) + extra,
        "max_steps": 6,
    }
    return SchedulerConfig(**(defaults | changes))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        turns=(1, draw(st.integers(1, 4))),
        stragglers=draw(st.sampled_from((0.0, 0.1))),
        failures=draw(st.sampled_from((0.0, 0.1, 0.3))),
        retries=draw(st.integers(0, 3)),
        train_s=draw(st.sampled_from((0.1, 5.0, 60.0))),
        publish_s=draw(st.sampled_from((0.0, 1.0, 90.0))),
        load_s=(0.0, draw(st.sampled_from((0.1, 30.0)))),
        workers=draw(st.integers(1, 3)),
        slots=draw(st.sampled_from((1, 4, 64))),
        deaths_every_s=draw(st.sampled_from((None, 30.0))),
    )


@settings(max_examples=40)
@given(
    alpha=st.sampled_from(ALPHAS),
    extra=st.integers(0, 2),
    batch=st.integers(1, 4),
    size=st.integers(2, 3),
    workload=workloads(),
    seed=st.integers(0, 2**16),
    gate=st.booleans(),
)
def test_every_run_reaches_its_end_with_every_promise_kept(
    alpha: str, extra: int, batch: int, size: int, workload: Workload, seed: int, gate: bool
) -> None:
    if alpha == "0":
        workload = Workload(**{f: getattr(workload, f) for f in workload.__struct_fields__} | {"drain": True})
    made = config(alpha, extra, batch_groups=batch, group_size=size, max_dead_groups=10_000)
    run = VirtualRun(Scheduler(made, Fcfs(gate=gate)), workload, seed).run()
    assert run.ended == FinishRun("max_steps")
    assert [b.version for b in run.batches] == list(range(6))
    # No drop is ever forced: what is cancelled is what was left of groups that could not train any more.
    assert set(run.cancelled) <= {"group_too_small", "group_closed"}
    _check_dispatches(run)


def _check_dispatches(run: VirtualRun) -> None:
    """Every request is dispatched once, or it was withdrawn with its trajectory, or it is still held at the end."""
    waiting: set[str] = set()
    for _, event, answer in run.log:
        if isinstance(event, TurnRequested):
            waiting.add(event.trajectory)
        for action in answer:
            if isinstance(action, Dispatch):
                assert action.trajectory in waiting
                waiting.remove(action.trajectory)
            elif isinstance(action, Hold):
                assert action.trajectory in waiting
                assert action.reason
    held = {e.name for e in run.episodes.values() if e.waiting and not e.over}
    assert held <= waiting


@settings(max_examples=10)
@given(
    alpha=st.sampled_from(ALPHAS[1:]),
    extra=st.integers(0, 1),
    grace=st.sampled_from((0.0, 20.0)),
    seed=st.integers(0, 2**16),
)
def test_with_drop_only_what_holds_up_a_batch_is_dropped(alpha: str, extra: int, grace: float, seed: int) -> None:
    made = config(alpha, extra, deadline="drop", drop_grace_s=grace)
    run = VirtualRun(Scheduler(made), Workload(hangs=0.03, failures=0.05), seed).run()
    assert run.ended == FinishRun("max_steps")
    assert set(run.cancelled) <= {"deadline", "group_too_small", "group_closed"}


def test_drop_outruns_wait_when_trajectories_hang() -> None:
    workload = Workload(hangs=0.02)
    wait, drop = (
        VirtualRun(Scheduler(config("2", deadline=deadline, drop_grace_s=10.0, max_steps=20)), workload, seed=2).run()
        for deadline in ("wait", "drop")
    )
    assert not wait.cancelled
    assert drop.cancelled["deadline"] > 0
    assert drop.clock.monotonic() < 0.75 * wait.clock.monotonic()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_same_events_give_the_same_actions(alpha: str) -> None:
    workload = Workload(stragglers=0.1, failures=0.1, deaths_every_s=50.0, drain=alpha == "0")
    first, second = (VirtualRun(Scheduler(config(alpha, 1)), workload, seed=3).run() for _ in range(2))
    assert first.log == second.log
    replayed = Scheduler(config(alpha, 1))
    assert [tuple(replayed.handle(event, now)) for now, event, _ in first.log] == [answer for *_, answer in first.log]


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def test_T05_a_fast_producer_is_paced_and_drops_nothing() -> None:
    """Rollout makes batches three times faster than they train: the window paces it, no work is thrown away."""
    staleness = {}
    for alpha in ("0.5", "1", "2", "3"):
        workload = Workload(turns=(1, 1), turn_s=(18.0, 22.0), train_s=60.0, publish_s=0.0, slots=1000)
        run = VirtualRun(Scheduler(config(alpha, 3 - math.ceil(float(alpha)), max_steps=20)), workload).run()
        assert not run.cancelled
        assert not run.scheduler.snapshot().retired
        trained = [s for batch in run.batches for s in batch.staleness]
        assert max(trained) <= 3
        staleness[alpha] = _mean(trained)
    assert 0 < staleness["0.5"] < staleness["1"] < staleness["2"] < staleness["3"] <= 3


def test_a_wider_bound_buys_freedom_at_the_same_mean_staleness() -> None:
    workload = Workload(turns=(1, 6), stragglers=0.05, straggler_factor=8.0, train_s=20.0, slots=1000)
    tight, wide = (VirtualRun(Scheduler(config("1", extra, max_steps=30)), workload, seed=5).run() for extra in (0, 2))
    assert wide.clock.monotonic() < tight.clock.monotonic()
    means = [_mean([s for batch in run.batches for s in batch.staleness]) for run in (tight, wide)]
    assert abs(means[0] - means[1]) < 0.15


def test_asynchrony_hides_the_trainer_behind_the_rollout() -> None:
    workload = Workload(turns=(2, 4), train_s=10.0, slots=1000)
    walls = [VirtualRun(Scheduler(config(alpha, max_steps=10)), workload, seed=1).run() for alpha in ("0", "1")]
    assert walls[1].clock.monotonic() < 0.75 * walls[0].clock.monotonic()


def test_a_task_order_that_ends_ends_the_run() -> None:
    run = VirtualRun(Scheduler(config("1.5", batch_groups=2, max_steps=10)), Workload(tasks=5)).run()
    assert run.ended == FinishRun("task_order_exhausted")
    assert len(run.batches) == 2


class _Reckless(Fcfs):
    """Sends every turn to the first worker at once, whatever the view says."""

    def decide(self, view: View) -> Iterator[Dispatch | Hold]:
        for turn in list(self._waiting.values()):
            if view.workers:
                self.remove(turn.trajectory)
                yield Dispatch("reckless", turn.trajectory, turn.turn, next(iter(view.workers)), 0)


def test_a_policy_that_ignores_versions_is_found_out() -> None:
    workload = Workload(turns=(3, 9), load_s=(20.0, 30.0), train_s=0.1)
    with pytest.raises((PromiseBroken, EventError)):
        VirtualRun(Scheduler(config("2", max_steps=30), _Reckless()), workload).run()


def test_a_scheduler_that_holds_for_ever_is_found_out() -> None:
    class Lazy(Fcfs):
        def add(self, turn: PendingTurn) -> None:
            pass

    with pytest.raises(PromiseBroken, match="deadlock"):
        VirtualRun(Scheduler(config("1"), Lazy()), Workload()).run(patience_s=100.0)


def test_a_scheduler_that_forms_what_is_not_due_is_found_out() -> None:
    class Hasty(Scheduler):
        def handle(self, event: Event, now: float) -> list[Any]:
            return [*super().handle(event, now), FormBatch("now", 0, ())]

    with pytest.raises(PromiseBroken):
        VirtualRun(Hasty(config("1")), Workload()).run()
