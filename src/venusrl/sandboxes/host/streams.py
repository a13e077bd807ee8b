"""Small helpers around what flows into a sandbox and who may start.

Owns: ``CountedStream`` (tells when a connection ends), ``Turn`` (a place among those that start at once).

Must not know: sandboxes.

Guarantees: ``CountedStream`` tells its end once; a wait for a turn has a limit and says what it waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from venusrl.sandboxes.agent.api import Stream
from venusrl.sandboxes.protocol import SandboxDenied


class CountedStream:
    """A stream whose ``close`` calls ``ended`` once."""

    def __init__(self, stream: Stream, ended: Callable[[], None]) -> None:
        self._stream = stream
        self._ended: Callable[[], None] | None = ended

    async def read(self) -> bytes:
        return await self._stream.read()

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def write_eof(self) -> None:
        await self._stream.write_eof()

    async def close(self) -> None:
        ended, self._ended = self._ended, None
        try:
            await self._stream.close()
        finally:
            if ended is not None:
                ended()


class Turn:
    """``async with``: wait for a place of ``turns``, at most ``seconds``. Raises SandboxDenied."""

    def __init__(self, turns: asyncio.Semaphore, seconds: float, sandbox: str) -> None:
        self._turns = turns
        self._seconds = seconds
        self._sandbox = sandbox

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._turns.acquire()
        except TimeoutError:
            raise SandboxDenied(
                f"sandbox {self._sandbox} waited {self._seconds:g} s for its turn: the host is busy starting others",
                self._seconds / 2,
            ) from None

    async def __aexit__(self, *_: object) -> None:
        self._turns.release()
