"""Turns for evaluation: one engine, one version, no scheduler. Case T41."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from tests.unit.gateway_bench import CHAT, SETTINGS, TASK, TEXT, scripted

from venusrl.rollout.direct import DirectTurns
from venusrl.rollout.engines.protocol import EngineError, GenerateRequest, Generation
from venusrl.rollout.gateway import VersionMismatch
from venusrl.rollout.turns import TurnResult
from venusrl.testing.clock import VirtualClock
from venusrl.testing.engine import FakeEngine


async def settle(clock: VirtualClock, work: Awaitable[TurnResult], seconds: float = 100.0) -> TurnResult:
    task = asyncio.ensure_future(work)
    await clock.run_for(seconds)
    return await task


async def test_direct_turns_need_no_scheduler_and_come_from_the_pinned_version() -> None:
    clock = VirtualClock()
    turns = DirectTurns(FakeEngine(scripted(), version=5), 5, CHAT, clock, settings=SETTINGS)
    turns.register("e0", "e")
    assert (await settle(clock, turns.turn("e0", TASK, 64))).text == TEXT
    assert turns.finish("e0").start_version == 5


@pytest.mark.parametrize("version", [4, 6])
async def test_T41_direct_turns_refuse_tokens_of_another_version(version: int) -> None:
    clock = VirtualClock()
    turns = DirectTurns(FakeEngine(scripted(), version=version), 5, CHAT, clock, settings=SETTINGS)
    turns.register("e0", "e")
    with pytest.raises(VersionMismatch):
        await settle(clock, turns.turn("e0", TASK, 64))
    assert turns.finish("e0").segments == []


async def test_direct_turns_go_on_with_a_restarted_engine() -> None:
    clock = VirtualClock()
    first = FakeEngine(scripted(), pace=lambda: clock.sleep(1.0))
    turns = DirectTurns(first, 0, CHAT, clock, settings=SETTINGS)
    turns.register("e0", "e")
    turn = asyncio.create_task(turns.turn("e0", TASK, 64))
    await clock.run_for(2)
    first.crash()
    turns.use(FakeEngine(scripted()))
    assert (await settle(clock, turn)).text == TEXT


async def test_an_engine_that_refuses_is_asked_again_a_bounded_number_of_times() -> None:
    class Refusing(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            raise EngineError("no such adapter")

    clock = VirtualClock()
    turns = DirectTurns(Refusing(scripted()), 0, CHAT, clock, settings=SETTINGS)
    turns.register("e0", "e")
    with pytest.raises(EngineError, match="no such adapter"):
        await settle(clock, turns.turn("e0", TASK, 64))
