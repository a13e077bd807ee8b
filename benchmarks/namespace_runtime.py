"""How fast persistent sandboxes are made and used, and what one weighs (the runtime alone, without the service).

    python benchmarks/namespace_runtime.py [--count 200] [--at-once 16] [--alive 200] [--disk memory|file] [--json]

Makes, commands (`true`), freezes and kills sandboxes of the `host` template, one at a time and many at once; then keeps
so many alive and divides what the machine has less by their number; writes 64 MiB in one and looks what that takes. CPU
time of a life does not count what the kernel does later in its own threads (network namespaces' ends). Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from venusrl.sandboxes.agent.api import Exit, ProcessSpec
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.sandboxes.templates.api import Image

LIMITS = Limits(memory_mib=128)
HOST = Image(id="host", name="host")
TRUE = ProcessSpec(("/bin/true",), "user")
WRITE = "head -c 67108864 /dev/zero > /work/x"
SLEEP = ProcessSpec(("/bin/sleep", "1000"), "user")


_T = TypeVar("_T")


async def timed(work: Callable[[], Awaitable[_T]], into: list[float]) -> _T:
    begun = time.perf_counter()
    result = await work()
    into.append(1e3 * (time.perf_counter() - begun))
    return result


async def command(sandbox: Instance) -> None:
    """A round trip: start `true`, hear of its end."""
    process = await sandbox.agent.start(TRUE)
    codes = [event.code async for event in process.events() if isinstance(event, Exit)]
    if codes != [0]:
        raise SystemExit(f"a command ended with {codes}")


async def life(runtime: NamespaceRuntime, name: str, times: dict[str, list[float]]) -> None:
    """One sandbox from beginning to end."""
    sandbox = await timed(lambda: runtime.create(Spec(name, HOST, LIMITS)), times["create"])
    await timed(lambda: command(sandbox), times["command"])
    await timed(sandbox.kill, times["kill"])


async def pauses(runtime: NamespaceRuntime, count: int, times: dict[str, list[float]]) -> None:
    """Freeze and thaw one in which something runs; keep the files of one in which nothing does."""
    for busy in (True, False):
        kind = "frozen" if busy else "files"
        sandbox = await runtime.create(Spec(f"pause-{kind}", HOST, LIMITS))
        if busy:
            await (await sandbox.agent.start(SLEEP)).detach()
        for _ in range(count):
            await timed(sandbox.pause, times[f"pause_{kind}"])
            await timed(sandbox.resume, times[f"resume_{kind}"])
        await sandbox.kill()


def available() -> int:
    """Bytes the machine could still give out."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


async def weight(runtime: NamespaceRuntime, count: int) -> dict[str, float]:
    """MiB a sandbox: as the machine sees it, and as its own footprint says."""
    before = available()
    sandboxes = [await runtime.create(Spec(f"alive-{n}", HOST, LIMITS)) for n in range(count)]
    machine = (before - available()) / count / (1 << 20)
    own = sum([(await each.footprint()).total for each in sandboxes]) / count / (1 << 20)
    begun = time.perf_counter()
    await command(sandboxes[count // 2])
    answer = 1e3 * (time.perf_counter() - begun)
    for each in sandboxes:
        await each.kill()
    return {"machine_mib": machine, "footprint_mib": own, "command_ms_among_them": answer}


async def filled(runtime: NamespaceRuntime) -> dict[str, float]:
    """What 64 MiB of files cost: memory that is the sandbox's own, seconds to write them and to end it."""
    sandbox = await runtime.create(Spec("filled", HOST, LIMITS))
    before = (await sandbox.footprint()).total
    begun = time.perf_counter()
    process = await sandbox.agent.start(ProcessSpec(("/bin/sh", "-c", WRITE), "user"))
    codes = [event.code async for event in process.events() if isinstance(event, Exit)]
    written = time.perf_counter() - begun
    after = (await sandbox.footprint()).total
    begun = time.perf_counter()
    await sandbox.kill()
    if codes != [0]:
        raise SystemExit(f"writing 64 MiB ended with {codes}")
    return {"memory_mib": (after - before) / (1 << 20), "write_s": written, "kill_s": time.perf_counter() - begun}


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds."""
    found = {}
    for name, values in times.items():
        if values:
            ordered = sorted(values)
            found[name] = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * (len(ordered) - 1))]}
    return found


def spent(runtime: NamespaceRuntime) -> dict[str, float]:
    """CPU milliseconds so far: this process, the forge, and what ended below it (makers, agents, commands)."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    link = runtime._link
    assert link is not None
    fields = Path(f"/proc/{link.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = [1e3 * int(each) / os.sysconf("SC_CLK_TCK") for each in fields[11:15]]
    return {"service": 1e3 * (own.ru_utime + own.ru_stime), "forge": sum(ticks[:2]), "sandboxes": sum(ticks[2:])}


def nothing() -> dict[str, list[float]]:
    names = ("create", "command", "kill", "pause_frozen", "resume_frozen", "pause_files", "resume_files")
    return {name: [] for name in names}


async def measure(count: int, at_once: int, alive: int, disk: Disk) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="venusrl-") as state:
        runtime = NamespaceRuntime(Path(state), disk=disk)
        await runtime.start()
        try:
            await life(runtime, "first", nothing())
            alone, together = nothing(), nothing()
            for turn in range(count):
                await life(runtime, f"alone-{turn}", alone)
            await pauses(runtime, count, alone)
            waiting = iter(range(2 * count))

            async def one_after_the_other() -> None:
                for turn in waiting:
                    await life(runtime, f"together-{turn}", together)

            begun, before = time.perf_counter(), spent(runtime)
            await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
            rate = 2 * count / (time.perf_counter() - begun)
            cpu = {name: (value - before[name]) / (2 * count) for name, value in spent(runtime).items()}
            weighed = await weight(runtime, alive)
            files = await filled(runtime)
        finally:
            for sandbox in list(runtime._instances.values()):
                await sandbox.kill()
            await runtime.sweep(set())
            await runtime.close()
    return {
        "alone_ms": summary(alone),
        f"at_{at_once}_at_once_ms": summary(together),
        "lives_a_second_at_once": rate,
        "cpu_ms_a_life": {**cpu, "all": sum(cpu.values())},
        f"weight_of_{alive}": weighed,
        "files_of_64_mib": files,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--alive", type=int, default=200)
    parser.add_argument("--disk", choices=("memory", "file"), default="memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(measure(args.count, args.at_once, args.alive, args.disk))
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        print(f"{name}: {value}" if not isinstance(value, dict) else name)
        for key, row in value.items() if isinstance(value, dict) else ():
            print(f"  {key}: {row}")


if __name__ == "__main__":
    main()
