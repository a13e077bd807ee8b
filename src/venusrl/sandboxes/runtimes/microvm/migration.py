"""A running machine moves to another host that shares no directory with this one.

Owns: the order of a move, what is said on its three byte streams.
Must not know: how the streams are made or authenticated (``Dial``), who decides to move, whose the sandbox is.

The streams, by name: ``control`` (a line of JSON each way and step), ``memory`` (QEMU's stream, filtered), ``disk``
(NBD, while the machine runs). A template that the receiver lacks goes over ``control`` first.

Guarantees: the machine runs on one side only: the receiver's starts after the sender gave it away, and the sender's
goes on when anything fails before that. The arrived machine maps the same template memory and holds only what differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from venusrl.sandboxes.protocol import RuntimeUnavailable, SandboxError
from venusrl.sandboxes.runtimes.base import Spec
from venusrl.sandboxes.runtimes.microvm import carry, machine
from venusrl.sandboxes.runtimes.microvm.carry import STEP_S, Control
from venusrl.sandboxes.runtimes.microvm.instance import MicroVm
from venusrl.sandboxes.runtimes.microvm.vm import Vm
from venusrl.sandboxes.runtimes.moving import Dial, Streams

if TYPE_CHECKING:
    from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime

_STARTED_S = 90.0
"""A little more than the receiver gives the guest's agent to answer."""
_MOVE_S = 120.0
_PIECE = 1 << 20
_DOWNTIME_MS = 40
_LONGEST_DOWNTIME_MS = 2000
_PATIENCE_S = 0.7
"""A guest that dirties faster than the stream gets half as much pause again each time this has passed."""


class Moved(msgspec.Struct, frozen=True):
    """What a move took: pages sent, pages that the receiver's template has already, and when (the event loop's time)
    the machine stopped here."""

    sent: int
    shared: int
    stopped_at: float


async def send(
    runtime: MicroVmRuntime, instance: MicroVm, dial: Dial, stopped: Callable[[], None], give: Callable[[], None]
) -> Moved:
    """As ``Movable.send``."""
    vm, door = instance.leave_to()
    async with door.awake(), _streams(dial) as (control, memory, disk):
        given = False
        try:
            await carry.offer(control, instance.made)
            await control.hear("ready", 300.0)
            async with _disk_to(vm, disk) as finish_disk:
                moved = await _memory_to(vm, instance, runtime.filter_program, (control, memory), finish_disk, stopped)
            await control.hear("loaded")
            instance.leave()
            give()
            given = True
        finally:
            if not given:
                await _stay(instance, vm)
        await control.say(go=True)
        await control.hear("running", _STARTED_S)
    return moved


@contextlib.asynccontextmanager
async def _streams(dial: Dial) -> AsyncIterator[tuple[Control, Streams, Streams]]:
    made: list[Streams] = []
    try:
        for name in ("control", "memory", "disk"):
            made.append(await asyncio.wait_for(dial(name), STEP_S))  # noqa: PERF401 - what was made is closed
        yield Control(made[0]), made[1], made[2]
    finally:
        for _, writer in made:
            writer.close()


async def _stay(instance: MicroVm, vm: Vm) -> None:
    if not vm.alive:
        return
    with contextlib.suppress(SandboxError):
        await vm.qmp.ask("migrate_cancel")
    with contextlib.suppress(SandboxError):
        await instance.stay()


@contextlib.asynccontextmanager
async def _disk_to(vm: Vm, disk: Streams) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Mirror the overlay while this is held. What is yielded ends the mirror with both sides equal."""
    ours, theirs = socket.socketpair()
    relay: asyncio.Task[None] | None = None
    try:
        await vm.qmp.give("nbd", theirs.fileno())
        theirs.close()
        relay = asyncio.create_task(_relay(await asyncio.open_unix_connection(sock=ours), disk), name="disk of a move")
        node = {"driver": "nbd", "node-name": "target", "export": "disk", "server": {"type": "fd", "str": "nbd"}}
        await vm.qmp.ask("blockdev-add", node)
        vm.qmp.events.clear()
        job = {"job-id": "mirror", "device": "disk", "target": "target", "sync": "top"}
        await vm.qmp.ask("blockdev-mirror", job)
        await _event(vm, "BLOCK_JOB_READY", _MOVE_S)

        async def finish() -> None:
            await vm.qmp.ask("block-job-cancel", {"device": "mirror"})
            await _event(vm, "BLOCK_JOB_COMPLETED", STEP_S)
            await vm.qmp.ask("blockdev-del", {"node-name": "target"})

        try:
            yield finish
        except BaseException:  # whatever it is, cancellation too: raised again below
            with contextlib.suppress(SandboxError):
                await vm.qmp.ask("block-job-cancel", {"device": "mirror", "force": True})
                await _event(vm, "BLOCK_JOB_CANCELLED", STEP_S)
            raise
        finally:
            with contextlib.suppress(SandboxError):
                await vm.qmp.ask("blockdev-del", {"node-name": "target"})
    finally:
        theirs.close()
        if relay is not None:
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)


async def _event(vm: Vm, name: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while name not in vm.qmp.events:
                if "BLOCK_JOB_ERROR" in vm.qmp.events or not vm.alive:
                    raise SandboxError("the disk could not be copied to the other host")
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise SandboxError(f"QEMU did not come to {name} within {timeout_s:.0f} s") from None


async def _memory_to(
    vm: Vm,
    instance: MicroVm,
    filter_program: str,
    streams: tuple[Control, Streams],
    finish_disk: Callable[[], Awaitable[None]],
    stopped: Callable[[], None],
) -> Moved:
    """The memory, live; at the end the disk's rest, then the devices."""
    control, memory = streams
    out = memory[1].get_extra_info("socket")
    read, write = os.pipe()
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *(filter_program, str(instance.made.memory), machine.MEMORY_BLOCK),
            stdin=read,
            stdout=out.fileno(),
            stderr=asyncio.subprocess.PIPE,
            env={},
        )
        os.close(read)  # the filter's alone: when it ends, QEMU's migration fails instead of waiting
        read = -1
        await vm.qmp.give("out", write)
        os.close(write)
        write = -1
        vm.qmp.events.pop("MIGRATION", None)
        await vm.qmp.ask("migrate-set-parameters", {"max-bandwidth": 1 << 40, "downtime-limit": _DOWNTIME_MS})
        await vm.qmp.ask("migrate", {"uri": "fd:out"})
        await _until_switchover(vm)
        stopped_at = asyncio.get_running_loop().time()
        stopped()
        await instance.hang_up()
        await finish_disk()
        await control.say(disk=True)
        await control.hear("disk")
        await vm.qmp.ask("migrate-continue", {"state": "pre-switchover"})
        await vm.qmp.migrated(timeout_s=STEP_S)
        _, said = await asyncio.wait_for(process.communicate(), STEP_S)
        if process.returncode:
            raise SandboxError(f"the machine's memory could not be sent: {said.decode(errors='replace')[:300]}")
        if memory[1].can_write_eof():
            memory[1].write_eof()
        sent, shared = said.split()
        return Moved(int(sent), int(shared), stopped_at)
    finally:
        for fd in (read, write):
            if fd >= 0:
                os.close(fd)
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _until_switchover(vm: Vm) -> None:
    loop = asyncio.get_running_loop()
    began = widened = loop.time()
    downtime = _DOWNTIME_MS
    while (status := vm.qmp.events.get("MIGRATION", {}).get("status")) != "pre-switchover":
        if status in ("failed", "cancelled", "completed") or not vm.alive:
            raise SandboxError(f"the machine's memory did not move: {status}")
        if loop.time() - began > _MOVE_S:
            raise SandboxError(f"the machine's memory did not move within {_MOVE_S:.0f} s")
        if loop.time() - widened > _PATIENCE_S:
            widened, downtime = loop.time(), min(downtime * 3 // 2, _LONGEST_DOWNTIME_MS)
            await vm.qmp.ask("migrate-set-parameters", {"downtime-limit": downtime})
        await asyncio.sleep(0.001)


async def receive(runtime: MicroVmRuntime, spec: Spec, dial: Dial) -> MicroVm:
    """Take in what ``send`` on another host moves here. The sandbox runs when it returns; when it raises, nothing is
    left here."""
    instance: MicroVm | None = None
    async with _streams(dial) as (control, memory, disk):
        try:
            made = await carry.accept(runtime, spec.image, control)
            instance = await runtime.awaiting(spec, made)
            vm = instance.vm
            assert vm is not None
            async with _disk_from(vm, disk) as stop_disk:
                await control.say(ready=True)
                await _memory_from(vm, control, memory, stop_disk)
            await control.say(loaded=True)
            await control.hear("go")
            await instance.run(fresh=False)
            await control.say(running=True)
        except BaseException as error:  # whatever it is, cancellation too: raised again below
            if instance is not None:
                await instance.kill()
            if isinstance(error, SandboxError | OSError):
                with contextlib.suppress(OSError):
                    await control.say(error=str(error)[:500])
            raise
    return instance


@contextlib.asynccontextmanager
async def _disk_from(vm: Vm, disk: Streams) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    listener = socket.socket(socket.AF_UNIX)
    relay: asyncio.Task[None] | None = None
    try:
        name = "\0" + secrets.token_hex(16)  # of this network namespace only, and gone with the socket
        listener.bind(name)
        listener.listen(1)
        await vm.qmp.give("nbd", listener.fileno())
        await vm.qmp.ask("nbd-server-start", {"addr": {"type": "fd", "data": {"str": "nbd"}}, "max-connections": 1})
        export = {"type": "nbd", "id": "disk", "node-name": "disk", "name": "disk", "writable": True}
        await vm.qmp.ask("block-export-add", export)
        relay = asyncio.create_task(_relay(await asyncio.open_unix_connection(name), disk), name="disk of a move")

        async def stop() -> None:
            await vm.qmp.ask("nbd-server-stop")

        yield stop
    finally:
        listener.close()
        if relay is not None:
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)


async def _memory_from(vm: Vm, control: Control, memory: Streams, stop_disk: Callable[[], Awaitable[None]]) -> None:
    read, write = os.pipe()
    feeding: asyncio.Task[None] | None = None
    try:
        await vm.qmp.give("in", read)
        transport, protocol = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(write, "wb")
        )
        pipe = asyncio.StreamWriter(transport, protocol, None, asyncio.get_running_loop())
        feeding = asyncio.create_task(_copy(memory[0], pipe), name="memory of a move")
        await vm.qmp.ask("migrate-incoming", {"uri": "fd:in"})
        await control.hear("disk", 2 * _MOVE_S)
        await stop_disk()
        await control.say(disk=True)
        await vm.qmp.migrated(timeout_s=STEP_S)
    finally:
        os.close(read)
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_PIECE):
            target.write(data)
            await target.drain()
    finally:
        target.close()


async def _relay(one: Streams, other: Streams) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(one[0], other[1]))
            group.create_task(_copy(other[0], one[1]))
    except* OSError as error:
        raise RuntimeUnavailable(f"the connection between two hosts broke: {error.exceptions[0]}") from error
