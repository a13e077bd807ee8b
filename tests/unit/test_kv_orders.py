"""What the scheduler wishes of idle KV reaches engines that obey, and is counted for those that do not."""

from __future__ import annotations

from tests.unit.gateway_bench import bench

from venusrl.scheduling.actions import ReleaseKV, RetainKV
from venusrl.scheduling.events import TurnFinished


def orders(calls: list[tuple[str, str]]) -> list[str]:
    return [detail for call, detail in calls if call == "order_kv"]


async def test_wishes_of_one_moment_are_told_together_and_the_newest_counts() -> None:
    async with bench() as b:
        engine = b.engine()
        engine.kv_control = True
        b.gateway.apply(RetainKV("ttl", "t0", "w0"))
        b.gateway.apply(ReleaseKV("gap", "t1", "w0"))
        b.gateway.apply(ReleaseKV("gap", "t0", "w0"))
        await b.clock.run_for(0.1)
        assert orders(engine.calls) == ["-t0,t1 +"]
        b.gateway.apply(RetainKV("ttl", "t2", "w0"))
        b.gateway.apply(RetainKV("ttl", "t2", "gone"))
        await b.clock.run_for(0.1)
        assert orders(engine.calls)[1:] == ["- +t2"]
        assert (b.gateway.kv_orders.told, b.gateway.kv_orders.unheard) == (3, 0)


async def test_an_engine_without_such_a_control_is_told_nothing() -> None:
    async with bench() as b:
        engine = b.engine()
        b.gateway.apply(ReleaseKV("gap", "t0", "w0"))
        await b.clock.run_for(0.1)
        assert orders(engine.calls) == []
        assert b.gateway.kv_orders.unheard == 1


async def test_a_trajectory_that_is_over_gives_up_its_kv() -> None:
    async with bench() as b:
        engine = b.engine()
        engine.kv_control = True
        turn = b.begin()
        await b.clock.run_for(60.0)
        await turn
        b.gateway.finish("t0")
        await b.clock.run_for(0.1)
        assert orders(engine.calls) == ["-t0 +"]


async def test_a_lost_engine_loses_its_wishes_and_nothing_else() -> None:
    async with bench() as b:
        engine = b.engine()
        engine.kv_control = True
        engine.crashed = "gone"
        b.gateway.apply(ReleaseKV("gap", "t0", "w0"))
        await b.clock.run_for(0.1)
        engine.crashed = ""
        b.gateway.apply(ReleaseKV("gap", "t1", "w0"))
        await b.clock.run_for(0.1)
        assert orders(engine.calls) == ["-t1 +"]


async def test_a_turn_through_new_weights_leaves_no_kv_to_be_found() -> None:
    async with bench() as b:
        b.engine()
        turn = b.begin()
        await b.clock.run_for(3.0)
        b.gateway.acknowledge("w0", 1)
        await b.clock.run_for(60.0)
        await turn
        finished = b.last(TurnFinished)
        assert isinstance(finished, TurnFinished)
        assert not finished.leaves_kv
