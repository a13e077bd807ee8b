"""How long the embedded node's operations take: one at a time, and many at once.

    python benchmarks/sandbox_latency.py [--count 200] [--at-once 16] [--json]

Creates, runs `true` in, and kills sandboxes of the `host` template. Prints p50 and p99 of each operation alone, and
operations a second with so many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from venusrl.sandboxes.node import EmbeddedNode, NodeConfig
from venusrl.sandboxes.protocol import Limits

LIMITS = Limits(memory_mib=128, command_timeout_s=30)


async def timed(work: Callable[[], Awaitable[object]], into: list[float]) -> object:
    begun = time.perf_counter()
    result = await work()
    into.append(1e3 * (time.perf_counter() - begun))
    return result


async def life(node: EmbeddedNode, times: dict[str, list[float]]) -> None:
    """One sandbox: created, one command, killed."""
    sandbox = str(await timed(lambda: node.create("host", LIMITS, {}), times["create"]))
    await timed(lambda: node.run(sandbox, "true", timeout_s=30), times["run"])
    await timed(lambda: node.kill(sandbox), times["kill"])


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds."""
    found = {}
    for name, values in times.items():
        ordered = sorted(values)
        found[name] = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * (len(ordered) - 1))]}
    return found


async def measure(count: int, at_once: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as root:
        node = EmbeddedNode(Path(root), "benchmark", NodeConfig(max_sandboxes=at_once + 1, concurrent_commands=at_once))
        await node.start()
        try:
            alone: dict[str, list[float]] = {"create": [], "run": [], "kill": []}
            await life(node, {name: [] for name in alone})
            for _ in range(count):
                await life(node, alone)
            together: dict[str, list[float]] = {name: [] for name in alone}
            begun = time.perf_counter()
            waiting = iter(range(count))

            async def one_after_the_other() -> None:
                for _ in waiting:
                    await life(node, together)

            await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
            lives_a_second = count / (time.perf_counter() - begun)
        finally:
            await node.close()
    return {
        "alone_ms": summary(alone),
        f"at_{at_once}_at_once_ms": summary(together),
        "sandboxes_a_second_at_once": lives_a_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(measure(args.count, args.at_once))
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        if isinstance(value, dict):
            row = "  ".join(f"{k} p50 {v['p50']:.1f} p99 {v['p99']:.1f}" for k, v in value.items())
            print(f"{name}: {row}")
        else:
            print(f"{name}: {value:.1f}")


if __name__ == "__main__":
    main()
