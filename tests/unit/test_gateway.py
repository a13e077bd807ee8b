"""The door to the engines: turns, versions, aborts, losses, pins.

Cases T03, T04, T07, T13, T30, T43.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.gateway_bench import CHAT, LENGTH, SETTINGS, TASK, TEXT, bench, scripted

from venusrl.recipe import resolve
from venusrl.rollout.engines.protocol import EngineLost, GenerateRequest, Generation
from venusrl.rollout.gateway import VersionMismatch
from venusrl.rollout.settings import GatewaySettings
from venusrl.rollout.turns import Asked, TurnCancelled
from venusrl.scheduling.actions import CancelTrajectory, FormBatch, Hold, Preempt
from venusrl.scheduling.events import TurnDispatched, TurnFinished, TurnRequested
from venusrl.testing.chat import answer
from venusrl.testing.engine import FakeEngine, fake_logprob
from venusrl.types import Message, StopReason


async def test_a_turn_goes_through_the_scheduler_and_is_recorded_exactly() -> None:
    async with bench() as b:
        engine = b.engine(version=7)
        turn = b.begin()
        await b.clock.run_for(LENGTH)
        result = await turn
        assert result.text == TEXT
        assert (result.stop, result.generated_tokens, result.version, result.worker) == (
            StopReason.STOP,
            LENGTH,
            7,
            "w0",
        )
        assert b.kinds() == ["TurnRequested", "TurnDispatched", "TurnFinished"]
        prompt = len(CHAT.encode(CHAT.render(TASK, True)))
        assert b.events[0] == TurnRequested("t0", 0, prompt, prompt, 64, 0)
        assert b.events[1] == TurnDispatched("t0", 0, "w0", 7)
        assert b.events[2] == TurnFinished("t0", 0, LENGTH, 0, StopReason.STOP)
        rollout = b.gateway.finish("t0")
        (segment,) = rollout.segments
        assert segment.token_ids[prompt:] == answer(CHAT, TEXT)
        assert segment.logprobs[prompt:] == [fake_logprob(token, 7) for token in answer(CHAT, TEXT)]
        assert (rollout.start_version, rollout.discarded) == (7, {})
        assert engine.running == []


async def test_the_next_turn_reuses_ids_and_reports_cached_tokens() -> None:
    async with bench() as b:
        b.engine(respond=scripted(TEXT, "submit"))
        first = b.begin()
        await b.clock.run_for(20)
        messages = [*TASK, Message("assistant", (await first).text), Message("user", "a b")]
        second = asyncio.create_task(b.gateway.turn("t0", messages, 64))
        await b.clock.run_for(20)
        result = await second
        assert result.text == "submit"
        assert result.cached_tokens >= len(CHAT.encode(CHAT.render(TASK, True)))
        assert result.prompt_tokens == len(CHAT.encode(CHAT.render(messages, True)))


async def test_a_hold_is_visible_and_its_time_is_not_the_agents() -> None:
    async with bench() as b:
        b.engine()
        b.to = None
        turn = b.begin()
        await b.clock.run_for(1)
        b.gateway.apply(Hold(reason="worker_draining", trajectory="t0", turn=0))
        assert b.gateway.holds == {"t0": "worker_draining"}
        await b.clock.run_for(9)
        b.dispatch("t0", 1, "w0")
        assert b.gateway.late_actions == 1
        b.dispatch("t0", 0, "w0")
        await b.clock.run_for(2)
        b.gateway.apply(Preempt(reason="test", trajectory="t0", turn=0))
        await b.clock.run_for(5)
        b.dispatch("t0", 0, "w0")
        await b.clock.run_for(LENGTH)
        result = await turn
        assert result.waited_s == 15
        assert result.finished_at - result.requested_at - result.waited_s == LENGTH
        assert b.gateway.holds == {}


async def test_T03_the_version_is_read_at_dispatch_and_spans_come_from_the_engine() -> None:
    async with bench() as b:
        engine = b.engine(version=0)
        turn = b.begin()
        await b.clock.run_for(2)
        await engine.load_weights("v1", 1)
        b.gateway.acknowledge("w0", 1)
        await b.clock.run_for(LENGTH)
        assert (await turn).version == 0
        rollout = b.gateway.finish("t0")
        assert rollout.start_version == 0
        assert [(s.version, s.end - s.start) for s in rollout.segments[0].spans] == [(0, 2), (1, LENGTH - 2)]


async def test_T13_a_preempted_turn_resumes_with_what_is_left_of_its_budget() -> None:
    async with bench() as b:
        b.engine()
        turn = b.begin(max_tokens=6)
        await b.clock.run_for(2)
        b.gateway.apply(Preempt(reason="test", trajectory="t0", turn=0))
        await b.clock.run_for(10)
        result = await turn
        assert b.last(TurnRequested) == TurnRequested("t0", 0, result.prompt_tokens, result.prompt_tokens, 4, 2)
        assert (result.generated_tokens, result.stop, result.preemptions) == (6, StopReason.LENGTH, 1)
        stops = [event.stop for event in b.events if isinstance(event, TurnFinished)]
        assert stops == [StopReason.ABORT, StopReason.LENGTH]
        assert b.gateway.finish("t0").discarded == {}


async def test_T04_with_partial_rollouts_off_a_preempted_turn_starts_pristine_at_one_version() -> None:
    recipe = resolve(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "training": {"steps": 1},
            "schedule": {"async_factor": 0},
            "rollout": {"weight_update": "drain", "context_tokens": 1024},
        }
    )
    async with bench(GatewaySettings.of(recipe, CHAT.stop_token_ids)) as b:
        engine = b.engine(version=2)
        turn = b.begin()
        for version in (4, 6):
            await b.clock.run_for(2)
            b.gateway.apply(Preempt(reason="test", trajectory="t0", turn=0))
            await engine.load_weights("w", version)
            b.gateway.acknowledge("w0", version)
        await b.clock.run_for(LENGTH + 2)
        assert (await turn).text == TEXT
        rollout = b.gateway.finish("t0")
        assert {span.version for span in rollout.segments[0].spans} == {6}
        assert rollout.start_version == 2
        assert rollout.discarded == {"partial_rollout_off": 4}
        assert [e.resumed for e in b.events if isinstance(e, TurnRequested)] == [0, 0, 0]


async def test_T04_with_partial_rollouts_off_a_turn_that_mixed_versions_is_not_recorded() -> None:
    async with bench(msgspec.structs.replace(SETTINGS, keep_partials=False)) as b:
        engine = b.engine(version=0)
        turn = b.begin()
        await b.clock.run_for(2)
        await engine.load_weights("v1", 1)
        b.gateway.acknowledge("w0", 1)
        b.gateway.acknowledge("gone", 1)
        await b.clock.run_for(2 * LENGTH)
        assert (await turn).text == TEXT
        rollout = b.gateway.finish("t0")
        assert [span.version for span in rollout.segments[0].spans] == [1]
        assert rollout.discarded == {"version_mismatch": LENGTH}


async def test_T07_no_kv_of_another_version_is_reused() -> None:
    async with bench() as b:
        engine = b.engine()
        first = b.begin("t0")
        await b.clock.run_for(LENGTH)
        await first
        await engine.load_weights("v1", 1)
        b.gateway.acknowledge("w0", 1)
        second = b.begin("t1")
        await b.clock.run_for(LENGTH)
        assert (await second).cached_tokens == 0
        assert engine.cross_version_hits == 0


async def test_a_lost_engine_means_the_turn_is_asked_for_again_elsewhere() -> None:
    async with bench() as b:
        first, _ = b.engine("w0"), b.engine("w1")
        turn = b.begin()
        await b.clock.run_for(2)
        b.to = "w1"
        first.crash()
        await b.clock.run_for(LENGTH + 2)
        result = await turn
        assert (result.worker, result.text) == ("w1", TEXT)
        assert b.kinds() == ["TurnRequested", "TurnDispatched", "TurnFinished"] * 2
        assert b.gateway.finish("t0").counters["reissues"] == 1


async def test_a_removed_worker_gives_its_turns_back_at_once_and_partials_survive_it() -> None:
    async with bench() as b:
        b.engine("w0")
        b.engine("w1")
        turn = b.begin()
        await b.clock.run_for(2)
        b.gateway.apply(Preempt(reason="test", trajectory="t0", turn=0))
        await b.clock.run_for(2)
        b.to = "w1"
        b.gateway.remove_worker("w0")
        await b.clock.run_for(LENGTH)
        assert (await turn).text == TEXT
        assert isinstance(requested := b.last(TurnRequested), TurnRequested)
        assert requested.resumed == 2


async def test_losses_are_bounded_and_the_last_error_is_told() -> None:
    async with bench() as b:
        b.engine().crash("out of memory")
        turn = b.begin()
        await b.clock.run_for(60)
        with pytest.raises(EngineLost, match="out of memory"):
            await turn
        assert b.kinds().count("TurnDispatched") == 1 + SETTINGS.turn_reissues
        assert b.kinds().count("TurnFinished") == 1 + SETTINGS.turn_reissues
        assert b.gateway.finish("t0").segments == []


async def test_a_dispatch_to_a_worker_that_is_gone_is_a_loss() -> None:
    async with bench() as b:
        b.engine("w1")
        b.to = "w0"
        turn = b.begin()
        await b.clock.run_for(0.1)
        b.to = "w1"
        await b.clock.run_for(LENGTH + 2)
        assert (await turn).worker == "w1"
        assert b.kinds() == ["TurnRequested", "TurnRequested", "TurnDispatched", "TurnFinished"]


async def test_T30_cancelling_a_turn_reaches_the_engine_before_it_returns() -> None:
    async with bench() as b:
        engine = b.engine()
        turn = b.begin()
        await b.clock.run_for(3)
        turn.cancel()
        await b.clock.run_for(0.5)
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert engine.running == []
        assert b.last(TurnFinished) == TurnFinished("t0", 0, 0, 0, StopReason.ABORT)
        rollout = b.gateway.finish("t0")
        assert rollout.segments == []
        assert rollout.discarded == {"cancelled": 3}


async def test_T30_a_retry_never_overlaps_the_orphan() -> None:
    async with bench() as b:
        engine = b.engine()
        turn = b.begin()
        await b.clock.run_for(3)
        turn.cancel()
        retry = asyncio.create_task(b.gateway.turn("t0", TASK, 64))
        await b.clock.run_for(LENGTH + 5)
        assert (await retry).text == TEXT
        assert engine.peak_running == 1
        assert b.gateway.finish("t0").discarded == {"cancelled": 3}


async def test_a_cancelled_trajectory_waiting_generating_and_later() -> None:
    async with bench() as b:
        engine = b.engine()
        running = b.begin("t0")
        await b.clock.run_for(2)
        b.to = None
        waiting = b.begin("t1")
        await b.clock.run_for(1)
        for trajectory in ("t0", "t1", "unknown"):
            b.gateway.apply(CancelTrajectory(reason="stale", trajectory=trajectory))
        settled = asyncio.create_task(b.gateway.settled())
        await b.clock.run_for(1)
        assert settled.done()
        assert engine.running == []
        for turn in (running, waiting):
            with pytest.raises(TurnCancelled, match="stale"):
                await turn
        with pytest.raises(TurnCancelled):
            await b.gateway.turn("t1", TASK, 64)
        assert b.gateway.finish("t0").discarded == {"stale": 3}
        assert b.gateway.finish("t1").discarded == {}


async def test_a_cancelled_trajectory_whose_engine_dies_was_cancelled_all_the_same() -> None:
    async with bench(msgspec.structs.replace(SETTINGS, turn_reissues=0)) as b:
        engine = b.engine()
        turn = b.begin()
        await b.clock.run_for(2)
        b.gateway.cancel("t0", "stale")
        engine.crash()
        await b.clock.run_for(10)
        with pytest.raises(TurnCancelled, match="stale"):
            await turn


async def test_late_decisions_are_counted_and_change_nothing() -> None:
    async with bench() as b:
        b.dispatch("gone", 0, "w0")
        b.gateway.apply(Preempt(reason="test", trajectory="gone", turn=0))
        b.gateway.apply(Hold(reason="test", trajectory="gone", turn=0))
        assert b.gateway.late_actions == 2
        with pytest.raises(TypeError, match="FormBatch"):
            b.gateway.apply(FormBatch(reason="x", version=0, groups=()))


async def test_T43_pins_win_over_what_an_agent_asks_and_are_counted() -> None:
    seen: list[GenerateRequest] = []

    class Watched(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            seen.append(request)
            return await super().generate(request)

    async with bench() as b:
        b.gateway.add_worker("w0", Watched(scripted()), 0)
        b.gateway.register("t0", "g")
        asked = Asked(temperature=0.2, top_p=1.0, seed=4, stop=("x",), penalties=True)
        turn = asyncio.create_task(b.gateway.turn("t0", TASK, 4096, asked))
        await b.clock.run_for(1)
        await turn
        assert seen[0].sampling == SETTINGS.sampling
        assert (seen[0].max_tokens, seen[0].urgency, seen[0].cache_salt) == (64, 3, "v0")
        counters = b.gateway.finish("t0").counters
        assert counters["overrides"] == 5
        assert {name for name in counters if name.startswith("override_")} == {
            "override_temperature",
            "override_seed",
            "override_stop",
            "override_penalties",
            "override_max_tokens",
        }


async def test_a_prompt_that_fills_the_context_needs_no_engine() -> None:
    async with bench() as b:
        b.gateway.register("t0", "g")
        result = await b.gateway.turn("t0", [Message("user", "x" * 600)], 64)
        assert (result.stop, result.generated_tokens, result.text) == (StopReason.CONTEXT, 0, "")
        assert b.events == []
        assert b.gateway.finish("t0").start_version is None


async def test_the_shared_prefix_is_what_the_group_has_in_common() -> None:
    async with bench() as b:
        b.engine()
        first, second = b.begin("t0"), b.begin("t1")
        await b.clock.run_for(2 * LENGTH)
        await asyncio.gather(first, second)
        requests = [e for e in b.events if isinstance(e, TurnRequested)]
        assert requests[0].shared_prefix == requests[1].shared_prefix == requests[0].prompt_tokens
        b.gateway.register("t2", "g")
        third = asyncio.create_task(b.gateway.turn("t2", [Message("user", "fix another")], 64))
        await b.clock.run_for(LENGTH)
        await third
        assert isinstance(last := b.last(TurnRequested), TurnRequested)
        assert 0 < last.shared_prefix < last.prompt_tokens


async def test_an_engine_with_older_weights_than_it_acknowledged_is_at_fault() -> None:
    async with bench() as b:
        b.gateway.add_worker("w0", FakeEngine(scripted(), version=1), 2)
        turn = b.begin()
        await b.clock.run_for(30)
        with pytest.raises(VersionMismatch, match="version 1 after it acknowledged 2"):
            await turn
        assert b.gateway.finish("t0").discarded == {"version_mismatch": 3 * LENGTH}


async def test_a_trajectory_is_registered_once_and_not_finished_while_it_generates() -> None:
    async with bench() as b:
        b.engine()
        turn = b.begin()
        await b.clock.run_for(1)
        with pytest.raises(ValueError, match="already"):
            b.gateway.register("t0", "g")
        with pytest.raises(RuntimeError, match="while a turn"):
            b.gateway.finish("t0")
        await b.clock.run_for(LENGTH)
        await turn
