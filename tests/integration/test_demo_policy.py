"""The demo policy's script and what it shipped belong together."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from venusrl.models import check_directory, resolve
from venusrl.rollout.chat import ChatTokenizer
from venusrl.training.demo_policy.build import BuildConfig, build, chat_text, make_tokenizer
from venusrl.training.demo_policy.longer import pretrain_longer
from venusrl.types import Message


def test_a_build_leaves_a_model_that_loads_and_nothing_else(tmp_path: Path) -> None:
    config = BuildConfig(
        hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32, steps=4, copying_steps=2
    )
    lines: list[str] = []
    build(tmp_path / "model", config, 1, lines.append)
    model = AutoModelForCausalLM.from_pretrained(check_directory(tmp_path / "model"))
    assert model.config.hidden_size == 32
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((tmp_path / "model" / "recipe.json").read_text())["config"]["steps"] == 4
    assert lines[-1].startswith("saved")


def test_a_policy_goes_on_from_where_it_was(tmp_path: Path) -> None:
    shape = BuildConfig(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32, steps=2)
    build(tmp_path / "model", shape, 1, lambda line: None)
    pretrain_longer(tmp_path / "model", tmp_path / "longer", 3.0, 7, 1, lambda line: None)
    before, after = (json.loads((tmp_path / name / "recipe.json").read_text()) for name in ("model", "longer"))
    assert after["continued_from"] == before["sha256"] != after["sha256"]
    assert after["figures"]["steps"] >= 1
    AutoModelForCausalLM.from_pretrained(check_directory(tmp_path / "longer"))


def test_the_shipped_tokenizer_is_the_one_that_the_script_makes() -> None:
    shipped = Tokenizer.from_file(str(resolve("builtin:demo-policy") / "tokenizer.json"))
    assert make_tokenizer(BuildConfig()).get_vocab() == shipped.get_vocab()


def test_pre_training_and_rollouts_render_a_conversation_alike() -> None:
    chat = ChatTokenizer.load(resolve("builtin:demo-policy"))
    messages = [Message("user", "Work on f in m.py: its tests fail."), Message("assistant", "```sh\nls\n```")]
    assert chat.render(messages, add_generation_prompt=False) == chat_text(messages)
    assert chat.encode(chat_text(messages)) == [
        token for message in messages for token in chat.encode(chat_text([message]))
    ]
