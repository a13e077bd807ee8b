"""What is missing or full is said in one sentence, with its mend, and nothing is left behind."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration.namespaces import LIMITS, as_another_user, output, python_for_everybody, serving

from venusrl.sandboxes.node import EmbeddedNode
from venusrl.sandboxes.probe import probe
from venusrl.sandboxes.protocol import HostDiskFull, RuntimeUnavailable
from venusrl.sandboxes.runtimes.namespace import kernel, userns

START = """
import asyncio, sys, tempfile
from pathlib import Path
from venusrl.sandboxes.node import EmbeddedNode, NodeConfig
from venusrl.sandboxes.protocol import SandboxError
async def main():
    node = EmbeddedNode(Path(sys.argv[1]) / "node", "test", NodeConfig(require_cgroup=sys.argv[2] == "groups"))
    try:
        await node.start()
        print("started")
    except SandboxError as error:
        print(type(error).__name__, error)
    await node.close()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with python_for_everybody() as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for next to nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    kernel.mount("small", str(folder), "tmpfs", 0, "size=64k")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)


def hide_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", nowhere)
    monkeypatch.setenv("PATH", "/nowhere")


async def test_no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bubblewrap(monkeypatch)
    node = EmbeddedNode(tmp_path / "node", "test")
    with pytest.raises(RuntimeUnavailable, match="pip install"):
        await node.start()
    with pytest.raises(RuntimeUnavailable, match="not started"):
        await node.create("host", LIMITS, {})
    await node.close()
    assert list((tmp_path / "node/nodes").iterdir()) == []


def test_the_doctor_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bubblewrap(monkeypatch)
    (check,) = probe()
    assert (check.name, check.ok, check.required) == ("bubblewrap", False, True)
    assert "pip install" in check.mend


async def test_the_doctor_here() -> None:
    found = {check.name: check for check in probe()}
    assert found["bubblewrap"].ok
    if not found["sandbox"].ok:
        pytest.skip(f"no sandboxes on this machine: {found['sandbox'].mend}")
    assert set(found) == {"bubblewrap", "sandbox", "sandbox python3", "sandbox limits", "sandbox templates"}
    assert all(check.mend for check in found.values() if not check.ok)


async def test_a_bubblewrap_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bubblewrap(monkeypatch)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="too old"):
        await EmbeddedNode(tmp_path / "node", "test").start()
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(RuntimeUnavailable, match="does not run"):
        await EmbeddedNode(tmp_path / "node", "test").start()


async def test_a_full_disk_before_the_start(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(HostDiskFull, match="no space left"):
        await EmbeddedNode(small_disk / "node", "test").start()


async def test_a_full_disk_at_a_create_loses_nothing_else(small_disk: Path) -> None:
    async with serving(small_disk / "node") as node:
        first = await node.create("host", LIMITS, {})
        fill(small_disk)
        with pytest.raises(HostDiskFull, match="no space left"):
            await node.create("host", LIMITS, {})
        assert await output(node, first, "echo fine") == "fine"
        (small_disk / "filler").unlink()
        await node.create("host", LIMITS, {})
        assert node.stats().sandboxes == 2


def test_no_user_namespaces(python: str) -> None:
    if shutil.which("nsenter") is None or shutil.which("setpriv") is None:
        pytest.skip("util-linux is needed to forbid user namespaces for one process only")
    slot = userns.IdSlot(userns.DEFAULT_BASE, userns.RANGE)
    namespace = userns.create(slot, 0)
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, slot.base + 1000, slot.base + 1000)
        forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --reuid 1000 --regid 1000 --clear-groups"
        command = ["nsenter", f"--user=/proc/{os.getpid()}/fd/{namespace}", "--setuid", "0", "--setgid", "0"]
        command += ["sh", "-c", f'{forbid} "$@"', "sh", python, "-c", START, home, "any"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]}, check=False
        )
    os.close(namespace)
    assert done.stdout.startswith("RuntimeUnavailable namespaces cannot be created"), done.stderr
    assert "user.max_user_namespaces" in done.stdout


@pytest.mark.parametrize(("wanted", "says"), [("groups", "RuntimeUnavailable no control group"), ("any", "started")])
def test_control_groups_can_be_required(python: str, wanted: str, says: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        done = as_another_user([python, "-c", START, home, wanted], Path(home))
    assert done.stdout.startswith(says), done.stdout + done.stderr


async def test_a_closed_node_admits_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path / "node") as node:
        sandbox = await node.create("host", LIMITS, {})
    await node.close()
    await node.kill(sandbox)
    with pytest.raises(RuntimeUnavailable, match="already closed"):
        await node.create("host", LIMITS, {})
