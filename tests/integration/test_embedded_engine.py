"""The embedded engine in this process: exactness under pressure, on several architectures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tests.integration.engine_processes import reference_logits, save_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from venusrl.rollout.engines import wire
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.embedded import server
from venusrl.rollout.engines.embedded.engine import Ended, Engine, EngineConfig, Refused
from venusrl.rollout.engines.embedded.model import Model, ModelUnusable
from venusrl.rollout.engines.protocol import EngineError, EngineLost, GenerateRequest
from venusrl.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[(i * j + i + j) % 128 for j in range(40 + i)] for i in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", 1)


class BrokenEngine(Engine):
    """Fails at its first step."""

    def step(self) -> None:
        raise RuntimeError("the disk of the matrix is on fire")


def make(directory: Path, *, capacity: int = 8192, context: int = 512, prefill: int = 512, slots: int = 12) -> Engine:
    config = EngineConfig(capacity, slots, context, prefill_tokens=prefill)
    return Engine(Model(directory, torch.float32), config, torch.float32)


def answer(engine: Engine, prompts: list[list[int]], limit: int) -> list[Ended]:
    ended: dict[str, Ended] = {}
    for i, prompt in enumerate(prompts):
        engine.submit(f"r{i}", prompt, limit, GREEDY, lambda e: ended.update({e.sequence.request_id: e}))
    for _ in range(10_000):
        if engine.idle:
            break
        engine.step()
    return [ended[f"r{i}"] for i in range(len(prompts))]


def check(directory: Path, ended: Ended) -> None:
    """Tokens and log-probabilities are those of one plain forward pass."""
    sequence = ended.sequence
    logprobs = torch.log_softmax(reference_logits(directory, sequence.tokens), -1)
    for i, logprob in enumerate(sequence.logprobs, start=sequence.prompt_tokens):
        assert sequence.tokens[i] == int(logprobs[i - 1].argmax())
        assert logprob == pytest.approx(float(logprobs[i - 1].max()), abs=1e-4)


@pytest.mark.parametrize("prefill", [7, 512])
def test_a_small_cache_preempts_and_every_answer_stays_exact(directory: Path, prefill: int) -> None:
    engine = make(directory, capacity=512, prefill=prefill)
    for ended in answer(engine, PROMPTS, 60):
        check(directory, ended)
    assert engine.preemptions > 0
    assert engine.load().kv_used == 0


def test_a_group_shares_its_prompt_and_is_exact(directory: Path) -> None:
    engine = make(directory)
    prompt = PROMPTS[5] * 2
    for ended in answer(engine, [[*prompt, i] for i in range(8)], 30):
        check(directory, ended)
    assert engine.cached_tokens_total == 7 * (len(prompt) // 16 * 16)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3),
        Qwen2Config(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
        ),
    ],
    ids=["llama", "qwen2"],
)
def test_other_decoders_are_served_exactly(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config.initializer_range = 0.2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for ended in answer(make(tmp_path), PROMPTS[:6], 20):
        check(tmp_path, ended)


def test_what_cannot_be_served_exactly_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="does not fit a KV cache"):
        make(directory, capacity=256)
    with pytest.raises(ModelUnusable, match="1024 positions"):
        make(directory, context=2000)
    sliding = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
    )
    AutoModelForCausalLM.from_config(sliding).save_pretrained(tmp_path)
    with pytest.raises(ModelUnusable, match="sliding"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "limit", "sampling", "words"),
    [
        ([], 5, GREEDY, "at least one prompt token"),
        ([1], 0, GREEDY, "max_tokens"),
        ([128], 5, GREEDY, "0..127"),
        ([-1], 5, GREEDY, "0..127"),
        ([1] * 512, 5, GREEDY, "no room"),
        ([1], 5, SamplingParams(top_p=0.0), "top_p"),
        ([1], 5, SamplingParams(temperature=-1.0), "temperature"),
    ],
)
def test_impossible_requests_are_refused(
    directory: Path, tokens: list[int], limit: int, sampling: SamplingParams, words: str
) -> None:
    engine = make(directory)
    with pytest.raises(Refused, match=words):
        engine.submit("r", tokens, limit, sampling, lambda ended: None)
    assert engine.idle


async def test_a_failed_step_answers_everybody_with_its_cause(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FAREWELL_S", 60.0)
    config = EngineConfig(8192, 4, 512)
    engine = BrokenEngine(Model(directory, torch.float32), config, torch.float32)
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.Server(engine, "key", "policy").run(0, bound.set_result, asyncio.Event()))
    client = HttpEngineClient(f"http://127.0.0.1:{await bound}", "key")
    await client.wait_ready(60)
    with pytest.raises(EngineLost, match="on fire"):
        await client.generate(GenerateRequest("r", [1, 2], 5, GREEDY))
    with pytest.raises(EngineLost, match="on fire"):
        await client.load()
    with pytest.raises(EngineError, match="500"):
        await client._call("GET", wire.HEALTH)
    await client.close()
    monkeypatch.setattr(server, "_FAREWELL_S", 0.0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
