"""``venusrl doctor``: what this machine can run, and for each lack its mend.

Owns: the list of checks and its verdict. Must not know: how anything checked is used. Imports no torch: versions
come from package metadata.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from venusrl.cli.output import EXIT_FAILED, print_json, stdout

if TYPE_CHECKING:
    from venusrl.sandboxes.probe import Check

_GIB = 1 << 30
_MEMORY_GIB = 6
_DISK_GIB = 5
_CLASHING = ("torchvision", "torchaudio", "torchcodec")


def doctor(json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False) -> None:
    """Say what this machine can run; for each lack, its mend. Exit code 1 when the demo cannot run here."""
    found = checks()
    able = all(check.ok or not check.required for check in found)
    if json_output:
        print_json({"ok": able, "checks": [msgspec.to_builtins(check) for check in found]})
    else:
        _print(found, able)
    if not able:
        raise typer.Exit(EXIT_FAILED)


def checks() -> list[Check]:
    """Every finding, required ones first within their area."""
    from venusrl.sandboxes.probe import probe

    own: list[Callable[[], Check]] = [_python, _cores, _memory, _disk, _torch, _transformers, _clashing, _policy, _vllm]
    return [check() for check in own] + probe()


def _print(found: list[Check], able: bool) -> None:
    console = stdout()
    width = max(len(check.name) for check in found)
    for check in found:
        mark, style = ("ok", "green") if check.ok else ("MISSING", "red") if check.required else ("no", "yellow")
        console.print(Text.assemble((f"{mark:>7}", style), f"  {check.name:<{width}}  {check.detail}"))
        if check.mend and not check.ok:
            console.print(Text(f"{'':>7}  {'':<{width}}  mend: {check.mend}", style="bold"))
    console.print()
    console.print("This machine can run the demo: venusrl train demo" if able else "The demo cannot run here yet.")


def _check(name: str, ok: bool, detail: str, mend: str = "", *, required: bool = True) -> Check:
    from venusrl.sandboxes.probe import Check

    return Check(name=name, ok=ok, detail=detail, mend="" if ok else mend, required=required)


def _python() -> Check:
    version = platform.python_version()
    return _check("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0))
    detail = f"{count} usable, {platform.machine()}"
    return _check("cores", count >= 2, detail, "two cores let training and rollout overlap", required=False)


def _memory() -> Check:
    available = _available_memory() / _GIB
    return _check(
        "memory",
        available >= _MEMORY_GIB,
        f"{available:.1f} GiB available",
        f"the demo wants {_MEMORY_GIB} GiB: close other programs",
        required=False,
    )


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    mend = f"free {_DISK_GIB} GiB here, or choose another disk with --run-dir"
    return _check("disk", free >= _DISK_GIB, f"{free:.1f} GiB free in {Path.cwd()}", mend, required=False)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _torch() -> Check:
    version = _version("torch")
    return _check("torch", bool(version), version or "not installed", 'pip install "venusrl[train]"')


def _transformers() -> Check:
    version = _version("transformers")
    return _check("transformers", bool(version), version or "not installed", 'pip install "venusrl[train]"')


def _clashing() -> Check:
    # Beside a CPU build of torch these break its import; beside another build they are harmless.
    found = [name for name in _CLASHING if _version(name)] if "+cpu" in _version("torch") else []
    mend = f"pip uninstall {' '.join(found)}"
    return _check("torch neighbours", not found, ", ".join(found) or "none that clash", mend, required=False)


def _policy() -> Check:
    from venusrl.models import ModelError, resolve

    try:
        return _check("demo policy", True, str(resolve("builtin:demo-policy")))
    except ModelError as error:
        return _check("demo policy", False, str(error), "install venusrl again: the demo policy ships with it")


def _vllm() -> Check:
    from venusrl.rollout.engines.install import vllm_python

    python = vllm_python()
    detail = str(python) if python else "not installed (only recipes with rollout.engine = vllm need it)"
    return _check("vllm", python is not None, detail, "venusrl engine install vllm", required=False)
