"""One sandbox as a virtual machine.

Owns: its states (running, paused with memory, paused with files only), what is kept of it on disk, its fresh identity
after every start. Must not know: how templates are made, who else is on the host.

Guarantees: those of ``runtimes.base.Instance``. A pause that fails leaves the sandbox running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from venusrl.sandboxes.agent.api import Agent, Settings
from venusrl.sandboxes.agent.client import AgentClient, unix
from venusrl.sandboxes.protocol import (
    BadPath,
    RuntimeUnavailable,
    SandboxError,
    SandboxGone,
    SandboxMoving,
    SandboxPaused,
)
from venusrl.sandboxes.runtimes.base import Footprint, Network, Shortages, Snapshot, Spec
from venusrl.sandboxes.runtimes.microvm import state
from venusrl.sandboxes.runtimes.microvm.idle import IdleAgent, IdlePolicy
from venusrl.sandboxes.runtimes.microvm.template import Made
from venusrl.sandboxes.runtimes.microvm.vm import Vm, VmRecord, copy_sparse

RUNTIME = "microvm"
Kept = Literal["running", "memory", "files", "left"]
"""``left``: its machine is stopped here, and what it was may run on another host."""
_ENTROPY_BYTES = 128
_SETTLE_S = 60.0
NO_CARD = (
    "this virtual machine was made without a network card, and cannot get one: "
    "make one that reaches something from its beginning (internet, or an address that is allowed)"
)

_KEPT_SHARE, _KEPT_BYTES = 40, 17 << 20
"""What ext4 keeps back of a disk, a little more than its fiftieth or 4096 blocks: nobody gets the last of it."""


class Record(msgspec.Struct, frozen=True):
    """What ``adopt`` needs."""

    spec: Spec
    kept: Kept
    vm: VmRecord | None
    store: str
    template: str


class Maker(Protocol):
    """What an instance asks of its runtime."""

    policy: IdlePolicy
    filter_program: str

    async def start_vm(self, spec: Spec, made: Made, kept: Path | None, *, memory: bool) -> Vm:
        """A stopped machine: the template's clone, or (``kept``) with that directory's overlay and memory."""
        ...

    async def connect(self, spec: Spec, machine: Vm, network: Network) -> str:
        """Put the rules of ``network`` into force; the text of its resolv.conf ("" = none). Raises SandboxError."""
        ...

    def traffic(self, sandbox: str) -> int:
        """Bytes that its network has carried so far, either way."""
        ...

    async def unplug(self, sandbox: str) -> None:
        """Its machine ends, its sandbox does not."""
        ...

    async def disconnect(self, sandbox: str) -> None: ...

    def gone(self, instance: MicroVm) -> None: ...


class MicroVm:
    """An ``Instance``. ``store``: its own directory for what a pause keeps."""

    def __init__(self, spec: Spec, made: Made, maker: Maker, store: Path, vm: Vm | None, kept: Kept) -> None:
        self._spec = spec
        self._maker = maker
        self._store = store
        self._kept: Kept = kept
        self._agent: IdleAgent | None = None
        self._killed = False
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.Task[None] | None = None
        self.made = made
        self.vm = vm

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def agent(self) -> Agent:
        if self._kept != "running":
            raise SandboxPaused(f"sandbox {self._spec.id} is {'moving' if self._kept == 'left' else 'paused'}")
        if self._agent is None or self.vm is None or not self.vm.alive:
            raise SandboxGone(f"sandbox {self._spec.id} has ended")
        return self._agent

    @property
    def has_memory(self) -> bool:
        """Whether its processes are kept: it runs, or was paused with them."""
        return self._kept != "files"

    def record(self) -> bytes:
        found = Record(self._spec, self._kept, self.vm.record if self.vm else None, str(self._store), self.made.digest)
        return msgspec.json.encode(found)

    async def run(self, *, fresh: bool) -> None:
        """Let the loaded machine run and tell its agent who it is. ``fresh``: it is a twin of another."""
        vm = self._running()
        resolvers = await self._maker.connect(self._spec, vm, self._spec.network)
        self._agent = self._door(vm)
        try:
            await vm.qmp.ask("cont")
            async with asyncio.timeout(_SETTLE_S):
                await self._settle(self._agent, fresh)
                if self.made.shape.network:
                    await self._agent.sever()
                await self._name_resolvers(self._agent, resolvers)
        except TimeoutError:
            await self._hang_up()
            raise SandboxError(f"the sandbox's agent did not answer within {_SETTLE_S:.0f} s") from None
        except BaseException:  # whatever it is, cancellation too: raised again below
            await self._hang_up()
            raise
        self._kept = "running"
        self._watch_end(vm)

    async def _name_resolvers(self, agent: Agent, resolvers: str) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield resolvers.encode()

        if resolvers:
            await agent.write("/etc/resolv.conf", "root", pieces())

    async def take_up(self) -> None:
        """Go on with a machine that ran all the while; one that was given away stays stopped until ``stay``."""
        vm = self._running()
        if self._kept == "running":
            await vm.give_up_moving()
            self._agent = self._door(vm)
            await vm.qmp.ask("cont")
        self._watch_end(vm)

    def _door(self, vm: Vm) -> IdleAgent:
        async def wake() -> None:
            await vm.qmp.ask("cont")
            await client.settle(
                Settings(self._spec.id, now_ns=time.time_ns(), env=self._env(), user=self._spec.image.user)
            )

        async def sleep() -> None:
            await vm.qmp.ask("stop")

        client = AgentClient(unix(vm.agent_socket))

        def traffic() -> int:
            return self._maker.traffic(self._spec.id)

        return IdleAgent(client, self._maker.policy, wake, sleep, frozenset(self.made.started), traffic)

    def _env(self) -> dict[str, str]:
        return {**self._spec.image.env, **self._spec.env}

    async def _settle(self, agent: Agent, fresh: bool) -> None:
        await agent.settle(
            Settings(
                self._spec.id,
                hostname=self._spec.id[:63] if fresh else "",
                machine_id=secrets.token_hex(16) if fresh else "",
                entropy=os.urandom(_ENTROPY_BYTES),
                now_ns=time.time_ns(),
                env=self._env(),
                user=self._spec.image.user,
            )
        )

    def _watch_end(self, vm: Vm) -> None:
        if self._watch is None:
            self._watch = asyncio.create_task(self._await_end(vm), name=f"end of sandbox {self._spec.id}")

    async def _watch_no_more(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _await_end(self, vm: Vm) -> None:
        cause = await vm.ended()
        if not self._killed and self.vm is vm and not self._dead.done():
            self._dead.set_result(cause)

    def _running(self) -> Vm:
        if self.vm is None or not self.vm.alive:
            raise SandboxGone(f"sandbox {self._spec.id} has ended")
        return self.vm

    async def _hang_up(self, error: SandboxError | None = None) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.close(error)

    async def _end_vm(self) -> None:
        """End the machine without its end being a death."""
        await self._watch_no_more()
        vm, self.vm = self.vm, None
        if vm is not None:
            await vm.kill()

    async def pause(self, *, memory: bool = True) -> None:
        if self._kept != "running":
            raise SandboxPaused(f"sandbox {self._spec.id} is paused already")
        vm = self._running()
        if not memory:
            async with asyncio.timeout(_SETTLE_S):
                await self._asked().quiesce()
        await self._hang_up()
        try:
            await asyncio.to_thread(_fresh, self._store)
            await vm.qmp.ask("stop")
            if memory:
                await state.save_memory(vm, self.made, self._maker.filter_program, self._store / state.MEMORY)
            await self._watch_no_more()  # its end is no death
            await vm.quit()
            await asyncio.to_thread(vm.overlay.rename, self._store / state.OVERLAY)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await asyncio.to_thread(shutil.rmtree, self._store, True)
            self._watch_end(vm)
            if vm.alive:
                self._agent = self._door(vm)
                with contextlib.suppress(SandboxError):
                    await vm.qmp.ask("cont")
            raise
        self._kept = "memory" if memory else "files"
        await self._end_vm()
        await self._maker.unplug(self._spec.id)

    def _asked(self) -> IdleAgent:
        assert self._agent is not None
        return self._agent

    async def resume(self) -> None:
        if self._kept == "running":
            return
        memory = self._kept == "memory"
        self.vm = await self._maker.start_vm(self._spec, self.made, self._store, memory=memory)
        try:
            await self.run(fresh=not memory)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await self._end_vm()
            raise
        await asyncio.to_thread(shutil.rmtree, self._store, True)

    async def snapshot(self, directory: Path, *, memory: bool = True) -> Snapshot:
        if self._kept == "left":
            raise SandboxPaused(f"sandbox {self._spec.id} is moving: ask where it is now")
        if self._kept == "files" and memory:
            raise SandboxPaused(f"sandbox {self._spec.id} was paused without its memory: take a snapshot of files only")
        try:
            await asyncio.to_thread(_fresh, directory)
            if self._kept != "running":
                await asyncio.to_thread(_copy_kept, self._store, directory, memory)
            else:
                await self._write_running(directory, memory)
        except BaseException:  # whatever it is, cancellation too: raised again below
            await asyncio.to_thread(shutil.rmtree, directory, True)
            raise
        (directory / state.TEMPLATE).write_text(self.made.digest)
        return Snapshot(str(directory), memory, await asyncio.to_thread(state.size, directory), RUNTIME)

    async def _write_running(self, directory: Path, memory: bool) -> None:
        vm = self._running()
        agent = self._asked()
        async with agent.awake():
            if not memory:
                await agent.quiesce()
            await vm.qmp.ask("stop")
            try:
                await state.save_disk(vm, directory / state.OVERLAY)
                if memory:
                    await state.save_memory(vm, self.made, self._maker.filter_program, directory / state.MEMORY)
            finally:
                if vm.alive:
                    await vm.qmp.ask("cont")
        await self._settle(agent, fresh=False)

    async def set_network(self, network: Network) -> None:
        if network.reaches_out and not self.made.shape.network:
            raise RuntimeUnavailable(NO_CARD)
        if self._kept == "running":
            resolvers = await self._maker.connect(self._spec, self._running(), network)
            await self._name_resolvers(self._asked(), resolvers)
        self._spec = msgspec.structs.replace(self._spec, network=network)

    async def footprint(self) -> Footprint:
        vm = self.vm
        if vm is None or not vm.alive:
            return Footprint()
        return await asyncio.to_thread(_footprint, vm)

    async def shortages(self, disk: bool = True) -> Shortages:
        """As the guest's own kernel counts: a command is ended inside, not by the host."""
        agent = self.agent
        counted = b"".join([piece async for piece in agent.read("/proc/vmstat", "root")])
        if not disk:
            return Shortages(memory_kills(counted))
        usage = await agent.usage()
        left = usage.disk_total - usage.disk_used
        return Shortages(memory_kills(counted), left <= min(usage.disk_total // _KEPT_SHARE, _KEPT_BYTES))

    async def died(self) -> str:
        return await asyncio.shield(self._dead)

    async def kill(self) -> None:
        self._killed = True
        await self._hang_up()
        await self._end_vm()
        await self._maker.disconnect(self._spec.id)
        await asyncio.to_thread(shutil.rmtree, self._store, True)
        self._maker.gone(self)

    def leave_to(self) -> tuple[Vm, IdleAgent]:
        """For a move: the machine and its door. Raises SandboxGone, SandboxPaused."""
        if self._kept != "running":
            raise SandboxPaused(f"sandbox {self._spec.id} is paused: it does not move live")
        return self._running(), self._asked()

    async def hang_up(self) -> None:
        """Let the agent go: the machine is about to run elsewhere."""
        await self._hang_up(SandboxMoving(f"sandbox {self._spec.id} goes on on another host: connect again"))

    def leave(self) -> None:
        """It is whole elsewhere. From now on the machine here runs no more, unless it ``stay``s."""
        self._kept = "left"

    async def stay(self) -> None:
        """The move failed: run on here. Nothing happens to one that is paused."""
        if self._kept not in ("running", "left"):
            return
        vm = self._running()
        self._kept = "running"
        if self._agent is None:
            self._agent = self._door(vm)
        await vm.qmp.ask("cont")

    async def let_go(self) -> None:
        """Close what this process holds of it; the sandbox goes on."""
        await self._hang_up()
        await self._watch_no_more()
        if self.vm is not None:
            await self.vm.let_go()


def memory_kills(vmstat: bytes) -> int:
    """The counter in a guest's /proc/vmstat, which is data of an enemy; 0 where it has none."""
    for line in vmstat.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.isdigit() and len(value) < 19:
            return int(value)
    return 0


def _fresh(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise BadPath(f"{directory} is there already: a state is written into a new directory") from None


def _copy_kept(store: Path, directory: Path, memory: bool) -> None:
    for name in (state.OVERLAY, state.MEMORY) if memory else (state.OVERLAY,):
        copy_sparse(store / name, directory / name)


def _footprint(vm: Vm) -> Footprint:
    """Private-dirty of QEMU, kernel memory of its group, what was swapped. Its overlay is an ordinary file on disk."""
    found = {"Private_Dirty": 0, "Swap": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{vm.record.pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return Footprint(found["Private_Dirty"], vm.kernel_memory(), 0, found["Swap"])
