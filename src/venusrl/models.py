"""Where a recipe's model lives on disk, without importing torch.

Owns: the meaning of ``model.path``: a directory in Hugging Face format, or ``builtin:NAME``.
Guarantees: ``resolve`` returns a directory with a config, a tokenizer and safetensors weights, or raises
ModelError with the mend.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

BUILTIN = ("demo-policy", "smollm2-135m")


class ModelError(Exception):
    """The model cannot be used; the message names the mend."""


def cache_directory() -> Path:
    """Where converted models are kept (``VENUSRL_CACHE``, else the user's cache directory)."""
    root = os.environ.get("VENUSRL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "venusrl"
    )
    return Path(root)


def resolve(path: str) -> Path:
    """The directory of ``model.path``. Raises ModelError.

    ``builtin:smollm2-135m`` is a GGUF file inside a wheel: its converted directory is returned, whether or
    not the conversion (``venusrl.training.gguf``) has happened yet.
    """
    if not path.startswith("builtin:"):
        return check_directory(Path(path).expanduser())
    name = path.removeprefix("builtin:")
    if name == "demo-policy":
        return check_directory(Path(str(resources.files("venusrl") / "training" / "demo_policy" / "model")))
    if name == "smollm2-135m":
        return cache_directory() / name
    raise ModelError(f"model.path: there is no builtin model {name!r}; builtin models: {', '.join(BUILTIN)}")


def check_directory(directory: Path) -> Path:
    """Return ``directory`` if it holds a usable model. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"model.path: there is no directory {directory}")
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"model.path: {directory} is not a Hugging Face model directory: no {', '.join(missing)}")
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"model.path: {directory} holds no *.safetensors weights; save the model as safetensors")
    return directory
