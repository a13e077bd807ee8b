"""A tokenizer and chat template made in a moment, for tests of agents and recorders.

Owns: ``toy_chat``. Must not know: models. Guarantees: every text survives encoding and decoding; merges cross
words and run over several line ends, so that a tokenization that depends on where a text was cut shows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from venusrl.rollout.chat import ChatTokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] if message['role'] == 'assistant' else message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Strips what an earlier answer thought, as templates of reasoning models do."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT = (
    "user\nassistant\nsystem\nuser\n\nassistant\n\n```sh\nls\n```\n\n```sh\nsubmit\n```\n[exit code 1]\n[no output]\n"
    "the the the file file fix fix sed sed -i cat cat cat\n\n\nan and answer  the  end.\n"
)


@cache
def toy_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few dozen merges."""
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"\n+|[^\n]+"), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    return tokenizer


def toy_chat(template: str = CHATML) -> ChatTokenizer:
    """A ``ChatTokenizer`` over ``toy_tokenizer``; its stop token is ``<|im_end|>``."""
    return ChatTokenizer(toy_tokenizer(), template)


def write_toy_chat(directory: Path, template: str = CHATML) -> None:
    """Write tokenizer.json and chat_template.jinja, as a model directory has them."""
    toy_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)


def turn_start(chat: ChatTokenizer) -> list[int]:
    """The ids that open an answer (what ``ScriptedModel`` looks for)."""
    return chat.encode("<|im_start|>assistant\n")


def answer(chat: ChatTokenizer, text: str) -> list[int]:
    """The ids of a whole answer, its stop token included."""
    return [*chat.encode(text), chat.stop_token_ids[0]]
