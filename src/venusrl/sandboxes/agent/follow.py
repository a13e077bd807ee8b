"""Processes as the host sees them: one channel to the agent each, any number of handles on it.

Owns: ``Followed`` (a process's channel, shared) and ``Handle`` (implements ``agent.api.Process``).

Must not know: frames, connections, files.

Guarantees: every handle gets all output from when it was made, in order, then one Exit; what no handle has taken yet
is not taken from the agent, so that the slowest reader slows its process and nothing else; a handle that was dropped
holds nothing up.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

from venusrl.sandboxes.agent import wire
from venusrl.sandboxes.agent.api import AgentError, Exit, Output, ProcessSpec, Size
from venusrl.sandboxes.agent.link import Channel
from venusrl.sandboxes.protocol import SandboxError

Ask = Callable[..., Awaitable[object]]
_STREAMS: dict[int, Literal["stdout", "stderr", "pty"]] = {
    wire.STDOUT: "stdout",
    wire.STDERR: "stderr",
    wire.PTY: "pty",
}


_KEPT_S = 60.0
_KEPT_BYTES = 1 << 20
_KEPT_EACH = 128
"""What a piece costs beyond its bytes."""


class _Recent:
    """The newest output of a process that an earlier host followed: its followers come one after the other, and each
    goes on where it was. Kept for a short while only."""

    def __init__(self) -> None:
        self._until = asyncio.get_running_loop().time() + _KEPT_S
        self._pieces: deque[tuple[int, int, Output]] = deque()
        self._size = 0

    def add(self, at: int, size: int, output: Output) -> None:
        if asyncio.get_running_loop().time() > self._until:
            self._pieces.clear()
            return
        self._pieces.append((at, size, output))
        self._size += size + _KEPT_EACH
        while self._size > _KEPT_BYTES:
            self._size -= self._pieces.popleft()[1] + _KEPT_EACH

    def after(self, at: int) -> list[tuple[int, int, Output]]:
        return [piece for piece in self._pieces if piece[0] > at]


class _Follower:
    """What one handle has not taken yet. Kept apart from the handle, so that dropping that one is seen."""

    def __init__(self, output: bool, at: int) -> None:
        self.output = output
        self.taken = at
        self.events: deque[tuple[int, int, Output | Exit | SandboxError]] = deque()
        self.changed = asyncio.Event()

    def push(self, at: int, event: Output | Exit | SandboxError, size: int = 0) -> None:
        self.events.append((at, size, event))
        self.changed.set()


class Followed:
    """One process that somebody follows. ``over`` is called once nobody does. ``new``: it has said nothing yet."""

    def __init__(
        self, channel: Channel, pid: int, spec: ProcessSpec, over: Callable[[Followed], None], *, new: bool
    ) -> None:
        self.pid = pid
        self.spec = spec
        self.exit: Exit | None = None
        self._exit_size = 0
        self._channel = channel
        self._over = over
        self._followers: list[_Follower] = []
        self._shift = -channel.acked if new else None
        self._recent = None if new else _Recent()
        self._seen = channel.acked
        self._sending = asyncio.Lock()
        channel.listener = self._on_change

    def follower(self, output: bool, since: int | None) -> _Follower:
        made = _Follower(output, self._seen)
        self._followers.append(made)
        if output and since is not None and self._recent is not None and self._shift is not None:
            for at, size, said in self._recent.after(since - self._shift):
                made.push(at, said, size)
        if self.exit is not None:
            made.push(self._seen, self.exit, self._exit_size)
        elif self._channel.failure is not None:
            made.push(self._seen, self._channel.failure)
        self._on_change()
        return made

    def span(self, at: int, size: int) -> tuple[int, int] | None:
        """The ``size`` bytes of the channel before ``at``, in all that it says; None: the agent does not tell."""
        return None if self._shift is None else (self._shift + at - size, self._shift + at)

    def drop(self, follower: _Follower) -> None:
        if follower not in self._followers:
            return
        self._followers.remove(follower)
        if self._followers:
            self.acknowledge()
            return
        self._over(self)
        if self._channel.ended:
            self._channel.finish()
        elif self._channel.open:
            self._channel.close()

    def acknowledge(self) -> None:
        """What every follower took need not be kept by the agent."""
        taken = min((f.taken for f in self._followers if f.output), default=self._seen)
        self._channel.took(taken - self._channel.acked)
        if self._channel.ended and taken == self._seen:
            self._over(self)
            self._channel.finish()

    async def send(self, data: bytes) -> None:
        if not self.spec.stdin and self.spec.pty is None:
            raise AgentError("failed_precondition", f"process {self.pid} was started without an input")
        async with self._sending:
            taken = not self._channel.last and await self._channel.write(data) and await self._channel.settled()
        if not taken:
            raise AgentError("failed_precondition", f"process {self.pid} takes no input any more")

    async def close_stdin(self) -> None:
        """Waits until the agent has it: whoever lets go next would take it back."""
        if not self.spec.stdin or self.spec.pty is not None:
            raise AgentError("failed_precondition", f"process {self.pid} has no stdin that could be closed")
        async with self._sending:
            self._channel.write_end()
            await self._channel.settled()

    def _on_change(self) -> None:
        channel = self._channel
        if channel.failure is not None:  # what is still queued may be the cause
            if self.exit is None:
                for follower in self._followers:
                    follower.push(self._seen, channel.failure)
                self._over(self)
            return
        try:
            while channel.queue:
                kind, payload, size = channel.queue.popleft()
                self._seen += size
                self._publish(kind, payload, size)
        except wire.ProtocolError as error:
            channel.blame(error)  # comes back here, as its failure
            return
        if channel.open:
            self.acknowledge()

    def _publish(self, kind: int, payload: bytes, size: int) -> None:
        if kind == wire.POSITION:
            self._shift = wire.Fields(payload).u64() - self._seen
            return
        if self.exit is not None or kind not in (wire.EXIT, *_STREAMS):
            raise wire.ProtocolError("a process's stream holds what it may not")
        if kind == wire.EXIT:
            self.exit, self._exit_size = wire.ending(payload), size
        elif self._recent is not None:
            self._recent.add(self._seen, size, Output(_STREAMS[kind], payload))
        for follower in self._followers:
            if kind == wire.EXIT and self.exit is not None:
                follower.push(self._seen, self.exit, size)
            elif kind != wire.EXIT and follower.output:
                follower.push(self._seen, Output(_STREAMS[kind], payload), size)


class Handle:
    """Somebody's hold on a process."""

    def __init__(self, process: Followed, output: bool, ask: Ask, since: int | None = None) -> None:
        self._process = process
        self._ask = ask
        self._follower = process.follower(output, since)
        self._span: tuple[int, int] | None = None
        self._release = weakref.finalize(self, process.drop, self._follower)
        self._release.atexit = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def span(self) -> tuple[int, int] | None:
        return self._span

    async def events(self) -> AsyncIterator[Output | Exit]:
        follower = self._follower
        while True:
            while not follower.events:
                follower.changed.clear()
                await follower.changed.wait()
            at, size, event = follower.events.popleft()
            if isinstance(event, SandboxError):
                raise event
            self._span = self._process.span(at, size)
            try:
                yield event
            finally:
                follower.taken = max(follower.taken, at)  # what was kept here was taken long ago
                self._process.acknowledge()
            if isinstance(event, Exit):
                self._release()
                return

    async def send(self, data: bytes) -> None:
        await self._process.send(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def signal(self, number: int) -> None:
        await self._ask(wire.SIGNAL, wire.u32(self.pid), wire.u32(_checked(number)))

    async def resize(self, size: Size) -> None:
        await self._ask(wire.RESIZE, wire.u32(self.pid), wire.u32(size.cols & 0xFFFF), wire.u32(size.rows & 0xFFFF))

    async def detach(self) -> None:
        self._release()


def _checked(number: int) -> int:
    if not 1 <= number <= 64:
        raise AgentError("invalid_argument", f"there is no signal {number}")
    return number
