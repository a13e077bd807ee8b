"""The runtime's end of the forge's socket.

Owns: the forge's process, requests and their answers, a new forge when the last one ended.

Must not know: sandboxes.

Guarantees: every request ends: with its answer, the forge's error, or SandboxError when the forge ends first or says
nothing for too long (it is then ended: sandboxes that were made do not mind).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.namespace import orders, wire
from venusrl.sandboxes.runtimes.namespace.orders import Answer, Order

_ANSWER_S = 60.0
_END_S = 5.0


class ForgeLink:
    """A running forge. Made by ``start``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log = log
        self._next = 0
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self.ended: str | None = None
        """Why it ended, once it has."""
        self._receiver = asyncio.create_task(self._receive(), name="sandbox forge answers")

    @classmethod
    async def start(cls, log: Path) -> ForgeLink:
        """Start the process. It needs a Prepare order first."""
        ours, theirs = socket.socketpair()
        try:
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-m", "venusrl.sandboxes.runtimes.namespace.forge"),
                    str(theirs.fileno()),
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
            raise RuntimeUnavailable(f"the sandbox forge could not be started: {error}") from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, build: Callable[[int], Order]) -> Answer:
        """Send a request and wait for its answer."""
        if self.ended is not None:
            raise SandboxError(self.ended)
        self._next += 1
        number = self._next
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self._writer.write(orders.encode(build(number)))
        try:
            return await asyncio.wait_for(future, _ANSWER_S)
        except TimeoutError:
            self._process.kill()
            raise SandboxError(f"the sandbox forge answered nothing for {_ANSWER_S:.0f} s and was ended") from None
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """Let it end; sandboxes go on."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._receiver

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(wire.HEADER_BYTES)
                answer = orders.decode_answer(await self._reader.readexactly(wire.body_length(header)))
                self._settle(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            self.ended = f"the sandbox forge ended (exit code {code}): {self._last_words()}"
        finally:
            self._writer.close()
            self.ended = self.ended or "the sandbox forge was given up"
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(SandboxError(self.ended))
                    future.exception()  # whoever still waits sees it; nobody waiting is no error

    def _settle(self, answer: Answer) -> None:
        future = self._pending.pop(answer.id, None)
        if future is None or future.done():
            return
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
