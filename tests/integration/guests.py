"""An agent as an ordinary process of this machine, with a line that can be cut."""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from venusrl.sandboxes.agent import build
from venusrl.sandboxes.agent.api import AgentError, Exit, Output, Process, ProcessSpec, Settings, Size
from venusrl.sandboxes.agent.client import AgentClient, unix
from venusrl.sandboxes.protocol import SandboxGone

ME = getpass.getuser()


class Guest:
    """A running agent. ``client`` is settled; ``cut`` breaks its connection; ``another`` makes a second client."""

    def __init__(self, path: Path, pid: int) -> None:
        self.path = path
        self.pid = pid
        self.connections = 0
        self.open_to_new = True
        self._writers: list[asyncio.StreamWriter] = []
        self.client = self.another()

    def another(self, patience_s: float = 5.0) -> AgentClient:
        return AgentClient(self._connect, patience_s=patience_s, answer_s=20.0)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.open_to_new:
            raise ConnectionRefusedError("cut by the test")
        reader, writer = await asyncio.open_unix_connection(self.path)
        self.connections += 1
        self._writers.append(writer)
        return reader, writer

    def cut(self) -> None:
        """Whatever is on its way, either way, is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def guest(folder: Path) -> AsyncIterator[Guest]:
    """An agent that ends with the test, and everything it started."""
    program = await build.program()
    path = folder / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        process = await asyncio.create_subprocess_exec(
            program, "--fd", str(listener.fileno()), pass_fds=[listener.fileno()], env={}
        )
    made = Guest(path, process.pid)
    try:
        await made.client.settle(Settings(sandbox="test", env={"FROM_SETTINGS": "yes"}, user=ME))
        yield made
        await end_all(made)
    finally:
        await made.client.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def end_all(made: Guest) -> None:
    cleaner = AgentClient(unix(made.path))
    with suppress(SandboxGone):
        for info in await cleaner.processes():
            with suppress(AgentError):
                await (await cleaner.attach(info.pid, output=False)).signal(9)
    await cleaner.close()


def shell(command: str, *, stdin: bool = False, pty: Size | None = None, user: str = ME) -> ProcessSpec:
    return ProcessSpec(("/bin/sh", "-c", command), user, stdin=stdin, pty=pty, cwd="/")


class Ended(msgspec.Struct):
    """All a process said."""

    stdout: bytes
    stderr: bytes
    pty: bytes
    exit: Exit | None


async def all_of(process: Process) -> Ended:
    ended = Ended(b"", b"", b"", None)
    pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
    async for event in process.events():
        if isinstance(event, Output):
            pieces[event.stream].append(event.data)
        else:
            assert ended.exit is None
            ended.exit = event
    ended.stdout, ended.stderr, ended.pty = (b"".join(pieces[name]) for name in ("stdout", "stderr", "pty"))
    return ended


async def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        stat = await asyncio.to_thread(Path(f"/proc/{pid}/stat").read_text)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
