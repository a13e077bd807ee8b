"""What the tests of persistent sandboxes share: a runtime, or the reason why this machine has none; what is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from venusrl.sandboxes.agent.api import Agent, Exit, Output, ProcessSpec
from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable
from venusrl.sandboxes.runtimes.base import Instance, Network, Spec
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.sandboxes.templates.api import Image, Start

LIMITS = Limits(memory_mib=192, pids=48, cpus=1.0, disk_mib=32)
HOST = Image(id="host", name="host")
WAIT_S = PATIENCE_S
"""For what must happen; nothing depends on how fast it does."""


@asynccontextmanager
async def running(state: Path, disk: Disk = "memory") -> AsyncIterator[NamespaceRuntime]:
    """A started runtime; the test is skipped where persistent sandboxes cannot be limited or kept."""
    if os.geteuid() != 0:
        pytest.skip("persistent sandboxes are tested as root: only root can give each its own users")
    runtime = NamespaceRuntime(state, require_cgroup=True, disk=disk)
    try:
        await runtime.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no persistent sandboxes on this machine: {error}")
    try:
        yield runtime
    finally:
        for sandbox in list(runtime._instances.values()):
            await sandbox.kill()
        await runtime.sweep(set())
        await runtime.close()


def spec(name: str, image: Image = HOST, limits: Limits = LIMITS, network: Network | None = None) -> Spec:
    return Spec(id=name, image=image, limits=limits, network=network or Network())


def starting(command: str, ready: str) -> Image:
    """The machine's own template with a start command."""
    return Image(id="host", name="host", start=Start(command, ready))


async def shell(sandbox: Instance, command: str, user: str = "user") -> tuple[int, str]:
    """Run a command; its exit code (128 + signal for a killed one) and what it printed, stripped."""
    code, told = await asyncio.wait_for(run(sandbox.agent, command, user), WAIT_S)
    return code, told.strip()


async def run(agent: Agent, command: str, user: str = "user") -> tuple[int, str]:
    """Run a command by an agent; its exit code (128 + signal for a killed one) and all that it printed."""
    process = await agent.start(ProcessSpec(("/bin/sh", "-c", command), user))
    told = b""
    async for event in process.events():
        if isinstance(event, Output):
            told += event.data
        elif isinstance(event, Exit):
            return (event.code if event.signal is None else 128 + event.signal), told.decode(errors="replace")
    raise AssertionError("a process without an end")


async def output(sandbox: Instance, command: str, user: str = "user") -> str:
    """What a command prints; it must succeed."""
    code, told = await shell(sandbox, command, user)
    assert code == 0, told
    return told


def left_of(state: Path) -> list[str]:
    """What there still is of a runtime's sandboxes on this machine: groups, sockets, kept files, mounts."""
    found = [str(path) for name in ("sockets", "paused") for path in (state / name).iterdir()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
    return found
