"""Pages of templates, as the kernel has them: who brings them in, and whom they serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from tests.integration import microvms, persistent
from tests.integration.persistent import output
from tests.unit.templates import archive, directory, entry, layout, symlink

from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.manager import local
from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable
from venusrl.sandboxes.runtimes.base import Instance, Runtime, Spec
from venusrl.sandboxes.runtimes.gvisor.runtime import GvisorRuntime
from venusrl.sandboxes.runtimes.microvm.instance import MicroVm
from venusrl.sandboxes.runtimes.namespace import merging, pages
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.sandboxes.templates.api import Image, Start
from venusrl.sandboxes.templates.service import Templates
from venusrl.sandboxes.templates.sharing import Share

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root: run as root"),
    pytest.mark.skipif(shutil.which("busybox") is None, reason="no root to start from: apt-get install busybox-static"),
]
MIB = 1 << 20
Make = Callable[[str, str], Awaitable[Instance]]


def layers() -> list[bytes]:
    root = archive(
        entry("bin/busybox", Path(str(shutil.which("busybox"))).read_bytes(), mode=0o755),
        *(symlink(f"bin/{tool}", "busybox") for tool in ("sh", "cat", "wc", "id")),
        entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"),
        entry("etc/group", b"root:x:0:\nuser:x:1000:\n"),
        directory("root", mode=0o700),
        directory("home/user", uid=1000, gid=1000),
        directory("tmp", mode=0o1777),
    )
    return [root, archive(entry("data", os.urandom(4 * MIB)))]


def forget(layer: str) -> str:
    """Out of the page cache with the data of a layer, whose path it returns."""
    path = f"{layer}/data"
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return path


@contextlib.asynccontextmanager
async def sandboxes(tmp_path: Path, runtime: Runtime, share: Share) -> AsyncIterator[Make]:
    """``make(sandbox, tenant)``, each ended at the end."""
    templates = Templates(tmp_path / "templates", share=share)
    await templates.start()
    await templates.from_oci("", "data", layout(tmp_path / "image", layers()))
    made: list[Instance] = []

    async def make(sandbox: str, tenant: str) -> Instance:
        image = await templates.resolve("data", tenant)
        image = msgspec.structs.replace(image, memory_mib=microvms.MEMORY_MIB, disk_mib=64)
        limits = Limits(memory_mib=image.memory_mib, disk_mib=image.disk_mib)
        spec = await templates.sharing.made_of(Spec(sandbox, image, limits, tenant=tenant))
        await runtime.prepare(spec.image)
        made.append(await runtime.create(spec))
        return made[-1]

    try:
        yield make
    finally:
        for instance in made:
            await instance.kill()
        await runtime.close()


async def started(runtime: Runtime) -> Runtime:
    try:
        await runtime.start()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))
    return runtime


@pytest.mark.parametrize("kind", ["namespace", "gvisor"])
@pytest.mark.parametrize(
    ("share", "tenants", "shared"),
    [("tenant", "aa", True), ("tenant", "ab", False), ("all", "ab", True), ("none", "aa", False)],
)
async def test_the_page_cache_of_a_layer(tmp_path: Path, kind: str, share: Share, tenants: str, shared: bool) -> None:
    if kind == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed: apt-get install runsc")
    runtime = await started(NamespaceRuntime(tmp_path / "r") if kind == "namespace" else GvisorRuntime(tmp_path / "r"))
    async with sandboxes(tmp_path, runtime, share) as make:
        reader, other = [await make(f"s{number}", tenant) for number, tenant in enumerate(tenants)]
        theirs = [forget(instance.spec.image.layers[1]) for instance in (reader, other)]
        assert pages.resident(theirs) == 0
        assert await output(reader, "cat /data | wc -c") == str(4 * MIB)
        assert pages.resident([theirs[0]]) >= 4 * MIB, "it reads the pages of its own layer"
        assert (pages.resident([theirs[1]]) > 0) == shared
        assert await output(other, "cat /data | wc -c") == str(4 * MIB)


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """A microVM runtime's state, with a kernel; skips, saying what is missing."""
    return microvms.new_state(tmp_path / "m", microvms.guest_kernel())


async def test_the_memory_of_a_virtual_machine_s_template(tmp_path: Path, machines: Path) -> None:
    runtime = await microvms.runtime(machines)
    async with sandboxes(tmp_path, runtime, "tenant") as make:
        one, two, other = [await make(f"s{number}", tenant) for number, tenant in enumerate("aab")]
        files = []
        for instance in (one, two, other):
            assert isinstance(instance, MicroVm)
            files.append((instance.made.memory.stat().st_ino, instance.made.base.stat().st_ino))
        assert files[0] == files[1]
        assert not {*files[0]} & {*files[2]}
        assert [await microvms.sh(instance, "echo it runs") for instance in (one, two, other)] == ["it runs\n"] * 3


MODULES = "asyncio, json, logging, ssl, sqlite3, unittest, http.client, urllib.request, argparse, zipfile, decimal"


async def test_equal_memory_of_preloaded_processes_is_held_once(tmp_path: Path) -> None:
    """Each sandbox runs the start command itself; what comes out the same is merged by the kernel."""
    if (lacks := merging.why_not()) is not None:
        pytest.skip(lacks)
    command = f'exec python3 -c \'import {MODULES}, time; open("/tmp/ready", "w"); time.sleep(1000)\''
    image = Image(id="host", name="host", start=Start(command, "cat /tmp/ready"))
    async with persistent.running(tmp_path / "r") as runtime:
        names = [f"s{number}" for number in range(4)]
        specs = [msgspec.structs.replace(persistent.spec(name, image), merge=name != "s3") for name in names]
        made = [await runtime.create(spec) for spec in specs]
        merged, alone = made[:3], made[3]
        deadline = asyncio.get_running_loop().time() + persistent.WAIT_S
        while asyncio.get_running_loop().time() < deadline:
            held = [(await each.footprint()).private for each in merged]
            if sum(held) / 3 < (await alone.footprint()).private / 2:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail(f"merged: {held}, alone: {(await alone.footprint()).private}")
        for each in made:  # nothing inside can join, or see what the others hold change
            code = "import ctypes, mmap; m = mmap.mmap(-1, 4096); print(ctypes.CDLL(None).prctl(67, 1, 0, 0, 0))"
            assert await persistent.output(each, f"python3 -c '{code}'") == "-1"


async def test_a_service_merges_for_one_tenant_at_a_time(tmp_path: Path) -> None:
    if (lacks := merging.why_not()) is not None:
        pytest.skip(lacks)
    parts = await local.assemble(tmp_path / "state", ["namespace"], merge=True)
    assert parts.templates is not None
    assert parts.kept is not None
    try:
        command = f'exec python3 -c \'import {MODULES}, time; open("/tmp/ready", "w"); time.sleep(1000)\''
        await parts.templates.from_directory("", "loaded", None, Start(command, "cat /tmp/ready"))
        for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            await parts.host.create(Order(id=name, template="loaded", runtime="namespace", tenant=tenant))
        deadline = asyncio.get_running_loop().time() + persistent.WAIT_S
        while asyncio.get_running_loop().time() < deadline:
            held = {one.id: one.footprint.private for one in (await parts.host.status()).held}
            if 0 < min(held["a1"], held["a2"]) < held["b1"] / 2:
                break
            await asyncio.sleep(0.2)
        else:
            pytest.fail(f"held: {held}")
    finally:
        for one in (await parts.host.status()).held:
            await parts.host.kill(one.id)
        await parts.host.close()
        await parts.templates.close()
        await parts.kept.close()
