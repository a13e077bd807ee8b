"""Baselines on simulated engines: slime's aborts, gates that keep KV, and promises under faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.scheduling.policies.registry import REGISTRY, find
from venusrl.simulation.results import Result
from venusrl.simulation.run import simulate
from venusrl.simulation.scenario import EngineSpec, FailureSpec, FleetSpec, Scenario, TrainerSpec
from venusrl.simulation.workloads.synthetic import Synthetic
from venusrl.testing.promises import Promises
from venusrl.types import StopReason

COSTS = EngineCosts(0.01, 0.0005, 1e-6, 1e-4, 1e-9)
SLOW_PREFILL = EngineCosts(0.01, 0.0005, 1e-6, 1e-3, 1e-9)
BASELINES = sorted(REGISTRY.keys() - {"venus"})


def scenario(alpha: str = "1", *, kv: int = 20_000, batch: int = 4, size: int = 4, **more: Any) -> Scenario:
    costs = more.pop("costs", COSTS)
    return Scenario(
        name="baselines",
        scheduler=SchedulerConfig(batch, size, Decimal(alpha), math.ceil(Decimal(alpha)), max_steps=4),
        fleet=FleetSpec(tuple(EngineSpec(f"e{i}", kv, 32, costs) for i in range(2)), load_s=0.5),
        trainer=TrainerSpec(fixed_s=5.0, token_s=1e-5, publish_s=1.0),
        workload=more.pop("workload", Synthetic(turns=(4, 12))),
        **more,
    )


class Log:
    """Checks the scheduler's promises and keeps the events."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.promises = Promises(config)
        self.events: list[tuple[float, ev.Event]] = []

    def __call__(self, now: float, event: ev.Event, answer: Sequence[act.Action]) -> None:
        self.promises(now, event, answer)
        self.events.append((now, event))


def run(name: str, case: Scenario, seed: int = 0, **options: Any) -> tuple[Result, Log]:
    baseline = find(name)
    config = baseline.config(case.scheduler)
    fleet = msgspec.structs.replace(case.fleet, weight_update=baseline.update(case.scheduler))
    case = msgspec.structs.replace(case, scheduler=config, fleet=fleet)
    log = Log(config)
    result = simulate(case, baseline.policy(**options), seed, log)
    log.promises.finish(result.time_s)
    return result, log


def running_at_publications(log: Log) -> list[tuple[set[str], set[str]]]:
    """For every new version: the trajectories whose turns ran when it was published, and those aborted then."""
    running: set[str] = set()
    found = []
    for now, event in log.events:
        if isinstance(event, ev.TurnDispatched):
            running.add(event.trajectory)
        elif isinstance(event, ev.TurnFinished):
            running.discard(event.trajectory)
        elif isinstance(event, ev.VersionPublished) and event.version:
            aborted = {
                e.trajectory
                for at, e in log.events
                if at == now and isinstance(e, ev.TurnFinished) and e.stop is StopReason.ABORT
            }
            found.append((set(running), aborted))
    return found


@pytest.mark.parametrize("name", ["slime", "rollflash"])
def test_every_request_is_aborted_at_every_new_version_and_every_cache_is_lost(name: str) -> None:
    case = scenario("2", kv=400_000, workload=Synthetic(turns=(10, 20), generated=(200, 400)))
    result, log = run(name, case)
    seen = running_at_publications(log)
    assert len(seen) == 3
    assert sum(len(running) for running, _ in seen) > 20
    assert all(aborted == running for running, aborted in seen)
    kept, calm = run("fcfs", case)
    assert not any(aborted for _, aborted in running_at_publications(calm))
    assert result.hit_rate < kept.hit_rate


def test_one_step_off_aborts_nothing_and_publishes_between_cohorts() -> None:
    _, log = run("slime-one-step-off", scenario("2"))
    seen = running_at_publications(log)
    assert len(seen) == 3
    assert not any(running or aborted for running, aborted in seen)


def test_where_kv_is_scarce_gates_compute_fewer_prompts_again_and_finish_sooner() -> None:
    load = Synthetic(turns=(15, 25), tool_s=(0.1, 2.0))
    case = scenario("1", kv=10_000, batch=4, costs=SLOW_PREFILL, workload=load)
    free, _ = run("fcfs", case)
    for name in ("thunderagent-best", "thunderagent-repaired", "continuum"):
        gated, _ = run(name, case)
        assert gated.prefill_tokens < 0.7 * free.prefill_tokens
        assert gated.time_s < free.time_s
    few, _ = run("fcfs", case, concurrency=14)
    assert few.prefill_tokens < free.prefill_tokens


def test_where_kv_is_plenty_no_gate_matters() -> None:
    case = scenario("1", kv=500_000)
    times = {name: run(name, case)[0].time_s for name in ("fcfs", "thunderagent-best", "continuum", "fcfs-gate")}
    assert max(times.values()) < 1.02 * min(times.values())


def test_by_its_default_flags_thunderagent_stands_still_for_its_timeout() -> None:
    """Programs that ended keep their room: once that is full, nobody enters before 1800 s."""
    case = scenario("1", kv=5_000, batch=2, size=3, workload=Synthetic(turns=(5, 10), tool_s=(0.1, 2.0)))
    stuck, _ = run("thunderagent", case)
    free, _ = run("fcfs", case)
    assert stuck.time_s > 8 * free.time_s
    assert stuck.holds["capacity"].longest_s == pytest.approx(1800.0)


@pytest.mark.parametrize("name", BASELINES)
@settings(max_examples=2)
@given(
    alpha=st.sampled_from(("0", "0.5", "1", "2")),
    kv=st.sampled_from((4_500, 30_000)),
    faults=st.booleans(),
    concurrency=st.sampled_from((None, 3)),
    seed=st.integers(0, 2**16),
)
def test_promises_hold_on_simulated_engines_whatever_happens(
    name: str, alpha: str, kv: int, faults: bool, concurrency: int | None, seed: int
) -> None:
    failures = FailureSpec(sandbox_rate=0.1, worker_mtbf_s=120.0, worker_restart_s=10.0) if faults else FailureSpec()
    case = scenario(alpha, kv=kv, batch=2, size=2, failures=failures, workload=Synthetic(turns=(2, 6)))
    options: dict[str, Any] = {"timeout_s": 60.0} if name.startswith("thunderagent") else {}
    result, _ = run(name, case, seed, concurrency=concurrency, **options)
    assert result.ended == "max_steps"
    again, _ = run(name, case, seed, concurrency=concurrency, **options)
    assert msgspec.json.encode(again) == msgspec.json.encode(result)
