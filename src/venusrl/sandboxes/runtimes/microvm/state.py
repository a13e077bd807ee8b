"""A machine's state in a directory: what differs from its template, and its disk overlay.

Owns: the files' names, writing them from a stopped machine through the filter, what they take on disk.

Must not know: sandboxes, who wants the state.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.microvm import machine
from venusrl.sandboxes.runtimes.microvm.template import Made, outgoing
from venusrl.sandboxes.runtimes.microvm.vm import Vm, copy_sparse

MEMORY = "memory"
OVERLAY = "overlay.qcow2"
TEMPLATE = "template"
"""Holds the digest of the template's memory that the state belongs to."""
_MOVE_S = 300.0


async def save_memory(vm: Vm, made: Made, filter_program: str, target: Path) -> tuple[int, int]:
    """Write a stopped machine's memory and devices; how many pages differ from the template, how many do not."""
    process: asyncio.subprocess.Process | None = None
    read, write = os.pipe()
    try:
        with target.open("xb") as file:
            process = await asyncio.create_subprocess_exec(
                *(filter_program, str(made.memory), machine.MEMORY_BLOCK),
                stdin=read,
                stdout=file,
                stderr=asyncio.subprocess.PIPE,
                env={},
            )
        os.close(read)
        read = -1
        await vm.qmp.give("out", write)
        os.close(write)
        write = -1
        await outgoing(vm, "fd:out", _MOVE_S)
        _, said = await asyncio.wait_for(process.communicate(), _MOVE_S)
        if process.returncode:
            raise SandboxError(f"the machine's memory could not be written: {said.decode(errors='replace')[:300]}")
        passed, dropped = said.split()
        return int(passed), int(dropped)
    finally:
        for fd in (read, write):
            if fd >= 0:
                os.close(fd)
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def save_disk(vm: Vm, target: Path) -> None:
    """Copy a stopped machine's overlay. QEMU has flushed it when it stopped."""
    await asyncio.to_thread(copy_sparse, vm.overlay, target)


def size(directory: Path) -> int:
    """Bytes on disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())
