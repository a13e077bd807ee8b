"""The host's end of the line to one agent: streams that outlive their connection.

Owns: ``Line`` (connects, reconnects, sends, receives) and ``Channel`` (one stream on it).

Must not know: what a stream is for.

Guarantees: a lost connection loses and repeats no byte of a channel; a channel holds at most a window of bytes in
either direction; what the agent does against the protocol ends the line with AgentError(internal); a line that cannot
be had for ``patience_s`` ends with SandboxGone; everybody who waits on a channel is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from venusrl.sandboxes.agent import wire
from venusrl.sandboxes.agent.api import AgentError
from venusrl.sandboxes.protocol import SandboxError, SandboxGone

_LOG = logging.getLogger(__name__)
_READ = 1 << 17
_HELLO_S = 10.0
_PARTING_S = 1.0
_PAUSE_S = (0.01, 0.5)
"""Between two attempts to connect: at first, at most."""

Connector = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Record = tuple[int, bytes]


class Channel:
    """One stream: bytes to the agent, records from it. Not for several tasks at once, but for ``write`` in one and
    ``record`` in another."""

    def __init__(self, line: Line, number: int, first: bytes, last: bool) -> None:
        self._line = line
        self.number = number
        self.failure: SandboxError | None = None
        self.stopped = False
        """The agent wants no more input."""
        self.listener: Callable[[], None] = self._wake
        """Called when ``queue``, ``ended`` or ``failure`` changed; by default wakes ``record``."""
        self.queue: deque[tuple[int, bytes, int]] = deque()
        self.received = 0
        self.ended = False
        self.stop_at = 0
        self.out = bytearray(first)
        self.written = len(first)
        self.base = 0
        self.sent = 0
        self.last = last
        self.last_sent = False
        self.last_acked = False
        self.open = True
        self._records = wire.Records()
        self._acked = 0
        self._previous = 0
        self._changed = asyncio.Event()

    # -- records

    async def record(self, timeout_s: float | None = None) -> Record | None:
        """The next record, None after the last. The one before counts as taken now.

        Raises what ended the line, and AgentError(unavailable) when nothing comes for ``timeout_s``.
        """
        self.took(self._previous)
        self._previous = 0
        with self._deadline(timeout_s):
            async with asyncio.timeout(timeout_s):
                while not self.queue:
                    if self.failure is not None:
                        raise self.failure
                    if self.ended:
                        return None
                    await self._wait()
        kind, payload, self._previous = self.queue.popleft()
        return kind, payload

    def took(self, size: int) -> None:
        """So many more bytes need not be sent again."""
        if size and self.open:
            self._acked += size
            self._line.acknowledge(self.number, self._acked)

    @property
    def acked(self) -> int:
        return self._acked

    # -- input

    async def write(self, data: bytes, timeout_s: float | None = None) -> bool:
        """All of ``data`` on its way; False when the agent wants no more."""
        view = memoryview(data)
        while view:
            await self._until(lambda: len(self.out) < wire.WINDOW, timeout_s)
            if self.stopped or self.ended:
                return False
            room = wire.WINDOW - len(self.out)
            self.out += view[:room]
            self.written += len(view[:room])
            view = view[room:]
            self._line.wake()
        return True

    def write_end(self) -> None:
        """No more input after this."""
        self.last = True
        self._line.wake()

    async def settled(self, timeout_s: float | None = None) -> bool:
        """Once all input was taken; False when it never will be."""
        await self._until(lambda: not self.out and (self.last_acked or not self.last), timeout_s)
        return self.written <= self.stop_at if self.stopped else not self.out

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        with self._deadline(timeout_s):
            async with asyncio.timeout(timeout_s):
                while not (condition() or self.stopped or self.ended):
                    if self.failure is not None:
                        raise self.failure
                    await self._wait()
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def _deadline(self, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise AgentError("unavailable", f"the sandbox did not answer within {timeout_s:.0f} s") from None

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()

    # -- the end

    def close(self) -> None:
        """Give it up; the agent stops working on it."""
        self._line.drop(self)
        self.fail(AgentError("unavailable", "the channel was closed"))

    def finish(self) -> None:
        """Everything was taken, the end too."""
        if self.open and self.ended:
            self._line.acknowledge(self.number, self.received + 1)
            self._line.forget(self)

    def fail(self, error: SandboxError) -> None:
        self.open = False
        if self.failure is None:
            self.failure = error
        self._wake()
        self.listener()

    def blame(self, error: wire.ProtocolError) -> None:
        """What came breaks the protocol: the end of the whole line."""
        self._line.break_off(error)

    # -- the line's part

    def on_data(self, offset: int, payload: bytes, last: bool) -> None:
        if offset + len(payload) <= self.received and not (last and not self.ended):
            return  # sent twice, on both sides of a lost connection
        if offset != self.received or self.ended:
            raise wire.ProtocolError("bytes of a stream are missing")
        self.received += len(payload)
        if self.received - self._acked > wire.WINDOW:
            raise wire.ProtocolError("more bytes of a stream than its window")
        self.queue.extend(self._records.feed(payload))
        self.ended = last
        if last and self._records.incomplete:
            raise wire.ProtocolError("a stream ends within a record")
        self._wake()
        self.listener()

    def on_ack(self, offset: int) -> None:
        if offset > self.sent + (1 if self.last_sent else 0):
            raise wire.ProtocolError("more was acknowledged than was sent")
        taken = min(offset - self.base, len(self.out))
        if taken > 0:
            del self.out[:taken]
            self.base += taken
            self._line.wake()  # there is room for more
        if self.last_sent and offset == self.sent + 1:
            self.last_acked = True
        self._wake()

    def on_stop(self, offset: int) -> None:
        self.stopped, self.stop_at = True, offset
        self._wake()

    def next_frame(self) -> bytes | None:
        """What may be sent now."""
        if self.stopped and self.sent > 0:
            self.base, self.last_acked = self.sent, self.last
            self.out.clear()
            return None
        window = self.base + wire.WINDOW - self.sent
        # The open alone may be larger than the window: the agent takes it as it comes.
        chunk = bytes(self.out[self.sent - self.base :][: min(wire.PAYLOAD, max(window, 0))])
        last = self.last and not self.last_sent and self.sent + len(chunk) == self.base + len(self.out)
        if not chunk and not last:
            return None
        made = wire.frame(self.number, wire.DATA, self.sent, chunk, wire.FIN if last else 0)
        self.sent += len(chunk)
        self.last_sent = self.last_sent or last
        return made

    def resume(self, received: int) -> None:
        """A new connection: the agent has so much of it."""
        if self._acked:
            self._line.acknowledge(self.number, self._acked)
        if self.stopped:
            self.out.clear()
            self.base = self.sent = received
            self.last_sent = self.last_acked = self.last
            return
        end = self.base + len(self.out)
        whole = self.last and received == end + 1
        if not (self.base <= received <= end or whole):
            raise wire.ProtocolError("the agent has another idea of what it received")
        self.sent = end if whole else received
        self.last_sent = whole


class Line:
    """The session with one agent. Connects when first needed."""

    def __init__(self, connect: Connector, patience_s: float) -> None:
        self._connect = connect
        self._patience_s = patience_s
        self._session = os.urandom(16)
        self._known = False
        self._channels: dict[int, Channel] = {}
        self._next = 1
        self._acks: dict[int, int] = {}
        self._resets: list[int] = []
        self._failure: SandboxError | None = None
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def open(self, first: bytes, *, last: bool = True) -> Channel:
        """A new stream. ``last``: nothing follows its open."""
        if self._failure is not None:
            raise self._failure
        if len(self._channels) >= wire.STREAMS - 24:
            raise AgentError("resource_exhausted", f"{len(self._channels)} things are asked of this sandbox already")
        channel = Channel(self, self._next, first, last)
        self._channels[self._next] = channel
        self._next += 1
        self.wake()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="line to a sandbox's agent")
        return channel

    def wake(self) -> None:
        self._work.set()

    def acknowledge(self, number: int, offset: int) -> None:
        self._acks[number] = offset
        self._work.set()

    def drop(self, channel: Channel) -> None:
        if self._channels.pop(channel.number, None) is not None:
            self._resets.append(channel.number)
            self._work.set()

    def forget(self, channel: Channel) -> None:
        channel.open = False
        self._channels.pop(channel.number, None)

    async def close(self, error: SandboxError | None = None) -> None:
        """What was taken is still said, so that whoever comes next does not get it again."""
        if self._writer is not None:
            with contextlib.suppress(OSError, TimeoutError):
                self._writer.write(self._compose())
                async with asyncio.timeout(_PARTING_S):
                    await self._writer.drain()
        self._fail(error or SandboxGone("the connection to the sandbox was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def break_off(self, error: wire.ProtocolError) -> None:
        self._fail(AgentError("internal", f"the sandbox's agent broke the protocol: {error}"))
        if self._writer is not None:
            self._writer.close()

    def _fail(self, error: SandboxError) -> None:
        self._failure = self._failure or error
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.fail(self._failure)

    # -- connecting

    async def _run(self) -> None:
        """Until the line ends, or nobody needs it and it is down."""
        try:
            await self._keep_connected()
        except SandboxError as error:
            self._fail(error)
        except wire.ProtocolError as error:
            self.break_off(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever on a line that is no more
            _LOG.exception("the line to a sandbox's agent broke")
            self._fail(AgentError("internal", f"the line to the sandbox broke: {error!r}"))

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        pause = _PAUSE_S[0]
        while True:
            reason: Exception | None = None
            try:
                reader, writer = await asyncio.wait_for(self._connect(), _HELLO_S)
            except (OSError, TimeoutError) as error:
                reason = error
            else:
                try:
                    if await self._serve(reader, writer):
                        since, pause = loop.time(), _PAUSE_S[0]
                    if self._failure is not None or not self._channels:
                        return
                finally:
                    writer.close()
            if loop.time() - since > self._patience_s:
                said = f": {reason}" if reason else ""
                raise SandboxGone(f"the sandbox's agent did not answer for {self._patience_s:.0f} s{said}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_S[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One connection, to its end. Whether the agent greeted."""
        nonce = os.urandom(16)
        parser = wire.Parser(nonce)
        sender: asyncio.Task[None] | None = None
        listed = {number: channel.received + channel.ended for number, channel in self._channels.items()}
        try:
            writer.write(wire.hello(self._session, nonce, self._known, listed))
            while True:
                async with asyncio.timeout(None if sender else _HELLO_S):
                    data = await reader.read(_READ)
                if not data:
                    break
                frames = parser.feed(data)
                if sender is None and frames:
                    self._greeted(frames.pop(0), listed)
                    sender = asyncio.create_task(self._send(writer), name="to a sandbox's agent")
                    self._writer = writer
                for frame in frames:
                    self._on_frame(frame)
        except (OSError, TimeoutError):
            pass
        finally:
            self._writer = None
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        return sender is not None

    def _greeted(self, frame: wire.Frame, listed: dict[int, int]) -> None:
        if frame.kind == wire.BYE:
            raise SandboxGone("the sandbox's agent has another host now, or was started anew")
        if frame.kind != wire.HELLO:
            raise wire.ProtocolError("the agent did not greet")
        greeting = wire.greeting(frame.payload)
        if self._known and not greeting.resumed:
            raise wire.ProtocolError("the agent began anew without being asked to")
        self._known = True
        for number, channel in list(self._channels.items()):
            if number in greeting.received:
                channel.resume(greeting.received[number])
            elif number in listed and number <= greeting.newest and greeting.resumed:
                self.forget(channel)
                channel.fail(AgentError("unavailable", "the sandbox forgot about it"))
            else:
                channel.resume(0)
        for number in greeting.received:
            if number not in self._channels:
                self._resets.append(number)
        self._work.set()

    # -- frames

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while made := self._compose():
                    writer.write(made)
                    await writer.drain()
        except OSError:
            writer.close()  # the reader sees the end and connects again

    def _compose(self) -> bytes:
        """What there is to send: a frame of each channel, acknowledgements first."""
        acks, self._acks = self._acks, {}
        resets, self._resets = self._resets, []
        frames = [wire.frame(number, wire.ACK, offset) for number, offset in acks.items()]
        frames += [wire.frame(number, wire.RESET) for number in resets]
        frames += [made for channel in self._channels.values() if (made := channel.next_frame()) is not None]
        return b"".join(frames)

    def _on_frame(self, frame: wire.Frame) -> None:
        channel = self._channels.get(frame.stream)
        if frame.kind == wire.HELLO or (frame.stream >= self._next):
            raise wire.ProtocolError("a frame that nobody asked for")
        if channel is None:
            return
        if frame.kind == wire.DATA:
            channel.on_data(frame.offset, frame.payload, frame.flags == wire.FIN)
        elif frame.kind == wire.ACK:
            channel.on_ack(frame.offset)
        elif frame.kind == wire.STOP:
            channel.on_stop(frame.offset)
        elif frame.kind == wire.RESET:
            self.forget(channel)
            channel.fail(AgentError("unavailable", "the sandbox let go of it"))
