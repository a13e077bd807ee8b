"""The small C programs of this runtime, compiled once: the guest's ``init``, QEMU's ``jail``, the stream ``filter``.

Owns: which they are and where the results are kept. Must not know: what they do.

Guarantees: as ``agent/build.py``: found by a hash of source, compiler and flags; in place whole or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from venusrl.sandboxes.agent import build as agent_build
from venusrl.sandboxes.protocol import RuntimeUnavailable

_FLAGS = ("-Os", "-s", "-static", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined")
_TARGET = "x86_64-linux-musl"
_TIMEOUT_S = 900.0
_HERE = Path(__file__).parent
_lock = asyncio.Lock()


class Programs(msgspec.Struct, frozen=True):
    """Paths of the compiled programs; ``agent`` is what runs in the guest."""

    agent: Path
    init: Path
    jail: Path
    filter: Path


async def build() -> Programs:
    """Compile what is not there yet. Raises RuntimeUnavailable with the compiler's words or the mend."""
    async with _lock:
        agent = await agent_build.program(machine="x86_64")
        init, jail, drop = [
            await _compile(source) for source in (_HERE / "guest" / "init.c", _HERE / "jail.c", _HERE / "filter.c")
        ]
    return Programs(agent, init, jail, drop)


async def _compile(source: Path) -> Path:
    try:
        compiler = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeUnavailable("microVMs need a C compiler: pip install 'venusrl[env]'") from None
    text = await asyncio.to_thread(source.read_bytes)
    digest = hashlib.sha256(" ".join((_TARGET, compiler, *_FLAGS)).encode() + text).hexdigest()[:20]
    cache = agent_build.default_cache()
    where = cache / "microvm" / f"{source.stem}-{digest}"
    if await asyncio.to_thread(where.exists):
        return where
    await asyncio.to_thread(where.parent.mkdir, parents=True, exist_ok=True)
    handle, name = await asyncio.to_thread(tempfile.mkstemp, dir=where.parent)
    os.close(handle)
    zig = str(cache / "agent" / "zig")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ziglang", "cc", "-target", _TARGET, *_FLAGS, "-o", name, str(source)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": zig, "ZIG_LOCAL_CACHE_DIR": zig},
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        raise RuntimeUnavailable(f"compiling {source.name} took more than {_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeUnavailable(f"{source.name} does not compile: {said.decode(errors='replace')[-2000:]}")
    await asyncio.to_thread(Path(name).chmod, 0o755)
    await asyncio.to_thread(Path(name).rename, where)
    return where
