"""A request at an engine has one limit, and it lets go. Case T38."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.gateway_bench import LENGTH, SETTINGS, TEXT, bench, scripted

from venusrl.rollout.engines.protocol import GenerateRequest, Generation
from venusrl.rollout.turns import TurnCancelled
from venusrl.testing.engine import FakeEngine


class Deaf(FakeEngine):
    """Never answers, and hears no abort."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__(scripted())
        self.heard = heard

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.heard.append("dropped")
        raise AssertionError("nobody answers")

    async def abort(self, request_ids: list[str]) -> None:
        self.heard += request_ids


async def test_T38_the_one_limit_on_a_turn_at_an_engine_is_the_gateways() -> None:
    async with bench() as b:
        heard: list[str] = []
        b.gateway.add_worker("w0", Deaf(heard), 0)
        b.engine("w1")
        turn = b.begin()
        await b.clock.run_for(99.9)
        assert b.kinds() == ["TurnRequested", "TurnDispatched"]
        b.to = "w1"
        await b.clock.run_for(SETTINGS.abort_grace_s + LENGTH + 5)
        assert (await turn).worker == "w1"
        assert len(heard) >= 6
        assert heard[-1] == "dropped"
        assert b.gateway.finish("t0").counters["reissues"] == 1


async def test_T38_a_turn_past_its_limit_keeps_what_it_has() -> None:
    async with bench() as b:
        engine = b.engine()
        turn = b.begin()
        await b.clock.run_for(2)
        await engine.pause()
        await b.clock.run_for(98.5)
        await engine.resume()
        await b.clock.run_for(LENGTH + 5)
        result = await turn
        assert (result.text, result.preemptions) == (TEXT, 1)


async def test_an_abort_that_overtakes_its_request_is_sent_again() -> None:
    class Slow(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            await b.clock.sleep(0.5)
            return await super().generate(request)

    async with bench() as b:
        engine = Slow(scripted(), pace=lambda: b.clock.sleep(1.0))
        b.gateway.add_worker("w0", engine, 0)
        turn = b.begin()
        await b.clock.run_for(0.1)
        b.gateway.cancel("t0", "stale")
        await b.clock.run_for(2.5)
        with pytest.raises(TurnCancelled):
            await turn
        assert engine.running == []
