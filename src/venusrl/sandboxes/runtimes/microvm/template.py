"""A template as this runtime keeps it: a root disk, a sealed memory and the state of a machine that has booted.

Owns: making it from an image's layers, its files, its hash. Must not know: sandboxes.

Guarantees: it appears whole or not at all; after that its files are read-only and nobody writes to them, which
``digest`` shows. Its memory is an ordinary disk file, so that the kernel can give its pages back under pressure; holes
stay holes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from venusrl.sandboxes.agent.api import Exit, ProcessSpec, Settings
from venusrl.sandboxes.agent.client import AgentClient, unix
from venusrl.sandboxes.protocol import Limits, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.microvm.machine import Shape
from venusrl.sandboxes.runtimes.microvm.setup import Guest
from venusrl.sandboxes.runtimes.microvm.vm import Parts, Site, Vm
from venusrl.sandboxes.templates.api import Image

_BOOT_S = 180.0
_READY_S = 120.0
_READY_PAUSE_S = 0.2
_SPARE_MIB = 48
_BLOCK = 65536
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Made(msgspec.Struct, frozen=True):
    """A finished template."""

    image: Image
    place: str
    shape: Shape
    digest: str
    started: tuple[int, ...] = ()
    """The start command's processes, running in every clone."""

    @property
    def directory(self) -> Path:
        return Path(self.place)

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def base(self) -> Path:
        return self.directory / "root.img"

    @property
    def overlay(self) -> Path:
        return self.directory / "empty.qcow2"


def place(root: Path, image: Image, guest: Guest, qemu_version: tuple[int, int], network: bool = False) -> Path:
    """Where the template of ``image`` is or will be; another guest, QEMU or a network card has another."""
    if not _SAFE.fullmatch(image.id) or image.id.startswith("."):
        raise TemplateNotFound(f"template id {image.id[:60]!r} cannot be a file's name")
    return root / f"{image.id}.{guest.id}.{qemu_version[0]}-{qemu_version[1]}{'.network' if network else ''}"


def load(directory: Path) -> Made | None:
    """A finished template in ``directory``."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        made = msgspec.json.decode((directory / "template.json").read_bytes(), type=Made)
        return msgspec.structs.replace(made, place=str(directory))
    return None


FILES = ("root.img", "memory", "state", "empty.qcow2")


def with_digest(root: Path, image: Image, wanted: str) -> Made | None:
    """The template of ``image`` whose memory has this digest: the one that a state was taken from."""
    for path in sorted(root.glob(f"{image.id}.*")):
        found = load(path)
        if found is not None and found.digest == wanted:
            return found
    return None


async def make(image: Image, target: Path, site: Site, guest: Guest, kvm: bool, network: bool = False) -> Made:
    """Boot the image once, run its start command, and keep the running machine."""
    if not image.layers:
        raise TemplateNotFound(
            f"template {image.name!r} has no files of its own, so no virtual machine can boot it: "
            "build one (venusrl env template build), or use the namespace runtime"
        )
    work = target.parent / f".making-{secrets.token_hex(6)}"
    await asyncio.to_thread(work.mkdir, parents=True)
    try:
        shape = Shape(image.memory_mib, image.cpus, kvm, network)
        await asyncio.to_thread(_root_disk, image, work)
        memory = work / "memory"
        await asyncio.to_thread(_sparse, memory, image.memory_mib << 20)
        parts = Parts(shape, memory, work / "root.img", None, (guest.kernel, guest.initramfs))
        limits = Limits(memory_mib=2 * image.memory_mib + 64, cpus=4.0)
        vm = await Vm.spawn(site, parts, limits)
        try:
            started = await _bring_up(vm, image)
            await freeze(vm, work / "state")
            await vm.quit()
        finally:
            await vm.kill()
        digest = await asyncio.to_thread(seal, work)
        made = Made(image, str(target), shape, digest, started)
        (work / "template.json").write_bytes(msgspec.json.encode(made))
        await asyncio.to_thread(work.rename, target)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, True)
    return made


async def freeze(vm: Vm, state: Path) -> None:
    """Stop the machine and write its state, without the memory that it shares, to ``state``."""
    await vm.qmp.ask("stop")
    await vm.give("out", await asyncio.to_thread(_touch, state), os.O_WRONLY)
    await outgoing(vm, "fd:out", 120.0)


async def outgoing(vm: Vm, uri: str, timeout_s: float) -> None:
    """Send the state of a stopped machine."""
    vm.qmp.events.pop("MIGRATION", None)
    await vm.qmp.ask("migrate-set-parameters", {"max-bandwidth": 1 << 40})
    await vm.qmp.ask("migrate", {"uri": uri})
    moving = asyncio.create_task(vm.qmp.migrated(timeout_s=timeout_s))
    try:
        while not moving.done():
            if vm.qmp.events.get("MIGRATION", {}).get("status") == "pre-switchover":
                vm.qmp.events.pop("MIGRATION", None)
                await vm.qmp.ask("migrate-continue", {"state": "pre-switchover"})
            await asyncio.wait({moving}, timeout=0.002)
        await moving
    finally:
        moving.cancel()


async def _bring_up(vm: Vm, image: Image) -> tuple[int, ...]:
    await vm.qmp.ask("cont")
    agent = AgentClient(unix(vm.agent_socket), patience_s=_BOOT_S, answer_s=_BOOT_S)
    try:
        try:
            await _within(
                agent.settle(Settings("template", now_ns=time.time_ns(), env=image.env, user=image.user)), vm, _BOOT_S
            )
        except (SandboxError, TimeoutError) as error:
            said = (await vm.console())[-1500:] if vm.alive else await vm.ended()
            raise TemplateNotFound(f"template {image.name!r} does not boot: {error}; console: {said}") from error
        if image.start is not None:
            await _start(agent, image)
        await agent.quiesce()
        return tuple(info.pid for info in await agent.processes())
    finally:
        await agent.close()


async def _within(work: object, vm: Vm, seconds: float) -> None:
    """Until the work is done, the machine ended, or the time is over."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    end = asyncio.create_task(vm.ended())
    try:
        done, _ = await asyncio.wait({task, end}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
        elif end in done:
            raise SandboxError(end.result())
        else:
            raise TimeoutError(f"no answer within {seconds:.0f} s")
    finally:
        for each in (task, end):
            each.cancel()
        await asyncio.gather(task, end, return_exceptions=True)


async def _start(agent: AgentClient, image: Image) -> None:
    """Run the start command and poll ``ready``."""
    assert image.start is not None

    def shell(command: str) -> ProcessSpec:
        return ProcessSpec(("/bin/sh", "-c", command), image.user, image.env, image.workdir)

    started = await agent.start(shell(image.start.command))
    await started.detach()
    if not image.start.ready:
        return
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        process = await agent.start(shell(image.start.ready))
        async for event in process.events():
            if isinstance(event, Exit) and event.code == 0:
                return
        await asyncio.sleep(_READY_PAUSE_S)
    raise TemplateNotFound(f"template {image.name!r} was not ready within {_READY_S:.0f} s: {image.start.ready!r}")


def _touch(path: Path) -> Path:
    path.touch(exist_ok=False)
    return path


def _sparse(path: Path, size: int) -> None:
    with path.open("xb") as file:
        file.truncate(size)


def _root_disk(image: Image, work: Path) -> None:
    """An ext4 image of the layers, with ``disk_mib`` left free."""
    with _merged(image.layers, work / "merged") as root:
        used = int(subprocess.run(["du", "-sxk", root], capture_output=True, check=True).stdout.split()[0])
        size_mib = used * 9 // 8 // 1024 + image.disk_mib + _SPARE_MIB
        _sparse(work / "root.img", size_mib << 20)
        command = ["mkfs.ext4", "-q", "-F", "-d", root, "-b", "4096", "-m", "0", "-J", "size=4", str(work / "root.img")]
        made = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    if made.returncode:
        raise TemplateNotFound(f"template {image.name!r} does not fit on a disk: {made.stderr[-500:]}")
    command = ["qemu-img", "create", "-q", "-f", "qcow2", str(work / "empty.qcow2"), f"{size_mib}M"]
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def _merged(layers: tuple[str, ...], target: Path) -> Iterator[str]:
    """One directory that shows all layers."""
    for layer in layers:
        if not Path(layer).is_dir():
            raise TemplateNotFound(f"the template's layer {layer} is gone: build it again")
    if len(layers) == 1:
        yield layers[0]
        return
    target.mkdir()
    options = "ro,lowerdir=" + ":".join(layer.replace(":", "\\:") for layer in reversed(layers))
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", target], capture_output=True, text=True
    )
    if mounted.returncode:
        raise SandboxError(f"layers cannot be put together (root and overlayfs are needed): {mounted.stderr[-300:]}")
    try:
        yield str(target)
    finally:
        subprocess.run(["umount", target], check=True)


def seal(work: Path) -> str:
    for name in FILES:
        os.chown(work / name, 0, 0)
        (work / name).chmod(0o444)
    return digest(work / "memory")


def digest(memory: Path) -> str:
    """SHA-256 of the blocks that are not all zero and of where they are.

    Holes are hardly read: reading a hole would fill the page cache.
    """
    found = hashlib.sha256()
    zeros = bytes(_BLOCK)
    with memory.open("rb") as file:
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA) // _BLOCK * _BLOCK
            except OSError:
                break  # only a hole is left
            piece = os.pread(file.fileno(), _BLOCK, at)
            if piece != zeros:
                found.update(at.to_bytes(8, "little") + piece)
            at += _BLOCK
    return found.hexdigest()


def resident(path: Path) -> int:
    """Bytes of the file in the page cache, by the kernel's own count (``cachestat``), else by what it holds on disk."""
    return path.stat().st_blocks * 512
