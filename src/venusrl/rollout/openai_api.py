"""The OpenAI chat door: any agent program that speaks it can be driven, and its tokens are recorded.

Owns: ``POST /v1/chat/completions`` (plain and streamed), ``GET /v1/models``, one bearer key a trajectory, errors in
OpenAI's shape. Binds to loopback.

Must not know: engines, scheduling, which program calls.

Guarantees: a key opens its own trajectory and nothing else; what cannot be honoured is refused by name, what is
pinned by the rollout is overridden and counted; a caller that hangs up has its generation aborted; a full
context is a 400 ``context_length_exceeded`` and a cut answer says ``length``.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from typing import Any

import msgspec
from aiohttp import web

from venusrl.rollout.chat import TokenizerError
from venusrl.rollout.engines.protocol import EngineError
from venusrl.rollout.turns import Asked, TurnCancelled, TurnResult, Turns
from venusrl.types import Message, StopReason

_MAX_BODY = 64 << 20
_LIMITS = ("max_completion_tokens", "max_tokens")
_HONOURED = frozenset({"model", "messages", *_LIMITS, "stream", "stream_options", "n", "user", "metadata", "store"})
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
_NEUTRAL = {"repetition_penalty": 1}
_PINNED = frozenset({"temperature", "top_p", "top_k", "seed", "stop", *_PENALTIES})


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChatRequest(msgspec.Struct, frozen=True):
    """What of a request body is used."""

    messages: list[Message]
    max_tokens: int | None
    asked: Asked
    stream: bool
    include_usage: bool


def parse(body: object) -> ChatRequest:
    """Read a request body. Raises Refused, naming what is wrong or not supported."""
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object", "invalid_json")
    unsupported = sorted(k for k, v in body.items() if k not in _HONOURED | _PINNED and v not in (None, False, [], {}))
    if unsupported:
        raise Refused(400, f"not supported here: {', '.join(unsupported)}", "unsupported_parameter")
    if body.get("n") not in (None, 1):
        raise Refused(400, "n must be 1: a turn has one answer", "unsupported_parameter")
    stop = body.get("stop") or ()
    options = body.get("stream_options") or {}
    try:
        max_tokens = msgspec.convert(body.get("max_completion_tokens") or body.get("max_tokens"), int | None)
        asked = msgspec.convert(
            {
                **{name: body.get(name) for name in ("temperature", "top_p", "top_k", "seed")},
                "stop": (stop,) if isinstance(stop, str) else stop,
                "penalties": any(body.get(name) not in (None, 0, {}, _NEUTRAL.get(name)) for name in _PENALTIES),
            },
            Asked,
        )
        usage = msgspec.convert(options, dict[str, Any]).get("include_usage") is True
    except msgspec.ValidationError as error:
        raise Refused(400, f"a parameter has the wrong type: {error}", "invalid_type") from error
    if max_tokens is not None and max_tokens < 1:
        raise Refused(400, "max_tokens must be at least 1", "invalid_value")
    return ChatRequest(_messages(body.get("messages")), max_tokens, asked, body.get("stream") is True, usage)


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise Refused(400, "messages must be a list with at least one message", "invalid_value")
    messages = []
    for index, entry in enumerate(value):
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            raise Refused(400, f"messages[{index}] must be an object with a role", "invalid_value")
        extra = sorted(k for k, v in entry.items() if k not in ("role", "content", "name") and v)
        if extra:
            raise Refused(
                400, f"messages[{index}] has {', '.join(extra)}: only text is supported", "unsupported_parameter"
            )
        messages.append(Message(entry["role"], _text(entry.get("content"), index)))
    return messages


def _text(content: object, index: int) -> str:
    """A message's text; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise Refused(400, f"messages[{index}].content must be text", "unsupported_parameter")


class ChatDoor:
    """Serves chat completions of registered trajectories over ``turns``."""

    def __init__(self, turns: Turns, *, model: str, max_turn_tokens: int) -> None:
        """``max_turn_tokens`` applies where a caller names no limit."""
        self._turns = turns
        self._model = model
        self._max_turn_tokens = max_turn_tokens
        self._trajectories: dict[str, str] = {}
        self._runner: web.AppRunner | None = None

    def issue(self, trajectory: str) -> str:
        """A new key for a registered trajectory."""
        key = secrets.token_urlsafe(24)
        self._trajectories[key] = trajectory
        return key

    def revoke(self, trajectory: str) -> None:
        """Close the door on a trajectory."""
        self._trajectories = {k: t for k, t in self._trajectories.items() if t != trajectory}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        return app

    async def start(self, port: int = 0) -> str:
        """Listen on 127.0.0.1 and return the base URL for clients (ends in /v1)."""
        # A caller that hangs up cancels its handler, which aborts the generation.
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _trajectory(self, request: web.Request) -> str:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        trajectory = self._trajectories.get(key.strip()) if scheme.lower() == "bearer" else None
        if trajectory is None:
            raise Refused(401, "this key opens no trajectory (any more)", "invalid_api_key")
        return trajectory

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._trajectory(request)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "venusrl"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            trajectory = self._trajectory(request)
            chat = parse(await _body(request))
            result = await self._answer(trajectory, chat)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)
        if chat.stream:
            return await self._stream(request, chat, result)
        return web.json_response(self._completion(result))

    async def _answer(self, trajectory: str, chat: ChatRequest) -> TurnResult:
        try:
            result = await self._turns.turn(
                trajectory, chat.messages, chat.max_tokens or self._max_turn_tokens, chat.asked
            )
        except TokenizerError as error:
            raise Refused(400, str(error), error.reason) from error
        except TurnCancelled as error:
            raise Refused(409, str(error), "trajectory_cancelled", "cancelled") from error
        except EngineError as error:
            raise Refused(503, str(error), error.reason, "server_error") from error
        if result.stop is StopReason.CONTEXT and result.generated_tokens == 0:
            raise Refused(400, "the conversation leaves no room in the context", "context_length_exceeded")
        return result

    def _completion(self, result: TurnResult) -> dict[str, Any]:
        return {
            **self._head(),
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": result.text},
                    "finish_reason": _finish_reason(result),
                    "logprobs": None,
                }
            ],
            "usage": _usage(result),
        }

    def _head(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._model}

    async def _stream(self, request: web.Request, chat: ChatRequest, result: TurnResult) -> web.StreamResponse:
        """The whole answer as server-sent events: the shape is streamed, the tokens came at once."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        head = {**self._head(), "object": "chat.completion.chunk"}
        deltas: list[tuple[dict[str, str], str | None]] = [
            ({"role": "assistant", "content": ""}, None),
            ({"content": result.text}, None),
            ({}, _finish_reason(result)),
        ]
        for delta, finish in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            await response.write(_event({**head, "choices": [choice]}))
        if chat.include_usage:
            await response.write(_event({**head, "choices": [], "usage": _usage(result)}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _body(request: web.Request) -> object:
    try:
        return json.loads(await request.text())
    except (ValueError, web.HTTPRequestEntityTooLarge) as error:
        raise Refused(400, f"the body is not usable JSON: {error}", "invalid_json") from error


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _finish_reason(result: TurnResult) -> str:
    return "stop" if result.stop is StopReason.STOP else "length"


def _usage(result: TurnResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.generated_tokens,
        "total_tokens": result.prompt_tokens + result.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }
