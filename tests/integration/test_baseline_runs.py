"""Whole runs of every policy in the registry: they end, with every promise of the scheduler kept."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.actions import FinishRun
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.policies.registry import REGISTRY, find
from venusrl.scheduling.scheduler import Scheduler
from venusrl.testing.virtual_run import VirtualRun, Workload

NAMES = sorted(REGISTRY)


def config(alpha: str = "1", extra: int = 0) -> SchedulerConfig:
    return SchedulerConfig(
        batch_groups=3,
        group_size=2,
        async_factor=Decimal(alpha),
        max_staleness=math.ceil(Decimal(alpha)) + extra,
        max_steps=4,
        max_dead_groups=10_000,
    )


def run(name: str, base: SchedulerConfig, workload: Workload, seed: int, concurrency: int | None = None) -> VirtualRun:
    baseline = find(name)
    drain = baseline.update(base) in ("drain", "turn_boundary")
    workload = Workload(**{f: getattr(workload, f) for f in workload.__struct_fields__} | {"drain": drain})
    # Virtual runs tick every second: shorter waves than 1800 s keep the tests fast.
    options = {"timeout_s": 60.0} if name.startswith("thunderagent") else {}
    policy = baseline.policy(concurrency=concurrency, **options)
    return VirtualRun(Scheduler(baseline.config(base), policy), workload, seed).run()


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        turns=(1, draw(st.integers(1, 5))),
        stragglers=draw(st.sampled_from((0.0, 0.1))),
        failures=draw(st.sampled_from((0.0, 0.2))),
        retries=draw(st.integers(0, 2)),
        train_s=draw(st.sampled_from((0.1, 30.0))),
        publish_s=draw(st.sampled_from((0.0, 20.0))),
        load_s=(0.0, draw(st.sampled_from((0.1, 10.0)))),
        workers=draw(st.integers(1, 3)),
        slots=draw(st.sampled_from((1, 3, 64))),
        deaths_every_s=draw(st.sampled_from((None, 40.0))),
        kv=draw(st.sampled_from((150, 700, 3000))),
        growth=(0, draw(st.sampled_from((0, 100)))),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(
    alpha=st.sampled_from(("0", "0.5", "1", "1.5", "2")),
    extra=st.integers(0, 1),
    workload=workloads(),
    seed=st.integers(0, 2**16),
    concurrency=st.sampled_from((None, 1, 3)),
)
def test_every_run_ends_with_every_promise_kept(
    name: str, alpha: str, extra: int, workload: Workload, seed: int, concurrency: int | None
) -> None:
    done = run(name, config(alpha, extra), workload, seed, concurrency)
    assert done.ended == FinishRun("max_steps")
    assert set(done.cancelled) <= {"group_too_small", "group_closed"}
