"""What a run needs of an engine, checked against real servers: the embedded worker, and vLLM where installed."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.integration.engine_processes import (
    CONTEXT,
    KEY,
    VOCABULARY,
    EngineProcess,
    engine_process,
    paused_within_a_turn,
    reference_logits,
    running,
    save_model,
)
from tests.waiting import PATIENCE_S, until

from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.install import vllm_python
from venusrl.rollout.engines.launch import EMBEDDED_START_TIMEOUT_S, VLLM_START_TIMEOUT_S, EngineKind
from venusrl.rollout.engines.protocol import EngineError, EngineLost, GenerateRequest, Generation
from venusrl.types import SamplingParams, StopReason, VersionSpan

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * i + 3) % VOCABULARY for i in range(100)]
START_TIMEOUT_S = {"embedded": EMBEDDED_START_TIMEOUT_S, "vllm": VLLM_START_TIMEOUT_S}
TOLERANCE = {"embedded": 1e-4, "vllm": 2e-3}

_ids = itertools.count()
_versions = itertools.count(1)

pytestmark = pytest.mark.timeout(420)


@dataclass
class Contract:
    """One server, started on ``weights[0]``; every test begins with those weights under a fresh version."""

    kind: EngineKind
    server: EngineProcess
    weights: tuple[Path, Path]
    client: HttpEngineClient
    version: int

    async def ask(self, prompt: list[int], limit: int, sampling: SamplingParams = GREEDY, salt: str = "") -> Generation:
        return await self.client.generate(request(prompt, limit, sampling, salt))

    def check(self, prompt: list[int], done: Generation, sampling: SamplingParams = GREEDY, weights: int = 0) -> None:
        """The tokens are possible and their log-probabilities those of a plain forward pass."""
        logits = reference_logits(self.weights[weights], prompt + done.token_ids)[len(prompt) - 1 : -1]
        for row, token, logprob in zip(processed(logits, sampling), done.token_ids, done.logprobs, strict=True):
            assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE[self.kind])
            if sampling.temperature == 0:
                assert token == int(row.argmax())


def request(
    prompt: list[int], limit: int, sampling: SamplingParams = GREEDY, salt: str = "", urgency: int = 0
) -> GenerateRequest:
    return GenerateRequest(f"r{next(_ids):05d}", prompt, limit, sampling, urgency, salt)


def long_turn() -> GenerateRequest:
    return request(PROMPT, 800)


def processed(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The slow, obvious way to the distribution that was sampled from."""
    rows = []
    for logit in logits / (sampling.temperature or 1.0):
        order = logit.argsort(descending=True)
        if sampling.top_k:
            order = order[: sampling.top_k]
        probabilities = torch.softmax(logit[order], -1)
        before = [0.0, *itertools.accumulate(probabilities.tolist())]
        keep = [i for i in range(len(order)) if before[i] < sampling.top_p]
        row = torch.full_like(logit, float("-inf"))
        row[order[keep]] = torch.log_softmax(logit[order[keep]], -1)
        rows.append(row)
    return torch.stack(rows)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return save_model(root / "old", 1), save_model(root / "new", 2)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest, weights: tuple[Path, Path]) -> Iterator[tuple[EngineKind, EngineProcess]]:
    kind: EngineKind = request.param
    if kind == "vllm" and vllm_python() is None:
        pytest.skip("the vLLM environment is not installed: venusrl engine install vllm")
    with engine_process(kind, weights[0]) as process:
        yield kind, process


@pytest.fixture
async def engine(server: tuple[EngineKind, EngineProcess], weights: tuple[Path, Path]) -> AsyncIterator[Contract]:
    kind, process = server
    client = HttpEngineClient(process.base_url, KEY, slots=16)
    try:
        await client.wait_ready(START_TIMEOUT_S[kind])
    except EngineLost:
        pytest.fail(f"the engine did not start:\n{process.text()[-3000:]}")
    await client.resume()
    version = next(_versions)
    await client.load_weights(str(weights[0]), version)
    yield Contract(kind, process, weights, client, version)
    await client.close()


async def aborted_within_a_turn(engine: Contract) -> Generation:
    """What a turn of 800 tokens had when it was aborted while it ran; begun anew where the engine was done first."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        asked = long_turn()
        turn = asyncio.create_task(engine.client.generate(asked))
        await running(engine.client, turn)
        await engine.client.abort([asked.request_id, "never-heard-of"])
        done = await asyncio.wait_for(turn, PATIENCE_S)
        if done.stop is not StopReason.LENGTH:
            return done
        assert time.monotonic() < deadline, "every turn was over before it could be aborted"


async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward(engine: Contract) -> None:
    done = await engine.ask(PROMPT, 24)
    assert len(done.token_ids) == 24
    assert done.stop is StopReason.LENGTH
    assert done.spans == [VersionSpan(engine.version, 0, 24)]
    engine.check(PROMPT, done)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.6),
    ],
    ids=str,
)
async def test_sampled_logprobs_are_those_of_the_processed_distribution(
    engine: Contract, sampling: SamplingParams
) -> None:
    answers = await asyncio.gather(*(engine.ask(PROMPT, 16, sampling) for _ in range(4)))
    for done in answers:
        engine.check(PROMPT, done, sampling)
    assert len({tuple(done.token_ids) for done in answers}) > 1


async def test_many_different_requests_at_once_are_each_exact(engine: Contract) -> None:
    prompts = [[(i * j + 5 * i + j) % VOCABULARY for j in range(1, 20 + 11 * i)] for i in range(1, 25)]
    kinds = [GREEDY, SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(temperature=1.0, top_k=7)]
    samplings = [kinds[i % 3] for i in range(len(prompts))]
    answers = await asyncio.gather(
        *(engine.ask(p, 5 + i, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True)))
    )
    for prompt, sampling, done in zip(prompts, samplings, answers, strict=True):
        engine.check(prompt, done, sampling)


async def test_a_following_turn_reuses_the_prefix_and_stays_exact(engine: Contract) -> None:
    first = await engine.ask(PROMPT, 40)
    longer = PROMPT + first.token_ids + [1, 2, 3, 4, 5]
    second = await engine.ask(longer, 8)
    assert second.cached_tokens >= 128, "generated tokens are reused too, in whole pages"
    engine.check(longer, second)
    apart = await engine.ask(longer, 8, salt="another namespace")
    assert apart.cached_tokens == 0
    engine.check(longer, apart)


async def test_stop_tokens_end_a_turn_and_are_part_of_it(engine: Contract) -> None:
    free = await engine.ask(PROMPT, 12)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    done = await engine.ask(PROMPT, 12, SamplingParams(temperature=0.0, stop_token_ids=(stop,)))
    assert done.stop is StopReason.STOP
    assert done.token_ids == free.token_ids[: first + 1]


async def test_a_seed_makes_a_request_repeatable(engine: Contract) -> None:
    seeded = SamplingParams(temperature=1.0, seed=1234)
    alone = await engine.ask(PROMPT, 12, seeded)
    again, *_ = await asyncio.gather(
        engine.ask(PROMPT, 12, seeded), *(engine.ask([i + 1] * 9, 12, SamplingParams()) for i in range(5))
    )
    assert again.token_ids == alone.token_ids


async def test_T18_a_full_context_is_told_from_a_normal_end(engine: Contract) -> None:
    prompt = [i % VOCABULARY for i in range(CONTEXT - 6)]
    cut = await engine.ask(prompt, 50)
    assert cut.stop is StopReason.CONTEXT
    assert len(cut.token_ids) == 6
    engine.check(prompt, cut)
    full = await engine.ask([1] * CONTEXT, 50)
    assert (full.stop, full.token_ids) == (StopReason.CONTEXT, [])
    short = await engine.ask(PROMPT, 6)
    assert short.stop is StopReason.LENGTH


async def test_abort_returns_what_was_generated(engine: Contract) -> None:
    done = await aborted_within_a_turn(engine)
    assert done.stop is StopReason.ABORT
    assert 0 < len(done.token_ids) < 800
    engine.check(PROMPT, done)


async def test_pause_keeps_requests_and_new_ones_queue(engine: Contract) -> None:
    _, task = await paused_within_a_turn(engine.client, long_turn)
    assert await engine.client.is_paused()
    queued = asyncio.create_task(engine.ask(PROMPT[:50], 4))
    before = (await engine.client.load()).generated_tokens_total
    await asyncio.sleep(0.3)  # time in which an engine that is not paused would generate
    assert (await engine.client.load()).generated_tokens_total == before
    assert not task.done()
    assert not queued.done()
    await engine.client.resume()
    done = await task
    assert len(done.token_ids) == 800
    engine.check(PROMPT, done)
    engine.check(PROMPT[:50], await queued)


async def test_abort_works_while_paused(engine: Contract) -> None:
    asked, task = await paused_within_a_turn(engine.client, long_turn)
    await engine.client.abort([asked.request_id])
    done = await asyncio.wait_for(task, PATIENCE_S)
    assert done.stop is StopReason.ABORT
    assert done.token_ids
    await engine.client.resume()


async def test_T03_weights_loaded_in_flight_split_the_spans_of_a_turn(engine: Contract) -> None:
    _, task = await paused_within_a_turn(engine.client, long_turn)
    newer = next(_versions)
    await engine.client.load_weights(str(engine.weights[1]), newer)
    assert await engine.client.version() == newer
    await engine.client.resume()
    done = await task
    assert len(done.token_ids) == 800
    assert [span.version for span in done.spans] == [engine.version, newer]
    (old, new) = done.spans
    assert (old.start, old.end, new.end) == (0, new.start, 800)
    kept = Generation(done.token_ids[: old.end], done.logprobs[: old.end], [], StopReason.LENGTH)
    engine.check(PROMPT, kept)


async def test_T07_no_prefix_survives_new_weights(engine: Contract) -> None:
    old = await engine.ask(PROMPT, 8)
    assert (await engine.ask(PROMPT, 8)).cached_tokens > 0
    _, in_flight = await paused_within_a_turn(engine.client, long_turn)
    await engine.client.load_weights(str(engine.weights[1]), next(_versions))
    await engine.client.resume()
    new = await engine.ask(PROMPT, 8)
    assert new.cached_tokens == 0
    assert new.token_ids != old.token_ids
    engine.check(PROMPT, new, weights=1)
    # What the old turn computed with both weights is not found either.
    mixed = await in_flight
    longer = PROMPT + mixed.token_ids
    after = await engine.ask(longer, 4)
    assert after.cached_tokens <= len(PROMPT)
    engine.check(longer, after, weights=1)


async def test_T10_a_failed_weight_load_tells_the_engines_words_and_the_next_one_works(
    engine: Contract, tmp_path: Path
) -> None:
    with pytest.raises(EngineError) as failure:
        await asyncio.wait_for(engine.client.load_weights(str(tmp_path / "nothing-here"), next(_versions)), PATIENCE_S)
    assert not isinstance(failure.value, EngineLost)
    assert "500" in str(failure.value)
    newer = next(_versions)
    await engine.client.load_weights(str(engine.weights[1]), newer)
    assert await engine.client.version() == newer
    engine.check(PROMPT, await engine.ask(PROMPT, 8), weights=1)


async def test_T13_a_resumed_turn_keeps_to_its_budget(engine: Contract) -> None:
    budget = 800
    part = await aborted_within_a_turn(engine)
    rest = await engine.ask(PROMPT + part.token_ids, budget - len(part.token_ids))
    assert len(part.token_ids) + len(rest.token_ids) == budget
    assert rest.stop is StopReason.LENGTH
    whole = Generation(part.token_ids + rest.token_ids, part.logprobs + rest.logprobs, [], StopReason.LENGTH)
    engine.check(PROMPT, whole)


async def test_T30_cancelling_a_call_leaves_nothing_running(engine: Contract) -> None:
    _, task = await paused_within_a_turn(engine.client, long_turn)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = (await engine.client.load()).generated_tokens_total
    await engine.client.resume()

    async def idle() -> bool:
        load = await engine.client.load()
        return not load.running and not load.waiting

    await until(idle, "the end of the turn that was cancelled")
    settled = (await engine.client.load()).generated_tokens_total
    assert settled - before < 700, "it ended because nobody waits for it, and not by its length"
    await asyncio.sleep(0.1)
    assert (await engine.client.load()).generated_tokens_total == settled


async def test_load_reports_what_runs_and_what_the_cache_holds(engine: Contract) -> None:
    _, task = await paused_within_a_turn(engine.client, long_turn)
    load = await engine.client.load()
    assert (load.running, load.waiting, load.slots) == (1, 0, 16)
    assert load.kv_capacity == 8192
    assert len(PROMPT) <= load.kv_used <= len(PROMPT) + 850
    assert load.prefill_tokens_total >= len(PROMPT)
    await engine.client.resume()
    await task


async def test_the_order_of_eviction_is_the_callers_where_the_engine_has_such_a_control(engine: Contract) -> None:
    """The cache of 8,192 tokens is filled once over: what was retained is still there, what was used with it is not."""
    assert engine.client.kv_control is (engine.kind == "embedded")
    if not engine.client.kv_control:
        with pytest.raises(EngineError):
            await engine.client.order_kv(["a"], ["b"])
        return

    async def turn(first: int, session: str) -> int:
        prompt = [first, *range(2, 97), *[first] * 160]
        asked = GenerateRequest(f"k{next(_ids):05d}", prompt, 1, GREEDY, session=session)
        return (await engine.client.generate(asked)).cached_tokens

    for first, session in ((100, "plain"), (101, "kept")):
        await turn(first, session)
    await engine.client.order_kv([], ["kept", "never seen"])
    for number in range(32):
        await turn(number, f"filler {number}")
    assert await turn(101, "kept") == 240
    assert await turn(100, "plain") == 0
    await engine.client.order_kv(["kept"], [])
    for number in range(40, 42):
        await turn(number, f"filler {number}")
    assert await turn(101, "kept") < 240, "released, it went before what was used longer ago"
    assert await turn(31, "filler 31") == 240


async def test_what_the_work_takes_is_learned_from_turns(engine: Contract) -> None:
    rng = random.Random(0)

    async def converse(number: int) -> None:
        while (await engine.client.load()).learned is None:
            prompt = [rng.randrange(2, 120) for _ in range(rng.randrange(20, 700))]
            await engine.ask(prompt, rng.randrange(1, 60))
            await asyncio.sleep(rng.random() / 5)

    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(*(converse(number) for number in range(6)))
    learned = (await engine.client.load()).learned
    assert learned is not None
    assert learned.samples > 0  # how well they explain the times depends on what else the machine does
    assert learned.costs.step_s(1, 100) > 0


async def test_a_wrong_key_is_refused(engine: Contract) -> None:
    stranger = HttpEngineClient(engine.server.base_url, "wrong", context_tokens=CONTEXT)
    try:
        with pytest.raises(EngineError, match="401"):
            await stranger.generate(request(PROMPT, 4))
    finally:
        await stranger.close()


async def test_bad_requests_are_refused_and_harm_nobody(engine: Contract) -> None:
    task = asyncio.create_task(engine.ask(PROMPT, 800))
    await running(engine.client, task)
    with pytest.raises(EngineError) as failure:
        await engine.ask(PROMPT, 4, SamplingParams(top_p=1.5))
    assert not isinstance(failure.value, EngineLost)
    engine.check(PROMPT, await task)


async def test_killed_engine_is_lost(weights: tuple[Path, Path], server: tuple[EngineKind, EngineProcess]) -> None:
    kind, _ = server
    with engine_process(kind, weights[0]) as process:
        client = HttpEngineClient(process.base_url, KEY)
        await client.wait_ready(START_TIMEOUT_S[kind])
        _, task = await paused_within_a_turn(client, long_turn)  # so that it cannot be done before it is killed
        process.process.kill()
        with pytest.raises(EngineLost):
            await asyncio.wait_for(task, PATIENCE_S)
        with pytest.raises(EngineLost):
            await client.load()
        with pytest.raises(EngineLost, match="not ready within"):
            await client.wait_ready(0.3)
        await client.close()
