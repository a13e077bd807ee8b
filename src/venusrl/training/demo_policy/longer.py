"""Pre-trains a demo policy for some more seconds: the control that asks what time alone would have given.

Owns: that continuation. Guarantees: the data are those of the last phase of ``build``, of another seed, so that none
is seen twice; the learning rate falls with the time spent, from a tenth of the original to its end value; a fresh
optimizer (``build`` keeps none).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from venusrl.training.demo_policy.build import BuildConfig, batches, make_optimizer, save, update


def learning_rate(config: BuildConfig, spent: float) -> float:
    """A cosine from 10% to 2% of the original; ``spent``: share of the time, 0..1."""
    return config.learning_rate * (0.02 + 0.08 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, spent))))


def pretrain_longer(
    model_dir: Path, output: Path, seconds: float, seed: int, threads: int, report: Callable[[str], None]
) -> None:
    """Go on from the policy in ``model_dir`` for ``seconds`` of wall time; the result lands in ``output``."""
    torch.set_num_threads(threads)
    config = msgspec.structs.replace(BuildConfig(), seed=seed, copying_steps=0, sound_steps=0)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = make_optimizer(config, model)
    start, tokens, smooth, done = time.monotonic(), 0, 0.0, 0
    for ids, weights in batches(tokenizer, config):
        spent = (time.monotonic() - start) / seconds
        if spent >= 1:
            break
        loss = update(model, optimizer, learning_rate(config, spent), ids, weights)
        done, tokens = done + 1, tokens + ids.numel()
        smooth = loss if done == 1 else 0.98 * smooth + 0.02 * loss
        if done % 50 == 0:
            report(f"step {done} loss {smooth:.4f}, {seconds * (1 - spent) / 60:.1f} min left")
    figures = {"steps": float(done), "tokens": float(tokens), "loss": smooth, "seconds": seconds}
    before = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    save(output, config, model, tokenizer, figures, continued_from=before)
    report(f"saved {output}")
