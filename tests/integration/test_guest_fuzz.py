"""The agent's C under sanitizers, fed well-framed nonsense: it may refuse, never stumble.

It runs as nobody, so that a request which happens to make sense does no harm.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from venusrl.sandboxes.agent import build, wire
from venusrl.sandboxes.agent.client import AgentClient, unix

ROUNDS = 25
NOBODY = 65534

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc with sanitizers: apt-get install gcc"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become nobody"),
]


async def sanitized(folder: Path) -> Path:
    result = folder / "agent-sanitized"
    compiler = await asyncio.create_subprocess_exec(
        *("gcc", "-g", "-O0", "-fsanitize=address,undefined", "-std=gnu11", "-Wall", "-Wextra", "-Werror"),
        *("-o", str(result), *map(str, build.sources())),
    )
    if await compiler.wait() != 0:
        pytest.skip("gcc here has no sanitizers: apt-get install libasan8 libubsan1")
    return result


def nonsense(chance: random.Random) -> bytes:
    """Opens of every operation with fields that are right, cut, too long, or noise; then frames about them."""
    out = wire.hello(chance.randbytes(16), chance.randbytes(16), chance.random() < 0.1, {})
    ids = list(range(1, 30))
    for stream in ids:
        open_ = wire.opened(chance.choice([*range(1, 9), *range(16, 25), 0, 99, 255]), *fields(chance))
        if chance.random() < 0.3:
            place = chance.randrange(len(open_))
            open_ = open_[:place] + chance.randbytes(4) + open_[place + 4 :]
        cut = chance.choice([len(open_), chance.randrange(len(open_) + 1)])
        out += wire.frame(stream, wire.DATA, 0, open_[:cut], chance.choice([0, 0, wire.FIN]))
        out += wire.frame(stream, wire.DATA, cut, open_[cut:])
        for _ in range(chance.randrange(4)):
            kind, offset = chance.randrange(1, 7), chance.choice([0, cut, len(open_), chance.randrange(1 << 40)])
            if kind != wire.HELLO:
                data = chance.randbytes(chance.randrange(3000))
                out += wire.frame(chance.choice(ids), kind, offset, data, chance.randrange(2))
    return out


def fields(chance: random.Random) -> list[bytes]:
    paths = ["/tmp", "/proc/self/fd", "/nowhere/at/all", "x" * 5000, "~", "/etc"]
    numbers = [0, 1, 2, 9, 0xFFFFFFFF, chance.randrange(1 << 32)]
    kinds: list[Callable[[], bytes]] = [
        lambda: wire.text("nobody"),
        lambda: wire.text(""),
        lambda: wire.text(chance.choice(paths)),
        lambda: wire.text(chance.randbytes(chance.randrange(40))),
        lambda: wire.u32(chance.choice(numbers)),
        lambda: wire.u32(2) + wire.text("true") + wire.text("A=b"),
        lambda: wire.u8(chance.randrange(256)),
    ]
    return [chance.choice(kinds)() for _ in range(chance.randrange(9))]


async def test_nonsense_makes_nothing_stumble(tmp_path: Path) -> None:
    program = await sanitized(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    errors = tmp_path / "errors"
    with socket.socket(socket.AF_UNIX) as listener, errors.open("wb") as said:
        listener.bind(str(tmp_path / "s"))
        listener.listen(8)
        agent = await asyncio.create_subprocess_exec(
            *(str(program), "--fd", str(listener.fileno())),
            pass_fds=[listener.fileno()],
            env={"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stderr=said,
        )
    try:
        for seed in range(ROUNDS):
            chance = random.Random(seed)
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(nonsense(chance))
            if chance.random() < 0.5:
                await reader.read(chance.randrange(1, 50_000))
                await asyncio.sleep(chance.random() * 0.02)
            writer.close()
            assert agent.returncode is None, f"seed {seed}: {errors.read_text()}"
        client = AgentClient(unix(tmp_path / "s"))
        assert (await client.usage()).cpus >= 1
        for info in await client.processes():
            await (await client.attach(info.pid, output=False)).signal(9)
        await client.close()
    finally:
        if agent.returncode is None:
            agent.kill()
        await agent.wait()
    assert errors.read_text() == ""
