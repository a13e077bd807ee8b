"""The fluid engine against formulas, and against an engine that really goes step by step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.costs import EngineCosts
from venusrl.simulation.cache import Path
from venusrl.simulation.engine import Engine, RequestTooLarge
from venusrl.simulation.requests import Request
from venusrl.simulation.scenario import EngineSpec

COSTS = EngineCosts(
    step_base_s=0.01,
    step_sequence_s=0.001,
    step_kv_token_s=1e-6,
    prefill_token_s=1e-4,
    prefill_token_context_s=1e-8,
)


def spec(**changes: object) -> EngineSpec:
    fields: dict[str, object] = {"name": "e", "kv_capacity": 10_000, "slots": 8, "costs": COSTS} | changes
    return EngineSpec(**fields)  # type: ignore[arg-type]


def decode_s(batch: int, contexts: list[int], steps: int) -> float:
    """Steps of a batch of these contexts, the KV read at the middle of each token (as the fluid does)."""
    mean = sum(contexts) + batch * steps / 2
    return steps * COSTS.step_s(batch, mean)


def drive(engine: Engine, now: float = 0.0, until: float = 1e9) -> list[tuple[float, Request]]:
    """Let it run by itself; what ended when."""
    ended: list[tuple[float, Request]] = []
    engine.settle(now)
    while (due := engine.next_at()) is not None and due <= until:
        ended += [(due, request) for request in engine.fire(due)]
        engine.settle(due)
    return ended


def test_one_sequence_takes_what_the_formula_says() -> None:
    engine = Engine(spec())
    engine.submit(Request("a", (), 1000, 200), 0, 5.0)
    [(when, request)] = drive(engine, 5.0)
    expected = COSTS.prefill_s(1000) + decode_s(1, [1000], 200)
    assert when - 5.0 == pytest.approx(expected, rel=1e-9)
    assert (request.generated, request.found, request.prefilled) == (200, 0, 1000)
    assert request.prefill_s == pytest.approx(COSTS.prefill_s(1000))
    assert request.decode_s == pytest.approx(decode_s(1, [1000], 200))
    assert engine.totals.decoded == 200
    assert engine.kv_running == pytest.approx(0)
    assert engine.cache.idle == 1200


def test_speed_divides_every_duration() -> None:
    times = []
    for speed in (1.0, 2.0):
        engine = Engine(spec(speed=speed))
        engine.submit(Request("a", (), 1000, 200), 0, 0.0)
        times.append(drive(engine)[0][0])
    assert times[1] == pytest.approx(times[0] / 2)


def test_equal_sequences_decode_as_one_batch_and_end_together() -> None:
    engine = Engine(spec(prefill_chunk=10**9))
    for name in "abcd":
        engine.submit(Request(name, (), 500, 100), 0, 0.0)
    ended = drive(engine)
    # A chunk without end: prompts first, decoding stalls meanwhile. The first prompt ends before any decoding.
    prompts = 4 * COSTS.prefill_s(500)
    assert len(ended) == 4
    assert ended[0][0] == pytest.approx(prompts + decode_s(4, [500] * 4, 100), rel=1e-3)
    assert ended[0][0] == pytest.approx(ended[-1][0], rel=1e-3)


def test_prompts_slow_decoding_by_their_share_of_a_step() -> None:
    engine = Engine(spec(prefill_chunk=100))
    engine.submit(Request("a", (), 100, 50), 0, 0.0)
    engine.settle(0.0)
    begun = COSTS.prefill_s(100)
    engine.fire(begun)
    engine.submit(Request("b", (), 1000, 1), 0, begun)
    ended = drive(engine, begun)
    # b's prompt takes ten steps, each of which carries a tenth of it and a token of a.
    ten = decode_s(1, [100], 10) + COSTS.prefill_s(1000)
    [when_b] = [when for when, request in ended if request.trajectory == "b"]
    one_both = decode_s(2, [110, 1000], 1)
    assert when_b - begun == pytest.approx(ten + one_both, rel=1e-6)
    [when_a] = [when for when, request in ended if request.trajectory == "a"]
    assert when_a - begun == pytest.approx(ten + one_both + decode_s(1, [111], 39), rel=1e-6)


def test_the_next_turn_computes_only_what_is_new() -> None:
    engine = Engine(spec())
    engine.submit(Request("a", (("g", 400),), 1000, 100), 0, 0.0)
    [(when, _)] = drive(engine)
    engine.submit(Request("a", (("g", 400),), 1300, 10), 0, when)
    [(_, second)] = drive(engine, when)
    assert (second.found, second.prefilled) == (1100, 200)
    assert second.prefill_s == pytest.approx(COSTS.prefill_s(200, 1100))


def test_siblings_compute_their_prefix_once() -> None:
    engine = Engine(spec())
    for name in "abc":
        engine.submit(Request(name, (("g", 800),), 1000, 10), 0, 0.0)
    drive(engine)
    assert engine.totals.prefilled == 800 + 3 * 200
    assert engine.totals.cached == 2 * 800
    assert engine.cache.idle == 800 + 3 * 210


def test_what_siblings_answer_and_are_told_alike_is_computed_once() -> None:
    engine, now = Engine(spec()), 0.0
    path = (("prompt", 400), ("answer", 100), ("result", 300))
    computed = []
    for name in "ab":
        for context, tokens in ((400, 100), (800, 10)):
            engine.submit(Request(name, path, context, tokens), 0, now)
            [(now, request)] = drive(engine, now)
            computed.append(request.prefilled)
    # The last token is computed whatever is there.
    assert computed == [400, 300, 1, 1]
    assert engine.cache.idle == 800 + 2 * 10


def test_an_aborted_prompt_hands_on_each_stretch_to_those_who_share_it() -> None:
    engine = Engine(spec())
    engine.submit(Request("a", (("g", 300), ("g1", 300), ("g2", 300)), 1000, 10), 0, 0.0)
    engine.submit(Request("b", (("g", 300), ("g1", 300)), 700, 10), 0, 0.0)
    engine.settle(0.0)
    # a has computed the first 400.
    [rest] = [request.todo for request in engine.requests.values() if request.trajectory == "b"]
    assert rest == 100
    when = COSTS.prefill_s(1000) * 0.4
    engine.abort("a", when)
    engine.settle(when)
    [(_, b)] = drive(engine, when)
    assert b.prefilled == 100 + 200
    assert engine.cache.lacking((("g", 300), ("g1", 300), ("g2", 300))) == 300


def test_only_whole_pages_are_found() -> None:
    engine = Engine(spec(page_tokens=16))
    engine.submit(Request("a", (), 1000, 100), 0, 0.0)
    [(when, _)] = drive(engine)
    engine.submit(Request("a", (), 1300, 10), 0, when)
    [(_, second)] = drive(engine, when)
    assert (second.found, second.prefilled) == (1088, 212)
    with pytest.raises(ValueError, match="page_tokens"):
        spec(page_tokens=0)


def test_without_a_prefix_cache_everything_is_computed_again() -> None:
    engine = Engine(spec(prefix_cache=False))
    for name in "ab":
        engine.submit(Request(name, (("g", 800),), 1000, 10), 0, 0.0)
    drive(engine)
    assert engine.totals.prefilled == 2000
    assert engine.cache.idle == 0


def test_a_resumed_turn_whose_kv_is_there_computes_one_token() -> None:
    engine = Engine(spec())
    engine.submit(Request("a", (), 1000, 100), 0, 0.0)
    engine.settle(0.0)
    engine.fire(engine.next_at() or 0.0)
    half = COSTS.prefill_s(1000) + decode_s(1, [1000], 50)
    request = engine.abort("a", half + 1e-9)
    assert request is not None
    assert (request.generated, request.left, request.context) == (50, 50, 1050)
    engine.submit(Request("a", (), 1050, 50), 0, half)
    [(_, again)] = drive(engine, half)
    assert again.prefilled == 1
    assert engine.totals.decoded == 100


def test_idle_kv_makes_room_for_running_sequences_oldest_first() -> None:
    engine = Engine(spec(kv_capacity=2500))
    now = 0.0
    for name in "ab":
        engine.submit(Request(name, (), 900, 100), 0, now)
        now = drive(engine, now)[0][0]
    assert engine.cache.idle == 2000
    engine.submit(Request("c", (), 900, 100), 0, now)
    drive(engine, now)
    assert (engine.cache.own("a"), engine.cache.own("b"), engine.cache.own("c")) == (500, 1000, 1000)
    assert engine.totals.preemptions == 0


def test_the_latest_is_preempted_when_kv_runs_out_and_loses_nothing() -> None:
    engine = Engine(spec(kv_capacity=2400))
    engine.submit(Request("a", (), 1000, 500), 0, 0.0)
    engine.submit(Request("b", (), 1000, 500), 0, 0.0)
    ended = drive(engine)
    assert [request.trajectory for _, request in ended] == ["a", "b"]
    assert engine.totals.preemptions == 1
    assert [request.generated for _, request in ended] == [500, 500]
    assert engine.totals.decoded == 1000
    # b came back when a had ended: part of what it had was evicted for a meanwhile, and only that is computed again.
    b = ended[1][1]
    assert b.preemptions == 1
    assert 1000 < b.prefilled < 2200
    assert b.queued_s > 0


def test_what_a_preempted_sequence_decoded_is_dropped_where_the_engine_does_so() -> None:
    prefilled = {}
    for mode in ("evictable", "dropped"):
        engine = Engine(spec(kv_capacity=2400, preempted_kv=mode))
        engine.submit(Request("a", (), 1000, 210), 0, 0.0)
        engine.submit(Request("b", (), 1000, 500), 0, 0.0)
        drive(engine)
        assert engine.totals.decoded == 710
        prefilled[mode] = engine.totals.prefilled
    assert prefilled["dropped"] > prefilled["evictable"]


def test_the_least_urgent_is_preempted_and_served_last() -> None:
    engine = Engine(spec(kv_capacity=2400))
    engine.submit(Request("a", (), 1000, 500), 0, 0.0)
    engine.submit(Request("b", (), 1000, 500), 1, 0.0)
    assert [request.trajectory for _, request in drive(engine)] == ["b", "a"]
    fifo = Engine(spec(kv_capacity=2400, priority_queue=False))
    fifo.submit(Request("a", (), 1000, 500), 0, 0.0)
    fifo.submit(Request("b", (), 1000, 500), 1, 0.0)
    assert [request.trajectory for _, request in drive(fifo)] == ["a", "b"]


def test_slots_and_the_watermark_bound_admission() -> None:
    engine = Engine(spec(slots=2))
    for name in "abc":
        engine.submit(Request(name, (), 100, 10), 0, 0.0)
    engine.settle(0.0)
    assert (engine.running, engine.queued) == (2, 1)
    tight = Engine(spec(kv_capacity=1000, watermark=0.1))
    for name in "ab":
        tight.submit(Request(name, (), 460, 10), 0, 0.0)
    tight.settle(0.0)
    assert (tight.running, tight.queued) == (1, 1)


def test_a_turn_larger_than_the_worker_is_refused_loudly() -> None:
    with pytest.raises(RequestTooLarge, match="a needs 10001 tokens"):
        Engine(spec()).submit(Request("a", (), 10_000, 1), 0, 0.0)


def test_a_paused_worker_stands_still_and_keeps_everything() -> None:
    engine = Engine(spec())
    engine.submit(Request("a", (), 1000, 100), 0, 0.0)
    engine.settle(0.0)
    whole = COSTS.prefill_s(1000) + decode_s(1, [1000], 100)
    engine.pause(0.05)
    engine.settle(0.05)
    assert engine.next_at() is None
    engine.resume(7.05)
    [(when, _)] = drive(engine, 7.05)
    assert when == pytest.approx(whole + 7.0)
    assert engine.totals.paused_s == pytest.approx(7.0)


def test_an_aborted_prompt_leaves_its_computed_part_and_hands_on_the_prefix() -> None:
    engine = Engine(spec())
    engine.submit(Request("a", (("g", 800),), 1000, 10), 0, 0.0)
    engine.submit(Request("b", (("g", 800),), 1000, 10), 0, 0.0)
    engine.settle(0.0)
    engine.abort("a", COSTS.prefill_s(1000) / 2)
    engine.settle(COSTS.prefill_s(1000) / 2)
    [(_, b)] = drive(engine, COSTS.prefill_s(1000) / 2)
    # The prefix's other 300 tokens fell to b.
    assert b.prefilled == 200 + 300
    assert engine.totals.prefilled == 500 + 500
    alone = Engine(spec())
    alone.submit(Request("a", (("g", 800),), 1000, 10), 0, 0.0)
    alone.settle(0.0)
    alone.abort("a", COSTS.prefill_s(1000) / 2)
    assert alone.cache.idle == 500
    assert alone.cache.lacking((("g", 800),)) == 300


class StepEngine:
    """Discrete steps with whole tokens, for batches that never fill the KV: what the fluid stands for."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def run(self, jobs: list[tuple[int, int]]) -> list[float]:
        now, ends = 0.0, [0.0] * len(jobs)
        todo = [[prompt, left, prompt] for prompt, left in jobs]
        while any(left for _, left, _ in todo):
            decoding = [job for job in todo if not job[0] and job[1]]
            room, prefill_s = self.chunk, 0.0
            for job, (prompt, _) in zip(todo, jobs, strict=True):
                part = min(job[0], room if decoding else job[0])
                if not part:
                    continue
                prefill_s += COSTS.prefill_s(prompt) * part / prompt
                job[0] -= part
                room -= part
                if room <= 0 or not decoding:
                    break
            now += prefill_s
            if decoding:
                now += COSTS.step_s(len(decoding), sum(job[2] for job in decoding))
            for index, job in enumerate(todo):
                if any(job is other for other in decoding):
                    job[1] -= 1
                    job[2] += 1
                    if not job[1]:
                        ends[index] = now
        return ends


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(50, 1500), st.integers(50, 400)), min_size=1, max_size=8),
    st.sampled_from([128, 512]),
)
def test_the_fluid_agrees_with_an_engine_that_goes_step_by_step(jobs: list[tuple[int, int]], chunk: int) -> None:
    engine = Engine(spec(kv_capacity=10**6, prefill_chunk=chunk))
    for index, (prompt, left) in enumerate(jobs):
        engine.submit(Request(f"t{index}", (), prompt, left), 0, 0.0)
    ended = {request.trajectory: when for when, request in drive(engine)}
    exact = StepEngine(chunk).run(jobs)
    step = COSTS.step_s(8, 16_000) + COSTS.prefill_s(1500) * chunk / 1500
    for index, when in enumerate(exact):
        # A prompt's end falls into a step: the fluid may be off by one such step for each prompt, no more.
        assert ended[f"t{index}"] == pytest.approx(when, abs=step * (len(jobs) + 1), rel=0.01)


def _branches(number: int) -> Path:
    """Two trees: one path at first, and parted later."""
    tree = f"g{number % 2}"
    return ((tree, 150), (f"{tree}a", 80), (f"{tree}b{number // 2 % 2}", 120), (f"{tree}c{number // 2 % 2}", 60))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1200, 4000), st.sampled_from(["tail", "whole"]), st.booleans())
def test_kv_is_never_exceeded_and_no_token_is_lost(seed: int, capacity: int, eviction: str, dropped: bool) -> None:
    draw = random.Random(seed)
    engine = Engine(
        spec(
            kv_capacity=capacity,
            slots=5,
            prefill_chunk=64,
            eviction=eviction,
            preempted_kv="dropped" if dropped else "evictable",
        )
    )
    now, finished, wanted = 0.0, 0, 0
    contexts: dict[str, int] = {}
    left: dict[str, int] = {}
    for step in range(60):
        name = f"t{draw.randrange(6)}"
        if name not in engine.requests and draw.random() < 0.7:
            context = contexts.get(name, 200) + draw.randrange(100)
            tokens = left.pop(name, 0) or draw.randrange(1, 150)
            if context + tokens <= capacity:
                wanted += tokens
                engine.submit(Request(name, _branches(int(name[1])), context, tokens), draw.randrange(2), now)
                contexts[name] = context
        elif name in engine.requests and draw.random() < 0.2:
            request = engine.abort(name, now)
            assert request is not None
            finished += request.generated
            wanted -= request.left
            wanted -= request.generated
            wanted += request.generated
            contexts[name], left[name] = request.context, request.left
        engine.settle(now)
        assert engine.kv_running + engine.cache.idle <= capacity + 1e-3, step
        until = now + draw.random() * 2
        for when, request in drive(engine, now, until):
            finished += request.generated
            contexts[request.trajectory] = request.context
            assert when <= until
            assert engine.kv_running <= capacity + 1e-3
        now = until
    for _, request in drive(engine, now):
        finished += request.generated
    assert finished == wanted == engine.totals.decoded
    assert engine.kv_running == pytest.approx(0, abs=1e-6)
    assert not engine.requests
