"""Persistent sandboxes out of namespaces: one PID 1 (our agent) each, its processes, its files.

Owns: the forge, the ids and control groups handed out, what lies in the runtime's state directory (sockets, kept
files), finding again what an earlier process made.

Must not know: E2B, HTTP, admission, who owns a sandbox.

Guarantees: those of ``runtimes.base.Runtime``. A sandbox depends on nothing of this process: not on its mounts, not on
a descriptor, not on the forge.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import resource
import shutil
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from venusrl.sandboxes.agent import build, client
from venusrl.sandboxes.agent.api import Agent, Exit, ProcessSpec
from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError, SandboxGone
from venusrl.sandboxes.runtimes.base import Abilities, Instance, Snapshot, Spec
from venusrl.sandboxes.runtimes.namespace import groups, kernel, merging, orders, pageout, pages, userns
from venusrl.sandboxes.runtimes.namespace.blanks import Blanks
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups
from venusrl.sandboxes.runtimes.namespace.egress import Egress
from venusrl.sandboxes.runtimes.namespace.forge import SOCKETS, STAGE
from venusrl.sandboxes.runtimes.namespace.groups import PersistentGroup
from venusrl.sandboxes.runtimes.namespace.helper import FORGE, Helper
from venusrl.sandboxes.runtimes.namespace.instance import FILES, RUNTIME, Init, NamespaceInstance, Record, start_time
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.templates.api import Image

_KEPT, _NETWORK, _DISKS = "paused", "network", "disks"
_READY_S, _READY_EVERY_S = 25.0, 0.1
_ANSWER_S = 60.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class NamespaceRuntime:
    """Implements ``runtimes.base.Runtime``. ``state`` is its own directory on this host. ``disk``: where sandboxes'
    files are: in memory, which they are charged for; or in a file each below ``state``, on a loop device (as root)."""

    def __init__(
        self, state: Path, *, uid_base: int | None = None, require_cgroup: bool = False, disk: Disk = "memory"
    ) -> None:
        self._state = state
        self.disk = disk
        self._blanks = Blanks(state / _DISKS) if disk == "file" else None
        self._uid_base = uid_base
        self._require_cgroup = require_cgroup
        self._pool: userns.IdPool | None = None
        self._groups: NodeGroups | None = None
        self._agent_program = self._maker_program = ""
        self._sockets = -1
        self._link: Helper[orders.Answer] | None = None
        self._starting = asyncio.Lock()
        self._instances: dict[str, NamespaceInstance] = {}
        self._residency = pages.Residency()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.egress = Egress(state / _NETWORK)
        self.boot = ""

    @property
    def name(self) -> str:
        return RUNTIME

    async def start(self) -> Abilities:
        for name in (SOCKETS, STAGE, _KEPT):
            (self._state / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = self._state.resolve()
        if self._blanks is not None:
            self._blanks = Blanks(self._state / _DISKS)
            self._blanks.start()
        self.egress = Egress(self._state / _NETWORK)
        self.egress.start()
        self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # noqa: ASYNC240 - not a disk
        if os.geteuid() == 0:
            maps = (Path(f"/proc/self/{name}").read_text() for name in ("uid_map", "gid_map"))  # noqa: ASYNC240
            self._pool = userns.choose_pool(self._uid_base, *maps)
        self._groups = await asyncio.to_thread(groups.open_node, self._group_name())
        if self._groups is None and self._require_cgroup:
            raise RuntimeUnavailable(
                "no control group with memory and pids is writable: start as root, or have a cgroup v2 subtree "
                "delegated (systemd-run --user --scope -p Delegate=yes ...), or do not require control groups"
            )
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a sandbox
        self._sockets = os.open(self._state / SOCKETS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._agent_program = str(await build.program())
        self._maker_program = str(await build.program(folder=Path(__file__).parent))
        await self._forge()
        return self._abilities()

    async def prepare(self, image: Image, *, network: bool = False) -> None:
        for layer in image.layers:
            if not Path(layer).is_dir():  # noqa: ASYNC240 - a handful
                raise SandboxError(f"the template {image.name} lacks its layer {layer}: build it again")
        if image.id in self._residency.known:
            return
        files = await asyncio.to_thread(self._residency.know, image)
        wanted = list(pages.worth_touching(image.layers, files))
        await asyncio.to_thread(pages.touch, self._groups, _plain(image.id), wanted)

    async def forget(self, image_id: str) -> None:
        self._residency.forget(image_id)
        await asyncio.to_thread(pages.forget, self._groups, _plain(image_id))

    async def derived(self) -> set[str]:
        return self._residency.known

    async def shared(self, images: Sequence[str]) -> dict[str, int]:
        return await self._residency.shared(images)

    async def create(self, spec: Spec) -> Instance:
        return await self._begin(spec, None)

    async def restore(self, spec: Spec, snapshot: Snapshot) -> Instance:
        if snapshot.runtime != RUNTIME or snapshot.memory:
            raise SandboxError(f"a snapshot of the {snapshot.runtime} runtime cannot be restored by {RUNTIME}")
        return await self._begin(spec, Path(snapshot.directory) / FILES)

    async def adopt(self, record: bytes) -> Instance | None:
        known = msgspec.json.decode(record, type=Record)
        sandbox, kept = known.spec.id, self.kept(known.spec.id)
        state, init = known.state, known.init
        alive = init is not None and known.boot == self.boot and start_time(init.pid) == init.start_time
        has_files = (kept / FILES).is_file()
        if has_files and (state == "files" or (not alive and known.boot == self.boot)):
            # The second: the record is older than the end of a pause that had come as far as ending the processes.
            await self._clear_processes(sandbox)
            self._instances[sandbox] = NamespaceInstance(self, known.spec, "files", known.boot_id)
            return self._instances[sandbox]
        if state == "files":  # the record is older than the end of a resume, which had let go of the files
            state, init = "running", self._find_init(sandbox)
            alive = init is not None
        if init is None or not alive:
            await self._clear_processes(sandbox)
            return None
        return await self._take_up(NamespaceInstance(self, known.spec, state, known.boot_id), init)

    async def sweep(self, known: set[str]) -> list[str]:
        found = {entry.name for entry in os.scandir(self._state / SOCKETS)}
        if self._groups is not None:
            found |= groups.sandboxes_in(self._groups)
        gone = []
        for sandbox in sorted(found - known - self._instances.keys()):
            await self._clear_processes(sandbox)
            gone.append(f"sandbox {sandbox}")
        for entry in list(os.scandir(self._state / _KEPT)):
            if entry.name not in known and entry.name not in self._instances:
                await asyncio.to_thread(shutil.rmtree, entry.path, ignore_errors=True)
                gone.append(f"kept files of sandbox {entry.name}")
        alive = known | self._instances.keys()
        gone += [f"network of sandbox {name}" for name in await self.egress.sweep(alive)]
        return gone

    async def close(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        for instance in list(self._instances.values()):
            instance.let_go()
            await instance.let_go_of_agent()
        self._instances.clear()
        if self._link is not None:
            await self._link.close()
            self._link = None
        if self._groups is not None:
            await asyncio.to_thread(groups.close_node, self._groups)
        if self._sockets >= 0:
            os.close(self._sockets)
            self._sockets = -1

    # -- Maker

    async def begin(self, spec: Spec, files: Path | None, boot_id: str) -> Init:
        link = await self._forge()
        blank = "" if self._blanks is None else str(await self._blanks.blank(spec.limits.disk_mib))
        slot = None if self._pool is None else self._pool.take()
        base, count = (None, 1) if slot is None else (slot.base, slot.count)
        layers = spec.image.layers
        archive = None if files is None else str(files)

        def order(number: int) -> orders.Order:
            user, merge = spec.image.user, spec.merge and merging.why_not() is None
            return orders.Make(number, spec.id, layers, spec.limits, base, count, user, archive, boot_id, merge, blank)

        work = asyncio.create_task(link.ask(order, _ANSWER_S), name=f"making sandbox {spec.id}")
        try:
            made = await asyncio.shield(work)
        except asyncio.CancelledError:
            self.supervise(self._undo(spec.id, base, work), f"undoing sandbox {spec.id}")
            raise
        except SandboxError:
            self._give_back(base)
            raise
        assert isinstance(made, orders.Made)
        started = start_time(made.pid)
        if started is None:
            await self.clear(spec.id, base)
            raise SandboxError(f"the agent of sandbox {spec.id} ended as it began")
        return Init(made.pid, started, base)

    def agent(self, sandbox: str) -> Agent:
        # By descriptor: a socket's path has at most 107 bytes.
        return client.AgentClient(client.unix(f"/proc/self/fd/{self._sockets}/{sandbox}"))

    def group(self, sandbox: str) -> PersistentGroup | None:
        return None if self._groups is None else PersistentGroup(self._groups, sandbox)

    def kept(self, sandbox: str) -> Path:
        return self._state / _KEPT / sandbox

    async def clear(self, sandbox: str, base: int | None) -> None:
        group = self.group(sandbox)
        if group is not None:
            await asyncio.to_thread(group.end)
        with suppress(FileNotFoundError):
            os.unlink(self._state / SOCKETS / sandbox)
        self._give_back(base)

    def forgotten(self, sandbox: str) -> None:
        self._instances.pop(sandbox, None)

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that outlives its caller's cancellation and is waited for by ``close``."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- how

    async def _take_up(self, instance: NamespaceInstance, init: Init) -> Instance | None:
        sandbox = instance.spec.id
        if self._pool is not None and init.base is not None:
            self._pool.claim(init.base)
        try:
            await instance.take_up(init)
        except SandboxGone:
            await self.clear(sandbox, init.base)
            return None
        # Files of a pause that did not come to its end: never to be taken for newer than what runs.
        await asyncio.to_thread(shutil.rmtree, self.kept(sandbox), ignore_errors=True)
        self._instances[sandbox] = instance
        return instance

    def _find_init(self, sandbox: str) -> Init | None:
        """A living sandbox's PID 1 by its control group alone."""
        group = self.group(sandbox)
        with suppress(FileNotFoundError):
            for pid in [] if group is None else group.pids():
                found = inside(pid)
                started = start_time(pid)
                if found is not None and found[0] == 1 and started is not None:
                    return Init(pid, started, None if self._pool is None else found[1])
        return None

    async def _begin(self, spec: Spec, files: Path | None) -> Instance:
        if not _ID.fullmatch(spec.id):
            raise SandboxError(f"{spec.id!r} cannot be a sandbox's id: letters, digits, - and _, at most 63")
        if spec.id in self._instances:
            raise SandboxError(f"there is a sandbox {spec.id} already")
        instance = NamespaceInstance(self, spec)
        self._instances[spec.id] = instance
        try:
            await instance.launch(files)
            if files is None and spec.image.start is not None:
                await preload(instance.agent, spec.image, merge=spec.merge and merging.why_not() is None)
        except BaseException:  # whatever it was, cancelled included, leaves nothing behind
            await instance.kill()
            raise
        return instance

    async def _undo(self, sandbox: str, base: int | None, work: asyncio.Task[orders.Answer]) -> None:
        """A creation was cancelled: end what comes of it."""
        try:
            await work
        except SandboxError:
            self._give_back(base)
            return
        await self._clear_processes(sandbox)
        self._give_back(base)

    async def _clear_processes(self, sandbox: str) -> None:
        """End a sandbox of which nothing is known but its name."""
        group = self.group(sandbox)
        if group is not None:
            await asyncio.to_thread(group.end)
        await self.egress.disconnect(sandbox)
        with suppress(FileNotFoundError):
            os.unlink(self._state / SOCKETS / sandbox)

    def _give_back(self, base: int | None) -> None:
        if self._pool is not None and base is not None:
            self._pool.give_back(self._pool.slot(base))

    async def _forge(self) -> Helper[orders.Answer]:
        """The running forge; a new one when there is none."""
        async with self._starting:
            if self._link is not None and self._link.ended is None:
                return self._link
            link = await Helper.start(FORGE, self._state / "forge.log")
            slot = None if self._pool is None else self._pool.first()
            base, count = (None, 1) if slot is None else (slot.base, slot.count)
            told = (
                str(self._state),
                self._group_name(),
                self._maker_program,
                self._agent_program,
                ("agent", "--fd", str(orders.AGENT_LISTENER)),
            )
            try:
                await link.ask(lambda number: orders.Prepare(number, *told, base, count), _ANSWER_S)
            except BaseException:  # whatever it was, cancelled included, leaves no process
                await link.close()
                raise
            self._link = link
            return link

    def _group_name(self) -> str:
        return "ns-" + hashlib.sha256(str(self._state.resolve()).encode()).hexdigest()[:12]

    def _abilities(self) -> Abilities:
        lacks = {
            "memory_snapshot": "processes of a namespace cannot be kept in a snapshot: use the microvm runtime",
            "live_migration": "processes of a namespace cannot be moved: use the microvm runtime",
        }
        if self.egress.lacks is not None:
            lacks["egress"] = self.egress.lacks
        why_not = merging.why_not()
        if why_not is not None:
            lacks["merge"] = why_not
        if not pageout.has_swap():
            lacks["page_out"] = "without swap a frozen sandbox keeps its memory: add a zram device or a swap file"
        if self._pool is None:
            lacks["users"] = "not root: a sandbox has one user, called root and user alike: start as root for two"
        if self._groups is None:
            lacks["limits"] = "no control groups: sandboxes can be neither limited as wholes nor paused; start as root"
        if self._pool is not None and not kernel.has_capability(kernel.CAP_SYS_RESOURCE):
            lacks["out_of_memory_score"] = (
                "without CAP_SYS_RESOURCE a sandbox can make itself as unlikely a victim as this service when the "
                "whole machine runs out of memory: give the container that capability"
            )
        return Abilities(memory_snapshot=False, live_migration=False, egress=self.egress.lacks is None, lacks=lacks)


def inside(pid: int) -> tuple[int, int] | None:
    """A process's number in its own namespace and its user here. None when it ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = {name: values.split() for name, _, values in (line.partition(":") for line in lines)}
    return int(fields["NSpid"][-1]), int(fields["Uid"][0])


def _plain(image: str) -> str:
    """A template's id as a file's name."""
    return hashlib.sha256(image.encode()).hexdigest()[:16]


async def preload(agent: Agent, image: Image, *, merge: bool) -> None:
    """Run a template's start command and wait until it is ready; with ``merge`` so that it comes out the same in each
    sandbox, as far as Python's interpreter is to blame. Raises SandboxError."""
    assert image.start is not None
    env = {"PYTHONHASHSEED": "0"} if merge else {}
    shell = ("/bin/sh", "-c")
    cwd = image.workdir
    started = await agent.start(ProcessSpec((*shell, image.start.command), image.user, env, cwd, tag="start"))
    await started.detach()
    if not image.start.ready:
        return
    deadline = asyncio.get_running_loop().time() + _READY_S
    while True:
        check = await agent.start(ProcessSpec((*shell, image.start.ready), image.user, cwd=cwd))
        code = [event.code async for event in check.events() if isinstance(event, Exit)]
        if code == [0]:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise SandboxError(
                f"the template {image.name} was not ready {_READY_S:.0f} s after its start command began"
            )
        await asyncio.sleep(_READY_EVERY_S)
