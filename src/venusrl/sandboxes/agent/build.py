"""Compiles the agent, and other small programs of ours: one static program for each kind of machine, once.

Owns: how the ``*.c`` of a directory become a program (Zig's C compiler and its musl, a Python wheel: no compiler of the
machine is needed) and where the result is kept.

Must not know: what the programs do.

Guarantees: the result is found by a hash of sources, compiler and flags, so that a changed source is never run as the
old program; it appears at its place whole or not at all, whoever else compiles meanwhile; one process compiles once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from venusrl.sandboxes.protocol import RuntimeUnavailable

_TARGETS = {"x86_64": "x86_64-linux-musl", "aarch64": "aarch64-linux-musl"}
_FLAGS = ("-Os", "-s", "-static", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined")
_TIMEOUT_S = 900.0
"""The first compilation on a machine builds musl too: half a minute of one core, more on a busy one."""
AGENT = Path(__file__).parent
_locks: dict[Path, asyncio.Lock] = {}


def sources(folder: Path = AGENT) -> list[Path]:
    """The C files, in a fixed order."""
    return sorted(folder.glob("*.c"))


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/venusrl``, else ``~/.cache/venusrl``."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "venusrl"


def place(cache: Path, machine: str, folder: Path = AGENT) -> Path:
    """Where the program for ``machine`` is, or will be. Raises RuntimeUnavailable when it cannot be compiled here."""
    target = _TARGETS.get(machine)
    if target is None:
        raise RuntimeUnavailable(f"the sandboxes' programs are not built for {machine}: use x86_64 or aarch64")
    try:
        compiler = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeUnavailable("the sandboxes' programs need a C compiler: pip install 'venusrl[env]'") from None
    digest = hashlib.sha256(" ".join((target, compiler, *_FLAGS)).encode())
    for source in (*sources(folder), *sorted(folder.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache / "agent" / f"{folder.name}-{machine}-{digest.hexdigest()[:20]}"


async def program(cache: Path | None = None, machine: str | None = None, folder: Path = AGENT) -> Path:
    """The program's path on this machine; compiled if it is not there. ``machine`` as ``platform.machine()`` says it,
    ``folder`` has the sources.

    Raises RuntimeUnavailable with the compiler's words or the mend.
    """
    where = await asyncio.to_thread(place, cache or default_cache(), machine or platform.machine(), folder)
    async with _locks.setdefault(where, asyncio.Lock()):
        if not await asyncio.to_thread(where.exists):
            await _compile(where, _TARGETS[machine or platform.machine()], folder)
    return where


async def _compile(where: Path, target: str, folder: Path) -> None:
    try:
        work = await asyncio.to_thread(_workspace, where.parent)
    except OSError as error:
        raise RuntimeUnavailable(f"the sandboxes' programs cannot be kept in {where.parent}: {error}") from error
    try:
        result = work / "agent"
        command = (sys.executable, "-m", "ziglang", "cc", "-target", target, *_FLAGS, "-o", str(result))
        zig = str(where.parent / "zig")
        process = await asyncio.create_subprocess_exec(
            *command,
            *map(str, sources(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": zig, "ZIG_LOCAL_CACHE_DIR": zig},
            start_new_session=True,
        )
        said = await _finish(process)
        if process.returncode != 0:
            raise RuntimeUnavailable(f"a program of the sandboxes does not compile ({folder}): {said[-2000:]}")
        await asyncio.to_thread(_install, result, where)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, True)


async def _finish(process: asyncio.subprocess.Process) -> str:
    """The compiler's words. It and what it started end with us: cancelled, or too slow."""
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        raise RuntimeUnavailable(f"compiling a program of the sandboxes took more than {_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
    return said.decode(errors="replace").strip()


def _workspace(folder: Path) -> Path:
    """A new directory; those of compilations that were killed long ago go."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("compiling-*"):
        with contextlib.suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - 2 * _TIMEOUT_S:
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="compiling-", dir=folder))


def _install(result: Path, where: Path) -> None:
    """Readable and runnable by every sandbox's user; in place in one step."""
    result.chmod(0o755)
    result.rename(where)
