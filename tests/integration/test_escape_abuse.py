"""Attempts to take the machine with oneself: each ends in the sandbox's own limits, says why, and harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.persistent import LIMITS, WAIT_S, output, running, shell, spec

from venusrl.sandboxes.agent.api import AgentError, Output, ProcessSpec
from venusrl.sandboxes.runtimes.namespace.instance import NamespaceInstance

Pair = tuple[NamespaceInstance, NamespaceInstance]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with running(tmp_path / "ns") as runtime:
        bad, neighbour = await runtime.create(spec("bad")), await runtime.create(spec("neighbour"))
        assert isinstance(bad, NamespaceInstance)
        assert isinstance(neighbour, NamespaceInstance)
        await output(neighbour, "echo untouched > mine; sleep 1000 & true")
        yield bad, neighbour
        assert await output(neighbour, "cat mine; pgrep -c sleep") == "untouched\n1"
        assert not neighbour.out_of_memory()
        await bad.kill()


async def test_a_fork_bomb_meets_the_limit_of_processes(pair: Pair) -> None:
    bomb = "import os,time\nwhile True:\n try:\n  os.fork()\n except OSError:\n  time.sleep(0.05)"
    await pair[0].agent.start(ProcessSpec(("python3", "-c", bomb), "user"))
    group = pair[0]._maker.group("bad")
    assert group is not None
    for _ in range(int(WAIT_S / 0.05)):
        if len(group.pids()) >= LIMITS.pids:
            break
        await asyncio.sleep(0.05)
    assert LIMITS.pids <= len(group.pids()) <= LIMITS.pids + 4
    assert await output(pair[1], "echo well") == "well"
    with pytest.raises(AgentError) as told:
        await asyncio.gather(*(pair[0].agent.start(ProcessSpec(("/bin/true",), "user")) for _ in range(8)))
    assert told.value.code == "resource_exhausted"
    await pair[0].kill()
    assert await output(pair[1], "echo well") == "well"


async def test_a_memory_bomb_ends_its_own_process(pair: Pair) -> None:
    assert not pair[0].out_of_memory()
    bomb = "x = []\nwhile True: x.append(b'x' * (1 << 20))"
    code, _ = await shell(pair[0], f'exec python3 -c "{bomb}"')
    assert code == 128 + 9
    assert pair[0].out_of_memory()
    assert not pair[0].out_of_memory()  # told once
    assert await output(pair[0], "echo well") == "well"


async def test_memory_files_count_as_memory_and_as_disk(pair: Pair) -> None:
    for path in ("/tmp/fill", "/dev/shm/fill", "/home/user/fill", "/var/tmp/fill"):
        code, told = await shell(pair[0], f"dd if=/dev/zero of={path} bs=1M count=4000 2>&1")
        assert code != 0
        assert "No space left" in told, path
        assert await output(pair[1], "echo more >> /tmp/other; wc -c < /tmp/other")
        await output(pair[0], f"rm {path}; echo well > /tmp/ok; cat /tmp/ok")
    code, told = await shell(pair[0], "cd /tmp; i=0; while :; do i=$((i+1)); : > f$i || exit 3; done")
    assert code != 0
    assert "No space left" in told
    await output(pair[0], "find /tmp -name 'f*' -delete")


async def test_a_flood_of_output_waits_for_its_reader(pair: Pair) -> None:
    flood = await pair[0].agent.start(ProcessSpec(("/bin/sh", "-c", "exec yes flood"), "user"))
    taken = 0
    async for event in flood.events():
        assert isinstance(event, Output)
        taken += len(event.data)
        if taken > 4 << 20:
            break
    assert await output(pair[1], "echo well") == "well"
    await asyncio.sleep(0.3)  # nobody reads now
    assert (await pair[0].footprint()).total < 64 << 20
    await flood.signal(9)
    assert await output(pair[0], "echo well") == "well"


async def test_descriptors_sockets_and_watches_are_its_own(pair: Pair) -> None:
    hog = "import os\nheld=[]\ntry:\n while True: held.append(os.open('/dev/null', 0))\n"
    hog += "except OSError as error: print(error.errno, len(held) < 70000)"
    assert await output(pair[0], f'python3 -c "{hog}"') == "24 True"
    many = "import socket\nheld=[]\nfor _ in range(2000):\n held.append(socket.socketpair())\nprint(len(held))"
    code, _ = await shell(pair[0], f'python3 -c "{many}"')
    assert code in {0, 1, 137}
    watches = "import ctypes\nc=ctypes.CDLL(None)\nprint(sum(c.inotify_init() >= 0 for _ in range(500)) < 500)"
    assert await output(pair[0], f'python3 -c "{watches}"') == "True"
    assert await output(pair[1], f'python3 -c "{watches}"') == "True"


async def test_processors_are_shared(pair: Pair) -> None:
    for _ in range(4):
        await pair[0].agent.start(ProcessSpec(("/bin/sh", "-c", "while :; do :; done"), "user"))
    for _ in range(5):
        assert await output(pair[1], "echo well") == "well"
