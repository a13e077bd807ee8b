"""The policy as the trainer sees it: a transformers model that scores sampled tokens, sharded or not.

Owns: loading, the forward pass that computes logits at sampled positions only, sharding over ranks, and whole
tensors from sharded ones and back.

Must not know: losses, batches of trajectories, HTTP.

Guarantees: scores are the model's own (checked against its full forward pass when it is loaded); parameters are
float32 whatever the recipe's dtype, which only says how it computes and what is published; dropout is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, DynamicCache

from venusrl.models import ModelError
from venusrl.training.batching import MicroBatch, Row, plan
from venusrl.training.grpo import Sampling, score

PROBE_TOKENS = 9
PROBE_TOLERANCE = 1e-3
"""Largest difference in logits allowed between the short way and the model's own forward pass."""


class Scorer(nn.Module):
    """Wraps a causal language model; ``forward`` returns log-probability and entropy of each sampled token.

    The output projection runs at the sampled positions only: with a large vocabulary it would otherwise dominate
    memory and time. Sharded, this module is the root, so that the projection's weight is whole when it is used.
    """

    def __init__(self, model: nn.Module, sampling: Sampling, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._sampling = sampling
        self._dtype = compute_dtype

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            logits = sampled_logits(self.model, batch)
        return score(logits, batch.targets, self._sampling)


def sampled_logits(model: Any, batch: MicroBatch) -> Tensor:
    """Logits [n, vocabulary] at the places of the batch's sampled tokens.

    A shared prompt is read once, and its keys and values are repeated for the rows; gradients flow through them.
    """
    decoder = model.get_decoder()
    cache = None
    if batch.prompt.shape[0]:
        cache = DynamicCache(config=model.config)
        decoder(input_ids=batch.prompt.unsqueeze(0), cache=cache, use_cache=True)
        cache.batch_repeat_interleave(batch.inputs.shape[0])
    hidden = decoder(input_ids=batch.inputs, cache=cache, use_cache=cache is not None).last_hidden_state
    logits: Tensor = model.get_output_embeddings()(hidden[batch.row_index, batch.position])
    return logits


def can_share_prompts(model: Any) -> bool:
    """Whether a key-value cache holds all that a prompt leaves behind: full attention in every layer."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    return all(kind == "full_attention" for kind in kinds)


def load_model(path: Path) -> Any:
    """The model in float32, dropout off. Raises ModelError when it cannot be loaded or scored."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded as a causal language model: {error}") from error
    model.eval()
    _check_scoring(model, path)
    return model


def _check_scoring(model: Any, path: Path) -> None:
    """Some architectures scale or cap logits after the projection; training those the short way would be wrong."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(PROBE_TOKENS) * 7 % vocabulary
    row = Row(
        tokens=tokens,
        sampled=torch.arange(1, PROBE_TOKENS),
        behaviour=torch.zeros(PROBE_TOKENS - 1),
        current=torch.ones(PROBE_TOKENS - 1, dtype=torch.bool),
        advantage=1.0,
    )
    ((batch,),) = plan([row], token_budget=PROBE_TOKENS, ranks=1, keep_zero_advantage=True)
    with torch.no_grad():
        whole = model(input_ids=tokens[:-1].unsqueeze(0), use_cache=False).logits[0]
        short = sampled_logits(model, batch)
    difference = float((whole - short).abs().max())
    if not difference <= PROBE_TOLERANCE:
        raise ModelError(
            f"{path}: {type(model).__name__} changes its logits after the output projection (by {difference:.3g}), "
            "which the trainer does not support"
        )


def shard(scorer: Scorer, device: torch.device) -> None:
    """Shard in place over all ranks with FSDP2: each block by itself, the rest with the root."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks = set(getattr(scorer.model, "_no_split_modules", None) or ())
    for module in scorer.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(scorer, mesh=mesh)


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor, on the CPU. A collective when it is sharded: every rank must call it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


def place_like(whole: Tensor, like: Tensor) -> Tensor:
    """``whole`` laid out as ``like``: this rank's shard of it, or all of it."""
    moved = whole.to(device=like.device, dtype=like.dtype)
    if isinstance(like, DTensor):
        return distribute_tensor(moved, like.device_mesh, like.placements)
    return moved


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, gathered. A collective when sharded."""
    return {name: gather(tensor) for name, tensor in _own_state(model).items()}


def _own_state(model: nn.Module) -> dict[str, Tensor]:
    """Without the second names of tied parameters: gathered, they would become tensors of their own."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    second_names = names - {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in second_names}


def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters in place from a gathered state. Raises ModelError when names or shapes differ."""
    own = _own_state(model)
    if set(own) != set(state):
        raise ModelError(f"weights of another model: differing names {sorted(set(own) ^ set(state))[:4]}")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ModelError(f"weights of another model: {name} has shape {tuple(state[name].shape)}")
            tensor.copy_(place_like(state[name], tensor))
