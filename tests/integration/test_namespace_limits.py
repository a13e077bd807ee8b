"""Commands that take more than their share: contained, told apart, and no neighbour harmed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.namespaces import LIMITS, output, serving

from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.protocol import DiskFull, Limits


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with serving(tmp_path / "node") as made:
        yield made


@pytest.fixture
async def sandbox(node: EmbeddedNode) -> AsyncIterator[str]:
    made = await node.create("host", LIMITS, {})
    neighbour = await node.create("host", LIMITS, {})
    yield made
    assert await output(node, neighbour, "echo fine") == "fine"
    assert await output(node, made, "echo fine") == "fine"


def processes_with(word: str) -> list[str]:
    """Command lines on this machine that contain ``word``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in text:
            found.append(text)
    return found


def limited_by_group(node: EmbeddedNode) -> None:
    if node.report is None or "memory" not in node.report.cgroup_controllers:
        pytest.skip("no control group can be made here: rlimits stand in")


async def test_t29_a_busy_loop_ends_at_its_time(node: EmbeddedNode, sandbox: str) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    result = await node.run(sandbox, "python3 -c 'while True: pass'", timeout_s=0.5)
    ticking.cancel()
    assert result.timed_out
    assert (result.exit_code, result.out_of_memory, result.out_of_disk) == (137, False, False)
    assert result.wall_s >= 0.5
    assert ticks > 1  # the owner's loop went on


async def test_a_timeout_keeps_the_output_and_takes_the_whole_tree(node: EmbeddedNode, sandbox: str) -> None:
    tree = "echo before; (setsid sleep 98.76 &) ; (nohup sh -c 'sleep 98.76' >/dev/null 2>&1 &);"
    tree += " trap '' TERM INT HUP; sleep 98.76"
    result = await node.run(sandbox, tree, timeout_s=3.0)
    assert result.timed_out
    assert result.output == "before\n"
    assert processes_with("98.76") == []


async def test_a_daemon_ends_with_its_command(node: EmbeddedNode, sandbox: str) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(98.71)\n os._exit(0)\n"
    )
    await node.write(sandbox, {"daemon_98.71.py": daemon.encode()})
    started = time.monotonic()
    result = await node.run(sandbox, "python3 daemon_98.71.py; nohup sleep 98.71 & echo done")
    assert (result.exit_code, result.output) == (0, "done\n")
    assert time.monotonic() - started < 90  # of the 98.71 that the daemon wants
    assert processes_with("98.71") == []


async def test_a_fork_bomb_is_stopped_by_the_process_limit(node: EmbeddedNode, sandbox: str) -> None:
    limited_by_group(node)
    bomb = (
        "import os\nn = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      import time; time.sleep(30)\n    n += 1\n"
    )
    bomb += "except OSError as error: print(n, error.errno)\n"
    await node.write(sandbox, {"bomb.py": bomb.encode()})
    result = await node.run(sandbox, "python3 bomb.py", timeout_s=10)
    count, errno = result.output.split()
    assert 25 <= int(count) <= 32
    assert errno == "11"
    classic = await node.run(sandbox, ":(){ :|:& };:", timeout_s=1)
    assert classic.wall_s < 10


async def test_a_memory_bomb_is_told_as_such(node: EmbeddedNode, sandbox: str) -> None:
    limited_by_group(node)
    result = await node.run(sandbox, "python3 -c 'x = bytearray(600 << 20)'")
    assert result.out_of_memory
    assert (result.exit_code, result.timed_out, result.out_of_disk) == (137, False, False)
    fine = await node.run(sandbox, "python3 -c 'x = bytearray(100 << 20)'")
    assert (fine.exit_code, fine.out_of_memory) == (0, False)


async def test_memory_disks_count_as_memory(node: EmbeddedNode, sandbox: str) -> None:
    limited_by_group(node)
    result = await node.run(
        sandbox, "head -c 300M /dev/zero > /dev/shm/x; head -c 300M /dev/zero > /tmp/x; ls -l /tmp/x"
    )
    assert result.exit_code == 0
    assert int(result.output.splitlines()[-1].split()[4]) <= 16 << 20


async def test_a_full_disk_is_told_as_such(node: EmbeddedNode, sandbox: str) -> None:
    result = await node.run(sandbox, "dd if=/dev/zero of=/work/big bs=1M count=64")
    assert result.out_of_disk
    assert result.exit_code != 0
    assert (result.timed_out, result.out_of_memory) == (False, False)
    assert "No space left" in result.output
    with pytest.raises(DiskFull):
        await node.write(sandbox, {"more": b"x" * 100_000})
    cleaned = await node.run(sandbox, "rm /work/big && echo x > /work/small")
    assert (cleaned.exit_code, cleaned.out_of_disk) == (0, False)


async def test_files_are_limited_in_number_too(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", Limits(disk_mib=1, memory_mib=128), {})
    await node.write(sandbox, {"many.py": b"for n in range(10000): open(f'/tmp/{n}', 'w')"})
    result = await node.run(sandbox, "python3 many.py")
    assert result.out_of_disk


async def test_a_flood_of_output_is_cut_and_costs_little(node: EmbeddedNode, sandbox: str) -> None:
    before = time.process_time()
    result = await node.run(sandbox, "echo first; yes flooding; echo never", timeout_s=2)
    assert result.timed_out
    assert result.truncated_bytes > 1 << 20
    assert len(result.output) < LIMITS.output_bytes + 100
    assert result.output.startswith("first\n")
    assert f"[... {result.truncated_bytes} bytes cut ...]" in result.output
    assert time.process_time() - before < 0.5


async def test_both_ends_of_long_output_are_kept(node: EmbeddedNode, sandbox: str) -> None:
    result = await node.run(sandbox, "seq 1 20000; echo error at the end >&2; exit 3")
    assert result.exit_code == 3
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("20000\nerror at the end\n")


async def test_output_without_newline_or_utf8(node: EmbeddedNode, sandbox: str) -> None:
    result = await node.run(sandbox, r"printf 'a\377b\0c'")
    assert result.output == "a\ufffdb\0c"


async def test_a_command_that_closes_its_output_is_still_waited_for(node: EmbeddedNode, sandbox: str) -> None:
    result = await node.run(sandbox, "exec >&- 2>&-; sleep 0.3; exit 5")
    assert (result.exit_code, result.output) == (5, "")
    assert result.wall_s >= 0.3


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -SEGV $$", 139), ("nosuch", 127)]
)
async def test_exit_codes(node: EmbeddedNode, sandbox: str, command: str, code: int) -> None:
    result = await node.run(sandbox, command)
    assert (result.exit_code, result.timed_out, result.out_of_memory, result.out_of_disk) == (code, False, False, False)


async def test_a_cpu_limit_slows_down(node: EmbeddedNode) -> None:
    if node.report is None or "cpu" not in node.report.cgroup_controllers:
        pytest.skip("no CPU control group can be made here")
    sandbox = await node.create("host", Limits(cpus=0.1, memory_mib=128), {})
    busy = "import time\nt = time.monotonic()\nwhile time.monotonic() < t + 1: pass\nprint(time.process_time())"
    result = await node.run(sandbox, f"python3 -c '{busy}'")
    assert float(result.output) < 0.5


async def test_commands_that_cannot_be_given_to_a_shell(node: EmbeddedNode, sandbox: str) -> None:
    for command in ("a\0b", "x" * 200_000):
        result = await node.run(sandbox, command)
        assert result.exit_code == 126
    assert await output(node, sandbox, "echo 'ünïcode \u2713'") == "ünïcode \u2713"
