"""One persistent sandbox of the namespace runtime.

Owns: its life: running, frozen, kept as files only, ended; its record.

Must not know: the forge's protocol (it asks its ``Maker``), E2B, admission.

Guarantees: those of ``runtimes.base.Instance``. Whatever a sandbox holds outside its processes (control group, socket,
kept files, ids) goes with ``kill``, and by itself when its PID 1 ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from venusrl.sandboxes.agent.api import Agent, Settings
from venusrl.sandboxes.protocol import SandboxError, SandboxGone, SandboxPaused, Unsupported
from venusrl.sandboxes.runtimes.base import Footprint, Network, Shortages, Snapshot, Spec
from venusrl.sandboxes.runtimes.namespace import archive, pageout
from venusrl.sandboxes.runtimes.namespace.egress import Egress
from venusrl.sandboxes.runtimes.namespace.groups import PersistentGroup
from venusrl.sandboxes.runtimes.namespace.orders import HIDDEN

FILES = "files"
RUNTIME = "namespace"
_END_S = 10.0
_SETTLE_S = 30.0
_AGENTS_OWN_S = 5.0
State = Literal["running", "frozen", "files", "ended"]


class Init(msgspec.Struct, frozen=True):
    """A sandbox's PID 1 as the machine sees it, and the first of its host ids (None = unprivileged)."""

    pid: int
    start_time: int
    base: int | None


class Record(msgspec.Struct, frozen=True):
    """What a later process needs. ``init`` None = only files are kept."""

    spec: Spec
    state: State
    boot: str
    init: Init | None
    boot_id: str = ""


class Maker(Protocol):
    """What an instance needs of its runtime."""

    egress: Egress
    boot: str

    async def begin(self, spec: Spec, files: Path | None, boot_id: str) -> Init:
        """Start its processes, with those files. Raises SandboxError, leaving nothing."""
        ...

    def agent(self, sandbox: str) -> Agent: ...

    def group(self, sandbox: str) -> PersistentGroup | None: ...

    def kept(self, sandbox: str) -> Path:
        """The directory for its files while it is paused."""
        ...

    async def clear(self, sandbox: str, base: int | None) -> None:
        """Remove what it has outside its processes, which are gone."""
        ...

    def forgotten(self, sandbox: str) -> None:
        """It is no more."""
        ...

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...


class NamespaceInstance:
    """Implements ``runtimes.base.Instance``."""

    def __init__(self, maker: Maker, spec: Spec, state: State = "running", boot_id: str = "") -> None:
        self._maker = maker
        self._spec = spec
        self._state: State = state
        self._boot_id = boot_id or str(uuid.uuid4())
        self._init: Init | None = None
        self._pidfd: int | None = None
        self._agent: Agent | None = None
        self._over = asyncio.Event()
        self._ending = False
        self._end: asyncio.Task[None] | None = None
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._oom_seen = 0

    # -- what the runtime calls

    async def launch(self, files: Path | None) -> None:
        """Start it and settle its agent. Raises SandboxError; then ``kill`` is still to be called."""
        init = await self._maker.begin(self._spec, files, self._boot_id)
        try:
            self.watch(init)
        except SandboxGone:
            await self._maker.clear(self._spec.id, init.base)
            raise
        try:
            await self._settle()
        except SandboxGone as error:
            raise SandboxGone(f"sandbox {self._spec.id} ended as it began: {error}") from error
        await self._connect(self._spec.network)

    def watch(self, init: Init) -> None:
        """Hold on to its PID 1. Raises SandboxGone when that has ended."""
        try:
            pidfd = os.pidfd_open(init.pid)
        except ProcessLookupError:
            raise SandboxGone(f"sandbox {self._spec.id} ended as it began") from None
        if start_time(init.pid) != init.start_time:
            os.close(pidfd)
            raise SandboxGone(f"sandbox {self._spec.id} ended")
        self._init, self._pidfd = init, pidfd
        self._over.clear()
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    async def take_up(self, init: Init) -> None:
        """Hold on to one that an earlier process made, and end what that was in the middle of: a freeze, a thaw.

        Raises SandboxGone when it has ended.
        """
        self.watch(init)
        group = self._maker.group(self._spec.id)
        if group is not None:
            await asyncio.to_thread(group.freeze if self._state == "frozen" else group.thaw)

    def let_go(self) -> None:
        """Hold it no more; it goes on."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def let_go_of_agent(self) -> None:
        if self._agent is not None:
            agent, self._agent = self._agent, None
            await agent.close()

    # -- Instance

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def agent(self) -> Agent:
        self._require_alive()
        if self._state != "running":
            raise SandboxPaused(f"sandbox {self._spec.id} is paused: resume it first")
        if self._agent is None:
            self._agent = self._maker.agent(self._spec.id)
        return self._agent

    def record(self) -> bytes:
        return msgspec.json.encode(Record(self._spec, self._state, self._maker.boot, self._init, self._boot_id))

    async def pause(self, *, memory: bool = True) -> None:
        """Keeps the files only when that is asked for or nothing but the agent runs; else freezes."""
        self._require_alive()
        if self._state == "files" or (self._state == "frozen" and memory):
            return
        group = self._freezable()
        await asyncio.to_thread(group.freeze)
        try:
            if memory and len(group.pids()) > 1:
                await asyncio.to_thread(pageout.page_out, group.pids())
                self._state = "frozen"
                return
            kept = self._maker.kept(self._spec.id)
            await asyncio.to_thread(_remake, kept)
            await asyncio.to_thread(archive.pack, self._disk(), kept / FILES, self._base())
        except BaseException:  # whatever it was, cancelled included, leaves it running
            if self._state == "running":
                group.thaw()
            raise
        self._state = "files"
        if not memory:
            # What was asked for is a restart; without a process to keep the rest is our own saving, not to be seen.
            self._boot_id = str(uuid.uuid4())
        await self._end_processes()

    async def resume(self) -> None:
        self._require_alive()
        if self._state == "frozen":
            group = self._maker.group(self._spec.id)
            assert group is not None
            group.thaw()
            self._state = "running"
        elif self._state == "files":
            kept = self._maker.kept(self._spec.id)
            self._over.clear()
            self._state = "running"
            try:
                await self.launch(kept / FILES)
            except BaseException:  # whatever it was, cancelled included, leaves it paused
                self._state = "files"
                await asyncio.shield(self._maker.supervise(self._end_processes(), "undoing a resume"))
                raise
            await asyncio.to_thread(shutil.rmtree, kept)

    async def snapshot(self, directory: Path, *, memory: bool = True) -> Snapshot:
        """Files only. Raises Unsupported when memory is asked for and there is some to keep."""
        self._require_alive()
        group = None if self._state == "files" else self._freezable()
        if group is not None and memory and await self._others_run(group):
            raise Unsupported(
                "the namespace runtime cannot keep running processes in a snapshot: end them, ask for the files only, "
                "or use the microvm runtime"
            )
        directory.mkdir(mode=0o700, parents=True)  # noqa: ASYNC240 - one small local directory
        try:
            if group is None:
                await asyncio.to_thread(shutil.copy, self._maker.kept(self._spec.id) / FILES, directory / FILES)
            else:
                await self._pack_frozen(group, directory / FILES)
        except BaseException:  # whatever it was, cancelled included, leaves nothing behind
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory))
            raise
        size = (directory / FILES).stat().st_size
        return Snapshot(str(directory), memory=False, bytes=size, runtime=RUNTIME)

    async def _others_run(self, group: PersistentGroup) -> bool:
        """Whether anything but the agent does. What that does itself (a file was just written) ends by itself."""
        deadline = time.monotonic() + _AGENTS_OWN_S
        while len(group.pids()) > 1:
            if self._state != "running" or time.monotonic() > deadline or await self.agent.processes():
                return True
            await asyncio.sleep(0.005)
        return False

    async def set_network(self, network: Network) -> None:
        self._require_alive()
        if self._state == "running":
            await self._connect(network)
        elif self._state == "frozen":
            await self._maker.egress.connect(self._spec.id, self._pid(), network)
        self._spec = msgspec.structs.replace(self._spec, network=network)

    async def footprint(self) -> Footprint:
        self._require_alive()
        if self._state == "files":
            return Footprint()
        group = self._maker.group(self._spec.id)
        try:
            if group is None:
                return await asyncio.to_thread(pageout.footprint_of_tree, self._pid())
            held = group.memory()
            return pageout.with_compressed_swap(Footprint(held.private, held.kernel, held.files, held.swap))
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._spec.id} ended") from None

    async def shortages(self, disk: bool = True) -> Shortages:
        self._require_alive()
        group = self._maker.group(self._spec.id)
        if group is None or self._base_or_none() is None:
            return Shortages()  # nothing counts where there are no limits
        try:
            space = os.statvfs(self._disk())
            return Shortages(group.oom_kills(), space.f_bavail == 0 or space.f_favail == 0)
        except (FileNotFoundError, ProcessLookupError):
            raise SandboxGone(f"sandbox {self._spec.id} ended") from None

    async def died(self) -> str:
        return await asyncio.shield(self._died)

    async def kill(self) -> None:
        self._ending = True
        if self._end is None:
            self._end = self._maker.supervise(self._kill(), f"end of sandbox {self._spec.id}")
        await asyncio.shield(self._end)

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed something in it for want of memory since this was last asked."""
        group = self._maker.group(self._spec.id)
        if group is None or self._state == "files":
            return False
        with suppress(FileNotFoundError):
            kills = group.oom_kills()
            seen, self._oom_seen = self._oom_seen, kills
            return kills > seen
        return False

    # -- how

    async def _settle(self) -> None:
        image = self._spec.image
        settings = Settings(
            sandbox=self._spec.id,
            machine_id=uuid.uuid4().hex,
            entropy=os.urandom(64),
            env={**image.env, **self._spec.env},
            user=image.user,
        )
        try:
            await asyncio.wait_for(self.agent.settle(settings), _SETTLE_S)
        except TimeoutError:
            raise SandboxError(f"the agent of sandbox {self._spec.id} did not answer in {_SETTLE_S:.0f} s") from None

    async def _connect(self, network: Network) -> None:
        resolvers = await self._maker.egress.connect(self._spec.id, self._pid(), network)
        if resolvers:
            await self.agent.write("/etc/resolv.conf", "root", _pieces(resolvers.encode()))

    async def _pack_frozen(self, group: PersistentGroup, target: Path) -> None:
        was_running = self._state == "running"
        await asyncio.to_thread(group.freeze)
        packing = asyncio.to_thread(archive.pack, self._disk(), target, self._base())
        try:
            await asyncio.shield(packing)
        finally:
            if was_running:
                group.thaw()

    def _on_end(self) -> None:
        """Its PID 1 has ended, and with it everything inside."""
        cause = "its PID 1 ended"
        if self.out_of_memory():
            cause = "out of memory: the kernel killed its PID 1"
        self.let_go()
        self._over.set()
        if not self._ending and self._state in ("running", "frozen"):
            self._ending = True
            if not self._died.done():
                self._died.set_result(cause)
            self._end = self._maker.supervise(self._kill(), f"end of sandbox {self._spec.id}")

    async def _kill(self) -> None:
        self._state = "ended"
        await self._end_processes()
        kept = self._maker.kept(self._spec.id)
        await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)
        self._maker.forgotten(self._spec.id)

    async def _end_processes(self) -> None:
        init, self._init = self._init, None
        await self.let_go_of_agent()
        if init is None:
            return
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            group = self._maker.group(self._spec.id)
            if group is not None:
                group.thaw()
            try:
                await asyncio.wait_for(self._over.wait(), _END_S)
            except TimeoutError:
                raise SandboxError(f"sandbox {self._spec.id} did not end in {_END_S:.0f} s") from None
        await self._maker.egress.disconnect(self._spec.id)
        await self._maker.clear(self._spec.id, init.base)

    def _freezable(self) -> PersistentGroup:
        group = self._maker.group(self._spec.id)
        if group is None or self._base_or_none() is None:
            raise SandboxError(
                "without root and control groups a sandbox can be neither frozen nor kept: start as root"
            )
        return group

    def _require_alive(self) -> None:
        if self._state == "ended" or self._ending:
            raise SandboxGone(f"sandbox {self._spec.id} does not exist (any more)")

    def _pid(self) -> int:
        if self._init is None:
            raise SandboxGone(f"sandbox {self._spec.id} ended")
        return self._init.pid

    def _base_or_none(self) -> int | None:
        return None if self._init is None else self._init.base

    def _base(self) -> int:
        base = self._base_or_none()
        assert base is not None
        return base

    def _disk(self) -> Path:
        return Path(f"/proc/{self._pid()}/root/{HIDDEN}")


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot: with the pid, its identity. None when it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _remake(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)
