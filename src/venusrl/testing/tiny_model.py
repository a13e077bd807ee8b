"""A random Qwen3-shaped policy that is made in a second, for tests and first tries.

Owns: a byte-level tokenizer with ChatML and a seeded model of a few thousand parameters, in Hugging Face format.
Imports torch only when called. Guarantees: the same arguments give the same files.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_model(
    directory: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, vocabulary: int = 272, tied: bool = True
) -> Path:
    """Write the model to ``directory`` (made if need be) and return it. ``vocabulary`` is at least 259."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    stop = _write_tokenizer(directory)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        eos_token_id=stop,
        pad_token_id=stop,
        bos_token_id=None,
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
    """Every byte a token, then the special ones; returns the id of the stop token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return len(alphabet) + SPECIAL_TOKENS.index("<|im_end|>")
