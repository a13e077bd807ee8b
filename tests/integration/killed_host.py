"""A host's service that is made to be killed: starts over what is on disk, tells what it found, then changes things.

Owns: the program run by ``test_env_kills``: ``python killed_host.py STATE SEED [end]``. It does nothing after
its first line before it is told to; every change is told before it begins and after it is done, a line each, so that
the reader knows what was promised when this process was killed.

Must not know: when it is killed.

Guarantees: with ``end`` it resumes whatever is paused, looks into every sandbox, ends all and closes.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from venusrl.sandboxes.agent.api import Exit, Output, ProcessSpec
from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.local import HostConfig, LocalHost
from venusrl.sandboxes.protocol import Limits, SandboxGone
from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
from venusrl.testing.hosts import AdmitAll, FixedImages, PlainDoor

LIMITS = Limits(memory_mib=64, pids=16, cpus=1.0, disk_mib=8)
WORKERS, MOST = 3, 9
BUSY = "busy"
"""Part of the name of those that have a process, which a pause must keep; the others are kept as files."""


def tell(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def run_in(host: LocalHost, sandbox: str, command: str) -> str:
    instance = host.cells.running(sandbox)[1]
    process = await instance.agent.start(ProcessSpec(("/bin/sh", "-c", command), "user"))
    told = b""
    async for event in process.events():
        if isinstance(event, Output):
            told += event.data
        elif isinstance(event, Exit):
            break
    return told.decode().strip()


async def fill(host: LocalHost, sandbox: str) -> None:
    keep = "sleep 10000 > /dev/null 2>&1 & " if BUSY in sandbox else ""
    assert await run_in(host, sandbox, f"{keep}echo {sandbox} > /work/name; echo ok") == "ok"


async def look(host: LocalHost, sandbox: str) -> str:
    """What it says of itself; "" when all is as it was left."""
    process = "grep -l sleep /proc/[0-9]*/comm | wc -l" if BUSY in sandbox else "echo 1"
    said = await run_in(host, sandbox, f"cat /work/name; {process}")
    return "" if said == f"{sandbox}\n1" else said or "nothing"


class Work:
    """Random changes by several workers, one at a time a sandbox."""

    def __init__(self, host: LocalHost, seed: int, states: Mapping[str, str]) -> None:
        self._host = host
        self._random = random.Random(seed)
        self._seed = seed
        self._free: dict[str, str] = dict(states)
        self._made = 0

    async def forever(self) -> None:
        while True:
            if not self._free or (len(self._free) < MOST and self._random.random() < 0.3):
                await self._create()
                continue
            sandbox = self._random.choice(sorted(self._free))
            await self._change(sandbox, self._free.pop(sandbox))

    async def _create(self) -> None:
        self._made += 1
        sandbox = f"s{self._seed}-{self._made}-{self._random.choice((BUSY, 'idle'))}"
        tell(begin="create", id=sandbox)
        await self._host.create(Order(id=sandbox, template="host", runtime="namespace", limits=LIMITS))
        tell(done="create", id=sandbox)
        tell(begin="fill", id=sandbox)
        await fill(self._host, sandbox)
        tell(done="fill", id=sandbox)
        self._free[sandbox] = "running"

    async def _change(self, sandbox: str, state: str) -> None:
        chances = {"running": ("pause", "pause", "snapshot", "kill"), "paused": ("resume", "resume", "kill")}
        change = self._random.choice(chances[state])
        name = f"{sandbox}.{self._random.randrange(1 << 30)}" if change == "snapshot" else ""
        tell(begin=change, id=sandbox, snapshot=name)
        if change == "pause":
            await self._host.pause(sandbox)
        elif change == "resume":
            await self._host.resume(sandbox)
        elif change == "snapshot":
            await self._host.snapshot(sandbox, name, memory=False)
        else:
            await self._host.kill(sandbox)
        tell(done=change, id=sandbox, snapshot=name)
        if change != "kill":
            self._free[sandbox] = {"pause": "paused", "resume": "running"}.get(change, state)


async def main(state: Path, seed: int, end: bool) -> None:
    runtime = NamespaceRuntime(state / "ns", require_cgroup=True)
    config = HostConfig(reserve=0)
    host = LocalHost(state / "host", {"namespace": runtime}, FixedImages(), AdmitAll(), PlainDoor(), config)
    lost = await host.start()
    status = await host.status()
    states = {held.id: held.state for held in status.held}
    groups = runtime._groups
    tell(
        held=states,
        lost={death.sandbox: death.cause for death in lost},
        lacking=[cell.lacks for cell in host.cells if cell.lacks],
        snapshots=[snapshot.id for snapshot in status.snapshots],
        groups=[] if groups is None else sorted({str(path) for path in groups.directories.values()}),
    )
    await asyncio.to_thread(sys.stdin.readline)  # the reader looks around first
    wrong = {}
    for sandbox, now in states.items():
        if end and now == "paused":
            await host.resume(sandbox)
        if end or now == "running":
            wrong[sandbox] = await look(host, sandbox)
    tell(wrong={sandbox: said for sandbox, said in wrong.items() if said})
    if not end:
        work = Work(host, seed, states)
        await asyncio.gather(*(work.forever() for _ in range(WORKERS)))
    for sandbox in states:
        try:
            await host.kill(sandbox)
        except SandboxGone:
            continue
    await host.close()
    tell(closed=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["end"]))
