"""What the tests of real sandboxes share: a node, or the reason why this machine has none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from venusrl.sandboxes.node import EmbeddedNode, NodeConfig
from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY_ELSE = 61234
"""A uid that nobody has."""
LIMITS = Limits(memory_mib=256, pids=32, cpus=1.0, disk_mib=16, output_bytes=4096, command_timeout_s=20.0)


@asynccontextmanager
async def serving(root: Path, config: NodeConfig | None = None) -> AsyncIterator[EmbeddedNode]:
    """A started node; the test is skipped where sandboxes cannot run at all."""
    node = EmbeddedNode(root, "test", config)
    try:
        await node.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this machine: {error}")
    try:
        yield node
    finally:
        await node.close()


async def output(node: EmbeddedNode, sandbox: str, command: str) -> str:
    """Run ``command`` and return what it printed, stripped."""
    return (await node.run(sandbox, command)).output.strip()


@contextmanager
def python_for_everybody() -> Iterator[str]:
    """An interpreter of this version that any user can run, with our packages; skips where there is none."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = f"/usr/bin/{name}"
    if os.geteuid() != 0:
        pytest.skip("another user can only be tried by root; the other tests then run without root anyway")
    if not os.access(base, os.X_OK):
        pytest.skip(f"no {base} that another user could run")
    if not all(part.stat().st_mode & 0o005 == 0o005 for part in (REPOSITORY, *REPOSITORY.parents)):
        pytest.skip("another user cannot read the source tree")
    with tempfile.TemporaryDirectory(prefix="venusrl-unprivileged-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        subprocess.run([base, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=60)
        own = Path(venv.__file__).parents[1]  # this interpreter's library does not fit the other one
        paths = [path for path in sys.path if path.endswith("site-packages") or not path.startswith(str(own.parent))]
        site = folder / "venv/lib" / name / "site-packages"
        (site / "ours.pth").write_text("\n".join([str(REPOSITORY / "src"), *filter(None, paths)]))
        yield str(folder / "venv/bin/python")


def as_another_user(command: list[str], home: Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """Run ``command`` as a user without rights; ``home`` is given to that user."""
    os.chown(home, NOBODY_ELSE, NOBODY_ELSE)
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        user=NOBODY_ELSE,
        group=NOBODY_ELSE,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
