"""Server streams of the Connect protocol: events out, until there are no more, the time is up or the client has gone.

Owns: ``ServerStream``: the response, keepalives, the deadline, the noticing of a client that left or does not read.

Must not know: what the events are.

Guarantees: memory stays bounded by one event and the socket's buffer (a slow client slows the source); a client that
takes nothing for ``STALL_S`` is treated as gone; the source is always closed; a sandbox that is lost in the middle
drops the connection, so that a client asks what became of it instead of believing in an orderly end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from aiohttp import web

from venusrl.sandboxes.envd import following
from venusrl.sandboxes.envd.connect import STREAMING, Fault, deadline_s, end_frame, fault_of, frame
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxMoving, SandboxPaused

KEEPALIVE_HEADER = "Keepalive-Ping-Interval"
KEEPALIVE_S = 90.0
STALL_S = 300.0
LOOK_S = 2.0
"""How often a stream without events looks whether its client is still there."""


class ClientGone(Exception):
    """Nobody reads the response any more."""


def keepalive_s(request: web.Request) -> float:
    """What the client asks for, within reason."""
    text = request.headers.get(KEEPALIVE_HEADER, "")
    return float(min(max(int(text), 1), 3600)) if text.isascii() and text.isdigit() and len(text) < 6 else KEEPALIVE_S


class ServerStream:
    """Answers one request with a stream of ``events``. Use ``serve`` once."""

    def __init__(self, request: web.Request, keepalive: Any) -> None:
        """``keepalive`` is the message sent when nothing else was for a while."""
        self._request = request
        self._keepalive = keepalive
        self._follow = following.of(request)
        begun = None if self._follow is None else self._follow.response
        self._response = begun or web.StreamResponse(headers={"Content-Type": STREAMING, "Cache-Control": "no-cache"})
        self._said = False

    async def serve(
        self,
        events: AsyncGenerator[Any, None],
        on_deadline: Callable[[], Awaitable[None]] | None = None,
        on_gone: Callable[[float], None] | None = None,
    ) -> web.StreamResponse:
        """``events`` yields messages; it may raise Fault or SandboxError, which ends the stream (SandboxGone and
        SandboxPaused before the first message are the caller's to answer). ``on_deadline`` is
        awaited when the client's deadline passes; ``on_gone`` is told how many seconds were left of it when the
        client went away before."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit = deadline_s(self._request.headers)
        try:
            async with contextlib.aclosing(events):
                fault = await self._pump(events, limit)
            if fault is not None and fault.code == "deadline_exceeded" and on_deadline is not None:
                await on_deadline()
            await self._write(end_frame(fault))
            if self._follow is None or self._follow.parted is None:
                await self._response.write_eof()
        except (ClientGone, asyncio.CancelledError) as left:
            if limit is not None and on_gone is not None:
                on_gone(max(0.0, limit - (loop.time() - began)))
            following.reset(self._request)
            if isinstance(left, asyncio.CancelledError):
                raise
        except (SandboxGone, SandboxPaused):
            if not self._said:
                raise
            following.reset(self._request)
        return self._response

    async def _pump(self, events: AsyncGenerator[Any, None], limit: float | None) -> Fault | None:
        loop = asyncio.get_running_loop()
        end = None if limit is None else loop.time() + limit
        every = keepalive_s(self._request)
        ping_at = loop.time() + every
        step: asyncio.Task[Any] | None = None
        try:
            while True:
                step = step or loop.create_task(_next(events))
                until = min(ping_at, loop.time() + LOOK_S, *(() if end is None else (end,)))
                await asyncio.wait({step}, timeout=max(0.0, until - loop.time()))
                now = loop.time()
                if step.done():
                    finished, step = step, None
                    try:
                        message = finished.result()
                    except StopAsyncIteration:
                        return None
                    await self._write(frame(message))
                    ping_at = now + every
                if end is not None and now >= end:
                    return Fault("deadline_exceeded", f"the time limit of {limit:g} s is over")
                if now >= ping_at:
                    await self._write(frame(self._keepalive))
                    ping_at = now + every
                self._look()
        except Fault as fault:
            return fault
        except SandboxMoving as moving:
            if not self._said:
                raise
            return fault_of(moving)  # in order, unlike a sandbox's death: whoever followed it can connect again
        except (SandboxGone, SandboxPaused):
            raise
        except SandboxError as error:
            return fault_of(error)
        finally:
            if step is not None:
                step.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Fault, SandboxError):
                    await step

    async def _write(self, data: bytes) -> None:
        self._said = True
        if self._follow is not None and not (data := self._follow.passed(data)):
            return
        try:
            async with asyncio.timeout(STALL_S):
                if not self._response.prepared:
                    # Not before there is something to say: a client that is answered early may stop sending.
                    await self._response.prepare(self._request)
                    if self._follow is not None:
                        self._follow.response = self._response
                await self._response.write(data)
        except (ConnectionError, TimeoutError):
            raise ClientGone from None

    def _look(self) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone


async def _next(events: AsyncGenerator[Any, None]) -> Any:
    return await anext(events)
