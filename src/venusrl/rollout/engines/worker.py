"""The embedded engine as a program: ``python -m venusrl.rollout.engines.worker --model DIR ...``.

Owns: the command line, the process's own limits (threads, CPUs, niceness), its exit.

Must not know: requests.

Guarantees: the bound port is written to ``--port-file`` only once the engine serves, at once and whole. SIGTERM
and SIGINT end the process promptly with 0; a failure of the engine ends it with 1 and the cause on stderr, a
model or option that cannot be served with 2 and one clear line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from venusrl.leaving import leave
from venusrl.rollout.engines import wire

if TYPE_CHECKING:
    from venusrl.rollout.engines.embedded.server import Server


def main() -> int:
    """Run until told to stop. Returns the exit code."""
    options = _options()
    key = os.environ.pop(wire.KEY_VARIABLE, "")
    if not key:
        return _refuse(f"set {wire.KEY_VARIABLE} to the bearer key that clients must show")
    if not (Path(options.model) / "config.json").is_file():
        return _refuse(f"{options.model} is not a model directory: there is no config.json in it")
    if options.nice:
        os.nice(options.nice)
    if options.cpus:
        os.sched_setaffinity(0, options.cpus)
    # Imported late: torch takes its thread pools from the limits above, and bad options fail fast.
    import torch
    from transformers.utils import logging as transformers_logging

    from venusrl.rollout.engines.embedded.engine import Engine, EngineConfig
    from venusrl.rollout.engines.embedded.model import Model, ModelUnusable
    from venusrl.rollout.engines.embedded.server import EngineFailed, Server

    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, options.dtype)
    config = EngineConfig(
        kv_capacity_tokens=options.kv_capacity_tokens,
        slots=options.slots,
        context_tokens=options.context_tokens,
        page_tokens=options.page_tokens,
        prefill_tokens=options.prefill_tokens,
        seed=options.seed,
    )
    try:
        engine = Engine(Model(Path(options.model), dtype), config, dtype)
    except ModelUnusable as error:
        return _refuse(str(error))
    try:
        asyncio.run(_serve(Server(engine, key, Path(options.model).name), options))
    except EngineFailed:
        traceback.print_exc()
        return 1
    except OSError as error:
        return _refuse(f"cannot serve on port {options.port}: {error}")
    return 0


async def _serve(server: Server, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def bound(port: int) -> None:
        if options.port_file is not None:
            _write_port(options.port_file, port)

    await server.run(options.port, bound, stop)


def _write_port(path: Path, port: int) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="venusrl.rollout.engines.worker", description="The embedded engine.")
    parser.add_argument("--model", required=True, help="Directory in Hugging Face format")
    parser.add_argument("--port", type=int, default=0, help="0 = any free one")
    parser.add_argument("--port-file", type=Path, help="Where to write the bound port once ready")
    parser.add_argument("--kv-capacity-tokens", type=int, default=65536)
    parser.add_argument("--slots", type=int, default=64, help="Sequences decoded at once")
    parser.add_argument("--context-tokens", type=int, default=2048, help="Longest prompt + output")
    parser.add_argument("--page-tokens", type=int, default=16, help="Tokens of one page of the prefix cache")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="Prompt tokens computed in one step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpus", type=_cpus, default=None, help="Pin to these CPUs, e.g. 0,1")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _cpus(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


def _refuse(message: str) -> int:
    sys.stderr.write(f"engine worker: {message}\n")
    return 2


if __name__ == "__main__":
    leave(main())
