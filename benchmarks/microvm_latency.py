"""How long a virtual machine's life takes, and what one weighs: create, command, pause, resume, fork; alone, together.

    python benchmarks/microvm_latency.py --kernel-package FILE.deb --state DIR

Prints one JSON object: milliseconds (p50, p99), clones a second at ``--together`` at once, and MiB of an idle clone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from venusrl.sandboxes.agent.api import ProcessSpec
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Spec
from venusrl.sandboxes.runtimes.microvm import setup
from venusrl.sandboxes.runtimes.microvm.idle import IdlePolicy
from venusrl.sandboxes.runtimes.microvm.instance import MicroVm
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.templates.api import Image

_T = TypeVar("_T")


def root(directory: Path) -> Path:
    for name in ("bin", "etc", "root", "tmp"):
        (directory / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SystemExit("apt install busybox-static")
    shutil.copy(busybox, directory / "bin" / "busybox")
    for tool in ("sh", "echo"):
        (directory / "bin" / tool).symlink_to("busybox")
    (directory / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    (directory / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    return directory


class Times:
    """Durations by name."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    async def of(self, name: str, work: Awaitable[_T]) -> _T:
        began = time.perf_counter()
        result = await work
        self._found.setdefault(name, []).append(1000 * (time.perf_counter() - began))
        return result

    def said(self) -> dict[str, dict[str, float]]:
        said = {}
        for name, found in self._found.items():
            found.sort()
            last = found[min(len(found) - 1, int(len(found) * 0.99))]
            said[name] = {"n": len(found), "p50_ms": round(statistics.median(found), 1), "p99_ms": round(last, 1)}
        return said


async def command(instance: MicroVm) -> None:
    process = await instance.agent.start(ProcessSpec(("/bin/sh", "-c", "echo done"), "root"))
    async for _ in process.events():
        pass


async def alone(runtime: MicroVmRuntime, image: Image, limits: Limits, options: argparse.Namespace, work: Path) -> Any:
    times = Times()
    weights = []
    for turn in range(options.operations):
        spec = Spec(f"alone-{turn}", image, limits)
        instance = await times.of("create", runtime.create(spec))
        await times.of("first command", command(instance))
        await times.of("command", command(instance))
        weights.append((await instance.footprint()).total / (1 << 20))
        if turn % 4 == 0:
            kept = await times.of("snapshot", instance.snapshot(work / "kept"))
            fork = await times.of("restore", runtime.restore(Spec(f"fork-{turn}", image, limits), kept))
            await fork.kill()
            shutil.rmtree(work / "kept")
            await times.of("pause", instance.pause())
            await times.of("resume", instance.resume())
        await times.of("kill", instance.kill())
        await asyncio.sleep(options.gap)  # the machine that waits is started between two operations
    return times.said(), round(statistics.median(weights), 1)


async def together(runtime: MicroVmRuntime, image: Image, limits: Limits, options: argparse.Namespace) -> Any:
    times = Times()
    began = time.perf_counter()
    specs = [Spec(f"together-{turn}", image, limits) for turn in range(options.together)]
    made = await asyncio.gather(*(times.of("create", runtime.create(spec)) for spec in specs))
    took = time.perf_counter() - began
    await asyncio.gather(*(instance.kill() for instance in made))
    return {"clones_per_s": round(options.together / took, 1), **times.said()["create"]}


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.state) as name:
        work = Path(name)
        await setup.setup(work / "state", Path(options.kernel_package) if options.kernel_package else None)
        runtime = MicroVmRuntime(work / "state", waiting=options.waiting, idle=IdlePolicy(after_s=0.0))
        abilities = await runtime.start()
        directory = await asyncio.to_thread(root, work / "root")
        image = Image("bench", "bench", (str(directory),), memory_mib=options.memory, disk_mib=64)
        limits = Limits(memory_mib=options.memory, disk_mib=64)
        began = time.perf_counter()
        await runtime.prepare(image)
        prepared = time.perf_counter() - began
        await asyncio.sleep(2.0)
        said, weight = await alone(runtime, image, limits, options, work)
        burst = await together(runtime, image, limits, options)
        await runtime.close()
    accelerator = "tcg" if "kvm" in abilities.lacks else "kvm"
    found = {
        "accelerator": accelerator,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory_mib": options.memory,
    }
    found |= {"template_s": round(prepared, 1), "alone": said, "footprint_mib": weight, "together": burst}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kernel-package", help="a linux-image .deb; else apt-get downloads one")
    parser.add_argument("--state", default=None, help="where the node keeps its files")
    parser.add_argument("--memory", type=int, default=256, help="of a guest, MiB")
    parser.add_argument("--operations", type=int, default=200)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--waiting", type=int, default=1, help="machines started ahead")
    parser.add_argument("--gap", type=float, default=0.3, help="seconds between operations")
    asyncio.run(main(parser.parse_args()))
