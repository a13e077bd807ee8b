"""The services of a sandbox as its clients see them: E2B's own on port 49983, whatever listens on the others.

Owns: ``Door``: which request goes where, whose user it runs as, what is remembered of each sandbox.

Must not know: keys, tokens, records, which runtime holds the sandbox.

Guarantees: paths of E2B's own control of its machines are never served; every failure before an answer's first byte is
an answer of the protocol asked, but ``SandboxGone`` and ``SandboxPaused``, which the caller knows better how to answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import ClientPayloadError, web

from venusrl.sandboxes.agent.api import Agent, Exit, Output, ProcessSpec
from venusrl.sandboxes.envd import connect, filesystem, following, process
from venusrl.sandboxes.envd.about import NOTHING, About
from venusrl.sandboxes.envd.answers import error_answer
from venusrl.sandboxes.envd.connect import Fault
from venusrl.sandboxes.envd.files import files
from venusrl.sandboxes.envd.proxy import proxy
from venusrl.sandboxes.envd.room import Room
from venusrl.sandboxes.host.api import ENVD_PORT
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused

INTERNAL = frozenset({"/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"})
RUNNER_OPTIONS: dict[str, Any] = {"auto_decompress": False, "lingering_time": 2.0}
"""What a server in front of a Door is to be given: bodies must arrive as they were sent, and a refused upload is
listened to no longer than it takes its client to read the refusal."""
UNARY_LIMIT_S = 600.0
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MAX_ENVIRONMENT = 1 << 20

Unary = Callable[[Agent, bytes, str], Awaitable[dict[str, Any]]]
Remembering = Callable[[Agent, bytes, str, Room], Awaitable[dict[str, Any]]]
Streaming = Callable[[Agent, web.Request, str, Room], Awaitable[web.StreamResponse]]
Following = Callable[[Agent, web.Request, str, Room, About], Awaitable[web.StreamResponse]]

_UNARY: dict[str, Unary] = {
    "/process.Process/List": process.listing,
    "/process.Process/Update": process.update,
    "/process.Process/SendInput": process.send_input,
    "/process.Process/SendSignal": process.send_signal,
    "/process.Process/CloseStdin": process.close_stdin,
    "/filesystem.Filesystem/Stat": filesystem.stat,
    "/filesystem.Filesystem/MakeDir": filesystem.make_dir,
    "/filesystem.Filesystem/Move": filesystem.move,
    "/filesystem.Filesystem/ListDir": filesystem.list_dir,
    "/filesystem.Filesystem/Remove": filesystem.remove,
}
_REMEMBERING: dict[str, Remembering] = {
    "/filesystem.Filesystem/CreateWatcher": filesystem.create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": filesystem.get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": filesystem.remove_watcher,
}
_STREAMING: dict[str, Streaming] = {
    "/filesystem.Filesystem/WatchDir": filesystem.watch_dir,
}
_FOLLOWING: dict[str, Following] = {following.START: process.start, following.CONNECT: process.connect}
_CLIENT_STREAM = "/process.Process/StreamInput"


class Door:
    """Answers requests for sandboxes of one host."""

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}

    async def serve(
        self, request: web.Request, agent: Agent, sandbox: str, port: int, about: About = NOTHING
    ) -> web.StreamResponse:
        """Answer one request. Raises SandboxGone, SandboxPaused before the answer has begun."""
        if port != ENVD_PORT:
            return await proxy(request, agent, sandbox, port)
        path = request.path
        if path in INTERNAL:
            return error_answer(404, f"{path} is not served")
        if path.startswith(("/process.Process/", "/filesystem.Filesystem/")):
            return await self._call(request, agent, sandbox, path, about)
        try:
            return await _plain(request, agent, path)
        except Fault as fault:
            return error_answer(fault.status, fault.message)
        except (SandboxGone, SandboxPaused):
            raise
        except SandboxError as error:
            return error_answer(500, str(error))

    def forget(self, sandbox: str) -> None:
        """Let go of what was kept for a sandbox that is here no longer."""
        if (room := self._rooms.pop(sandbox, None)) is not None:
            room.close()

    def close(self) -> None:
        for sandbox in list(self._rooms):
            self.forget(sandbox)

    async def _call(
        self, request: web.Request, agent: Agent, sandbox: str, path: str, about: About
    ) -> web.StreamResponse:
        streaming = path in _STREAMING or path in _FOLLOWING or path == _CLIENT_STREAM
        expected = connect.STREAMING if streaming else connect.UNARY
        if request.method != "POST":
            return web.Response(status=405, headers={"Allow": "POST"})
        if request.content_type != expected:
            return web.Response(status=415, headers={"Accept-Post": expected})
        try:
            user = requested_user(request)
            if path in _FOLLOWING:
                return await _FOLLOWING[path](agent, request, user, self._room(sandbox), about)
            if path in _STREAMING:
                return await _STREAMING[path](agent, request, user, self._room(sandbox))
            limit = connect.deadline_s(request.headers)
            if path == _CLIENT_STREAM:
                return await _client_stream(agent, request, user, limit)
            async with asyncio.timeout(UNARY_LIMIT_S if limit is None else limit):
                payload = await connect.whole(request.content)
                if path in _UNARY:
                    return connect.unary_answer(await _UNARY[path](agent, payload, user))
                if path in _REMEMBERING:
                    return connect.unary_answer(await _REMEMBERING[path](agent, payload, user, self._room(sandbox)))
            return connect.unary_fault(Fault("unimplemented", f"{path} is not a method of E2B's services"))
        except Fault as fault:
            return connect.unary_fault(fault)
        except TimeoutError:
            return connect.unary_fault(Fault("deadline_exceeded", "the request's time limit is over"))
        except (ConnectionError, ClientPayloadError):
            return connect.unary_fault(Fault("canceled", "the client went away"))
        except (SandboxGone, SandboxPaused):
            raise
        except SandboxError as error:
            return connect.unary_fault(connect.fault_of(error))

    def _room(self, sandbox: str) -> Room:
        return self._rooms.setdefault(sandbox, Room())


def requested_user(request: web.Request) -> str:
    """Who a request runs as; "" = the sandbox's default. Raises Fault."""
    header = request.headers.get("Authorization", "")
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        user = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise Fault("unauthenticated", "malformed Authorization header: Basic base64('user:') is expected") from None
    return checked_user(user)


def checked_user(user: str) -> str:
    """Raises Fault."""
    if user and not _USER.fullmatch(user):
        raise Fault("unauthenticated", f"invalid username: {user!r}")
    return user


async def _client_stream(agent: Agent, request: web.Request, user: str, limit: float | None) -> web.Response:
    try:
        async with asyncio.timeout(limit):
            return process.client_stream_answer(await process.stream_input(agent, request, user), None)
    except Fault as fault:
        return process.client_stream_answer(None, fault)
    except TimeoutError:
        return process.client_stream_answer(None, Fault("deadline_exceeded", "the request's time limit is over"))
    except (SandboxGone, SandboxPaused):
        raise
    except SandboxError as error:
        return process.client_stream_answer(None, connect.fault_of(error))


async def _plain(request: web.Request, agent: Agent, path: str) -> web.StreamResponse:
    if path == "/files" or path.startswith("/files/"):
        user = checked_user(request.query.get("username", "")) or requested_user(request)
        return await files(agent, request, user)
    if request.method not in ("GET", "HEAD"):
        return error_answer(404, f"{request.method} {path} is not served")
    if path == "/health":
        return web.Response(status=204, headers={"Cache-Control": "no-store"})
    if path == "/metrics":
        return _json(await _metrics(agent))
    if path == "/envs":
        return _json(await _environment(agent, requested_user(request)))
    return error_answer(404, f"{path} is not served")


def _json(message: Any) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(message), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


async def _metrics(agent: Agent) -> dict[str, Any]:
    usage = await agent.usage()
    return {
        "ts": int(time.time()),
        "cpu_count": usage.cpus,
        "cpu_used_pct": round(usage.cpu_percent, 2),
        "mem_total": usage.memory_total,
        "mem_used": usage.memory_used,
        "mem_cache": usage.memory_cache,
        "mem_total_mib": usage.memory_total >> 20,
        "mem_used_mib": usage.memory_used >> 20,
        "disk_used": usage.disk_used,
        "disk_total": usage.disk_total,
    }


async def _environment(agent: Agent, user: str) -> dict[str, str]:
    """What a process started now would have: asked of one, since only the agent knows it all."""
    started = await agent.start(ProcessSpec(args=("env", "-0"), user=user))
    text = b""
    try:
        async for event in started.events():
            if isinstance(event, Output) and event.stream == "stdout":
                text += event.data[: _MAX_ENVIRONMENT - len(text)]
            if isinstance(event, Exit):
                break
    finally:
        await started.detach()
    pairs = (item.partition("=") for item in text.decode("utf-8", "replace").split("\0") if item)
    return {name: value for name, _, value in pairs}
