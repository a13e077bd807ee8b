"""E2B's process service.

Owns: List, Start, Connect, Update, StreamInput, SendInput, SendSignal, CloseStdin.

Must not know: how an agent is reached, keys, other sandboxes.

Guarantees: a process outlives the request that started it, unless that request's own deadline passed: then it and its
process group are killed; what one client does to its stream disturbs no other's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from aiohttp import web

from venusrl.sandboxes.agent.api import Agent, Exit, Output, Process, ProcessInfo, ProcessSpec, Size
from venusrl.sandboxes.envd import messages
from venusrl.sandboxes.envd.about import About, Verdict, verdict
from venusrl.sandboxes.envd.connect import STREAMING, Fault, decode, end_frame, frame, frames, one_frame
from venusrl.sandboxes.envd.room import Room
from venusrl.sandboxes.envd.streams import ServerStream
from venusrl.sandboxes.protocol import SandboxError

SIGKILL = 9
_KEEPALIVE: dict[str, Any] = {"event": {"keepalive": {}}}
_SIGNAL_NAMES = {1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 6: "aborted", 7: "bus error"} | {
    8: "floating point exception",
    9: "killed",
    11: "segmentation fault",
    13: "broken pipe",
    14: "alarm clock",
    15: "terminated",
}


_VERDICTS = {"out_of_memory": "out of memory", "out_of_disk": "no space left on the sandbox's disk"}


def end_event(end: Exit, why: Verdict = "") -> dict[str, Any]:
    """How a process ended, in E2B's words. ``cause`` is ours: E2B's clients ignore what they do not know."""
    if end.signal is not None:
        status = f"signal: {_SIGNAL_NAMES.get(end.signal, f'signal {end.signal}')}"
    else:
        status = f"exit status {end.code}"
    event: dict[str, Any] = {"exitCode": end.code, "exited": end.signal is None, "status": status}
    if end.code != 0:
        event["error"] = f"{status} ({_VERDICTS[why]})" if why else status
    if why:
        event["cause"] = why
    return {"event": {"end": event}}


def data_event(output: Output) -> dict[str, Any]:
    return {"event": {"data": {output.stream: base64.b64encode(output.data).decode()}}}


def info(process: ProcessInfo) -> dict[str, Any]:
    """A running process as List shows it."""
    spec = process.spec
    config: dict[str, Any] = {"cmd": spec.args[0] if spec.args else "", "args": list(spec.args[1:]), "envs": spec.env}
    if spec.cwd:
        config["cwd"] = spec.cwd
    shown: dict[str, Any] = {"config": config, "pid": process.pid}
    if spec.tag:
        shown["tag"] = spec.tag
    return shown


def size_of(pty: messages.Pty) -> Size:
    """Raises Fault."""
    size = pty.size or messages.PtySize()
    if not 0 < size.cols < 65536 or not 0 < size.rows < 65536:
        raise Fault("invalid_argument", f"a terminal of {size.cols} x {size.rows} characters cannot be")
    return Size(size.cols, size.rows)


async def select(agent: Agent, selector: messages.Selector) -> int:
    """The process id that is meant. Raises Fault."""
    if selector.pid is not None:
        return selector.pid
    if selector.tag is None:
        raise Fault("invalid_argument", "the request selects no process: give pid or tag")
    for process in reversed(await agent.processes()):
        if process.spec.tag == selector.tag:
            return process.pid
    raise Fault("not_found", f"no process has the tag {selector.tag!r}")


async def listing(agent: Agent, payload: bytes, _user: str) -> dict[str, Any]:
    decode(payload, messages.ListRequest)
    return {"processes": [info(process) for process in await agent.processes()]}


async def start(agent: Agent, request: web.Request, user: str, room: Room, about: About) -> web.StreamResponse:
    """The process ends with the client's deadline, not with its connection: the deadline holds without it too."""
    holder: list[Process] = []

    async def events() -> AsyncGenerator[Any, None]:
        asked = decode(await one_frame(request.content), messages.StartRequest)
        config = asked.process
        if not config.cmd:
            raise Fault("invalid_argument", "the request names no command")
        spec = ProcessSpec(
            args=(config.cmd, *(config.args or ())),
            user=user,
            env=config.envs or {},
            cwd=config.cwd or about.workdir,
            tag=asked.tag or "",
            stdin=asked.stdin and asked.pty is None,
            pty=None if asked.pty is None else size_of(asked.pty),
        )
        before = await about.shortages(False)
        process = await agent.start(spec)
        holder.append(process)
        async for event in _followed(process, lambda end: verdict(about, before, end)):
            yield event

    async def kill() -> None:
        for process in holder:
            await _kill_after(agent, process.pid, 0.0)

    def kill_later(seconds: float) -> None:
        for process in holder:
            room.keep(_kill_after(agent, process.pid, seconds), f"the deadline of process {process.pid}")

    return await ServerStream(request, _KEEPALIVE).serve(events(), kill, kill_later)


async def connect(agent: Agent, request: web.Request, _user: str, _room: Room) -> web.StreamResponse:
    """Follow a process that runs. The deadline ends the following only."""

    async def events() -> AsyncGenerator[Any, None]:
        asked = decode(await one_frame(request.content), messages.ConnectRequest)
        process = await agent.attach(await select(agent, asked.process))
        async for event in _followed(process):
            yield event

    return await ServerStream(request, _KEEPALIVE).serve(events())


async def update(agent: Agent, payload: bytes, _user: str) -> dict[str, Any]:
    asked = decode(payload, messages.UpdateRequest)
    if asked.pty is None:
        return {}
    size = size_of(asked.pty)
    async with _held(agent, asked.process) as process:
        await process.resize(size)
    return {}


async def send_input(agent: Agent, payload: bytes, _user: str) -> dict[str, Any]:
    asked = decode(payload, messages.SendInputRequest)
    data = asked.input.data()
    async with _held(agent, asked.process) as process:
        await process.send(data)
    return {}


async def close_stdin(agent: Agent, payload: bytes, _user: str) -> dict[str, Any]:
    asked = decode(payload, messages.CloseStdinRequest)
    async with _held(agent, asked.process) as process:
        await process.close_stdin()
    return {}


async def send_signal(agent: Agent, payload: bytes, _user: str) -> dict[str, Any]:
    asked = decode(payload, messages.SendSignalRequest)
    number = asked.number()
    async with _held(agent, asked.process) as process:
        await process.signal(number)
    return {}


async def stream_input(agent: Agent, request: web.Request, _user: str) -> dict[str, Any]:
    """A client's stream of input, in order. The caller bounds it by the client's deadline."""
    process: Process | None = None
    try:
        async for payload in frames(request.content):
            message = decode(payload, messages.StreamInputRequest)
            if message.start is not None:
                if process is not None:
                    raise Fault("invalid_argument", "a second start message")
                process = await agent.attach(await select(agent, message.start.process), output=False)
            elif message.data is not None:
                if process is None:
                    raise Fault("invalid_argument", "input came before the start message")
                await process.send(message.data.input.data())
    finally:
        if process is not None:
            await _detach(process)
    return {}


def client_stream_answer(message: Any | None, fault: Fault | None) -> web.Response:
    """The answer to a client stream: one message, then the end."""
    body = (b"" if message is None else frame(message)) + end_frame(fault)
    return web.Response(body=body, headers={"Content-Type": STREAMING})


async def _no_verdict(_end: Exit) -> Verdict:
    return ""


async def _followed(
    process: Process, judge: Callable[[Exit], Awaitable[Verdict]] = _no_verdict
) -> AsyncGenerator[Any, None]:
    try:
        yield {"event": {"start": {"pid": process.pid}}}
        async for event in process.events():
            yield end_event(event, await judge(event)) if isinstance(event, Exit) else data_event(event)
    finally:
        await _detach(process)


async def _detach(process: Process) -> None:
    # A sandbox that is gone has nothing left to detach from.
    with contextlib.suppress(SandboxError):
        await process.detach()


async def _kill_after(agent: Agent, pid: int, seconds: float) -> None:
    # It, or its sandbox, may end by itself meanwhile.
    with contextlib.suppress(SandboxError):
        process = await agent.attach(pid, output=False)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    async for event in process.events():
                        if isinstance(event, Exit):
                            return
            await process.signal(SIGKILL)
        finally:
            await _detach(process)


@contextlib.asynccontextmanager
async def _held(agent: Agent, selector: messages.Selector) -> AsyncGenerator[Process, None]:
    process = await agent.attach(await select(agent, selector), output=False)
    try:
        yield process
    finally:
        await asyncio.shield(_detach(process))
