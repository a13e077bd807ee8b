"""A model's tokenizer and chat template, without transformers.

Owns: reading them from a model directory, rendering a conversation, text to ids and back, the stop tokens.

Must not know: engines, trajectories.

Guarantees: the same rendering as the model's own library would give for plain text messages; a template
cannot reach outside its sandbox; whatever is wrong with the files is a TokenizerError that names the mend.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from venusrl.types import Message

_PROBE = "venus"
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class TokenizerError(Exception):
    """The tokenizer or chat template cannot be used; the message names the mend."""

    reason = "tokenizer_error"


class TemplateRefused(TokenizerError):
    """The chat template refused this conversation (for instance a role it does not know)."""

    reason = "template_refused"


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for some trainers; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape that jinja2 asks for

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTokenizer:
    """Text to ids and back for one model (see the module's guarantees)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        stop_token_ids: Sequence[int] = (),
        special: dict[str, str] | None = None,
    ) -> None:
        """``special``: names that templates use (``bos_token``...). Stop tokens are ``stop_token_ids`` and
        the special token that the template writes after an answer. Raises TokenizerError without any."""
        self._tokenizer = tokenizer
        self._special = special or {}
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not parse: {error}") from error
        ids = dict.fromkeys(stop_token_ids)
        closing = self._closing_token()
        if closing is not None:
            ids[closing] = None
        self.stop_token_ids: tuple[int, ...] = tuple(ids)
        if not ids:
            raise TokenizerError(
                "no stop token: name one as eos_token_id in generation_config.json or as eos_token in"
                " tokenizer_config.json"
            )

    @classmethod
    def load(cls, model_dir: Path) -> ChatTokenizer:
        """Read ``tokenizer.json``, the chat template and the stop tokens of a model directory."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{model_dir} has no tokenizer.json; save the model's fast tokenizer there")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception for any bad file
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _json(model_dir / "tokenizer_config.json")
        special = {name: text for name in _TOKEN_NAMES if (text := _token_text(config.get(name))) is not None}
        stops = _ids(_json(model_dir / "generation_config.json").get("eos_token_id"))
        stops += _ids(_json(model_dir / "config.json").get("eos_token_id"))
        if "eos_token" in special:
            eos = tokenizer.token_to_id(special["eos_token"])
            if eos is None:
                raise TokenizerError(f"{model_dir}: eos_token {special['eos_token']!r} is not in the vocabulary")
            stops.append(eos)
        return cls(tokenizer, _template(model_dir, config), stop_token_ids=stops, special=special)

    @property
    def vocabulary(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as the model sees it. Raises TemplateRefused."""
        plain = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # A template is a program of the model's author: what it trips over is a fact about this conversation.
            raise TemplateRefused(f"the chat template refused the conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written out in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, without special tokens unless ``special``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def token(self, token_id: int) -> str:
        """One token's text, special or not."""
        return self.decode([token_id], special=True)

    def _closing_token(self) -> int | None:
        """The special token that the template writes right after an answer, if it writes one."""
        probe = [Message("user", "x"), Message("assistant", _PROBE)]
        try:
            tail = self.render(probe, False).rpartition(_PROBE)[2]
        except TemplateRefused:
            return None
        encoding = self._tokenizer.encode(tail.lstrip(), add_special_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        first = encoding.ids[0] if encoding.ids else None
        return first if first is not None and first in added and added[first].special else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is written as text, or as an object with its text in ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _template(model_dir: Path, config: dict[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise TokenizerError(
            f"{model_dir} has no chat template: put one in chat_template.jinja or in tokenizer_config.json"
            ' as "chat_template"'
        )
    return value
