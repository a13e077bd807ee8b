"""The engine fake behaves as the engine contract says: others build on it."""

from __future__ import annotations

import asyncio

import pytest

from venusrl.rollout.engines.protocol import EngineClient, EngineError, EngineLost, GenerateRequest
from venusrl.testing.engine import FakeEngine, ScriptedModel, fake_logprob
from venusrl.types import SamplingParams, StopReason, VersionSpan


class Stepper:
    """A pace that lets one tick through per ``step``."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)

    async def pace(self) -> None:
        await self._permits.acquire()

    async def step(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self._permits.release()
            for _ in range(8):
                await asyncio.sleep(0)


def ask(
    request_id: str, prompt: list[int], *, limit: int = 100, salt: str = "", stop: int = 99, urgency: int = 0
) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, limit, SamplingParams(stop_token_ids=(stop,)), urgency, salt)


def count_up(prompt: list[int]) -> list[int]:
    return [prompt[-1] + i for i in range(1, 60)]


async def test_answers_until_stop_token_length_or_context() -> None:
    engine: EngineClient = FakeEngine(lambda prompt: [7, 8, 99, 5], context_tokens=10)
    done = await engine.generate(ask("a", [1, 2]))
    assert (done.token_ids, done.stop) == ([7, 8, 99], StopReason.STOP)
    assert done.logprobs == [fake_logprob(t, 0) for t in (7, 8, 99)]
    assert (await engine.generate(ask("b", [1, 2], limit=2))).stop is StopReason.LENGTH
    cut = await engine.generate(ask("c", [1] * 8, limit=3))
    assert (cut.token_ids, cut.stop) == ([7, 8], StopReason.CONTEXT)
    assert (await engine.generate(ask("d", [1] * 10))).stop is StopReason.CONTEXT
    with pytest.raises(EngineError, match="used before"):
        await engine.generate(ask("a", [1]))


async def test_pause_keeps_requests_and_load_splits_spans() -> None:
    steps = Stepper()
    engine = FakeEngine(count_up, pace=steps.pace)
    task = asyncio.create_task(engine.generate(ask("a", [0], limit=5)))
    await asyncio.sleep(0)
    await steps.step(2)
    await engine.pause()
    await steps.step(4)
    assert engine.running == ["a"]
    await engine.load_weights("/weights", 3)
    await engine.resume()
    await steps.step(4)
    done = await task
    assert done.token_ids == [1, 2, 3, 4, 5]
    assert done.spans == [VersionSpan(0, 0, 2), VersionSpan(3, 2, 5)]


async def test_abort_returns_partial_even_while_paused_or_waiting() -> None:
    steps = Stepper()
    engine = FakeEngine(count_up, pace=steps.pace, slots=1)
    first = asyncio.create_task(engine.generate(ask("a", [0])))
    second = asyncio.create_task(engine.generate(ask("b", [0])))
    await asyncio.sleep(0)
    await steps.step(3)
    await engine.pause()
    await engine.abort(["a", "b", "unknown"])
    assert (await first).token_ids == [1, 2, 3]
    assert (await first).stop is StopReason.ABORT
    assert (await second).token_ids == []
    assert engine.running == []


async def test_urgent_requests_get_slots_first() -> None:
    steps = Stepper()
    engine = FakeEngine(count_up, pace=steps.pace, slots=1)
    calm = asyncio.create_task(engine.generate(ask("calm", [0], limit=1)))
    urgent = asyncio.create_task(engine.generate(ask("urgent", [0], limit=1, urgency=5)))
    await asyncio.sleep(0)
    await steps.step()
    assert urgent.done()
    assert not calm.done()
    await steps.step()
    assert calm.done()


async def test_cancel_forgets_the_request() -> None:
    steps = Stepper()
    engine = FakeEngine(count_up, pace=steps.pace)
    task = asyncio.create_task(engine.generate(ask("a", [0])))
    await asyncio.sleep(0)
    await steps.step()
    task.cancel()
    await asyncio.wait([task])
    assert engine.running == []


async def test_T07_fake_counts_cross_version_hits_without_a_salt_and_none_with_one() -> None:
    engine = FakeEngine(count_up)
    await engine.generate(ask("a", [1, 2, 3], limit=3))
    reuse = await engine.generate(ask("b", [1, 2, 3, 4, 5, 50], limit=1))
    assert reuse.cached_tokens == 5
    assert engine.cross_version_hits == 0
    await engine.load_weights("/weights", 1)
    await engine.generate(ask("c", [1, 2, 3, 4], limit=1))
    assert engine.cross_version_hits == 1
    salted = await engine.generate(ask("d", [1, 2, 3, 4], limit=1, salt="v1"))
    assert salted.cached_tokens == 0
    assert engine.cross_version_hits == 1


async def test_crash_and_failed_loads_are_typed() -> None:
    steps = Stepper()
    engine = FakeEngine(count_up, pace=steps.pace)
    task = asyncio.create_task(engine.generate(ask("a", [0])))
    await asyncio.sleep(0)
    engine.fail_next_load("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await engine.load_weights("/weights", 1)
    await engine.load_weights("/weights", 1)
    engine.crash()
    with pytest.raises(EngineLost):
        await task
    with pytest.raises(EngineLost):
        await engine.load()


async def test_scripted_model_answers_turn_by_turn_and_resumes() -> None:
    model = ScriptedModel([[10, 11, 12], [20, 21]], turn_start=[1, 2])
    assert model([5, 1, 2]) == [10, 11, 12]
    assert model([5, 1, 2, 10]) == [11, 12]
    assert model([5, 1, 2, 10, 11, 12, 6, 1, 2]) == [20, 21]
