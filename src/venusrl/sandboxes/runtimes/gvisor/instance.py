"""One gVisor sandbox.

Owns: its states (running; frozen: processes stopped where they are; files: nothing runs, its files are kept), pausing,
snapshots, noticing its end.

Must not know: how it is made (``place``), other sandboxes.

Guarantees: those of ``runtimes.base``. Processes are never kept on disk: gVisor cannot save a sandbox whose agent's
socket the host has made a connection to.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from venusrl.sandboxes.agent.api import Agent, Exit, ProcessSpec, Settings
from venusrl.sandboxes.agent.client import AgentClient
from venusrl.sandboxes.agent.link import Connector
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused, Unsupported
from venusrl.sandboxes.runtimes.base import Footprint, Network, Shortages, Snapshot, Spec
from venusrl.sandboxes.runtimes.gvisor.place import Place, Runsc
from venusrl.sandboxes.runtimes.namespace import archive
from venusrl.sandboxes.runtimes.namespace.instance import start_time
from venusrl.sandboxes.templates.api import Image

NAME = "gvisor"
_FILES = "files"
_SETTLE_S = 20.0
_AGENTS_OWN_S = 5.0
_READY_S = 300.0
_READY_EVERY_S = 0.1
State = Literal["running", "frozen", "files"]


class Record(msgspec.Struct, frozen=True):
    """What ``adopt`` needs."""

    spec: Spec
    state: State
    pid: int
    start_time: int


class GvisorInstance:
    """Implements ``runtimes.base.Instance``."""

    def __init__(
        self,
        place: Place,
        runsc: Runsc,
        spec: Spec,
        program: Path,
        connect: Connector,
        forgotten: Callable[[str], None],
    ) -> None:
        self._place = place
        self._runsc = runsc
        self._spec = spec
        self._program = program
        self._connect = connect
        self._forgotten = forgotten
        self._state: State = "running"
        self._pid = 0
        self._start_time = 0
        self._pidfd: int | None = None
        self._agent: AgentClient | None = None
        self._ended = False
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # -- what the runtime calls

    async def launch(self, kept: Path | None) -> None:
        """Start it and settle its agent. Raises SandboxError; then ``kill`` is due."""
        work = asyncio.create_task(asyncio.to_thread(self._place.make, self._spec, self._program, kept))
        try:
            pid = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait((work,))  # half made it cannot be removed
            raise
        self.watch(pid, start_time(pid))
        await self._settle()
        self._state = "running"

    def watch(self, pid: int, started: int | None) -> None:
        """Hold on to its process. Raises SandboxGone."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise SandboxGone(f"sandbox {self._spec.id} ended as it began: {self._last_words()}") from None
        if started is None or start_time(pid) != started:
            os.close(pidfd)
            raise SandboxGone(f"sandbox {self._spec.id} ended")
        self._pid, self._start_time, self._pidfd = pid, started, pidfd
        self._agent = AgentClient(self._connect)
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    async def let_go(self) -> None:
        """Hold it no more; it goes on."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._agent is not None:
            agent, self._agent = self._agent, None
            await agent.close()

    def take_up(self, record: Record) -> None:
        """Go on where an earlier process was. Raises SandboxGone."""
        self._state = record.state
        if record.state != "files":
            self.watch(record.pid, record.start_time)

    # -- Instance

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def agent(self) -> Agent:
        self._require_alive()
        if self._state != "running" or self._agent is None:
            raise SandboxPaused(f"sandbox {self._spec.id} is paused: resume it first")
        return self._agent

    def record(self) -> bytes:
        return msgspec.json.encode(Record(self._spec, self._state, self._pid, self._start_time))

    async def pause(self, *, memory: bool = True) -> None:
        """With processes (and ``memory``) they are stopped where they are, which frees processors, not memory."""
        self._require_alive()
        if self._state == "files" or (self._state == "frozen" and memory):
            return
        if memory and await self._busy():
            await asyncio.to_thread(self._runsc.call, "pause", self._place.container)
            self._state = "frozen"
            return
        part = self._place.files.with_suffix(".part")
        part.unlink(missing_ok=True)
        await self._packed(part)
        part.rename(self._place.files)
        await self.let_go()
        await asyncio.to_thread(self._place.stop)
        self._state = "files"

    async def resume(self) -> None:
        self._require_alive()
        if self._state == "frozen":
            await asyncio.to_thread(self._runsc.call, "resume", self._place.container)
            self._state = "running"
        elif self._state == "files":
            try:
                await self.launch(self._place.files)
            except BaseException:  # whatever it was, it is paused as before
                await self.let_go()
                await asyncio.shield(asyncio.to_thread(self._place.stop))
                raise
            self._place.files.unlink()

    async def snapshot(self, directory: Path, *, memory: bool = True) -> Snapshot:
        """Files only. Raises Unsupported when memory is asked for and there is some to keep."""
        self._require_alive()
        if memory and self._state != "files" and await self._others_run():
            raise Unsupported(
                "the gvisor runtime cannot keep running processes in a snapshot: end them, ask for the files only, "
                "or use the microvm runtime"
            )
        directory.mkdir(mode=0o700, parents=True)  # noqa: ASYNC240 - one small local directory
        try:
            if self._state == "files":
                await asyncio.to_thread(shutil.copyfile, self._place.files, directory / _FILES)
            else:
                await self._packed(directory / _FILES)
        except BaseException:  # whatever it was, cancelled included, leaves nothing behind
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory))
            raise
        size = (directory / _FILES).stat().st_size
        return Snapshot(str(directory), memory=False, bytes=size, runtime=NAME)

    async def set_network(self, network: Network) -> None:
        self._require_alive()
        check_network(network)

    async def footprint(self) -> Footprint:
        group = self._place.group()
        if self._state == "files" or group is None:
            return Footprint()
        try:
            held = await asyncio.to_thread(group.memory)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._spec.id} is no more") from None
        return Footprint(held.private, held.kernel, held.files, held.swap)

    async def shortages(self, disk: bool = True) -> Shortages:
        """Of the disk alone: runsc itself is what the kernel ends for want of memory, and its sandbox with it."""
        self._require_alive()
        try:
            space = os.statvfs(self._place.disk)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._spec.id} is no more") from None
        return Shortages(disk_full=space.f_bavail == 0 or space.f_favail == 0)

    async def died(self) -> str:
        return await asyncio.shield(self._died)

    async def kill(self) -> None:
        self._ended = True
        await self.let_go()
        await asyncio.shield(asyncio.to_thread(self._place.remove))
        self._forgotten(self._spec.id)

    # -- within

    async def _settle(self) -> None:
        """Fresh identity, then the template's start command."""
        image = self._spec.image
        await self._answering()
        agent = self.running_agent()
        await agent.settle(
            Settings(
                sandbox=self._spec.id,
                machine_id=secrets.token_hex(16),
                entropy=secrets.token_bytes(64),
                env={**image.env, **self._spec.env},
                user=image.user,
            )
        )
        if image.start is not None:
            await preload(agent, image)

    def running_agent(self) -> AgentClient:
        if self._agent is None:
            raise SandboxGone(f"sandbox {self._spec.id} is no more")
        return self._agent

    async def _answering(self) -> None:
        """The agent listens a moment after runsc says that it runs."""
        deadline = asyncio.get_running_loop().time() + _SETTLE_S
        while True:
            try:
                _, writer = await self._connect()
            except SandboxGone:
                if self._died.done() or asyncio.get_running_loop().time() > deadline:
                    raise SandboxGone(f"sandbox {self._spec.id} never answered: {self._last_words()}") from None
                await asyncio.sleep(0.002)
            else:
                writer.close()
                return

    async def _busy(self) -> bool:
        """Whether anything but the agent runs."""
        if self._state == "frozen":
            return True
        pids = await asyncio.to_thread(self._runsc.call, "ps", "--format", "json", self._place.container)
        return len(msgspec.json.decode(pids)) > 1

    async def _others_run(self) -> bool:
        """Whether anything but the agent does. What that does itself (a file was just written) ends by itself."""
        deadline = asyncio.get_running_loop().time() + _AGENTS_OWN_S
        while await self._busy():
            late = asyncio.get_running_loop().time() > deadline
            if self._state != "running" or late or await self.running_agent().processes():
                return True
        return False

    async def _packed(self, target: Path) -> None:
        """Its files at one instant."""
        running = self._state == "running"
        if running:
            await asyncio.to_thread(self._runsc.call, "pause", self._place.container)
        try:
            await asyncio.to_thread(archive.pack, self._place.disk, target, 0)
        finally:
            if running:
                await asyncio.shield(asyncio.to_thread(self._runsc.call, "resume", self._place.container))

    def _on_end(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if not self._ended and not self._died.done():
            self._ended = True
            self._died.set_result(self._cause())

    def _cause(self) -> str:
        """runsc needs threads of the machine's for what runs inside, and ends without a word when it gets none."""
        group, limits = self._place.group(), self._spec.limits
        if group is not None and group.oom_kills():
            return f"out of memory: its limit is {limits.memory_mib} MiB; ask for more"
        if group is not None and group.refused_processes():
            return f"out of processes: its limit is {limits.pids}; start fewer at once"
        return f"its processes ended: {self._last_words()}"

    def _last_words(self) -> str:
        try:
            lines = (self._place.folder / "log").read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return lines[-1][-300:] if lines else "it said nothing"

    def _require_alive(self) -> None:
        if self._ended:
            raise SandboxGone(f"sandbox {self._spec.id} is no more")


def check_network(network: Network) -> None:
    """Raises SandboxError: there is none to give."""
    if network.internet or network.allow:
        raise Unsupported("the gvisor runtime has no network but loopback: use the namespace runtime for egress")


async def preload(agent: Agent, image: Image) -> None:
    """Run the template's start command and wait until it is ready. Raises SandboxError."""
    if image.start is None:
        return
    if image.start.command:
        spec = ProcessSpec(("/bin/sh", "-c", image.start.command), image.user, cwd=image.workdir, tag="start")
        await (await agent.start(spec)).detach()
    deadline = asyncio.get_running_loop().time() + _READY_S
    while image.start.ready:
        check = await agent.start(ProcessSpec(("/bin/sh", "-c", image.start.ready), image.user, cwd=image.workdir))
        codes = [event.code async for event in check.events() if isinstance(event, Exit)]
        if codes == [0]:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise SandboxError(
                f"the template {image.name} was not ready {_READY_S:.0f} s after its start command began"
            )
        await asyncio.sleep(_READY_EVERY_S)
