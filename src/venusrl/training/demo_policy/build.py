"""Pre-trains the demo policy from nothing on generated sessions (48 minutes on two cores).

Owns: the model's shape, the training schedule, and the files it leaves: a Hugging Face directory (bf16 safetensors,
tokenizer) and ``recipe.json`` (the data recipe, the figures reached, SHA-256 of the weights).

Guarantees: the same seed, thread count and versions give the same data in the same order; progress is printed;
Ctrl-C and a later call goes on from the last progress file; the directory is written at the end, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from venusrl.training.demo_policy import sessions
from venusrl.training.demo_policy import tokenizer as tokenizers
from venusrl.types import Message


class BuildConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that shapes the result. The policy's own tokens count 1 in the loss, the rest ``context_weight``."""

    vocabulary: int = 1280
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    batch_rows: int = 32
    copying_rows: int = 8
    steps: int = 4200
    warmup_steps: int = 100
    copying_steps: int = 250
    sound_steps: int = 2000
    decay_fraction: float = 0.4
    context_weight: float = 0.1
    seed: int = 1


Row = tuple[list[int], list[float]]


def chat_text(messages: list[Message]) -> str:
    """ChatML, as the tokenizer's chat template renders it."""
    return "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)


def encode(tokenizer: Tokenizer, messages: list[Message], context_weight: float) -> Row:
    """Token ids and a loss weight for each: 1 where the policy speaks (its end token included)."""
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message.role}\n", add_special_tokens=False).ids
        body = tokenizer.encode(f"{message.content}<|im_end|>", add_special_tokens=False).ids
        tail = tokenizer.encode("\n", add_special_tokens=False).ids
        spoken = 1.0 if message.role == "assistant" else context_weight
        ids += head + body + tail
        weights += [context_weight] * len(head) + [spoken] * len(body) + [context_weight] * len(tail)
    return ids, weights


def copying(rng: random.Random, vocabulary: int) -> Row:
    """Random tokens, then the same again; only the repetition counts in the loss.

    Looking back and copying forms within about 150 steps when there is nothing else to learn, and had not begun after
    2.2 million tokens of sessions alone, where few tokens are copies.
    """
    first = [rng.randrange(vocabulary) for _ in range(32)]
    ids = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 20))] + first + first
    return ids, [0.0] * (len(ids) - len(first)) + [1.0] * len(first)


def rows(tokenizer: Tokenizer, config: BuildConfig) -> Iterator[list[Row]]:
    """Endless batches of rows: copying alone at first, then sessions of like length beside a few rows of copying."""
    rng = random.Random(config.seed)
    vocabulary = tokenizer.get_vocab_size()
    for _ in range(config.copying_steps):
        yield [copying(rng, vocabulary) for _ in range(config.batch_rows)]
    made = config.copying_steps
    each = config.batch_rows - config.copying_rows
    while True:
        sound = made < config.sound_steps
        pool = [encode(tokenizer, sessions.session(rng, sound), config.context_weight) for _ in range(each * 8)]
        made += 8
        pool.sort(key=lambda row: len(row[0]))
        chunks = [pool[i : i + each] for i in range(0, len(pool), each)]
        rng.shuffle(chunks)
        for chunk in chunks:
            # Without these rows transcribing had not resumed 250 steps later.
            yield chunk + [copying(rng, vocabulary) for _ in range(config.copying_rows)]


def batches(tokenizer: Tokenizer, config: BuildConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, weights) of shape [batch_rows, longest]."""
    for chunk in rows(tokenizer, config):
        longest = max(len(ids) for ids, _ in chunk)
        # Right padding needs no attention mask under causal attention: padded positions only look back and weigh 0.
        ids = torch.zeros(len(chunk), longest, dtype=torch.long)
        weights = torch.zeros(len(chunk), longest)
        for i, (row, weight) in enumerate(chunk):
            ids[i, : len(row)] = torch.tensor(row)
            weights[i, : len(row)] = torch.tensor(weight)
        yield ids, weights


def make_tokenizer(config: BuildConfig) -> Tokenizer:
    rng = random.Random(config.seed + 1)
    return tokenizers.train((chat_text(sessions.session(rng)) for _ in range(20000)), config.vocabulary)


def make_model(config: BuildConfig, vocabulary: int, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    end = tokenizer.token_to_id("<|im_end|>")
    torch.manual_seed(config.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            rope_theta=10000.0,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        )
    )


def loss_of(model: torch.nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean next-token cross-entropy, nats."""
    with torch.autocast("cpu", torch.bfloat16):  # half as long again in float32 on processors that know bf16
        logits = model(input_ids=ids[:, :-1]).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    target = weights[:, 1:].flatten()
    return (nll * target).sum() / target.sum()


def learning_rate(config: BuildConfig, step: int) -> float:
    """Warm-up, constant, then a cosine fall to 2% over the last ``decay_fraction`` of the steps."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    tail = (step / config.steps - (1 - config.decay_fraction)) / config.decay_fraction
    return config.learning_rate * warm * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, tail)))))


def make_optimizer(config: BuildConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, ids: torch.Tensor, weights: torch.Tensor
) -> float:
    """One optimizer step on a batch; returns its loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loss_of(model, ids, weights)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(
    config: BuildConfig, progress: Path, report: Callable[[str], None]
) -> tuple[Qwen3ForCausalLM, Tokenizer, dict[str, float]]:
    """Pre-train, or go on from ``progress``; returns the model, its tokenizer and the figures reached."""
    tokenizer = make_tokenizer(config)
    model = make_model(config, -(-tokenizer.get_vocab_size() // 64) * 64, tokenizer)
    optimizer = make_optimizer(config, model)
    report(f"parameters {sum(p.numel() for p in model.parameters()):,}, vocabulary {tokenizer.get_vocab_size()}")
    first, seconds, tokens, smooth = _resume(config, progress, model, optimizer, report)
    start = time.monotonic() - seconds
    for step, (ids, weights) in enumerate(batches(tokenizer, config)):
        if step >= config.steps:
            break
        if step < first:  # the data are cheap: run the generator up to where the progress file left off
            continue
        loss = update(model, optimizer, learning_rate(config, step), ids, weights)
        tokens += ids.numel()
        smooth = loss if step == 0 else 0.98 * smooth + 0.02 * loss
        seconds = time.monotonic() - start
        if step % 50 == 49:
            left = seconds / (step + 1) * (config.steps - step - 1)
            report(
                f"step {step + 1}/{config.steps} loss {smooth:.4f} {tokens / seconds:,.0f} tokens/s, "
                f"{left / 60:.0f} min left"
            )
        if step % 250 == 249:
            _save_progress(config, progress, model, optimizer, (step + 1, seconds, tokens, smooth))
    return model, tokenizer, {"tokens": float(tokens), "loss": smooth, "seconds": seconds}


_Position = tuple[int, float, int, float]
"""Steps done, seconds spent, tokens seen, smoothed loss."""


def _save_progress(
    config: BuildConfig, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: _Position
) -> None:
    state = {"config": msgspec.to_builtins(config), "position": position}
    staging = path.with_name(path.name + ".partial")
    torch.save({**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, staging)
    staging.replace(path)


def _resume(
    config: BuildConfig,
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    report: Callable[[str], None],
) -> _Position:
    if not path.exists():
        return 0, 0.0, 0, 0.0
    state = torch.load(path, weights_only=True)
    if state["config"] != msgspec.to_builtins(config):
        report(f"{path} is of another configuration: starting anew")
        return 0, 0.0, 0, 0.0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    steps, seconds, tokens, smooth = state["position"]
    report(f"going on from {path} at step {steps}")
    return int(steps), float(seconds), int(tokens), float(smooth)


def save(
    directory: Path,
    config: BuildConfig,
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    figures: dict[str, float],
    continued_from: str | None = None,
) -> None:
    """Write the model directory atomically, weights in bf16. ``continued_from``: SHA-256 of the weights before."""
    staging = directory.with_name(directory.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(staging)
    tokenizers.save(tokenizer, staging)
    digest = hashlib.sha256((staging / "model.safetensors").read_bytes()).hexdigest()
    recipe = {"config": msgspec.to_builtins(config), "figures": figures, "sha256": digest, "torch": torch.__version__}
    if continued_from is not None:
        recipe["continued_from"] = continued_from
    (staging / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)


def build(directory: Path, config: BuildConfig, threads: int, report: Callable[[str], None]) -> None:
    """Pre-train and save the demo policy into ``directory``; interrupted, it goes on where it was."""
    torch.set_num_threads(threads)
    directory.parent.mkdir(parents=True, exist_ok=True)
    progress = directory.with_name(directory.name + ".progress.pt")
    model, tokenizer, figures = train(config, progress, report)
    save(directory, config, model, tokenizer, figures)
    progress.unlink(missing_ok=True)
    report(f"saved {directory}")
