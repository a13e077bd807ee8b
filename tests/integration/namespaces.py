"""What the tests of real sandboxes share: a node, or the reason why this machine has none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from venusrl.sandboxes.node import EmbeddedNode, NodeConfig
from venusrl.sandboxes.protocol import Limits, RuntimeUnavailable

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
