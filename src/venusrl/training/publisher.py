"""What goes into a version's directory.

Owns: the files of ``model/`` (weights, config, tokenizer) and ``optimizer.pt``, written from a learner and read back
into one.

Must not know: HTTP, when versions are written.

Guarantees: ``model/`` is a complete Hugging Face directory in the recipe's dtype; a full checkpoint restores weights
(float32 even where less is published), moments and random state exactly, whatever the number of ranks then.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from venusrl.training.checkpoint import Checkpoint, Manifest, write
from venusrl.training.errors import CheckpointError
from venusrl.training.learner import Learner
from venusrl.training.world import World

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
_MARGIN_BYTES = 1 << 20
"""Config, tokenizer and manifest, roughly."""


class Publisher:
    """``model`` names architecture and config; weights come from ``learner``. ``source``: where its tokenizer is."""

    def __init__(self, root: Path, model: Any, source: Path, dtype: torch.dtype, world: World) -> None:
        self._root = root
        self._model = model
        self._source = source
        self._dtype = dtype
        self._world = world

    def publish(self, learner: Learner, manifest: Manifest) -> None:
        """Write the version. Every rank calls it (gathering is a collective); rank 0 writes."""
        weights = learner.weights()
        resumable = self._resumable(learner, weights) if manifest.checkpointed else None
        if self._world.leads:
            self._write(manifest, weights, resumable)
        self._world.barrier()

    def _resumable(self, learner: Learner, weights: dict[str, Tensor]) -> dict[str, Any]:
        exact = None if self._dtype is torch.float32 else weights
        return {"optimizer": learner.optimizer_state(), "weights": exact, "rng": torch.get_rng_state()}

    def _write(self, manifest: Manifest, weights: dict[str, Tensor], resumable: dict[str, Any] | None) -> None:
        def write_files(directory: Path) -> None:
            self._write_model(directory / "model", weights)
            if resumable is not None:
                # Through a file object: torch's own file writer turns a full disk into an unrelated error.
                with (directory / "optimizer.pt").open("wb") as file:
                    torch.save(resumable, file)

        published = sum(tensor.numel() for tensor in weights.values()) * self._dtype.itemsize
        write(
            self._root,
            manifest,
            write_files,
            expected_bytes=published + _tensor_bytes(resumable) + _MARGIN_BYTES,
        )

    def _write_model(self, directory: Path, weights: dict[str, Tensor]) -> None:
        state = {name: tensor.to(self._dtype) for name, tensor in weights.items()}
        self._model.save_pretrained(directory, state_dict=state)
        for name in _TOKENIZER_FILES:
            if (self._source / name).is_file():
                shutil.copyfile(self._source / name, directory / name)
        _set_dtype(directory / "config.json", self._dtype)


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """save_pretrained notes the dtype of the model in memory; engines read the one of the files."""
    fields = json.loads(config.read_text())
    fields.pop("torch_dtype", None)
    fields["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _tensor_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())
    return 0


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Give ``learner``, built on the checkpoint's model, its exact weights, moments and random state."""
    try:
        # mmap: every rank reads the file, and each keeps only its shards.
        saved = torch.load(checkpoint.optimizer, map_location="cpu", weights_only=True, mmap=True)
        if saved["weights"] is not None:
            learner.load_weights(saved["weights"])
        learner.load_optimizer_state(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} cannot be read ({error}); remove it to resume from the one before"
        ) from error
