"""How many tokens a second an engine generates under an agent's load.

Each of ``--sessions`` conversations takes turns: a prompt, a short answer, an observation appended, and again,
all at once, as a rollout does. Arms: ``embedded`` and ``vllm`` through the HTTP client that a run uses, and
``transformers``, the library's own continuous batching in this process. Wall and processor time are both told:
on a machine that does other work only the second compares.

    python -m benchmarks.engine_throughput embedded transformers --model builtin:demo-policy
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from venusrl import models
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.launch import EngineKind, EngineSettings, engine_command
from venusrl.rollout.engines.protocol import GenerateRequest
from venusrl.types import SamplingParams

KEY = "benchmark"


class Load(msgspec.Struct, frozen=True):
    """The shape of the work; answer lengths are drawn around ``answer`` (half to one and a half times)."""

    sessions: int
    turns: int
    prompt: int
    answer: int
    observation: int
    vocabulary: int
    temperature: float
    top_p: float

    def answers(self) -> list[list[int]]:
        drawn = random.Random(1)
        low, high = self.answer // 2, self.answer + self.answer // 2
        return [[drawn.randint(low, high) for _ in range(self.turns)] for _ in range(self.sessions)]

    def context(self) -> int:
        return self.prompt + self.turns * (self.answer + self.answer // 2 + self.observation) + 64


class Result(msgspec.Struct, frozen=True):
    generated: int
    prefilled: int
    wall_s: float
    cpu_s: float


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


async def session(client: HttpEngineClient, load: Load, number: int, answers: list[int]) -> int:
    rng = random.Random(number)
    context = tokens(rng, load.prompt, load.vocabulary)
    sampling = SamplingParams(temperature=load.temperature, top_p=load.top_p)
    generated = 0
    for turn, limit in enumerate(answers):
        request = GenerateRequest(f"s{number}t{turn}", context, limit, sampling)
        done = await client.generate(request)
        generated += len(done.token_ids)
        context = context + done.token_ids + tokens(rng, load.observation, load.vocabulary)
    return generated


@contextlib.contextmanager
def started(kind: EngineKind, model: Path, load: Load, slots: int) -> Iterator[tuple[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    context = load.context()
    settings = EngineSettings(str(model), -(-load.sessions * context // 32) * 32, slots, context)
    launch = engine_command(kind, settings, port=port, api_key=KEY)
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(launch.argv, env={**os.environ, **launch.env}, stdout=sink, stderr=sink)
        try:
            yield launch.base_url, process.pid
        finally:
            process.terminate()
            process.wait(30)


def processor_s(pid: int) -> float:
    """Processor time of a process and all that it started."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def serve(kind: EngineKind, model: Path, load: Load, slots: int) -> Result:
    """Drive a server process, from ready to the last answer."""

    async def drive(url: str, pid: int) -> Result:
        client = HttpEngineClient(url, KEY, slots=slots)
        await client.wait_ready(900)
        began, cpu = time.monotonic(), processor_s(pid)
        work = [session(client, load, i, answers) for i, answers in enumerate(load.answers())]
        generated = sum(await asyncio.gather(*work))
        wall, cpu = time.monotonic() - began, processor_s(pid) - cpu
        prefilled = (await client.load()).prefill_tokens_total
        await client.close()
        return Result(generated, prefilled, wall, cpu)

    with started(kind, model, load, slots) as (url, pid):
        return asyncio.run(drive(url, pid))


def library(model: Path, load: Load, slots: int) -> Result:
    """The transformers library's continuous batching, with a bounded cache and small pages."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    sampling = GenerationConfig(do_sample=True, temperature=load.temperature, top_p=load.top_p, eos_token_id=-1)
    blocks = -(-load.sessions * load.context() // 16)
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=blocks, max_batch_tokens=1024, use_cuda_graph=False, return_logprobs=True
    )
    manager = network.init_continuous_batching(generation_config=sampling, continuous_batching_config=config)
    manager.start()
    answers = load.answers()
    rngs = [random.Random(i) for i in range(load.sessions)]
    contexts = [tokens(rng, load.prompt, load.vocabulary) for rng in rngs]
    began, cpu, generated, left = time.monotonic(), time.process_time(), 0, load.sessions * load.turns
    for i in range(load.sessions):
        manager.add_request(contexts[i], request_id=f"{i}-0", max_new_tokens=answers[i][0])
    while left:
        done = manager.get_result(timeout=60)
        if done is None or not done.is_finished():
            continue
        i, turn = map(int, done.request_id.split("-"))
        generated, left = generated + len(done.generated_tokens), left - 1
        contexts[i] += done.generated_tokens + tokens(rngs[i], load.observation, load.vocabulary)
        if turn + 1 < load.turns:
            manager.add_request(contexts[i], request_id=f"{i}-{turn + 1}", max_new_tokens=answers[i][turn + 1])
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    manager.stop(block=True)
    return Result(generated, 0, wall, cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arms", nargs="+", choices=("embedded", "vllm", "transformers"))
    parser.add_argument("--model", default="builtin:demo-policy")
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=120)
    parser.add_argument("--answer", type=int, default=20)
    parser.add_argument("--observation", type=int, default=70)
    parser.add_argument("--vocabulary", type=int, default=512, help="Token ids are drawn below this")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in Load.__struct_fields__}
    load, model = Load(**shape), models.resolve(options.model)
    for arm in options.arms:
        run = library if arm == "transformers" else lambda *rest, kind=arm: serve(kind, *rest)
        result = run(model, load, options.sessions)
        rate, cpu_rate = result.generated / result.wall_s, result.generated / max(result.cpu_s, 1e-9)
        sys.stdout.write(
            f"{arm}: {result.generated} tokens, {rate:.0f} a second, {cpu_rate:.0f} a processor second; "
            f"{result.prefilled} prompt tokens computed\n"
        )


if __name__ == "__main__":
    main()
