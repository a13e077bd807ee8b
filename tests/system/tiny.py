"""A model and tasks so small that whole runs take seconds, and that still learn.

The model is a random two-layer Qwen3 whose vocabulary holds whole commands as single tokens. The first
embedding dimension is the same for every token, so that its column of the output matrix acts as a bias: it
makes commands likely and bytes unlikely. A task is won by the command that writes the right word.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3ForCausalLM

from venusrl.testing.tiny_model import byte_tokenizer, tiny_config

WORDS = ("red", "green")
COMMANDS = (
    *(f"```sh\necho {word} > answer\n```" for word in WORDS),
    "```sh\ncat word\n```",
    "```sh\nsubmit\n```",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = "<|im_end|>"


def build_model(directory: Path, seed: int = 0, **shape: int) -> Path:
    """Write the model, its tokenizer and its chat template. ``shape``: what differs from ``tiny_config``."""
    tokenizer = _tokenizer()
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))
    torch.manual_seed(seed)
    end = tokenizer.token_to_id(END)
    model = Qwen3ForCausalLM(tiny_config(tokenizer.get_vocab_size(), end, tie_word_embeddings=False, **shape))
    commands = [tokenizer.token_to_id(command) for command in COMMANDS]
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        embedding[:, 0], head[:, 0] = 1.0, -2.0
        head[commands, 0], head[end, 0] = 0.5, -0.1
        # The second dimension says that the token before was a command: then the turn ends.
        embedding[:, 1], head[:, 1] = 0.0, 0.0
        embedding[commands, 1], head[commands, 1], head[end, 1] = 1.0, -0.5, 1.0
    model.save_pretrained(directory)
    return directory


def _tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer(("<|im_start|>", END))
    tokenizer.add_tokens([AddedToken(command, special=False, normalized=False) for command in COMMANDS])
    return tokenizer


def build_tasks(directory: Path, count: int, prefix: str) -> Path:
    """Write ``count`` Harbor tasks: the answer must hold the word of the task."""
    for number in range(count):
        task, word = directory / f"{prefix}-{number:03d}", WORDS[number % len(WORDS)]
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "solution").mkdir()
        (task / "instruction.md").write_text(f"Write {word}.\n")
        (task / "task.toml").write_text(
            'version = "1.0"\n[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 10.0\n'
        )
        (task / "environment" / "word").write_text(f"{word}\n")
        (task / "tests" / "test.sh").write_text(
            "#!/bin/sh\nmkdir -p /logs/verifier\n"
            f'if [ "$(cat /work/answer 2>/dev/null)" = "{word}" ]; then echo 1; else echo 0; fi'
            " > /logs/verifier/reward.txt\n"
        )
        (task / "solution" / "solve.sh").write_text(f"#!/bin/sh\necho {word} > /work/answer\n")
    return directory
