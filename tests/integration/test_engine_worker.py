"""The embedded worker as a process: its start, its end, its refusals."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integration.engine_processes import CONTEXT, KEY, engine_process, paused_within_a_turn, save_model
from tests.waiting import PATIENCE_S, until

from venusrl.rollout.engines import wire
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.launch import EMBEDDED_START_TIMEOUT_S
from venusrl.rollout.engines.protocol import EngineError, EngineLost, GenerateRequest
from venusrl.types import SamplingParams

WORKER = (sys.executable, "-m", "venusrl.rollout.engines.worker")
GREEDY = SamplingParams(temperature=0.0)

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", 1)


def worker(*options: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WORKER, *options],
        env={**os.environ, wire.KEY_VARIABLE: key},
        capture_output=True,
        text=True,
        timeout=EMBEDDED_START_TIMEOUT_S,
        check=False,
    )


def asked(name: str, prompt: list[int], limit: int, salt: str = "") -> GenerateRequest:
    return GenerateRequest(name, prompt, limit, GREEDY, 0, salt)


def test_refusals_are_one_clear_line(model: Path, tmp_path: Path) -> None:
    missing = worker("--model", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "not a model directory" in missing.stderr
    assert "Traceback" not in missing.stderr
    unkeyed = worker("--model", str(model), key="")
    assert unkeyed.returncode == 2
    assert wire.KEY_VARIABLE in unkeyed.stderr


async def test_the_port_file_appears_when_it_serves_and_sigterm_ends_it(model: Path, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    process = subprocess.Popen(  # noqa: ASYNC220 - the worker is what is tested
        [*WORKER, "--model", str(model), "--port-file", str(port_file), "--context-tokens", str(CONTEXT)],
        env={**os.environ, wire.KEY_VARIABLE: KEY},
    )
    try:
        await until(port_file.exists, "the port file")
        client = HttpEngineClient(f"http://127.0.0.1:{int(port_file.read_text())}", KEY)
        await client.wait_ready(EMBEDDED_START_TIMEOUT_S)
        names = itertools.count()
        _, turn = await paused_within_a_turn(client, lambda: asked(f"a{next(names)}", [1, 2, 3], 800))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        with pytest.raises(EngineLost):
            await turn
        await client.close()
    finally:
        process.kill()
        process.wait()


async def test_a_failed_step_is_told_to_everybody_and_ends_the_process(model: Path, tmp_path: Path) -> None:
    # Finite weights whose products are not: the step itself has to notice.
    broken = save_model(tmp_path / "broken", 1)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with engine_process("embedded", model) as server:
        client = HttpEngineClient(server.base_url, KEY)
        await client.wait_ready(EMBEDDED_START_TIMEOUT_S)
        await client.load_weights(str(broken), 1)
        turns = [asyncio.create_task(client.generate(asked(f"r{i}", [1, 2, i], 50))) for i in range(3)]
        answers = await asyncio.gather(*turns, return_exceptions=True)
        assert all(isinstance(answer, EngineLost) for answer in answers)
        assert any("not finite" in str(answer) for answer in answers)
        assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 1
        assert "logits are not finite" in server.text()
        await client.close()


async def test_a_bad_checkpoint_changes_nothing(model: Path, tmp_path: Path) -> None:
    with engine_process("embedded", model) as server:
        client = HttpEngineClient(server.base_url, KEY)
        await client.wait_ready(EMBEDDED_START_TIMEOUT_S)
        before = await client.generate(asked("before", [1, 2, 3], 8))
        good = load_file(model / "model.safetensors")
        norm = "model.norm.weight"
        for name, weights in {
            "lacks the weights": {k: v for k, v in good.items() if k != norm},
            "not finite": good | {norm: torch.full_like(good[norm], float("nan"))},
            "the model has": good | {norm: torch.zeros(7)},
        }.items():
            save_file(weights, tmp_path / "model.safetensors")
            with pytest.raises(EngineError, match=name):
                await client.load_weights(str(tmp_path), 5)
        (tmp_path / "model.safetensors").write_bytes(b"half a file")
        with pytest.raises(EngineError, match="cannot be read"):
            await client.load_weights(str(tmp_path), 5)
        assert await client.version() == 0
        after = await client.generate(asked("after", [1, 2, 3], 8))
        assert after.token_ids == before.token_ids
        await client.close()
