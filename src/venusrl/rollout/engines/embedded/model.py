"""The policy network: loading, replacing its weights in place, computing next-token logits.

Owns: the transformers model of an embedded engine.

Must not know: requests, pages, sampling.

Guarantees: a reload either replaces every weight or, when the directory is not a complete, finite checkpoint
of the same shape, none. A model whose attention the engine does not compute exactly is refused at load.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from venusrl.rollout.engines.embedded.rows import ATTENTION, KVShape, Pass


class ModelUnusable(Exception):
    """The model or its weights cannot be served; the message says why."""


class Model:
    """A causal language model read from a Hugging Face directory, on the CPU."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Raises ModelUnusable."""
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelUnusable(f"{path} cannot be loaded as a causal language model: {error}") from error
        _require_full_attention(config)
        self._model = model.eval().requires_grad_(False)
        self.vocabulary: int = config.vocab_size
        self.positions: int = config.max_position_embeddings
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.kv_shape = KVShape(config.num_hidden_layers, getattr(config, "num_key_value_heads", heads), width)

    @torch.inference_mode()
    def logits(self, tokens: list[int], rows_pass: Pass, wanted: list[int]) -> torch.Tensor:
        """Float32 logits after the tokens at the indices ``wanted`` of the pass."""
        output = self._model(
            input_ids=torch.tensor([tokens]),
            position_ids=rows_pass.places[None],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long),
            rows_pass=rows_pass,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def reload(self, directory: Path) -> None:
        """Replace the weights by those in ``directory``. Raises ModelUnusable, and then nothing changed."""
        parameters = dict(self._model.named_parameters())  # Tied weights appear once, under their first name.
        fresh = _read(directory)
        missing = sorted(parameters.keys() - fresh.keys())
        if missing:
            raise ModelUnusable(f"{directory} lacks the weights {', '.join(missing[:3])} ({len(missing)} in all)")
        for name, parameter in parameters.items():
            if fresh[name].shape != parameter.shape:
                raise ModelUnusable(
                    f"{directory}: {name} is {tuple(fresh[name].shape)}, the model has {tuple(parameter.shape)}"
                )
            if not bool(torch.isfinite(fresh[name]).all()):
                raise ModelUnusable(f"{directory}: {name} has values that are not finite")
        for name, parameter in parameters.items():
            parameter.copy_(fresh[name])


def _read(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelUnusable(f"there are no safetensors weights in {directory}")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelUnusable(f"{file} cannot be read: {error}") from error
    return weights


def _require_full_attention(config: object) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelUnusable(
            f"the embedded engine serves models with full attention only, not {', '.join(sorted(kinds))}"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise ModelUnusable("the embedded engine does not serve models with sliding-window attention")
    if hasattr(config, "text_config") or getattr(config, "is_encoder_decoder", False):
        raise ModelUnusable("the embedded engine serves decoder-only text models only")
