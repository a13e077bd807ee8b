"""Tokenizer and chat template of a model directory: what is read, and what is said when it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from venusrl.rollout.chat import ChatTokenizer, TemplateRefused, TokenizerError
from venusrl.testing.chat import CHATML, answer, toy_chat, toy_tokenizer, write_toy_chat
from venusrl.types import Message

USER = [Message("user", "fix it")]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_renders_chatml_and_ends_with_the_generation_prompt() -> None:
    chat = toy_chat()
    assert chat.render(USER, True) == "<|im_start|>user\nfix it<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(USER, False) == "<|im_start|>user\nfix it<|im_end|>\n"


def test_text_survives_the_way_to_ids_and_back() -> None:
    chat = toy_chat()
    text = "Käse \N{SNOWMAN}\n\n```sh\nls\n```"
    assert chat.decode(chat.encode(text)) == text


def test_decoding_leaves_special_tokens_out_unless_asked() -> None:
    chat = toy_chat()
    ids = answer(chat, "the end")
    assert chat.decode(ids) == "the end"
    assert chat.decode(ids, special=True) == "the end<|im_end|>"


def test_loads_the_template_from_either_file_the_jinja_file_first(tmp_path: Path) -> None:
    toy_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": CHATML, "eos_token": "<|im_end|>"})
    assert ChatTokenizer.load(tmp_path).render(USER, False).startswith("<|im_start|>user")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    assert ChatTokenizer.load(tmp_path).render(USER, False) == "fix it<|im_end|>"


def test_takes_the_default_of_several_named_templates(tmp_path: Path) -> None:
    toy_tokenizer().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert "fix it" in ChatTokenizer.load(tmp_path).render(USER, False)


def test_stop_tokens_are_those_configured_and_the_one_the_template_closes_with(tmp_path: Path) -> None:
    write_toy_chat(tmp_path)
    end, text_end = (toy_tokenizer().token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert ChatTokenizer.load(tmp_path).stop_token_ids == (end,)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [text_end]})
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}})
    assert ChatTokenizer.load(tmp_path).stop_token_ids == (text_end, end)


def test_templates_see_the_special_tokens_and_usual_helpers(tmp_path: Path) -> None:
    template = (
        "{{ eos_token }}{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}"
        "{% break %}{% endfor %}{{ strftime_now('%%') }}"
    )
    write_toy_chat(tmp_path, template)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    assert ChatTokenizer.load(tmp_path).render([*USER, *USER], False) == '<|endoftext|>"fix it"%'


def test_padding_and_truncation_of_the_file_are_not_ours(tmp_path: Path) -> None:
    write_toy_chat(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write_json(tmp_path / "tokenizer.json", settings)
    assert len(ChatTokenizer.load(tmp_path).encode("xyzxyzxyz")) > 2


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": None}, "no chat template"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% for %}"}, "does not parse"),
        ({"tokenizer.json": None, "chat_template.jinja": "x"}, "no stop token"),
        ({"tokenizer.json": None, "chat_template.jinja": CHATML, "tokenizer_config.json": "["}, "cannot be read"),
        ({"tokenizer.json": None, "chat_template.jinja": CHATML, "tokenizer_config.json": "[]"}, "not a JSON object"),
        (
            {"tokenizer.json": None, "chat_template.jinja": CHATML, "tokenizer_config.json": '{"eos_token": "</s>"}'},
            "not in the vocabulary",
        ),
    ],
)
def test_says_what_is_wrong_with_the_files(tmp_path: Path, files: dict[str, str | None], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(toy_tokenizer().to_str() if content is None else content)
    with pytest.raises(TokenizerError, match=said):
        ChatTokenizer.load(tmp_path)


def test_a_conversation_that_the_template_refuses_is_a_typed_error() -> None:
    strict = toy_chat("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML)
    assert strict.render(USER, False)
    with pytest.raises(TemplateRefused, match="no system"):
        strict.render([Message("system", "x"), *USER], False)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    hostile = toy_chat(CHATML + "{% if messages|length == 1 %}{{ ''.__class__.__mro__ }}{% endif %}")
    with pytest.raises(TemplateRefused):
        hostile.render(USER, False)
