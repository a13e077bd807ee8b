"""A sandbox's agent, seen through a door that stops the virtual processors while nobody needs them.

Owns: counting what is under way, the idle policy, waking. Must not know: QEMU (it is given ``wake`` and ``sleep``).

Guarantees: no question reaches a stopped machine; a machine with a process that the agent started, a held stream or
watch, or processors at work is never stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from venusrl.sandboxes.agent.api import (
    Agent,
    Change,
    Entry,
    Exit,
    Output,
    Process,
    ProcessInfo,
    ProcessSpec,
    Settings,
    Size,
    Stream,
    Usage,
)
from venusrl.sandboxes.protocol import SandboxError

_T = TypeVar("_T")
Step = Callable[[], Awaitable[None]]


class IdlePolicy(msgspec.Struct, frozen=True):
    """Stop the processors ``after_s`` of silence, unless the guest's own are busier than ``busy_percent``.

    ``after_s`` 0: never stop.
    """

    after_s: float = 2.0
    busy_percent: float = 25.0


class IdleAgent:
    """An ``Agent``. ``wake`` lets the processors run, ``sleep`` stops them; both idempotent."""

    def __init__(
        self,
        agent: Agent,
        policy: IdlePolicy,
        wake: Step,
        sleep: Step,
        background: frozenset[int] = frozenset(),
        traffic: Callable[[], int] = lambda: 0,
    ) -> None:
        """``background``: processes that came with the template (a server waits for requests, which wake it).
        ``traffic``: bytes that its network has carried so far; a machine whose network carries some is not idle."""
        self._agent = agent
        self._background = background
        self._policy = policy
        self._wake = wake
        self._sleep = sleep
        self._traffic = traffic
        self._under_way = 0
        self._turn = asyncio.Lock()
        self._asleep = False
        self._touched = asyncio.Event()
        self._task = (
            asyncio.create_task(self._watch(), name="idle watch of a virtual machine") if policy.after_s else None
        )

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """The processors run while this is held."""
        self._under_way += 1
        try:
            async with self._turn:
                if self._asleep:
                    await self._wake()
                    self._asleep = False
            yield
        finally:
            self._under_way -= 1
            self._touched.set()

    async def _watch(self) -> None:
        """Ends with the machine: its first failed question."""
        with contextlib.suppress(SandboxError):
            carried = self._traffic()
            while True:
                self._touched.clear()
                try:
                    async with asyncio.timeout(self._policy.after_s):  # wait_for may lose a cancellation (3.11)
                        await self._touched.wait()
                    continue
                except TimeoutError:
                    pass
                before, carried = carried, self._traffic()
                if carried != before:
                    async with self.awake():  # what came is for somebody inside
                        continue
                if not self._under_way and not self._asleep and await self._is_idle():
                    async with self._turn:
                        if not self._under_way:
                            await self._sleep()
                            self._asleep = True

    async def _is_idle(self) -> bool:
        if any(info.pid not in self._background for info in await self._agent.processes()):
            return False
        return (await self._agent.usage()).cpu_percent < self._policy.busy_percent

    async def _do(self, work: Callable[[], Awaitable[_T]]) -> _T:
        async with self.awake():
            return await work()

    async def settle(self, settings: Settings) -> None:
        await self._do(lambda: self._agent.settle(settings))

    async def start(self, spec: ProcessSpec) -> Process:
        return _AwakeProcess(await self._do(lambda: self._agent.start(spec)), self)

    async def attach(self, pid: int, *, output: bool = True, since: int | None = None) -> Process:
        return _AwakeProcess(await self._do(lambda: self._agent.attach(pid, output=output, since=since)), self)

    async def processes(self) -> list[ProcessInfo]:
        return await self._do(self._agent.processes)

    async def stat(self, path: str, user: str) -> Entry:
        return await self._do(lambda: self._agent.stat(path, user))

    async def list(self, path: str, user: str, depth: int = 1) -> list[Entry]:
        return await self._do(lambda: self._agent.list(path, user, depth))

    async def make_directory(self, path: str, user: str) -> Entry:
        return await self._do(lambda: self._agent.make_directory(path, user))

    async def move(self, source: str, target: str, user: str) -> Entry:
        return await self._do(lambda: self._agent.move(source, target, user))

    async def remove(self, path: str, user: str) -> None:
        await self._do(lambda: self._agent.remove(path, user))

    async def read(self, path: str, user: str) -> AsyncIterator[bytes]:
        async with self.awake():
            async for piece in self._agent.read(path, user):
                yield piece

    async def write(
        self, path: str, user: str, data: AsyncIterator[bytes], attributes: dict[str, str] | None = None
    ) -> Entry:
        return await self._do(lambda: self._agent.write(path, user, data, attributes))

    async def watch(
        self, path: str, user: str, recursive: bool = False, ready: asyncio.Event | None = None
    ) -> AsyncIterator[Change]:
        async with self.awake():
            async for change in self._agent.watch(path, user, recursive, ready):
                yield change

    async def usage(self) -> Usage:
        return await self._do(self._agent.usage)

    async def quiesce(self) -> None:
        await self._do(self._agent.quiesce)

    async def sever(self) -> None:
        await self._do(self._agent.sever)

    async def connect(self, port: int) -> Stream:
        held = self.awake()
        await held.__aenter__()
        try:
            return _AwakeStream(await self._agent.connect(port), held)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await held.__aexit__(None, None, None)
            raise

    async def close(self, error: SandboxError | None = None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._agent.close(error)


class _AwakeProcess:
    """A process keeps its machine awake by running; a question about it wakes the machine too."""

    def __init__(self, process: Process, door: IdleAgent) -> None:
        self._process = process
        self._door = door

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def span(self) -> tuple[int, int] | None:
        return self._process.span

    async def events(self) -> AsyncIterator[Output | Exit]:
        async with self._door.awake():
            async for event in self._process.events():
                yield event

    async def send(self, data: bytes) -> None:
        async with self._door.awake():
            await self._process.send(data)

    async def close_stdin(self) -> None:
        async with self._door.awake():
            await self._process.close_stdin()

    async def signal(self, number: int) -> None:
        async with self._door.awake():
            await self._process.signal(number)

    async def resize(self, size: Size) -> None:
        async with self._door.awake():
            await self._process.resize(size)

    async def detach(self) -> None:
        async with self._door.awake():
            await self._process.detach()


class _AwakeStream:
    """A connection into the machine; held until it is closed."""

    def __init__(self, stream: Stream, held: contextlib.AbstractAsyncContextManager[None]) -> None:
        self._stream = stream
        self._held: contextlib.AbstractAsyncContextManager[None] | None = held

    async def read(self) -> bytes:
        return await self._stream.read()

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def write_eof(self) -> None:
        await self._stream.write_eof()

    async def close(self) -> None:
        held, self._held = self._held, None
        try:
            await self._stream.close()
        finally:
            if held is not None:
                await held.__aexit__(None, None, None)
