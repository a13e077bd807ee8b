"""Whether many sandboxes leave anything behind: makes, uses and kills them, and keeps many alive at once.

    python benchmarks/sandbox_churn.py [--lives 10000] [--alive 1000] [--at-once 16] [--shared] [--json]

Counts before and after what is its own: processes below it, mounts, control groups of its sandboxes in every
hierarchy, descriptors, files in the state directory; and what only the whole machine can tell: control groups as
/proc/cgroups has them (zombies too), network devices, memory. Prints the differences and fails when one that must be
none is not. Needs root. ``--shared``: others use the machine meanwhile, so the whole machine's figures are told, not
judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from venusrl.sandboxes.agent.api import Exit, Output, ProcessSpec
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.runtimes.namespace import kernel
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.sandboxes.templates.api import Image

LIMITS = Limits(memory_mib=64, pids=16, disk_mib=8)
HOST = Image(id="host", name="host")
MEMORY_SLACK_MIB = 256
GROUP_SLACK = 32
"""Groups whose last page the kernel has not let go of yet; none of them is per life."""
MACHINE = ("groups_memory", "groups_pids", "devices", "memory_mib")
"""What others change too."""
_SETTLE_S = 60.0


def count(state: Path, directories: list[Path]) -> dict[str, int]:
    """What there is; ``directories`` hold our sandboxes' control groups."""
    groups = {}
    for line in Path("/proc/cgroups").read_text().splitlines()[1:]:
        controller, _, number, _ = line.split()
        groups[controller] = int(number)
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "processes": processes(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "groups": sum(entry.is_dir() for each in directories for entry in os.scandir(each)),
        "groups_memory": groups.get("memory", 0),
        "groups_pids": groups.get("pids", 0),
        "devices": len(os.listdir("/sys/class/net")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sum(1 for path in state.rglob("*") if path.is_file() or path.is_socket()),
        "memory_mib": (int(meminfo["MemTotal"].split()[0]) - int(meminfo["MemAvailable"].split()[0])) >> 10,
    }


def processes() -> int:
    """Processes below this one, orphans included: ``main`` takes those."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return len(found) - 1


async def use(sandbox: Instance) -> None:
    """Write a file and leave a process behind."""
    process = await sandbox.agent.start(ProcessSpec(("/bin/sh", "-c", "echo x > /tmp/x; sleep 1000 & echo ok"), "user"))
    told = b""
    async for event in process.events():
        if isinstance(event, Output):
            told += event.data
            break
        if isinstance(event, Exit):
            break
    if told != b"ok\n":
        raise SystemExit(f"a command said {told!r}")


async def keep_alive(runtime: NamespaceRuntime, number: int, at_once: int) -> dict[str, float]:
    """Many at once; how long a command takes among them."""
    numbers = iter(range(number))
    made: list[Instance] = []

    async def make() -> None:
        for each in numbers:
            sandbox = await runtime.create(Spec(f"alive-{each}", HOST, LIMITS))
            made.append(sandbox)

    begun = time.perf_counter()
    await asyncio.gather(*(make() for _ in range(at_once)))
    took = time.perf_counter() - begun
    times = []
    for sandbox in made[:: max(1, number // 50)]:
        begun = time.perf_counter()
        await use(sandbox)
        times.append(1e3 * (time.perf_counter() - begun))
    begun = time.perf_counter()
    footprints = [(await each.footprint()).total for each in made]
    looked = time.perf_counter() - begun
    doomed = iter(made)

    async def end() -> None:
        for each in doomed:
            await each.kill()

    await asyncio.gather(*(end() for _ in range(at_once)))
    times.sort()
    return {
        "made_a_second": number / took,
        "command_ms_p50": times[len(times) // 2],
        "command_ms_max": times[-1],
        "footprint_mib_mean": sum(footprints) / number / (1 << 20),
        "all_footprints_s": looked,
    }


async def churn(runtime: NamespaceRuntime, lives: int, at_once: int) -> float:
    numbers = iter(range(lives))

    async def live() -> None:
        for each in numbers:
            sandbox = await runtime.create(Spec(f"life-{each}", HOST, LIMITS))
            await use(sandbox)
            await sandbox.kill()

    begun = time.perf_counter()
    await asyncio.gather(*(live() for _ in range(at_once)))
    return lives / (time.perf_counter() - begun)


def leaks(before: dict[str, int], after: dict[str, int], *, shared: bool) -> dict[str, int]:
    """What is more than it was, and should not be."""
    names = [name for name in before if not (shared and name in MACHINE)]
    slack = {"memory_mib": MEMORY_SLACK_MIB, "groups_memory": GROUP_SLACK}
    return {name: after[name] - before[name] for name in names if after[name] - before[name] > slack.get(name, 0)}


async def run(lives: int, alive: int, at_once: int, *, shared: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="venusrl-") as folder:
        state = Path(folder) / "ns"
        runtime = NamespaceRuntime(state)
        await runtime.start()
        node = runtime._groups
        directories = [] if node is None else sorted(set(node.directories.values()))
        try:
            await churn(runtime, 2 * at_once, at_once)  # what is made once for all is there then
            before = count(state, directories)
            together = await keep_alive(runtime, alive, at_once) if alive else {}
            rate = await churn(runtime, lives, at_once)
            deadline = time.monotonic() + _SETTLE_S
            after = count(state, directories)
            while leaks(before, after, shared=shared) and time.monotonic() < deadline:
                time.sleep(1.0)  # noqa: ASYNC251 - nothing else runs; the kernel frees groups in its own time
                after = count(state, directories)
        finally:
            for sandbox in list(runtime._instances.values()):
                await sandbox.kill()
            await runtime.sweep(set())
            await runtime.close()
    return {
        "lives": lives,
        "lives_a_second": rate,
        "alive": together,
        "before": before,
        "after": after,
        "leaks": leaks(before, after, shared=shared),
        "groups_left_after_close": sum(path.exists() for path in directories),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--alive", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kernel.become_subreaper()
    result = asyncio.run(run(args.lives, args.alive, args.at_once, shared=args.shared))
    print(json.dumps(result, indent=2 if args.json else None))
    if result["leaks"] or result["groups_left_after_close"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
