"""The client against a server that misbehaves on purpose, and the text formats it reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web

from venusrl.rollout.engines import wire
from venusrl.rollout.engines.client import HttpEngineClient
from venusrl.rollout.engines.metrics import read_load, write_load
from venusrl.rollout.engines.protocol import EngineError, EngineLoad, EngineLost, GenerateRequest
from venusrl.types import SamplingParams, StopReason, VersionSpan

Answer = Callable[[web.Request], Awaitable[web.Response]]


@dataclass
class Server:
    """Answers each path by its own function; remembers what was asked."""

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.asked.append((request.path, msgspec.json.decode(raw) if raw else None))
        answer = self.answers.get(request.path)
        return await answer(request) if answer else web.json_response({})

    def says(self, path: str, body: object, status: int = 200) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")

        self.answers[path] = answer

    def hangs(self, path: str) -> None:
        async def answer(request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        self.answers[path] = answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[HttpEngineClient]:
    client = HttpEngineClient(server.url, "key", context_tokens=20)
    yield client
    await client.close()


@pytest.fixture
async def hasty(server: Server) -> AsyncIterator[HttpEngineClient]:
    """A client whose time limits are met at once by a server that hangs."""
    client = HttpEngineClient(server.url, "key", context_tokens=20, weight_timeout_s=0.1, generate_timeout_s=0.1)
    yield client
    await client.close()


def request(tokens: int = 3, urgency: int = 0, salt: str = "") -> GenerateRequest:
    params = SamplingParams(temperature=0.5, top_p=0.9, stop_token_ids=(7,))
    return GenerateRequest("r1", list(range(tokens)), 10, params, urgency, salt)


def generated(tokens: list[int], finish: str = "stop", versions: list[wire.WireSpan] | None = None) -> object:
    spans = [wire.WireSpan("3", 0, len(tokens))] if versions is None else versions
    content = [wire.WireLogprob(t, -0.5, 1) for t in tokens]
    choice = wire.WireChoice(0, tokens, finish, None, wire.WireLogprobs(content), spans)
    usage = wire.WireUsage(3, len(tokens), 3 + len(tokens), wire.WirePromptDetails(2))
    return wire.WireGenerated("r1", [choice], usage)


async def test_generate_maps_the_request_and_the_answer(server: Server, client: HttpEngineClient) -> None:
    server.says(wire.GENERATE, generated([5, 7], versions=[wire.WireSpan("3", 0, 1), wire.WireSpan("4", 1, 2)]))
    done = await client.generate(request(urgency=9, salt="a/group@home"))
    assert (done.token_ids, done.logprobs, done.stop, done.cached_tokens) == ([5, 7], [-0.5, -0.5], StopReason.STOP, 2)
    assert done.spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)]
    _, body = server.asked[-1]
    assert body["priority"] == -9, "the server takes lower values first"
    assert re.fullmatch(r"v0-[0-9a-f]{32}", body["cache_salt"]), "servers take few characters in a salt"
    assert body["sampling_params"]["ignore_eos"] is True
    assert body["sampling_params"]["stop_token_ids"] == [7]


async def test_T07_the_prefix_namespace_follows_the_loaded_version(server: Server, client: HttpEngineClient) -> None:
    server.says(wire.GENERATE, generated([5]))
    await client.load_weights("/weights", 4)
    await client.generate(request())
    assert [path for path, _ in server.asked] == [wire.COLLECTIVE_RPC, wire.UPDATE_WEIGHT_VERSION, wire.GENERATE]
    assert server.asked[0][1] == {"method": "reload_weights", "kwargs": {"weights_path": "/weights"}}
    assert server.asked[-1][1]["cache_salt"] == "v4"


async def test_T18_context_is_told_from_length_and_needs_no_engine(server: Server, client: HttpEngineClient) -> None:
    server.says(wire.GENERATE, generated([5] * 10, "length"))
    assert (await client.generate(request(10))).stop is StopReason.CONTEXT
    assert (await client.generate(request(9))).stop is StopReason.LENGTH
    count = len(server.asked)
    assert (await client.generate(request(20))).stop is StopReason.CONTEXT
    assert len(server.asked) == count


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, {"error": {"message": "CUDA out of memory", "type": "X", "code": 500}}, "CUDA out of memory"),
        (500, {"error": "Failed to pause"}, "Failed to pause"),
        (500, "plain words", "plain words"),
        (400, {"detail": [{"msg": "field required"}]}, "field required"),
    ],
)
async def test_T10_errors_carry_the_engines_text(
    server: Server, client: HttpEngineClient, status: int, body: object, words: str
) -> None:
    server.says(wire.COLLECTIVE_RPC, body, status)
    with pytest.raises(EngineError, match=words) as failure:
        await client.load_weights("/weights", 1)
    assert not isinstance(failure.value, EngineLost)
    server.says(wire.COLLECTIVE_RPC, {"results": [None]})
    await client.load_weights("/weights", 1)


async def test_T10_a_hanging_weight_load_ends_within_its_timeout(server: Server, hasty: HttpEngineClient) -> None:
    server.hangs(wire.COLLECTIVE_RPC)
    with pytest.raises(EngineLost, match=r"did not answer /collective_rpc within 0\.1 s"):
        await hasty.load_weights("/weights", 1)


async def test_T30_cancelling_generate_aborts_before_it_returns(server: Server, client: HttpEngineClient) -> None:
    server.hangs(wire.GENERATE)
    task = asyncio.create_task(client.generate(request()))
    while not server.asked:  # noqa: ASYNC110 - the server is on this loop
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.asked[-1] == (wire.ABORT, {"request_ids": ["generate-tokens-r1"]})


async def test_T07_requests_of_a_pause_wait_and_run_in_the_new_namespace(
    server: Server, client: HttpEngineClient
) -> None:
    server.says(wire.GENERATE, generated([5]))
    await client.pause()
    held = asyncio.create_task(client.generate(request()))
    await asyncio.sleep(0)
    await client.load_weights("/weights", 8)
    assert not held.done()
    assert wire.GENERATE not in [path for path, _ in server.asked]
    await client.resume()
    assert (await held).stop is StopReason.STOP
    assert server.asked[-1][1]["cache_salt"] == "v8"


async def test_requests_of_a_pause_can_be_aborted_and_cancelled(server: Server, client: HttpEngineClient) -> None:
    await client.pause()
    aborted = asyncio.create_task(client.generate(request()))
    await asyncio.sleep(0)
    await client.abort(["r1"])
    assert (await aborted).stop is StopReason.ABORT
    cancelled = asyncio.create_task(client.generate(request()))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_a_failed_pause_or_resume_holds_nobody(server: Server, client: HttpEngineClient) -> None:
    server.says(wire.GENERATE, generated([5]))
    server.says(wire.PAUSE, {"error": "not now"}, 500)
    with pytest.raises(EngineError, match="not now"):
        await client.pause()
    assert (await client.generate(request())).stop is StopReason.STOP
    server.says(wire.PAUSE, {"status": "paused"})
    server.says(wire.RESUME, {"error": {"message": "dead", "type": "X", "code": 503}}, 503)
    await client.pause()
    held = asyncio.create_task(client.generate(request()))
    await asyncio.sleep(0)
    with pytest.raises(EngineLost, match="no longer serves: dead"):
        await client.resume()
    assert (await held).stop is StopReason.STOP


async def test_an_endless_generation_is_aborted_and_an_error(server: Server, hasty: HttpEngineClient) -> None:
    server.hangs(wire.GENERATE)
    with pytest.raises(EngineError, match="did not finish request r1"):
        await hasty.generate(request())
    assert server.asked[-1][0] == wire.ABORT


async def test_aborting_nothing_does_not_abort_everything(server: Server, client: HttpEngineClient) -> None:
    await client.abort([])
    assert server.asked == []


@pytest.mark.parametrize(
    "answer",
    [
        {"request_id": "r1", "choices": []},
        {"nonsense": True},
        generated([5], "error"),
        generated([5, 6], versions=[wire.WireSpan("3", 0, 1)]),
        generated([5], versions=[wire.WireSpan("default", 0, 1)]),
    ],
)
async def test_answers_that_cannot_be_trusted_are_errors(
    server: Server, client: HttpEngineClient, answer: object
) -> None:
    server.says(wire.GENERATE, answer)
    with pytest.raises(EngineError):
        await client.generate(request())


async def test_logprobs_of_other_tokens_are_an_error(server: Server, client: HttpEngineClient) -> None:
    body = msgspec.to_builtins(generated([5, 6]))
    body["choices"][0]["logprobs"]["content"].pop()
    server.says(wire.GENERATE, body)
    with pytest.raises(EngineError, match="not those of its tokens"):
        await client.generate(request())


async def test_wait_ready_learns_the_context_and_names_the_weights(server: Server) -> None:
    client = HttpEngineClient(server.url, "key", version=6)
    server.says(wire.MODELS, {"data": [{"id": "policy", "max_model_len": 9}]})
    server.says(wire.WEIGHT_INFO, {"weight_version": "default"})
    await client.wait_ready(1.0)
    assert (wire.UPDATE_WEIGHT_VERSION, {"new_version": "6"}) in server.asked
    assert (await client.generate(request(9))).stop is StopReason.CONTEXT
    await client.close()


async def test_a_server_that_is_not_there_is_lost() -> None:
    client = HttpEngineClient("http://127.0.0.1:9", "key", context_tokens=20)
    with pytest.raises(EngineLost):
        await client.generate(request())
    with pytest.raises(EngineLost, match="not ready within"):
        await client.wait_ready(0.1)
    await client.close()


def test_metrics_are_read_as_written() -> None:
    load = EngineLoad(3, 2, 640, 6400, 16, 1000, 2000)
    assert read_load(write_load(load, page_size=16, cached_tokens_total=9, preemptions_total=1), slots=16) == load


def test_metrics_of_a_real_server_are_read() -> None:
    text = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="256",sliding_window="None"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="policy",source="local_compute"} 70.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="policy",source="local_cache_hit"} 30.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.2e+03
"""
    assert read_load(text, 8) == EngineLoad(2, 1, 2048, 8192, 8, 1200, 70)
    with pytest.raises(KeyError):
        read_load("nothing 1\n", 8)
