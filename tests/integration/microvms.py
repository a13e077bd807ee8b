"""Virtual machines for tests: a guest kernel once a machine, a tiny template once a test run."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from venusrl.sandboxes.agent.api import Exit, Output, ProcessSpec
from venusrl.sandboxes.agent.build import default_cache
from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.runtimes.microvm import setup
from venusrl.sandboxes.runtimes.microvm.idle import IdlePolicy
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.runtimes.moving import Dial, Streams
from venusrl.sandboxes.templates.api import Image, Start

MEMORY_MIB = 128
TOOLS = "sh ls cat echo sleep hostname date dd id ps md5sum od tail head mkdir mount touch sync stat chmod kill wc tr"
KERNEL_PACKAGE = "VENUSRL_KERNEL_PACKAGE"


def tiny_root(directory: Path) -> Path:
    """A root file system of one program: busybox."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox: apt install busybox-static")
    for name in ("bin", "etc", "root", "home/user", "tmp"):
        (directory / name).mkdir(parents=True)
    shutil.copy(busybox, directory / "bin" / "busybox")
    for tool in TOOLS.split():
        (directory / "bin" / tool).symlink_to("busybox")
    (directory / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (directory / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    os.chown(directory / "home" / "user", 1000, 1000)
    return directory


def guest_kernel() -> Path:
    """A state directory with a prepared kernel; skips, saying what is missing."""
    if os.geteuid() != 0:
        pytest.skip("microVMs confine QEMU as root does: run as root")
    state = default_cache() / "microvm" / "for-tests"
    named = os.environ.get(KERNEL_PACKAGE)
    try:
        asyncio.run(setup.check_qemu())
        if not all((state / "kernel" / f"{name}.ko").exists() for name in setup.NETWORK_MODULES):
            asyncio.run(setup.setup(state, Path(named) if named else None))
    except RuntimeUnavailable as error:
        pytest.skip(f"{error} (or name a kernel package's file in {KERNEL_PACKAGE})")
    return state


def tiny_template(state: Path, command: Sequence[str], sides: Iterable[str]) -> None:
    """The template ``tiny`` for the service in ``state``, by ``venusrl env``; each of ``sides`` has the kernel."""
    kernel = guest_kernel() / "kernel"
    for side in sides:
        shutil.copytree(kernel, state / side / "runtimes" / "microvm" / "kernel")
    root = tiny_root(state / "root")
    (root / "bin" / "bash").write_text('#!/bin/sh\nexec /bin/sh -c "$3"\n')  # called as bash -l -c COMMAND
    (root / "bin" / "bash").chmod(0o755)
    build = [*command, "template", "build", str(root), "tiny", "--state", str(state / "service")]
    subprocess.run(build, check=True, timeout=120, capture_output=True)


def new_state(directory: Path, kernel: Path) -> Path:
    directory.mkdir()
    shutil.copytree(kernel / "kernel", directory / "kernel")
    return directory


def image(root: Path, start: Start | None = None) -> Image:
    return Image("tiny", "tiny", (str(root),), memory_mib=MEMORY_MIB, disk_mib=64, start=start)


def spec(name: str, template: Image) -> Spec:
    return Spec(name, template, Limits(memory_mib=MEMORY_MIB, disk_mib=64))


async def runtime(state: Path, *, idle_s: float = 0.0, waiting: int = 0) -> MicroVmRuntime:
    made = MicroVmRuntime(state, waiting=waiting, idle=IdlePolicy(after_s=idle_s, busy_percent=70.0), use_kvm=False)
    await made.start()
    return made


async def sh(instance: Instance, command: str, user: str = "root") -> str:
    """What the command printed; it must succeed."""
    process = await instance.agent.start(ProcessSpec(("/bin/sh", "-c", command), user))
    said = b""
    async for event in process.events():
        if isinstance(event, Output):
            said += event.data
        elif isinstance(event, Exit):
            assert event.code == 0, said
    return said.decode()


async def joined() -> tuple[asyncio.Server, Dial, Dial]:
    """Two ends of TCP streams by name: what a host's door gives a move."""
    loop = asyncio.get_running_loop()
    arrived: dict[str, asyncio.Future[Streams]] = {n: loop.create_future() for n in ("control", "memory", "disk")}

    async def on_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived[(await reader.readline()).decode().strip()].set_result((reader, writer))

    server = await asyncio.start_server(on_stream, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def dial(name: str) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(name.encode() + b"\n")
        return reader, writer

    async def accept(name: str) -> Streams:
        return await arrived[name]

    return server, dial, accept
