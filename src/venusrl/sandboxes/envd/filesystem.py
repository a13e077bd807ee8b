"""E2B's filesystem service.

Owns: Stat, MakeDir, Move, ListDir, Remove, WatchDir and the polled watchers.

Must not know: how an agent is reached, uploads and downloads.

Guarantees: every path is the agent's to resolve, inside the sandbox and as the asking user: nothing here opens a file.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from aiohttp import web

from venusrl.sandboxes.agent.api import Agent, AgentError, Change, Entry
from venusrl.sandboxes.envd import messages
from venusrl.sandboxes.envd.connect import Fault, decode, one_frame
from venusrl.sandboxes.envd.entries import follow, home_relative, in_order, printable, shown
from venusrl.sandboxes.envd.room import Room, Watcher
from venusrl.sandboxes.envd.streams import ServerStream
from venusrl.sandboxes.protocol import SandboxError, SandboxMoving

MAX_DEPTH = 128
_TURNS = 3
_BEGIN_S = 30.0
_MOVED = "the sandbox moved, and events may have been missed since: look at the directory and watch it again"


async def stat(agent: Agent, payload: bytes, user: str) -> dict[str, Any]:
    asked = decode(payload, messages.PathRequest)
    return {"entry": await shown(agent, await agent.stat(home_relative(asked.path), user), user)}


async def make_dir(agent: Agent, payload: bytes, user: str) -> dict[str, Any]:
    path = home_relative(decode(payload, messages.PathRequest).path)
    try:
        entry = await agent.make_directory(path, user)
    except AgentError as error:
        if error.code == "already_exists" and (await _end_of(agent, path, user)).kind != "directory":
            raise Fault("invalid_argument", f"{path} exists and is not a directory") from None
        raise
    return {"entry": await shown(agent, entry, user)}


async def move(agent: Agent, payload: bytes, user: str) -> dict[str, Any]:
    asked = decode(payload, messages.MoveRequest)
    source, target = home_relative(asked.source), home_relative(asked.destination)
    try:
        entry = await agent.move(source, target, user)
    except AgentError as error:
        if error.code != "not_found":
            raise
        await agent.stat(source, user)
        # The source is there, so the target's directory is not: E2B makes it.
        await _make_parents(agent, target, user)
        entry = await agent.move(source, target, user)
    return {"entry": await shown(agent, entry, user)}


async def list_dir(agent: Agent, payload: bytes, user: str) -> dict[str, Any]:
    asked = decode(payload, messages.ListDirRequest)
    path = home_relative(asked.path)
    await _directory(agent, path, user)
    entries = await agent.list(path, user, min(max(asked.depth, 1), MAX_DEPTH))
    return {"entries": [await shown(agent, entry, user) for entry in in_order(entries)]}


async def remove(agent: Agent, payload: bytes, user: str) -> dict[str, Any]:
    try:
        await agent.remove(home_relative(decode(payload, messages.PathRequest).path), user)
    except AgentError as error:
        # E2B: what is not there is removed.
        if error.code != "not_found":
            raise
    return {}


async def watch_dir(agent: Agent, request: web.Request, user: str, _room: Room) -> web.StreamResponse:
    async def events() -> AsyncGenerator[Any, None]:
        asked = decode(await one_frame(request.content), messages.WatchRequest)
        watched = await _directory(agent, home_relative(asked.path), user)
        queue: asyncio.Queue[Change | SandboxError | None] = asyncio.Queue(maxsize=1024)
        ready = asyncio.Event()
        task = asyncio.create_task(_into(queue, agent.watch(watched.path, user, asked.recursive, ready)))
        try:
            await _stands(ready, task)
            yield {"start": {}}
            while (item := await queue.get()) is not None:
                if isinstance(item, SandboxMoving):
                    raise Fault("unavailable", _MOVED)  # it could be begun anew there, but not without a gap
                if isinstance(item, SandboxError):
                    raise item
                yield {"filesystem": await _event(agent, item, watched.path, user, asked.include_entry)}
        finally:
            task.cancel()

    return await ServerStream(request, {"keepalive": {}}).serve(events())


async def create_watcher(agent: Agent, payload: bytes, user: str, room: Room) -> dict[str, Any]:
    asked = decode(payload, messages.WatchRequest)
    watched = await _directory(agent, home_relative(asked.path), user)
    watcher = Watcher(watched.path, user, asked.include_entry)
    ready = asyncio.Event()
    name, task = room.add_watcher(watcher, agent.watch(watched.path, user, asked.recursive, ready))
    await _stands(ready, task)
    if not ready.is_set():
        room.remove_watcher(name)
        watcher.take()
        raise Fault("unavailable", "the watch ended at once")
    return {"watcherId": name}


async def get_watcher_events(agent: Agent, payload: bytes, _user: str, room: Room) -> dict[str, Any]:
    watcher = room.watcher(decode(payload, messages.WatcherRequest).watcher_id)
    # A client that wrote a file and asks at once expects to see it.
    await _caught_up(agent, watcher.path, watcher.user)
    changes = watcher.take()
    return {
        "events": [await _event(agent, change, watcher.path, watcher.user, watcher.include_entry) for change in changes]
    }


async def remove_watcher(_agent: Agent, payload: bytes, _user: str, room: Room) -> dict[str, Any]:
    room.remove_watcher(decode(payload, messages.WatcherRequest).watcher_id)
    return {}


async def _into(queue: asyncio.Queue[Change | SandboxError | None], changes: AsyncIterator[Change]) -> None:
    """A watch must be begun before its first change: the queue lets the two be told apart."""
    try:
        async for change in changes:
            await queue.put(change)
        await queue.put(None)
    except SandboxError as error:
        await queue.put(error)


async def _stands(ready: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Wait until the watch stands, or has failed. Raises Fault when neither happens."""
    waiting = asyncio.ensure_future(ready.wait())
    try:
        done, _ = await asyncio.wait({waiting, task}, timeout=_BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if not done:
        raise Fault("unavailable", f"the sandbox did not begin to watch within {_BEGIN_S:g} s")


async def _caught_up(agent: Agent, path: str, user: str) -> None:
    """Wait until the agent has done what it was asked before, and what it had to tell has arrived here."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
        try:
            await agent.stat(path, user)
        except AgentError:
            # The watched directory may be gone; the answer came all the same.
            continue
    await asyncio.sleep(0)


async def _event(agent: Agent, change: Change, base: str, user: str, include_entry: bool) -> dict[str, Any]:
    event: dict[str, Any] = {"name": printable(change.name), "type": messages.EVENT_TYPES[change.kind]}
    if include_entry and change.kind != "remove":
        try:
            event["entry"] = await shown(agent, await agent.stat(posixpath.join(base, change.name), user), user)
        except AgentError:
            # Gone again, or renamed away: the event alone says so.
            return event
    return event


async def _end_of(agent: Agent, path: str, user: str) -> Entry:
    entry = await agent.stat(path, user)
    return await follow(agent, entry, user) or entry


async def _directory(agent: Agent, path: str, user: str) -> Entry:
    """Raises Fault unless ``path`` leads to a directory, AgentError(not_found) when to nothing."""
    entry = await _end_of(agent, path, user)
    if entry.kind == "symlink":
        raise Fault("not_found", f"{entry.path} is a link that leads nowhere")
    if entry.kind != "directory":
        raise Fault("invalid_argument", f"{entry.path} is not a directory")
    return entry


async def _make_parents(agent: Agent, path: str, user: str) -> None:
    parent = posixpath.dirname(path)
    if not parent:
        return
    try:
        await agent.make_directory(parent, user)
    except AgentError as error:
        if error.code != "already_exists":
            raise
