"""Episodes with the real things: an embedded engine process, sandboxes with bubblewrap, a task's own verifier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tests.integration.engine_processes import KEY, engine_process
from tests.integration.namespaces import serving
from transformers import AutoModelForCausalLM

from venusrl.rollout.agents.bash import AgentLimits
from venusrl.rollout.chat import ChatTokenizer
from venusrl.rollout.direct import DirectTurns
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.launch import EMBEDDED_START_TIMEOUT_S
from venusrl.rollout.episode import EpisodeLimits, EpisodeSpec, run_episode
from venusrl.rollout.settings import GatewaySettings
from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.protocol import Limits
from venusrl.tasks import harbor
from venusrl.testing.chat import answer, toy_chat, turn_start
from venusrl.testing.engine import FakeEngine, ScriptedModel
from venusrl.testing.sandboxes import FakeSandboxes
from venusrl.testing.tiny_model import build_tiny_model
from venusrl.types import EndReason, Failure, FailureKind, SamplingParams, Segment, Task, Trajectory

LIMITS = EpisodeLimits(
    agent=AgentLimits(max_turns=4, max_turn_tokens=64, max_output_tokens=512, time_s=60.0, observation_bytes=256),
    sandbox=Limits(command_timeout_s=5.0),
    sandbox_wait_s=10.0,
    deadline_s=120.0,
)
VERIFIER = """\
if [ "$(cat /work/a.txt)" = fixed ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(directory: Path) -> Task:
    for name, text in {
        "instruction.md": "Write fixed to a.txt.",
        "task.toml": "[verifier]\ntimeout_sec = 10\n",
        "environment/a.txt": "broken\n",
        "tests/test.sh": VERIFIER,
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return harbor.read(directory)


async def play(node: EmbeddedNode, task: Task, *commands: str, limits: EpisodeLimits = LIMITS) -> Trajectory:
    """An episode whose agent says ``commands``."""
    chat = toy_chat()
    script = ScriptedModel([answer(chat, f"```sh\n{command}\n```") for command in commands], turn_start(chat))
    settings = GatewaySettings(
        sampling=SamplingParams(stop_token_ids=chat.stop_token_ids), context_tokens=2048, max_turn_tokens=64
    )
    turns = DirectTurns(FakeEngine(script), 0, chat, settings=settings)
    return await run_episode(EpisodeSpec("t0", "g0", task, 0), turns, node, limits, lambda event: None)


async def test_an_agent_that_mends_the_file_is_rewarded_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    async with serving(tmp_path / "node") as node:
        good = await play(node, task, "cat a.txt", "echo fixed > a.txt", "cat a.txt; ls /tests; false", "submit")
        assert [turn.observation for turn in good.turns[:2]] == ["broken", "[no output]"]
        assert good.turns[2].observation.startswith("fixed\n")
        assert good.turns[2].observation.endswith("[exit code 1]")
        assert "test.sh" not in good.turns[2].observation
        assert (good.reward, good.failure, good.end) == (1.0, None, EndReason.SUBMITTED)
        assert (await play(node, task, "ls", "submit")).reward == 0.0
        assert node.stats().sandboxes == 0


async def test_T19_a_command_without_end_is_an_observation_and_the_cap_on_time_holds(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    agent = AgentLimits(max_turns=4, max_turn_tokens=64, max_output_tokens=512, time_s=1.5, observation_bytes=256)
    limits = EpisodeLimits(agent, Limits(command_timeout_s=1.0), 10.0, 60.0)
    async with serving(tmp_path / "node") as node:
        trajectory = await play(node, task, "echo fixed > a.txt; while :; do :; done", limits=limits)
        assert [turn.observation for turn in trajectory.turns] == ["[timed out]\n[exit code 137]"] * 2
        assert trajectory.failure == Failure(FailureKind.POLICY, "time")
        assert trajectory.reward == 1.0
        assert node.stats().sandboxes == 0


@pytest.mark.timeout(240)
async def test_the_recorded_log_probabilities_are_those_of_the_recorded_ids(tmp_path: Path) -> None:
    """Many turns of a random policy, recorded in pieces, equal one plain forward pass over each segment."""
    torch.set_num_threads(1)
    model = build_tiny_model(tmp_path / "model", seed=3)
    chat = ChatTokenizer.load(model)
    settings = GatewaySettings(
        sampling=SamplingParams(temperature=0.8, top_p=1.0, stop_token_ids=chat.stop_token_ids),
        context_tokens=512,
        max_turn_tokens=64,
    )
    with engine_process("embedded", model) as server:
        client = HttpEngineClient(server.base_url, KEY)
        await client.wait_ready(EMBEDDED_START_TIMEOUT_S)
        turns = DirectTurns(client, 0, chat, settings=settings)
        task = Task(id="t", instruction="Say something.", directory=str(write_task(tmp_path / "task").directory))
        specs = [EpisodeSpec(f"t{i}", "g0", task, i) for i in range(6)]
        sandboxes = FakeSandboxes()
        episodes = (run_episode(s, turns, sandboxes, LIMITS, lambda event: None) for s in specs)
        trajectories = await asyncio.gather(*episodes)
        await turns.close()
        await client.close()
    assert sum(len(t.turns) for t in trajectories) > len(trajectories)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for trajectory in trajectories:
        assert trajectory.start_version == 0
        for segment in trajectory.segments:
            check(segment, policy)


def check(segment: Segment, policy: torch.nn.Module, temperature: float = 0.8) -> None:
    with torch.no_grad():
        logits = policy(torch.tensor([segment.token_ids]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits / temperature, dim=-1)
    sampled = [i for i, mask in enumerate(segment.loss_mask) if mask]
    assert sampled
    for i in sampled:
        assert segment.logprobs[i] == pytest.approx(float(expected[i - 1, segment.token_ids[i]]), abs=1e-3)
