"""The node's end of the launcher's socket.

Owns: the launcher process, requests and their replies.

Must not know: which sandboxes exist, admission, ownership.

Guarantees: every request ends: with its reply, the launcher's error, or SandboxGone when the launcher ends
first. ``on_end`` is called once, however the launcher ends.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.namespace import wire

_END_TIMEOUT_S = 15.0


class LauncherClient:
    """A running launcher. Made by ``start``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
        on_end: Callable[[str], None],
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log = log
        self._on_end = on_end
        self._next = 0
        self._heard_at = 0.0
        self._pending: dict[int, asyncio.Future[wire.Reply]] = {}
        self.ended: str | None = None
        """Why it ended, once it has."""
        self._receiver = asyncio.create_task(self._receive(), name="sandbox launcher replies")

    @classmethod
    async def start(cls, log: Path, on_end: Callable[[str], None]) -> LauncherClient:
        """Start the process. It needs a Setup request first."""
        ours, theirs = socket.socketpair()
        try:
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-m", "venusrl.sandboxes.runtimes.namespace.launcher"),
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
            raise RuntimeUnavailable(f"the sandbox launcher could not be started: {error}") from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return cls(process, reader, writer, log, on_end)

    def submit(self, build: Callable[[int], wire.Request]) -> tuple[int, asyncio.Future[wire.Reply]]:
        """Send a request; its number and its reply to come (an exception when it fails)."""
        if self.ended is not None:
            raise SandboxGone(self.ended)
        self._next += 1
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._pending[self._next] = future
        self._writer.write(wire.encode(build(self._next)))
        return self._next, future

    async def ask(self, build: Callable[[int], wire.Request], timeout_s: float) -> wire.Reply:
        """Send a request and wait for its reply. A launcher that answers nobody for that long is ended."""
        number, future = self.submit(build)
        try:
            return await self.wait(future, timeout_s)
        finally:
            self._pending.pop(number, None)

    async def wait(self, future: asyncio.Future[wire.Reply], timeout_s: float) -> wire.Reply:
        """Wait for a submitted request. A launcher that answers nobody for that long is ended.

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
                raise SandboxError(f"the sandbox launcher answered nothing for {timeout_s:.0f} s and was ended")
        return future.result()

    async def close(self) -> None:
        """Let the launcher clean up and end; force it after a while."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._receiver

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(wire.HEADER_BYTES)
                reply = wire.decode_reply(await self._reader.readexactly(wire.body_length(header)))
                self._heard_at = asyncio.get_running_loop().time()
                self._settle(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            self.ended = f"the sandbox launcher ended (exit code {code}): {self._last_words()}"
        finally:
            self._writer.close()
            self.ended = self.ended or "the sandbox launcher was given up"
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(SandboxGone(self.ended))
                    future.exception()  # whoever still waits sees it; nobody waiting is no error
            self._pending.clear()
            self._on_end(self.ended)

    def _settle(self, reply: wire.Reply) -> None:
        future = self._pending.pop(reply.id, None)
        if future is None or future.done():
            return  # its caller has gone
        if isinstance(reply, wire.Failed):
            future.set_exception(wire.error_of(reply))
            future.exception()
        else:
            future.set_result(reply)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError as error:
            return f"its log cannot be read ({error})"
        return f"{lines[-1]} (more in {self._log})" if lines else "it said nothing"
