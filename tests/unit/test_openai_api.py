"""The OpenAI chat door, over real HTTP on loopback: shapes, keys, refusals, hang-ups. Cases T17, T18, T30, T43."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.waiting import until

from venusrl.rollout.direct import DirectTurns
from venusrl.rollout.openai_api import ChatDoor, Refused, parse
from venusrl.rollout.settings import GatewaySettings
from venusrl.testing.chat import CHATML, answer, toy_chat, turn_start
from venusrl.testing.engine import FakeEngine, ScriptedModel
from venusrl.types import SamplingParams

CHAT = toy_chat("{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML)
ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "fix it"}]}


class Served:
    """A door over a fake engine, and a client of it."""

    def __init__(self, *texts: str, context: int = 256) -> None:
        self.release = asyncio.Event()
        self.release.set()
        script = ScriptedModel([answer(CHAT, text) for text in texts or ("the end", "really")], turn_start(CHAT))
        self.engine = FakeEngine(script, pace=self._pace)
        settings = GatewaySettings(
            sampling=SamplingParams(stop_token_ids=CHAT.stop_token_ids),
            context_tokens=context,
            max_turn_tokens=32,
            turn_reissues=0,
        )
        self.turns = DirectTurns(self.engine, 0, CHAT, settings=settings)
        self.door = ChatDoor(self.turns, model="policy", max_turn_tokens=32)
        self.turns.register("t0", "g")
        self.key = self.door.issue("t0")
        self.url = ""
        self.http: aiohttp.ClientSession

    async def _pace(self) -> None:
        await asyncio.sleep(0)
        await self.release.wait()

    async def ask(self, key: str | None = None, **body: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        async with self.http.post(f"{self.url}/chat/completions", json={**ASK, **body}, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def served(*texts: str, context: int = 256) -> AsyncIterator[Served]:
    made = Served(*texts, context=context)
    made.url = await made.door.start()
    async with aiohttp.ClientSession() as made.http:
        yield made
    await made.door.close()
    await made.turns.close()


async def test_a_conversation_is_answered_and_recorded() -> None:
    async with served() as s:
        status, first = await s.ask()
        assert status == 200
        assert first["choices"][0]["message"] == {"role": "assistant", "content": "the end"}
        assert first["choices"][0]["finish_reason"] == "stop"
        assert first["usage"]["completion_tokens"] == len(answer(CHAT, "the end"))
        messages = [*ASK["messages"], first["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        status, second = await s.ask(messages=messages)
        assert second["choices"][0]["message"]["content"] == "really"
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert len(s.turns.finish("t0").segments) == 1


async def test_streaming_has_the_shape_that_clients_read() -> None:
    async with served() as s:
        headers = {"Authorization": f"Bearer {s.key}"}
        body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        async with s.http.post(f"{s.url}/chat/completions", json=body, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "the end"
        assert deltas[0]["role"] == "assistant"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1


async def test_models_are_listed() -> None:
    async with served() as s:
        headers = {"Authorization": f"Bearer {s.key}"}
        async with s.http.get(f"{s.url}/models", headers=headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        async with s.http.get(f"{s.url}/models") as response:
            assert response.status == 401


async def test_a_key_opens_its_own_trajectory_and_only_while_it_lives() -> None:
    async with served() as s:
        s.turns.register("t1", "g")
        other = s.door.issue("t1")
        assert (await s.ask(other))[0] == 200
        assert s.turns.finish("t0").segments == []
        assert len(s.turns.finish("t1").segments) == 1
        s.door.revoke("t1")
        for key in (other, "wrong", ""):
            status, body = await s.ask(key)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_T43_pinned_parameters_are_overridden_and_counted() -> None:
    async with served() as s:
        status, _ = await s.ask(temperature=0.0, top_p=1, max_tokens=4000, stop=["x"], presence_penalty=0.5, seed=None)
        assert status == 200
        counters = s.turns.finish("t0").counters
        assert counters["overrides"] == 4
        assert counters["override_temperature"] == 1


async def test_T18_a_cut_says_length_and_a_full_context_says_so() -> None:
    async with served("x" * 40, context=40) as s:
        status, body = await s.ask()
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        messages = [*ASK["messages"], body["choices"][0]["message"], {"role": "user", "content": "more"}]
        status, body = await s.ask(messages=messages)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        rollout = s.turns.finish("t0")
        assert rollout.counters["context_cuts"] == 2
        assert len(rollout.segments) == 1


async def test_T17_a_retry_after_a_lost_response_is_one_consistent_path() -> None:
    async with served() as s:
        await s.ask()
        await s.ask()
        rollout = s.turns.finish("t0")
        assert len(rollout.segments) == 1
        assert rollout.counters["rollbacks"] == 1
        assert rollout.discarded == {"response_lost": len(answer(CHAT, "the end"))}


async def test_T30_a_caller_that_hangs_up_has_its_generation_aborted() -> None:
    async with served() as s:
        s.release.clear()
        call = asyncio.create_task(s.ask())
        await until(lambda: bool(s.engine.calls))
        call.cancel()
        await until(lambda: ("abort", s.engine.calls[0][1]) in s.engine.calls)
        s.release.set()
        await until(lambda: not s.engine.running and not s.engine.waiting)
        assert (await s.ask())[0] == 200
        assert len(s.turns.finish("t0").segments) == 1


async def test_failures_have_openais_shape() -> None:
    async with served() as s:
        status, body = await s.ask(messages=[{"role": "tool", "content": "x"}])
        assert (status, body["error"]["code"]) == (400, "template_refused")
        s.engine.crash("killed")
        status, body = await s.ask()
        assert (status, body["error"]["type"], body["error"]["code"]) == (503, "server_error", "engine_lost")
        s.turns.cancel("t0", "stale")
        status, body = await s.ask()
        assert (status, body["error"]["code"]) == (409, "trajectory_cancelled")
        headers = {"Authorization": f"Bearer {s.key}"}
        async with s.http.post(f"{s.url}/chat/completions", data=b"{", headers=headers) as response:
            assert (await response.json())["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "JSON object"),
        ({"messages": []}, "at least one"),
        ({"messages": ["x"]}, "with a role"),
        ({**ASK, "tools": [{"type": "function"}]}, "tools"),
        ({**ASK, "logprobs": True, "response_format": {"type": "json_object"}}, "logprobs, response_format"),
        ({**ASK, "n": 2}, "n must be 1"),
        ({**ASK, "max_tokens": 0}, "at least 1"),
        ({**ASK, "max_tokens": "many"}, "wrong type"),
        ({**ASK, "temperature": "hot"}, "wrong type"),
        ({**ASK, "stream_options": 3}, "wrong type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "must be text"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "tool_calls"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: object, said: str) -> None:
    with pytest.raises(Refused, match=said):
        parse(body)


def test_neutral_parameters_are_neither_refused_nor_counted() -> None:
    neutral: dict[str, Any] = {
        "tools": None,
        "logprobs": False,
        "n": 1,
        "logit_bias": {},
        "presence_penalty": 0,
        "stop": None,
    }
    request = parse({**ASK, **neutral, "repetition_penalty": 1.0, "user": "me"})
    assert (request.asked.penalties, request.asked.stop, request.max_tokens) == (False, (), None)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "fix "}, {"type": "text", "text": "it"}]
    assert parse({"messages": [{"role": "user", "content": parts}]}).messages[0].content == "fix it"
