"""The physical limit against hand-computed cases (against policies: ``test_simulation_bound_holds``)."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import msgspec
import pytest

from venusrl.scheduling.config import SchedulerConfig
from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.bound import NoBound, bound
from venusrl.simulation.demand import Prices, demand, hardware
from venusrl.simulation.scenario import (
    EngineSpec,
    FailureSpec,
    FleetSpec,
    SandboxSpec,
    Scenario,
    Script,
    TrainerSpec,
    TurnScript,
)

BARE = EngineCosts(
    step_base_s=0.01, step_sequence_s=0.0, step_kv_token_s=0.0, prefill_token_s=0.001, prefill_token_context_s=0.0
)


class Listed(msgspec.Struct, frozen=True):
    """Groups of identical members, as listed."""

    scripts: tuple[Script, ...]
    name: Literal["listed"] = "listed"

    @property
    def tasks(self) -> int | None:
        return len(self.scripts)

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        return self.scripts[ordinal]


def scenario(
    *scripts: Script,
    batch: int = 1,
    size: int = 2,
    alpha: str = "0",
    staleness: int | None = None,
    costs: EngineCosts = BARE,
    workers: int = 1,
    kv: int = 100_000,
    slots: int = 1000,
    speed: float = 1.0,
    trainer: TrainerSpec | None = None,
    sandboxes: SandboxSpec | None = None,
    load_s: float = 0.0,
) -> Scenario:
    engines = tuple(EngineSpec(f"w{i}", kv, slots, costs, speed=speed if i else 1.0) for i in range(workers))
    least = -(-Decimal(alpha) // 1)
    return Scenario(
        name="test",
        scheduler=SchedulerConfig(batch, size, Decimal(alpha), staleness if staleness is not None else -int(-least)),
        fleet=FleetSpec(engines, load_s=load_s),
        trainer=trainer or TrainerSpec(),
        workload=Listed(scripts),
        sandboxes=sandboxes or SandboxSpec(),
    )


def one(generated: int, prompt: int = 0, shared: int = 0, **rest: float) -> Script:
    return Script(prompt or shared or 1, shared, (TurnScript(generated),), **rest)  # type: ignore[arg-type]


def test_one_trajectory_alone_takes_its_critical_path() -> None:
    costs = EngineCosts(0.01, 0.001, 1e-6, 1e-4, 1e-9)
    script = Script(
        500, 0, (TurnScript(10, tool_s=3.0, observation=100), TurnScript(20)), reward=1.0, setup_s=2.0, verify_s=5.0
    )
    decode = 30 * 0.011 + 1e-6 * (10 * 500 + 45 + 20 * 610 + 190)
    prefill = 600 * 1e-4 + 1e-9 * (500 * 250 + 100 * (510 + 50))
    least = bound(scenario(script, size=2, costs=costs), 0)
    assert least.parts["window"] == pytest.approx(2 + 3 + 5 + decode + prefill)
    assert least.time_s == least.parts["window"]
    assert least.binding == "window"
    assert least.trained_tokens == 60


def test_decoding_shares_a_step_among_as_many_as_the_kv_holds() -> None:
    # 8 members of 1,000 tokens, KV for 4 of them: 10 tokens each in steps of 0.01 s take 2 x 0.1 s and not 0.1 s.
    costs = EngineCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    least = bound(scenario(one(10, prompt=1000), size=8, costs=costs, kv=4000), 0)
    assert least.parts["compute"] == pytest.approx(0.2, rel=0.01)
    assert bound(scenario(one(10, prompt=1000), size=8, costs=costs, kv=8100), 0).time_s == pytest.approx(0.1, rel=0.01)


def test_a_shared_prefix_takes_room_once_and_is_computed_once() -> None:
    costs = EngineCosts(0.01, 0.0, 0.0, 0.001, 0.0)
    least = bound(scenario(one(10, prompt=1000, shared=1000), size=8, costs=costs, kv=1100), 0)
    assert least.parts["compute"] == pytest.approx(1.0 + 8 * 45 / 1100 * 0.01)


def test_slots_limit_a_step_as_well() -> None:
    costs = EngineCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    assert bound(scenario(one(10), size=8, costs=costs, slots=2), 0).parts["compute"] == pytest.approx(0.4)


def test_a_gap_is_held_or_paid_again_whichever_is_cheaper() -> None:
    # 4 members, each 1,000 own tokens through a tool call; a re-prefill takes 1 s.
    def least(tool_s: float, kv: int) -> dict[str, float]:
        script = Script(1000, 0, (TurnScript(1, tool_s=tool_s), TurnScript(1)))
        return bound(scenario(script, size=4, kv=kv), 0).parts

    # Short gaps fit beside the prefill of others: nothing but the first prefills is paid for.
    assert least(0.1, kv=100_000)["fluid"] == pytest.approx(4.0, rel=0.01)
    # Held without a cache for anything else, 100 s of 4 x 1,000 tokens fill 2,000 tokens for 200 s; paid again they
    # cost 4 s and half of the KV while they last.
    tight = least(100.0, kv=2000)["fluid"]
    assert tight == pytest.approx(8.0, rel=0.05)


def test_prices_never_decrease_with_more_groups_and_any_weight_is_valid() -> None:
    machine = hardware(scenario(one(10, prompt=100)).fleet)
    demands = [demand([one(10 * n, prompt=100 * n)] * 2, machine, TrainerSpec()) for n in range(1, 6)]
    prices = Prices(demands, machine)
    assert prices.least_s(range(5), 2) <= prices.least_s(range(5), 3) <= prices.least_s(range(5), 5)
    assert prices.least_s(range(5), 2) == pytest.approx(prices.least_s(range(2), 2))
    assert all(prices.least_s(range(5), 5, weights=(w / 32,)) <= prices.least_s(range(5), 5) for w in range(33))


def test_on_policy_batches_come_one_after_the_other() -> None:
    trainer = TrainerSpec(fixed_s=1.0, publish_s=0.5)
    costs = EngineCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    least = bound(scenario(one(100), one(300), one(200), costs=costs, trainer=trainer, load_s=0.25), 0)
    assert least.time_s == pytest.approx(1 + 3 + 2 + 3 * 1 + 2 * 0.5 + 2 * 0.25)


def test_an_async_window_overlaps_as_much_as_staleness_lets_it() -> None:
    trainer = TrainerSpec(fixed_s=1.0)
    costs = EngineCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    groups = [one(1000)] * 6  # 10 s each: trained at 11, 12, 22, 23, 33, 34.
    least = bound(scenario(*groups, alpha="1", costs=costs, trainer=trainer), 0)
    assert least.time_s == pytest.approx(34)
    wide = bound(scenario(*groups, alpha="5", costs=costs, trainer=trainer), 0)
    assert wide.time_s == pytest.approx(10 + 6)
    assert wide.parts["trainer"] == pytest.approx(6)


def test_the_trainer_binds_when_it_is_slow_and_waits_for_its_publications_only_if_it_must() -> None:
    groups = [one(1)] * 4
    slow = TrainerSpec(fixed_s=10.0, publish_s=2.0)
    least = bound(scenario(*groups, alpha="1", trainer=slow), 0)
    assert least.parts["trainer"] == pytest.approx(46)
    assert least.time_s == pytest.approx(46, rel=0.01)
    free = msgspec.structs.replace(slow, publish_blocks=False)
    assert bound(scenario(*groups, alpha="3", trainer=free), 0).parts["trainer"] == pytest.approx(40)


def test_the_trainer_pays_for_lengths() -> None:
    trainer = TrainerSpec(token_s=0.01, attention_s=0.0001)
    least = bound(scenario(one(50, prompt=50), one(150, prompt=50), alpha="1", trainer=trainer), 0)
    assert least.parts["trainer"] == pytest.approx(0.01 * 600 + 0.0001 * (2 * 100**2 + 2 * 200**2) / 2)


def test_sandboxes_bind_when_memory_is_short() -> None:
    script = Script(
        1, 0, (TurnScript(1, tool_s=4.0), TurnScript(1, tool_s=99.0)), setup_s=1.0, verify_s=3.0, sandbox_memory=2.0
    )
    short = scenario(script, size=4, sandboxes=SandboxSpec(memory=4.0, setups_at_once=1))
    assert bound(short, 0).parts["sandboxes"] == pytest.approx(4 * 2 * 8 / 4)


def test_unequal_workers_are_worth_their_speed() -> None:
    costs = EngineCosts(0.0, 0.001, 0.0, 0.0, 0.0)
    even = bound(scenario(one(10), size=40, costs=costs, workers=2), 0)
    uneven = bound(scenario(one(10), size=40, costs=costs, workers=2, speed=3.0), 0)
    assert even.parts["compute"] == pytest.approx(0.2)
    assert uneven.parts["compute"] == pytest.approx(0.1)


def test_what_leaves_the_trained_set_open_has_no_bound() -> None:
    base = scenario(one(1), one(1))
    replace = msgspec.structs.replace
    dropping = replace(base, scheduler=SchedulerConfig(1, 2, Decimal(1), 1, deadline="drop"))
    refilling = replace(base, scheduler=SchedulerConfig(1, 2, Decimal(1), 1, zero_variance_refills=1))
    failing = replace(base, failures=FailureSpec(sandbox_rate=0.1))
    for scene in (dropping, refilling, failing, scenario(one(1), batch=2)):
        with pytest.raises(NoBound):
            bound(scene, 0)


def test_with_a_choice_of_groups_the_lightest_count() -> None:
    # Three tasks for one batch of two groups: the heaviest may be left out.
    costs = EngineCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    scene = scenario(one(1000), one(100), one(200), batch=2, alpha="1", costs=costs)
    assert bound(scene, 0).time_s == pytest.approx(2.0)
