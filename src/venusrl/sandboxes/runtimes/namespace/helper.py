"""The owner's end of a helper process's socket: the node's launcher, the runtime's forge.

Owns: the helper's process, requests and their answers.

Must not know: what is asked, which sandboxes exist, admission, ownership.

Guarantees: every request ends: with its answer, the helper's error, or the kind's own error when the helper ends first
or answers nobody for too long (it is then ended). ``on_end`` is called once, however it ends.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.namespace import orders, wire


class Numbered(Protocol):
    @property
    def id(self) -> int: ...


_A = TypeVar("_A", bound=Numbered)


class Kind(msgspec.Struct, Generic[_A], frozen=True):
    """What a helper is called, the module it runs, how its answers are read, what its end means to those who wait, and
    for how many seconds it may take to end."""

    name: str
    module: str
    decode: Callable[[bytes], _A]
    lost: type[SandboxError]
    end_s: float


_HERE = "venusrl.sandboxes.runtimes.namespace"
LAUNCHER: Kind[wire.Reply] = Kind("sandbox launcher", f"{_HERE}.launcher", wire.decode_reply, SandboxGone, 15.0)
"""Its sandboxes end with it."""
FORGE: Kind[orders.Answer] = Kind("sandbox forge", f"{_HERE}.forge", orders.decode_answer, SandboxError, 5.0)
"""Sandboxes that it made do not mind its end."""


def nobody(_why: str) -> None:
    """An ``on_end`` for who looks at ``ended`` instead."""


class Helper(Generic[_A]):
    """A running helper. Made by ``start``."""

    def __init__(
        self,
        kind: Kind[_A],
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        log: Path,
        on_end: Callable[[str], None],
    ) -> None:
        self._kind = kind
        self._process = process
        self._reader, self._writer = streams
        self._log = log
        self._on_end = on_end
        self._next = 0
        self._heard_at = 0.0
        self._pending: dict[int, asyncio.Future[_A]] = {}
        self.ended: str | None = None
        """Why it ended, once it has."""
        self._receiver = asyncio.create_task(self._receive(), name=f"answers of the {kind.name}")

    @classmethod
    async def start(cls, kind: Kind[_A], log: Path, on_end: Callable[[str], None] = nobody) -> Helper[_A]:
        """Start the process. Its first request sets it up."""
        ours, theirs = socket.socketpair()
        try:
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-m", kind.module, str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=errors,
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise RuntimeUnavailable(f"the {kind.name} could not be started: {error}") from None
        finally:
            theirs.close()
        return cls(kind, process, await asyncio.open_connection(sock=ours, limit=1 << 20), log, on_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, build: Callable[[int], msgspec.Struct]) -> tuple[int, asyncio.Future[_A]]:
        """Send a request; its number and its answer to come (an exception when it fails)."""
        if self.ended is not None:
            raise self._kind.lost(self.ended)
        self._next += 1
        future: asyncio.Future[_A] = asyncio.get_running_loop().create_future()
        self._pending[self._next] = future
        self._writer.write(wire.encode(build(self._next)))
        return self._next, future

    async def ask(self, build: Callable[[int], msgspec.Struct], timeout_s: float) -> _A:
        """Send a request and wait for its answer, as ``wait`` does."""
        number, future = self.submit(build)
        try:
            return await self.wait(future, timeout_s)
        finally:
            self._pending.pop(number, None)

    async def wait(self, future: asyncio.Future[_A], timeout_s: float) -> _A:
        """Wait for a submitted request. A helper that answers nobody for that long is ended.

        Silence is what counts, not this request's turn: behind a hundred others on a starved machine a healthy
        launcher takes minutes, and ending it would lose every sandbox of the node.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while not future.done():
            silent_since = max(asked_at, self._heard_at)
            await asyncio.wait((future,), timeout=max(0.0, silent_since + timeout_s - loop.time()))
            if not future.done() and loop.time() - max(asked_at, self._heard_at) >= timeout_s:
                self._process.kill()
                raise SandboxError(f"the {self._kind.name} answered nothing for {timeout_s:.0f} s and was ended")
        return future.result()

    async def close(self) -> None:
        """Let it clean up and end; force it after a while."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), self._kind.end_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._receiver

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(wire.HEADER_BYTES)
                answer = self._kind.decode(await self._reader.readexactly(wire.body_length(header)))
                self._heard_at = asyncio.get_running_loop().time()
                self._settle(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            self.ended = f"the {self._kind.name} ended (exit code {code}): {self._last_words()}"
        finally:
            self._writer.close()
            self.ended = self.ended or f"the {self._kind.name} was given up"
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(self._kind.lost(self.ended))
                    future.exception()  # whoever still waits sees it; nobody waiting is no error
            self._pending.clear()
            self._on_end(self.ended)

    def _settle(self, answer: _A) -> None:
        future = self._pending.pop(answer.id, None)
        if future is None or future.done():
            return  # its caller has gone
        if isinstance(answer, wire.Failed):
            future.set_exception(wire.error_of(answer))
            future.exception()
        else:
            future.set_result(answer)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError as error:
            return f"its log cannot be read ({error})"
        return f"{lines[-1]} (more in {self._log})" if lines else "it said nothing"
