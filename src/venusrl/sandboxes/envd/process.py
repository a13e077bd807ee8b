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
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from venusrl.sandboxes.agent.api import Agent, Exit, Output, Process, ProcessInfo, ProcessSpec, Size
from venusrl.sandboxes.envd import following, messages
from venusrl.sandboxes.envd.about import About, Verdict, verdict
from venusrl.sandboxes.envd.connect import HEADER, STREAMING, Fault, decode, end_frame, frame, frames, one_frame
from venusrl.sandboxes.envd.following import Part, Parted
from venusrl.sandboxes.envd.room import Room
from venusrl.sandboxes.envd.streams import ServerStream
from venusrl.sandboxes.protocol import SandboxError, SandboxMoving
from venusrl.sandboxes.runtimes.base import Shortages

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
        async for event in _followed(process, Part(process.pid, 0, ends=True), about, before):
            yield event

    return await _until_deadline(agent, request, room, events(), holder)


async def connect(agent: Agent, request: web.Request, _user: str, room: Room, about: About) -> web.StreamResponse:
    """Follow a process that runs. The deadline ends the following only, unless it is that of the process's start, which
    went on here with the sandbox."""
    holder: list[Process] = []

    async def events() -> AsyncGenerator[Any, None]:
        follow = following.of(request)
        message = b"" if follow is None else follow.message
        asked = decode(message[HEADER.size :] or await one_frame(request.content), messages.ConnectRequest)
        since = asked.since
        before = await about.shortages(False) if since is not None and since.ends else None
        at = None if since is None else since.position
        process = await agent.attach(await select(agent, asked.process), since=at)
        if since is None:
            part = Part(process.pid)
        else:
            part = Part(process.pid, since.position, since.ends)
            holder.extend([process] if since.ends else [])
        async for event in _followed(process, part, about, before, again=since is not None):
            yield event

    return await _until_deadline(agent, request, room, events(), holder)


async def _until_deadline(
    agent: Agent, request: web.Request, room: Room, events: AsyncGenerator[Any, None], doomed: list[Process]
) -> web.StreamResponse:
    """Answer with ``events``; what is in ``doomed`` ends at the client's deadline, whether that is here or not."""

    async def kill() -> None:
        for process in doomed:
            await _kill_after(agent, process.pid, 0.0)

    def kill_later(seconds: float) -> None:
        for process in doomed:
            room.keep(_kill_after(agent, process.pid, seconds), f"the deadline of process {process.pid}")

    return await ServerStream(request, _KEEPALIVE).serve(events, kill, kill_later)


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


async def _followed(
    process: Process, part: Part, about: About, before: Shortages | None, *, again: bool = False
) -> AsyncGenerator[Any, None]:
    """What it says after ``part``, as messages. ``before``: judge a failure by what was short since; ``again``: the
    client knows of it already. Raises Parted when the sandbox goes elsewhere."""
    position = part.position
    try:
        yield _KEEPALIVE if again else {"event": {"start": {"pid": process.pid}}}
        async for event in process.events():
            known = again and _known(process.span, position)
            if isinstance(event, Exit):
                yield end_event(event, "" if before is None else await verdict(about, before, event))
                continue
            if known:
                continue
            yield data_event(event)
            position = process.span[1] if process.span is not None else None
    except SandboxMoving as moving:
        raise Parted(str(moving), Part(process.pid, position, part.ends)) from None
    finally:
        await _detach(process)


def _known(span: tuple[int, int] | None, position: int | None) -> bool:
    """Whether a client that has everything up to ``position`` has it. Raises Fault when there is a gap before it."""
    if span is None or position is None:
        return False
    if span[0] > position:
        raise Fault("data_loss", f"{span[0] - position} bytes of output were dropped: nobody followed the process")
    return span[1] <= position


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
