"""A busy virtual machine moves between two nodes that share no directory: how long, how still, how much is shared.

Runs two microVM runtimes with separate state directories on this machine, joined by TCP. The guest holds a buffer that
a small program in it dirties at a set rate, and notes the longest gap of a 10 ms heartbeat. Afterwards the guest checks
every page of the buffer against what must be in it. The same machine is then moved by the recovery path (paused to
storage, restored on the other node) for comparison. ``outage_s`` is from the machine's stop until its agent has
answered on the other node; the guest's own clock stands still while the machine does. Prints one JSON object.

    python benchmarks/migration.py --kernel-package FILE.deb --state DIR
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from venusrl.sandboxes.agent.api import Exit, Output, ProcessSpec
from venusrl.sandboxes.agent.build import default_cache
from venusrl.sandboxes.protocol import Limits
from venusrl.sandboxes.runtimes.base import Instance, Spec
from venusrl.sandboxes.runtimes.microvm import migration, setup
from venusrl.sandboxes.runtimes.microvm.idle import IdlePolicy
from venusrl.sandboxes.runtimes.microvm.instance import MicroVm
from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime
from venusrl.sandboxes.runtimes.moving import Dial, Streams
from venusrl.sandboxes.templates.api import Image

LOAD = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
/* load MIB RATE: page p of the buffer is filled with (p, round); "stop" ends it; the report is in /tmp/report. */
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv) {
    uint64_t pages = strtoull(argv[argc - 2], 0, 10) * 256, done = 0, bad = 0, round = 0, at = 0;
    double rate = atof(argv[argc - 1]) * 256, gap = 0;
    volatile double *beat = mmap(0, 4096, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t *buffer = mmap(0, pages * 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pid_t heart = fork();
    if (!heart) {
        for (double last = now();;) { /* the heartbeat */
            usleep(10000);
            double time = now();
            if (time - last > beat[0]) beat[0] = time - last;
            last = time;
            if (access("/tmp/reset", F_OK) == 0) { beat[0] = 0; unlink("/tmp/reset"); }
        }
    }
    double start = now();
    while (access("/tmp/stop", F_OK)) {
        for (int burst = 0; burst < 256; burst++, done++) {
            uint64_t *page = buffer + at * 512;
            for (int i = 0; i < 512; i += 8) page[i] = at * 1000003 + round + i;
            if (++at == pages) { at = 0; round++; }
        }
        double ahead = done / rate - (now() - start);
        if (ahead > 0) usleep(ahead * 1e6);
        if (ahead < -0.5) { start = now(); done = 0; gap++; }
    }
    for (uint64_t p = 0; p < pages; p++) {
        uint64_t of = p < at ? round : round - 1;
        if (round == 0 && p >= at) break;
        for (int i = 0; i < 512; i++)
            if (buffer[p * 512 + i] != (i % 8 ? 0 : p * 1000003 + of + i)) { bad++; break; }
    }
    FILE *file = fopen("/tmp/report", "w");
    fprintf(file, "%llu %llu %f %llu\n", (unsigned long long)pages, (unsigned long long)bad, beat[0],
            (unsigned long long)(round * pages + at));
    fclose(file);
    kill(heart, 9);
    return 0;
}
"""


async def sh(instance: Instance, command: str) -> str:
    process = await instance.agent.start(ProcessSpec(("/bin/sh", "-c", command), "root"))
    said = b""
    async for event in process.events():
        if isinstance(event, Output):
            said += event.data
        elif isinstance(event, Exit) and event.code != 0:
            raise SystemExit(f"in the guest: {command}: {said.decode(errors='replace')}")
    return said.decode()


def guest_root(directory: Path) -> Path:
    """Busybox and the load."""
    for name in ("bin", "etc", "root", "tmp"):
        (directory / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SystemExit("apt install busybox-static")
    shutil.copy(busybox, directory / "bin" / "busybox")
    for tool in ("sh", "cat", "sleep", "touch", "rm", "dd", "date", "cp"):
        (directory / "bin" / tool).symlink_to("busybox")
    (directory / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    (directory / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    source = directory.parent / "load.c"
    source.write_text(LOAD.replace("#include <fcntl.h>", "#include <fcntl.h>\n#include <signal.h>"))
    compiler = (sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-musl", "-Os", "-s", "-static")
    zig = str(default_cache() / "agent" / "zig")  # where the agent's compilation left musl
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": zig, "ZIG_LOCAL_CACHE_DIR": zig}
    flags = ("-std=gnu11", "-fno-sanitize=undefined", "-w")
    subprocess.run([*compiler, *flags, "-o", directory / "bin" / "load", source], check=True, env=environment)
    return directory


async def joined() -> tuple[asyncio.Server, Dial, Dial]:
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


async def report(instance: Instance) -> dict[str, Any]:
    """Stop the load; what it found."""
    await sh(instance, "touch /tmp/stop; while [ ! -s /tmp/report ]; do sleep 0.1; done")
    pages, bad, gap, written = (await sh(instance, "cat /tmp/report; rm /tmp/report /tmp/stop")).split()
    return {
        "pages": int(pages),
        "bad_pages": int(bad),
        "longest_gap_ms": round(1000 * float(gap), 1),
        "writes": int(written),
    }


async def load(instance: Instance, options: argparse.Namespace) -> float:
    """Start the load and let it reach its rate; MB/s that it dirties."""
    await sh(
        instance,
        f"load {options.buffer} {options.rate} >/dev/null 2>&1 & sleep {options.warm}; touch /tmp/reset; sleep 0.1",
    )
    return float(options.rate)


async def live(a: MicroVmRuntime, b: MicroVmRuntime, instance: MicroVm, options: argparse.Namespace) -> dict[str, Any]:
    """One live move; the instance runs on ``b`` afterwards and is ended there."""
    await load(instance, options)
    before = (await instance.footprint()).private
    server, dial, accept = await joined()
    began = time.monotonic()
    receiving = asyncio.create_task(migration.receive(b, instance.spec, accept))
    moved = await migration.send(a, instance, dial, lambda: None, lambda: None)
    arrived = await receiving
    outage = asyncio.get_running_loop().time() - moved.stopped_at
    total = time.monotonic() - began
    server.close()
    await instance.kill()
    after = (await arrived.footprint()).private
    found = await report(arrived)
    await arrived.kill()
    found |= {"total_s": round(total, 3), "outage_s": round(outage, 3)}
    found |= {"private_before_mib": before >> 20, "private_after_mib": after >> 20}
    return found | {"private_ratio": round(after / before, 3), "pages_sent": moved.sent, "pages_shared": moved.shared}


async def recovery(b: MicroVmRuntime, instance: MicroVm, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Paused to storage here, restored there."""
    await load(instance, options)
    before = (await instance.footprint()).private
    began = time.monotonic()
    kept = await instance.snapshot(work / "kept")
    await instance.kill()
    arrived = await b.restore(instance.spec, kept)
    outage = time.monotonic() - began
    after = (await arrived.footprint()).private
    found = await report(arrived)
    await arrived.kill()
    shutil.rmtree(work / "kept")
    return found | {"outage_s": round(outage, 3), "private_ratio": round(after / before, 3), "bytes": kept.bytes}


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.state) as name:
        work = Path(name)
        package = Path(options.kernel_package) if options.kernel_package else None
        runtimes = []
        for node in ("a", "b"):
            await setup.setup(work / node, package)
            runtimes.append(MicroVmRuntime(work / node, waiting=0, idle=IdlePolicy(after_s=0.0)))
            abilities = await runtimes[-1].start()
        a, b = runtimes
        root = await asyncio.to_thread(guest_root, work / "root")
        image = Image("bench", "bench", (str(root),), memory_mib=options.memory, disk_mib=64)
        limits = Limits(memory_mib=options.memory, disk_mib=64, cpus=2.0)
        await a.prepare(image)
        moves, recoveries = [], []
        for turn in range(options.repeat + 1):
            instance = await a.create(Spec(f"live-{turn}", image, limits))
            found = await live(a, b, instance, options)
            if turn:  # the first one brings the template along
                moves.append(found)
        for turn in range(options.repeat):
            instance = await a.create(Spec(f"kept-{turn}", image, limits))
            recoveries.append(await recovery(b, instance, options, work))
        for runtime in runtimes:
            await runtime.close()
        totals = [move["total_s"] for move in moves]
        print(
            json.dumps(
                {
                    "accelerator": "tcg" if "kvm" in abilities.lacks else "kvm",
                    "memory_mib": options.memory,
                    "dirtied_mb_s": options.rate,
                    "total_s_median": statistics.median(totals),
                    "live": moves,
                    "recovery": recoveries,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kernel-package", help="a linux-image .deb; else apt-get downloads one")
    parser.add_argument("--state", default=None, help="where nodes keep their files (a disk with 3 GiB)")
    parser.add_argument("--memory", type=int, default=512, help="of the guest, MiB")
    parser.add_argument("--buffer", type=int, default=64, help="what the load dirties, MiB")
    parser.add_argument("--rate", type=int, default=100, help="MB/s that it dirties")
    parser.add_argument("--warm", type=int, default=3, help="seconds before the move")
    parser.add_argument("--repeat", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
