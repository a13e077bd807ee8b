"""Disks in files: what they hold is on the host's disk, not in the sandbox's memory; they go with the sandbox."""

# ruff: noqa: ASYNC240 - a test may look at a local file

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.persistent import WAIT_S, output, running, shell, spec

from venusrl.sandboxes.protocol import DiskFull, Limits
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime

LIMITS = Limits(memory_mib=64, pids=32, disk_mib=192)
MIB = 1 << 20


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[NamespaceRuntime]:
    async with running(tmp_path / "ns", "file") as made:
        yield made


def loops(state: Path) -> list[str]:
    """Loop devices over a file of ours, whether or not that has a name."""
    found = []
    for place in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if place.read_text().startswith(f"{state}/"):
                found.append(place.parts[3])
        except OSError:
            continue  # it was let go of just now
    return found


async def none_left(state: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while loops(state):  # noqa: ASYNC110 - the kernel unmounts in its own time
            await asyncio.sleep(0.02)


async def test_files_are_not_memory_and_may_be_more_than_there_is_of_it(
    runtime: NamespaceRuntime, tmp_path: Path
) -> None:
    sandbox = await runtime.create(spec("big", limits=LIMITS))
    before = (await sandbox.footprint()).total
    await output(sandbox, "head -c 134217728 /dev/urandom > /work/x; sha256sum /work/x > /work/sum; sync")
    assert (await sandbox.footprint()).total - before < 16 * MIB
    assert (await output(sandbox, "sha256sum -c /work/sum")) == "/work/x: OK"
    assert (await sandbox.shortages()).memory_kills == 0
    taken = Path(f"/sys/block/{loops(tmp_path)[0]}/loop/backing_file")
    assert "(deleted)" in taken.read_text()  # nothing to remove, whatever happens to us
    await sandbox.kill()
    await none_left(tmp_path)


async def test_a_full_disk_is_the_sandboxs_own_affair(runtime: NamespaceRuntime) -> None:
    sandbox, other = [await runtime.create(spec(name, limits=LIMITS)) for name in ("full", "other")]
    code, said = await shell(sandbox, "head -c 400000000 /dev/zero 2>&1 > /work/x; e=$?; rm /work/x; exit $e")
    assert code != 0
    assert "No space left" in said
    assert await shell(sandbox, "echo again > /work/y && cat /work/y") == (0, "again")
    many = "i=0; while : > /work/f$i; do i=$((i + 1)); test $i -gt 60000 && exit 7; done 2>/dev/null; exit 3"
    assert (await shell(sandbox, many))[0] in (2, 3)
    assert await shell(other, "echo fine > /work/z && cat /work/z") == (0, "fine")


async def test_what_is_removed_inside_is_given_back(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("gives", limits=LIMITS))
    loop = Path("/sys/block") / loops(tmp_path)[0]
    assert (loop / "queue/discard_max_bytes").read_text().strip() != "0"
    assert "discard" in await output(sandbox, "grep ' /work ' /proc/mounts")


async def test_a_paused_one_holds_no_device(runtime: NamespaceRuntime, tmp_path: Path) -> None:
    sandbox = await runtime.create(spec("paused", limits=LIMITS))
    await output(sandbox, "head -c 20000000 /dev/urandom > /work/file")
    snapshot = await sandbox.snapshot(tmp_path / "snapshot")
    await sandbox.pause(memory=False)
    await none_left(tmp_path)
    small = Limits(memory_mib=64, pids=32, disk_mib=8)
    with pytest.raises(DiskFull, match="disk limit"):
        await runtime.restore(spec("small", limits=small), snapshot)
    await none_left(tmp_path)
    await sandbox.resume()
    assert await output(sandbox, "stat -c %s /work/file") == "20000000"
