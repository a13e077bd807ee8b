"""A real process that ends as vLLM does, with code 0 and chatter: its end is told with what happened."""

from __future__ import annotations

import sys
from pathlib import Path

from venusrl.coordinator.engines import LocalEngine
from venusrl.coordinator.processes import Command, SupervisedProcess
from venusrl.rollout.engines.client import HttpEngineClient

SAID = (
    "(Worker pid=9) ERROR 12-01 04:20:54 [executor.py:1063] RuntimeError: Unsupported head_dim=16\\n" + 40 * "leaked\\n"
)


async def test_the_end_of_a_vllm_is_told_with_the_error_it_wrote_far_above(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", f"print('{SAID}')"])
    process = SupervisedProcess("worker-0", command, log_path=tmp_path / "worker-0.log")
    engine = LocalEngine(process, HttpEngineClient("http://127.0.0.1:1", "key"))
    await process.start()
    try:
        told = await engine.wait_exit()
    finally:
        await engine.stop()
    assert told.startswith("RuntimeError: Unsupported head_dim=16; worker-0 ended with exit code 0")
