"""A random Qwen3-shaped policy that is made in a second, for tests and first tries.

Owns: a byte-level tokenizer with ChatML and a seeded model of a few thousand parameters, in Hugging Face format; and
the shape and the byte-level tokenizer alone, for whoever makes a model of another kind of them.
Imports torch only when called. Guarantees: the same arguments give the same files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3Config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(vocabulary: int, stop: int | None, **changes: Any) -> Qwen3Config:
    """The shape of a two-layer Qwen3 with 32 dimensions; ``changes`` are its configuration's own names."""
    from transformers import Qwen3Config

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    shape |= changes
    shape.setdefault("intermediate_size", 2 * shape["hidden_size"])
    return Qwen3Config(vocab_size=vocabulary, eos_token_id=stop, pad_token_id=stop, bos_token_id=None, **shape)


def byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    """Every byte a token, then the special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def build_tiny_model(
    directory: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, vocabulary: int = 272, tied: bool = True
) -> Path:
    """Write the model to ``directory`` (made if need be) and return it. ``vocabulary`` is at least 259."""
    import torch
    from transformers import Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    stop = _write_tokenizer(directory)
    config = tiny_config(
        vocabulary,
        stop,
        hidden_size=hidden,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        # The default initialisation is almost uniform over the vocabulary, which would hide scoring faults.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def _write_tokenizer(directory: Path) -> int:
    """Returns the id of the stop token."""
    tokenizer = byte_tokenizer(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer.get_vocab_size() - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index("<|im_end|>")
