"""Evaluation of one version: pinned, retried, surviving its engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from venusrl.coordinator.evaluation import Attempt, EvaluationItem, Sweep, plan
from venusrl.coordinator.store import OpenedTrajectory
from venusrl.rollout.engines.protocol import EngineClient, EngineLost
from venusrl.testing.engine import FakeEngine
from venusrl.testing.runs import made_up_trajectory
from venusrl.types import Failure, FailureKind, Trajectory

VERSION = 7


def played(
    item: EvaluationItem, *, version: int = VERSION, reward: float | None = 1.0, failure: Failure | None = None
) -> Trajectory:
    opened = OpenedTrajectory(f"{item.task_id}-{item.mode}-{item.sample}", "evaluation", item.sample, 0)
    return made_up_trajectory(opened, item.task_id, version=version, reward=reward, sampled=2, failure=failure)


def scripted(
    script: Callable[[EvaluationItem, int], Trajectory], seen: Counter[EvaluationItem] | None = None
) -> Attempt:
    async def attempt(client: EngineClient, item: EvaluationItem, version: int, number: int) -> Trajectory:
        await asyncio.sleep(0)
        if seen is not None:
            seen[item] += 1
        return script(item, number)

    return attempt


def engines(*names: str) -> dict[str, EngineClient]:
    return {name: FakeEngine(lambda ids: [1]) for name in names}


ITEMS = plan(["a", "b"], samples=2, greedy=True)


def test_the_plan_interleaves_modes_and_samples_by_task() -> None:
    assert [(i.task_id, i.mode, i.sample) for i in ITEMS[:3]] == [
        ("a", "sampled", 0),
        ("a", "sampled", 1),
        ("a", "greedy", 0),
    ]
    assert len(ITEMS) == 6
    assert all(item.mode == "sampled" for item in plan(["a"], samples=3, greedy=False))


async def test_every_item_is_played_once_over_several_engines() -> None:
    seen: Counter[EvaluationItem] = Counter()
    sweep = Sweep(VERSION, ITEMS, scripted(lambda item, number: played(item), seen), retries=3, pause_s=0)
    await sweep.run(engines("e0", "e1"), slots=2)
    assert sweep.finished
    assert set(seen.values()) == {1}
    assert len(sweep.samples("greedy")) == 2
    assert {sample.version for sample in sweep.samples("sampled")} == {VERSION}


async def test_T41_a_sample_from_another_version_never_counts() -> None:
    def script(item: EvaluationItem, number: int) -> Trajectory:
        return played(item, version=VERSION + 1 if number == 0 else VERSION)

    sweep = Sweep(VERSION, ITEMS, scripted(script), retries=1, pause_s=0)
    await sweep.run(engines("e0"), slots=4)
    assert all(not sample.failure for item in ("sampled", "greedy") for sample in sweep.samples(item))

    stubborn = Sweep(
        VERSION, ITEMS[:1], scripted(lambda item, n: played(item, version=VERSION + 1)), retries=1, pause_s=0
    )
    await stubborn.run(engines("e0"), slots=1)
    (sample,) = stubborn.samples("sampled")
    assert (sample.reward, sample.failure) == (None, "mixed_versions")


async def test_infrastructure_is_tried_again_a_bounded_number_of_times_and_policy_failures_count() -> None:
    seen: Counter[EvaluationItem] = Counter()

    def script(item: EvaluationItem, number: int) -> Trajectory:
        if item.mode == "greedy":
            return played(item, reward=0.0, failure=Failure(FailureKind.POLICY, "out_of_turns"))
        return played(item, reward=None, failure=Failure(FailureKind.INFRASTRUCTURE, "sandbox_died"))

    sweep = Sweep(VERSION, ITEMS, scripted(script, seen), retries=2, pause_s=0)
    await sweep.run(engines("e0"), slots=2)
    assert {seen[item] for item in ITEMS if item.mode == "sampled"} == {3}
    assert {seen[item] for item in ITEMS if item.mode == "greedy"} == {1}
    assert {sample.failure for sample in sweep.samples("sampled")} == {"sandbox_died"}
    assert [sample.reward for sample in sweep.samples("greedy")] == [0.0, 0.0]


async def test_a_lost_engine_costs_no_attempt_and_the_sweep_goes_on_with_another() -> None:
    dead = engines("dead", "alive")

    async def attempt(client: EngineClient, item: EvaluationItem, version: int, number: int) -> Trajectory:
        await asyncio.sleep(0)
        if client is dead["dead"]:
            return played(item, reward=None, failure=Failure(FailureKind.INFRASTRUCTURE, EngineLost.reason))
        assert number == 0
        return played(item)

    sweep = Sweep(VERSION, ITEMS, attempt, retries=0, pause_s=0)
    with pytest.raises(EngineLost, match="version 7"):
        await sweep.run({"dead": dead["dead"]}, slots=2)
    assert not sweep.results
    await sweep.run({"alive": dead["alive"]}, slots=2)
    assert sweep.finished


async def test_cancelling_hands_the_unfinished_attempts_back() -> None:
    forever = asyncio.Event()
    blocked = True

    async def attempt(client: EngineClient, item: EvaluationItem, version: int, number: int) -> Trajectory:
        if blocked:
            await forever.wait()
        return played(item)

    sweep = Sweep(VERSION, ITEMS, attempt, retries=0, pause_s=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await sweep.run(engines("e0"), slots=3)
    blocked = False
    await sweep.run(engines("e0"), slots=3)
    assert sweep.finished


async def test_a_fault_in_an_attempt_is_not_swallowed() -> None:
    def script(item: EvaluationItem, number: int) -> Trajectory:
        raise ZeroDivisionError("a bug")

    sweep = Sweep(VERSION, ITEMS, scripted(script), retries=0, pause_s=0)
    with pytest.raises(ZeroDivisionError):
        await sweep.run(engines("e0"), slots=2)
