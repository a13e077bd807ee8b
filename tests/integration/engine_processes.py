"""Real engine processes and tiny seeded models for the engine tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.waiting import PATIENCE_S, until
from transformers import AutoModelForCausalLM

from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.launch import EngineKind, EngineSettings, engine_command
from venusrl.rollout.engines.protocol import GenerateRequest, Generation
from venusrl.testing.tiny_model import tiny_config

KEY = "test-key"
VOCABULARY = 128
CONTEXT = 1024


@dataclass
class EngineProcess:
    """A running server, and the file with all that it printed."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def save_model(directory: Path, seed: int, scale: float = 0.2) -> Path:
    """A random Qwen3 whose next-token distributions are far from uniform (``scale``: spread of its weights)."""
    config = tiny_config(
        VOCABULARY,
        None,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=scale,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def reference_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Plain float32 logits after every token, by one uncached forward pass."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def engine_process(
    kind: EngineKind, model: Path, *, slots: int = 16, kv_capacity_tokens: int = 8192, context_tokens: int = CONTEXT
) -> Iterator[EngineProcess]:
    """Start a server and stop it in the end, whatever happened to it."""
    settings = EngineSettings(str(model), kv_capacity_tokens, slots, context_tokens)
    launch = engine_command(kind, settings, port=free_port(), api_key=KEY)
    with tempfile.TemporaryDirectory(prefix="venusrl-engine-") as folder:
        log = Path(folder) / "engine.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                launch.argv,
                env={**os.environ, **launch.env},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield EngineProcess(launch.base_url, process, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    # vLLM is several processes, and those of a killed one live on.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def running(client: HttpEngineClient, turn: asyncio.Task[Generation]) -> None:
    """Wait until a turn has generated some tokens, or is over."""
    before = (await client.load()).generated_tokens_total

    async def generates() -> bool:
        return turn.done() or (await client.load()).generated_tokens_total >= before + 3

    await until(generates, "a token of the turn")


async def paused_within_a_turn(
    client: HttpEngineClient, make: Callable[[], GenerateRequest]
) -> tuple[GenerateRequest, asyncio.Task[Generation]]:
    """A turn that stands still in its middle; another is made where the engine was done first."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        asked = make()
        turn = asyncio.create_task(client.generate(asked))
        await running(client, turn)
        await client.pause()
        if (await client.load()).running:
            return asked, turn
        await client.resume()
        await turn
        assert time.monotonic() < deadline, "every turn was over before the engine could be paused"
