"""QEMU's control channel.

Owns: one connection, its questions and answers, descriptors handed over with them, the events that are waited for.

Must not know: what is asked.

Guarantees: every question ends in its answer, ``QemuError`` or ``SandboxGone``; one that takes longer than its limit
fails. QEMU is confined but runs an enemy's machine: an answer has bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from venusrl.sandboxes.protocol import SandboxError, SandboxGone

_LONGEST = 4 << 20
ANSWER_S = 60.0


class QemuError(SandboxError):
    """QEMU refused; its own words."""

    reason = "qemu_error"


class Qmp:
    """Use ``connect``. One question at a time; events set ``events[name]`` to their newest data."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._asking = asyncio.Lock()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._changed = asyncio.Event()
        self.events: dict[str, dict[str, Any]] = {}
        self.closed = asyncio.Event()
        self._task = asyncio.create_task(self._listen(), name="QMP")

    @classmethod
    async def connect(cls, path: Path) -> Qmp:
        """Raises SandboxGone when nothing answers."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(path))
        except OSError as error:
            sock.close()
            raise SandboxGone(f"the virtual machine's control socket is dead: {error}") from error
        qmp = cls(sock)
        try:
            await qmp.ask("qmp_capabilities", timeout_s=20.0)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await qmp.close()
            raise
        return qmp

    async def ask(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        fds: Sequence[int] = (),
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """QEMU's answer."""
        question: dict[str, Any] = {"execute": command}
        if arguments:
            question["arguments"] = arguments
        async with self._asking:
            if self.closed.is_set():
                raise SandboxGone("the virtual machine has ended")
            self._answer = asyncio.get_running_loop().create_future()
            data = json.dumps(question).encode() + b"\n"
            try:
                if fds:
                    sent = socket.send_fds(self._socket, [data], list(fds))
                    data = data[sent:]
                await asyncio.get_running_loop().sock_sendall(self._socket, data)
                answer = await asyncio.wait_for(self._answer, timeout_s)
            except TimeoutError:
                await self.close()  # a late answer must not be taken for another question's
                raise SandboxGone(f"QEMU did not answer {command} within {timeout_s:.0f} s") from None
            except OSError as error:
                raise SandboxGone(f"the virtual machine has ended: {error}") from error
            finally:
                self._answer = None
        if "error" in answer:
            raise QemuError(f"{command}: {str(answer['error'].get('desc'))[:500]}")
        return answer.get("return")

    async def give(self, name: str, fd: int) -> None:
        """Hand over a descriptor under a name."""
        await self.ask("getfd", {"fdname": name}, [fd])

    async def migrated(self, *, timeout_s: float) -> None:
        """Until a migration, in or out, is over. Raises QemuError when it failed."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    status = self.events.get("MIGRATION", {}).get("status")
                    if status == "completed":
                        return
                    if status in ("failed", "cancelled"):
                        found = await self.ask("query-migrate")
                        raise QemuError(f"migration {status}: {str(found.get('error-desc', ''))[:300]}")
                    if self.closed.is_set():
                        raise SandboxGone("QEMU ended while the machine's state moved")
                    await self._changed.wait()
        except TimeoutError:
            raise QemuError(f"the machine's state did not move within {timeout_s:.0f} s") from None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._socket, 65536):
                self._buffer += data
                if len(self._buffer) > _LONGEST:
                    break
                while (end := self._buffer.find(b"\n")) >= 0:
                    line = bytes(self._buffer[:end])
                    del self._buffer[: end + 1]
                    self._on_message(json.loads(line))
        except (OSError, ValueError):
            pass  # whatever broke it: the connection is over
        finally:
            self.closed.set()
            self._changed.set()
            self._socket.close()
            if self._answer is not None and not self._answer.done():
                with contextlib.suppress(asyncio.InvalidStateError):
                    self._answer.set_exception(SandboxGone("the virtual machine ended"))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self.events[str(message["event"])[:64]] = message.get("data") or {}
            self._changed.set()
        elif ("return" in message or "error" in message) and self._answer is not None and not self._answer.done():
            self._answer.set_result(message)
