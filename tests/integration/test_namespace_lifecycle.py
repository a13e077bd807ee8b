"""Beginnings and ends: cancellation, killed owners, killed launchers, reaping, admission."""

# ruff: noqa: ASYNC240 - a test may look at a local file

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration.namespaces import LIMITS, output, serving
from tests.integration.test_namespace_limits import processes_with
from tests.waiting import until

from venusrl.sandboxes.node import EmbeddedNode, NodeConfig
from venusrl.sandboxes.protocol import SandboxDenied, SandboxError, SandboxGone

OWNER = """
import asyncio, json, sys
from pathlib import Path
from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.protocol import Limits

async def main():
    node = EmbeddedNode(Path(sys.argv[1]), "owner")
    await node.start()
    limits = Limits(memory_mib=128, disk_mib=8)
    sandboxes = [await node.create("host", limits, {}) for _ in range(3)]
    running = [asyncio.create_task(node.run(s, "sleep 97.53", timeout_s=60)) for s in sandboxes]
    report = node.report
    print(json.dumps({"launcher": report.pid, "groups": report.cgroup_directories}), flush=True)
    await asyncio.gather(*running)

asyncio.run(main())
"""


def records(root: Path) -> list[str]:
    return sorted(path.stem for path in (root / "sandboxes").glob("*.json"))


def start_owner(root: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, json.loads(owner.stdout.readline())


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[EmbeddedNode]:
    async with serving(tmp_path / "node") as made:
        yield made


async def test_kill_removes_everything_and_may_be_repeated(node: EmbeddedNode, tmp_path: Path) -> None:
    sandbox = await node.create("host", LIMITS, {"task": "t1"})
    assert records(tmp_path / "node") == [sandbox]
    assert node.report is not None
    groups = [Path(directory) / sandbox for directory in node.report.cgroup_directories]
    assert all(group.is_dir() for group in groups)
    await node.kill(sandbox)
    await node.kill(sandbox)
    await node.kill("never-existed")
    assert records(tmp_path / "node") == []
    assert not any(group.exists() for group in groups)
    for call in (node.run(sandbox, "true"), node.write(sandbox, {}), node.read(sandbox, "x")):
        with pytest.raises(SandboxGone):
            await call
    assert await node.create("host", LIMITS, {}) != sandbox


async def test_files_persist_between_commands_and_nothing_else_does(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    await node.run(sandbox, "echo one > file; export A=b; cd /tmp; echo two > other")
    assert await output(node, sandbox, "cat file /tmp/other; pwd; echo $A") == "one\ntwo\n/work"


async def test_killing_a_sandbox_ends_its_command(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    running = asyncio.create_task(node.run(sandbox, "sleep 97.11"))
    await until(lambda: processes_with("97.11") != [])
    await node.kill(sandbox)
    with pytest.raises(SandboxGone):
        await running
    assert processes_with("97.11") == []


async def test_t30_a_cancelled_command_leaves_no_process(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    running = asyncio.create_task(node.run(sandbox, "sleep 97.12 & sleep 97.12"))
    await until(lambda: processes_with("97.12") != [])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes_with("97.12") == []
    assert await output(node, sandbox, "echo still here") == "still here"


async def test_t36_a_create_cancelled_at_any_moment_leaves_nothing(node: EmbeddedNode, tmp_path: Path) -> None:
    assert node.report is not None
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03):
        making = asyncio.create_task(node.create("host", LIMITS, {}))
        await asyncio.sleep(delay_s)
        making.cancel()
        with suppress(asyncio.CancelledError):
            await node.kill(await making)  # it was faster
        assert records(tmp_path / "node") == []
        assert node.stats().sandboxes == 0
        left = [g for d in node.report.cgroup_directories for g in Path(d).iterdir() if g.is_dir()]
        assert left == []


async def test_many_at_once(node: EmbeddedNode) -> None:
    async def one(index: int) -> str:
        sandbox = await node.create("host", LIMITS, {})
        try:
            await node.write(sandbox, {"n": str(index).encode()})
            return await output(node, sandbox, "sleep 0.1; cat n")
        finally:
            await node.kill(sandbox)

    assert await asyncio.gather(*map(one, range(24))) == [str(n) for n in range(24)]
    assert node.stats() == type(node.stats())(sandboxes=0, running=0, waiting=0, launcher_restarts=0)


async def test_commands_of_one_sandbox_may_overlap(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    first = asyncio.create_task(node.run(sandbox, "sleep 1; echo first"))
    second = await node.run(sandbox, "sleep 97.13 & echo second")
    assert second.output == "second\n"
    assert (await first).output == "first\n"


async def test_admission_is_bounded_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "node", NodeConfig(max_sandboxes=2)) as node:
        first = await node.create("host", LIMITS, {})
        await node.create("host", LIMITS, {})
        with pytest.raises(SandboxDenied) as denied:
            await node.create("host", LIMITS, {})
        assert denied.value.retry_after_s > 0
        await node.kill(first)
        await node.create("host", LIMITS, {})


async def test_concurrent_commands_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path / "node", NodeConfig(concurrent_commands=2)) as node:
        sandboxes = [await node.create("host", LIMITS, {}) for _ in range(4)]
        running = [asyncio.create_task(node.run(s, "sleep 97.14", timeout_s=200)) for s in sandboxes]
        await until(lambda: (node.stats().running, node.stats().waiting) == (2, 2))
        await until(lambda: len(processes_with("sleep 97.14")) >= 2)
        running[0].cancel()
        await until(lambda: (node.stats().running, node.stats().waiting) == (2, 1))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert (node.stats().running, node.stats().waiting) == (0, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_t35_a_killed_owner_leaves_nothing_running_and_is_reaped(tmp_path: Path, how: signal.Signals) -> None:
    root = tmp_path / "shared"
    async with serving(root) as living:
        mine = await living.create("host", LIMITS, {})
        owner, told = start_owner(root)
        await until(lambda: len(processes_with("97.53")) >= 3)
        owner.send_signal(how)
        owner.wait()
        await until(lambda: processes_with("97.53") == [])
        await until(lambda: not Path(f"/proc/{told['launcher']}").exists())
        groups = told["groups"]
        assert isinstance(groups, list)
        await until(lambda: not any(Path(group).exists() for group in groups))
        assert len(records(root)) == 4  # its three are known as orphans until somebody starts

        other = EmbeddedNode(root, "next")
        assert await other.start() == 3
        await other.close()
        assert records(root) == [mine]
        assert await output(living, mine, "echo unharmed") == "unharmed"


async def test_an_owner_and_its_launcher_killed_together_leave_nothing(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    async with serving(root):
        owner, told = start_owner(root)
        os.kill(int(str(told["launcher"])), signal.SIGKILL)
        owner.kill()
        owner.wait()
        await until(lambda: processes_with("97.53") == [])
        other = EmbeddedNode(root, "next")
        assert await other.start() == 3
        await other.close()
        groups = told["groups"]
        assert isinstance(groups, list)
        assert not any(Path(group).exists() for group in groups)


async def test_a_killed_launcher_loses_its_sandboxes_and_is_replaced(node: EmbeddedNode, tmp_path: Path) -> None:
    sandbox = await node.create("host", LIMITS, {})
    running = asyncio.create_task(node.run(sandbox, "sleep 97.14"))
    await until(lambda: processes_with("97.14") != [])
    assert node.report is not None
    os.kill(node.report.pid, signal.SIGKILL)
    with pytest.raises(SandboxGone, match="launcher ended"):
        await running
    await until(lambda: processes_with("97.14") == [])
    with pytest.raises(SandboxGone):
        await node.run(sandbox, "true")
    assert records(tmp_path / "node") == []
    again = await node.create("host", LIMITS, {})
    assert await output(node, again, "echo back") == "back"
    assert node.stats().launcher_restarts == 1


async def test_bubblewrap_killed_from_outside_ends_the_command_only(node: EmbeddedNode) -> None:
    sandbox = await node.create("host", LIMITS, {})
    running = asyncio.create_task(node.run(sandbox, "sleep 97.15"))
    await until(lambda: processes_with("97.15") != [])
    assert node.report is not None
    children = Path(f"/proc/{node.report.pid}/task/{node.report.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    with pytest.raises(SandboxError, match="not run"):
        await running
    await until(lambda: processes_with("97.15") == [])
    assert await output(node, sandbox, "echo fine") == "fine"


async def test_close_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "node"
    async with serving(root) as node:
        sandbox = await node.create("host", LIMITS, {})
        running = asyncio.create_task(node.run(sandbox, "sleep 97.16"))
        await until(lambda: processes_with("97.16") != [])
        report = node.report
    with pytest.raises(SandboxGone):
        await running
    assert report is not None
    assert processes_with("97.16") == []
    assert not Path(f"/proc/{report.pid}").exists()
    assert not any(Path(directory).exists() for directory in report.cgroup_directories)
    assert list((root / "nodes").iterdir()) == []
    assert records(root) == []
