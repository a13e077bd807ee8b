"""Runs inside vLLM's worker process: makes a tied output head follow a weight reload on the CPU.

vLLM 0.32 packs each output head for the CPU when it loads a model. With tied embeddings a reload replaces the
embedding, but not that packed copy: the model goes on with the old head, gives wrong log-probabilities and no
error. vLLM imports this module because ``--worker-extension-cls`` names ``TiedHead``; importing it wraps the
reload, so that the plain ``reload_weights`` call of the client does the whole work.

Owns: that one repair. Must not know (and cannot import): the rest of VenusRL, which is not in vLLM's environment.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


class TiedHead:
    """Adds nothing to the worker; it is here to be named."""


def repack_heads(model: Any, embedding_method: type) -> None:
    """Pack again, from the weights they have now, the heads and embeddings of ``model``."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, embedding_method) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)  # type: ignore[attr-defined]


def _wrap_reload() -> None:
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    layers = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    plain = runner.reload_weights

    @functools.wraps(plain)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        repack_heads(self.get_model(), layers.UnquantizedEmbeddingMethod)

    runner.reload_weights = reload_weights


if __name__ == "venusrl_tied_head":  # As vLLM imports it; our own tools read this file under its package name.
    _wrap_reload()
