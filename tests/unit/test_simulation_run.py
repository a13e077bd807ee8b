"""Whole simulated runs: conservation, determinism, the ways weights arrive, failures, and the scheduler's promises."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
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
from venusrl.scheduling.policies import Policy
from venusrl.scheduling.policies.fcfs import Fcfs
from venusrl.scheduling.policies.venus import Venus
from venusrl.simulation.results import Result
from venusrl.simulation.run import PolicyFault, RequestTooLarge, SimulationStuck, simulate
from venusrl.simulation.scenario import (
    EngineSpec,
    FailureSpec,
    FleetSpec,
    SandboxSpec,
    Scenario,
    Script,
    TrainerSpec,
    TurnScript,
    Workload,
)
from venusrl.simulation.workloads.synthetic import Synthetic
from venusrl.testing.promises import Promises

COSTS = EngineCosts(0.01, 0.0005, 1e-6, 1e-4, 1e-9, transfer_token_s=1e-6, transfer_latency_s=0.01)
TRAINER = TrainerSpec(fixed_s=3.0, token_s=1e-5, publish_s=1.0)


def scenario(
    *,
    batch: int = 2,
    size: int = 2,
    alpha: str = "1",
    steps: int = 3,
    kv: int = 20_000,
    slots: int = 8,
    workers: int = 2,
    workload: Workload | None = None,
    fleet: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
    **more: Any,
) -> Scenario:
    engines = tuple(EngineSpec(f"e{i}", kv, slots, COSTS, **(engine or {})) for i in range(workers))
    factor = Decimal(alpha)
    config = SchedulerConfig(
        batch, size, factor, math.ceil(factor), max_steps=steps, min_valid=min(2, size), **(rules or {})
    )
    mode = {"weight_update": "drain"} if not factor else {}
    return Scenario(
        name="test",
        scheduler=config,
        fleet=FleetSpec(engines, **{"load_s": 0.5, **mode, **(fleet or {})}),
        trainer=more.pop("trainer", TRAINER),
        workload=workload or Synthetic(turns=(2, 5)),
        **more,
    )


class Same(msgspec.Struct, frozen=True):
    """Every trajectory goes alike."""

    one: Script
    tasks: int | None = None
    name: str = "same"

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        return self.one


def checked(case: Scenario, policy: Policy, seed: int = 0) -> tuple[Result, Promises]:
    promises = Promises(case.scheduler)
    result = simulate(case, policy, seed, promises)
    promises.finish(result.time_s)
    return result, promises


def scripts(case: Scenario, result: Result, seed: int = 0) -> list[Script]:
    return [
        case.workload.script(seed, g.ordinal, i, 0) for g in result.groups for i in range(case.scheduler.group_size)
    ]


def test_one_trajectory_takes_what_its_parts_take() -> None:
    script = Script(1000, 0, (TurnScript(100, 7.0, 50), TurnScript(20)), reward=1.0, setup_s=2.0, verify_s=3.0)
    case = scenario(batch=1, size=1, alpha="0", steps=1, workers=1, workload=Same(script))
    result = simulate(case, Fcfs(), 0)

    def decode(context: int, tokens: int) -> float:
        return tokens * COSTS.step_s(1, context + tokens / 2)

    turns = COSTS.prefill_s(1000) + decode(1000, 100) + 7.0 + COSTS.prefill_s(50, 1100) + decode(1150, 20)
    rollout = 2.0 + turns + 3.0
    assert result.time_s == pytest.approx(rollout + TRAINER.step_s([1170]), rel=1e-9)
    assert (result.trained_tokens, result.trained_length) == (120, 1170)
    assert (result.prefill_tokens, result.cached_tokens, result.decode_tokens) == (1050, 1100, 120)
    assert result.trainer_idle_s == pytest.approx(rollout)
    [blocked] = result.blocked
    assert blocked.reason == "groups"
    assert blocked.end == pytest.approx(rollout)


@pytest.mark.parametrize("alpha", ["0", "0.5", "1", "2"])
@pytest.mark.parametrize("policy", [Fcfs, Venus])
def test_every_sampled_token_is_decoded_once_and_every_prompt_computed_or_found(
    alpha: str, policy: Callable[[], Policy]
) -> None:
    case = scenario(alpha=alpha, keep_trajectories=True)
    result, _ = checked(case, policy())
    wanted = scripts(case, result)
    assert len(result.groups) == 6
    assert result.trained_tokens == result.decode_tokens == sum(s.generated for s in wanted)
    assert result.trained_length == sum(s.length for s in wanted)
    assert sum(t.prefilled for t in result.trajectories) == result.prefill_tokens
    assert sum(t.cached for t in result.trajectories) == result.cached_tokens
    assert sum(result.staleness.values()) == 12
    assert max(result.staleness) <= case.scheduler.max_staleness
    for trace in result.trajectories:
        spent = trace.held_s + trace.queued_s + trace.prefill_s + trace.decode_s
        spent += trace.tool_s + trace.sandbox_s + trace.verify_s
        assert spent == pytest.approx(trace.finished_at - trace.opened_at, abs=2.0)


@pytest.mark.parametrize("policy", [Fcfs, Venus])
def test_the_same_arguments_give_the_same_bytes(policy: Callable[[], Policy]) -> None:
    case = scenario(kv=2500, failures=FailureSpec(0.2, 3, 60.0, 5.0), sandboxes=SandboxSpec(6.0, 2))
    first, second = (msgspec.json.encode(simulate(case, policy(), 3)) for _ in range(2))
    assert first == second
    assert msgspec.json.decode(first, type=Result).time_s > 0
    assert first != msgspec.json.encode(simulate(case, policy(), 4))


def test_all_policies_meet_the_same_tasks_in_the_same_order() -> None:
    case = scenario(alpha="1", steps=4)
    taken = [sorted(g.ordinal for g in simulate(case, policy(), 0).groups) for policy in (Fcfs, Venus)]
    assert taken[0] == taken[1] == list(range(8))


def test_on_policy_weights_change_when_nothing_runs() -> None:
    running: set[str] = set()
    loads: list[int] = []

    def log(now: float, event: ev.Event, answer: Any) -> None:
        if isinstance(event, ev.TurnDispatched):
            running.add(event.trajectory)
        elif isinstance(event, ev.TurnFinished):
            running.discard(event.trajectory)
        elif isinstance(event, ev.WorkerAcknowledged):
            loads.append(len(running))

    case = scenario(alpha="0")
    result = simulate(case, Fcfs(), 0, log)
    assert set(loads) == {0}
    assert result.staleness == {0: 12}


def test_in_flight_weights_pause_every_request_and_lose_none() -> None:
    case = scenario(fleet={"load_s": 2.0})
    result, _ = checked(case, Fcfs())
    assert [engine.paused_s for engine in result.engines] == [pytest.approx(4.0)] * 2
    assert [engine.aborts for engine in result.engines] == [0, 0]


def test_abort_cuts_every_request_off_at_every_version_and_flushes() -> None:
    long = Script(500, 400, (TurnScript(3000),), setup_s=0.0)
    case = scenario(workload=Same(long), alpha="1", fleet={"weight_update": "abort"}, trainer=TrainerSpec(fixed_s=3.0))
    result, _ = checked(case, Fcfs())
    assert sum(engine.aborts for engine in result.engines) > 0
    assert result.decode_tokens == result.trained_tokens
    # Partial tokens are kept, their KV is not: they are computed again as prompt.
    assert result.prefill_tokens > 6 * 400 + 12 * 100
    kept = simulate(scenario(workload=Same(long), alpha="1", trainer=TrainerSpec(fixed_s=3.0)), Fcfs(), 0)
    assert result.prefill_tokens > kept.prefill_tokens


def test_stale_kv_is_reused_or_not_as_the_fleet_says() -> None:
    prefilled = {}
    for mode in ("keep", "flush"):
        case = scenario(workload=Synthetic(turns=(6, 12)), fleet={"stale_kv": mode})
        prefilled[mode] = simulate(case, Fcfs(), 0).prefill_tokens
    assert prefilled["flush"] > prefilled["keep"]


def test_turn_boundary_updates_wait_for_the_workers_own_turns() -> None:
    case = scenario(fleet={"weight_update": "turn_boundary"})
    result, _ = checked(case, Fcfs())
    assert sum(engine.aborts for engine in result.engines) == 0
    assert result.holds["draining"].count > 0


def test_sandboxes_wait_for_memory_by_priority_and_are_denied_meanwhile() -> None:
    ready: list[str] = []
    denied: set[str] = set()

    def log(now: float, event: ev.Event, answer: Any) -> None:
        if isinstance(event, ev.SandboxReady):
            ready.append(event.trajectory)
        elif isinstance(event, ev.SandboxDenied):
            denied.add(event.trajectory)

    case = scenario(batch=2, size=2, alpha="0", steps=1, sandboxes=SandboxSpec(memory=1.0))
    result = simulate(case, Fcfs(), 0, log)
    assert ready == ["g0/0.0", "g0/1.0", "g1/0.0", "g1/1.0"]
    assert denied == set(ready[1:])
    assert result.staleness == {0: 4}


def test_failed_sandboxes_are_replaced_and_the_bounded_rest_shrinks_its_group() -> None:
    case = scenario(batch=2, size=6, steps=4, failures=FailureSpec(sandbox_rate=0.4, max_attempts=2))
    result, _ = checked(case, Fcfs())
    assert result.failures["sandbox_died"] > 0
    assert sum(result.staleness.values()) < 8 * 6
    assert result.wasted_tokens > 0
    assert result.decode_tokens == result.trained_tokens + result.wasted_tokens


def test_turns_of_a_dead_worker_go_on_elsewhere_with_their_tokens() -> None:
    case = scenario(steps=5, failures=FailureSpec(worker_mtbf_s=40.0, worker_restart_s=10.0))
    result, _ = checked(case, Fcfs())
    assert sum(engine.deaths for engine in result.engines) > 0
    assert result.decode_tokens == result.trained_tokens


def test_a_finite_order_of_tasks_ends_the_run() -> None:
    case = scenario(workload=Synthetic(turns=(1, 3), tasks=5))
    case = msgspec.structs.replace(case, scheduler=msgspec.structs.replace(case.scheduler, max_steps=None))
    result = simulate(case, Fcfs(), 0)
    assert result.ended == "task_order_exhausted"
    assert len(result.steps) == 2


def test_groups_without_variance_are_refilled_as_configured() -> None:
    same = Script(100, 50, (TurnScript(10),), reward=1.0)
    case = scenario(workload=Same(same), alpha="0", steps=2, rules={"zero_variance_refills": 1})
    result, _ = checked(case, Fcfs())
    assert result.failures == {"group_closed": 4}
    assert len(result.groups) == 4


def test_dropped_groups_are_reissued_with_other_samples() -> None:
    class Straggler(Same, frozen=True):
        def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
            slow = ordinal == 0 and attempt == 0
            return Script(100, 50, (TurnScript(10, 5000.0 if slow else 1.0, 10), TurnScript(10)))

    drop = {"deadline": "drop", "drop_grace_s": 20.0}
    case = scenario(workload=Straggler(Script(1, 0, (TurnScript(1),))), alpha="1", steps=4, rules=drop)
    result = simulate(case, Fcfs(), 0)
    assert result.failures == {"deadline": 2}
    assert sorted(g.ordinal for g in result.groups) == list(range(8))
    assert result.time_s < 5000


class Mover(Fcfs):
    """Moves every trajectory to the other worker in its first tool call, and pauses its sandbox in the second."""

    name = "mover"

    def __init__(self) -> None:
        super().__init__()
        self.todo: list[Any] = []
        self.moved: list[int] = []

    def observe(self, event: ev.Event, view: Any) -> None:
        if isinstance(event, ev.ToolStarted):
            home = view.home(event.trajectory)
            other = next(name for name in view.workers if name != home.name)
            if event.turn == 0:
                self.todo.append(act.Migrate("test", event.trajectory, other))
            elif event.turn == 1:
                self.todo.append(act.PauseSandbox("test", event.trajectory))
        elif isinstance(event, ev.KVTransferred):
            self.moved.append(event.tokens)

    def decide(self, view: Any) -> Any:
        todo, self.todo = self.todo, []
        yield from todo
        yield from super().decide(view)


def test_kv_moves_with_an_idle_trajectory_and_paused_tools_go_on_where_they_stopped() -> None:
    script = Script(1000, 400, (TurnScript(50, 5.0, 20), TurnScript(50, 5.0, 20), TurnScript(10)))
    case = scenario(workload=Same(script), alpha="0", steps=1, sandboxes=SandboxSpec(pause_s=1.0, resume_s=2.0))
    policy = Mover()
    result, _ = checked(case, policy)
    assert policy.moved == [650] * 4
    assert sum(engine.migrated_in for engine in result.engines) == 4
    # Each group is split over both workers; after the move nothing is computed but what is new.
    assert result.prefill_tokens == 4 * 1000 + 4 * (20 + 20)
    plain = simulate(case, Fcfs(), 0)
    assert result.time_s == pytest.approx(plain.time_s + 3.0, abs=0.2)


def test_policies_that_ask_hear_of_tokens_while_turns_decode() -> None:
    heard: Counter[tuple[str, int]] = Counter()
    ended: Counter[tuple[str, int]] = Counter()

    def log(now: float, event: ev.Event, answer: Any) -> None:
        if isinstance(event, ev.TokensGenerated):
            heard[event.trajectory, event.turn] += event.count
        elif isinstance(event, ev.TurnFinished):
            ended[event.trajectory, event.turn] += event.generated

    class Curious(Fcfs):
        tokens_every_s = 0.5

    simulate(scenario(kv=3400), Curious(), 0, log)
    assert heard
    assert all(0 < count <= ended[turn] for turn, count in heard.items())
    assert sum(heard.values()) > 0.5 * sum(ended.values())


def test_faults_of_scenario_and_policy_are_named() -> None:
    with pytest.raises(RequestTooLarge, match="needs"):
        simulate(scenario(kv=500), Fcfs(), 0)
    with pytest.raises(SimulationStuck, match=r"stuck at .* under fcfs: groups"):
        simulate(scenario(max_sim_s=10.0), Fcfs(), 0)

    class Silent(Fcfs):
        def decide(self, view: Any) -> Any:
            return iter(())

    with pytest.raises(SimulationStuck, match=r"held for \{'new'"):
        simulate(scenario(), Silent(), 0)

    with pytest.raises(PolicyFault, match=r"the sandbox of g0/0\.0 needs 1\.0, there is 0\.5"):
        simulate(scenario(sandboxes=SandboxSpec(memory=0.5)), Fcfs(), 0)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from([Fcfs, lambda: Fcfs(gate=True), Venus]),
    seed=st.integers(0, 10**6),
    alpha=st.sampled_from(["0", "0.5", "1", "1.5", "2"]),
    kv=st.sampled_from([3400, 5000, 20_000]),
    workers=st.integers(1, 3),
    mode=st.sampled_from(["in_flight", "turn_boundary", "abort"]),
    stale=st.sampled_from(["keep", "flush"]),
    engine=st.fixed_dictionaries(
        {
            "kv_control": st.booleans(),
            "eviction": st.sampled_from(["tail", "whole"]),
            "preempted_kv": st.sampled_from(["evictable", "dropped"]),
            "priority_queue": st.booleans(),
            "prefix_cache": st.booleans(),
            "prefill_chunk": st.sampled_from([1, 64, 2048]),
            "watermark": st.sampled_from([0.0, 0.01, 0.2]),
        }
    ),
    deaths=st.sampled_from([None, 80.0]),
    rate=st.sampled_from([0.0, 0.15]),
    memory=st.sampled_from([None, 5.0]),
)
def test_promises_hold_and_nothing_is_lost_whatever_happens(
    policy: Callable[[], Policy],
    seed: int,
    alpha: str,
    kv: int,
    workers: int,
    mode: str,
    stale: str,
    engine: dict[str, Any],
    deaths: float | None,
    rate: float,
    memory: float | None,
) -> None:
    case = scenario(
        alpha=alpha,
        kv=kv,
        workers=workers,
        workload=Synthetic(turns=(1, 5)),
        fleet={"stale_kv": stale} if alpha == "0" else {"weight_update": mode, "stale_kv": stale},
        engine=engine,
        failures=FailureSpec(rate, 3, deaths, 5.0),
        sandboxes=SandboxSpec(memory, 2),
    )
    result, _ = checked(case, policy(), seed)
    assert result.ended == "max_steps"
    assert len(result.steps) == 3
    assert result.decode_tokens == result.trained_tokens + result.wasted_tokens
    assert all(engine.mean_resident <= 1 + 1e-9 for engine in result.engines)
    assert result.trainer_busy_s + result.trainer_idle_s <= result.time_s + 1e-6


def test_a_run_in_which_only_housekeeping_goes_on_is_stuck() -> None:
    class Silent(Fcfs):
        def decide(self, view: Any) -> Any:
            return iter(())

        def wake_at(self, view: Any) -> float:
            return float(view.now) + 5.0

    with pytest.raises(SimulationStuck, match=r"stuck at 10\d{3}"):
        simulate(scenario(patience_s=1e4, fleet={"measure_every_s": 10.0}), Silent(), 0)
