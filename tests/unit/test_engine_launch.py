"""How engines are started and vLLM's environment is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from venusrl.rollout.engines import install
from venusrl.rollout.engines.install import EngineMissing, install_vllm, vllm_python
from venusrl.rollout.engines.launch import EngineKind, EngineSettings, engine_command
from venusrl.rollout.engines.protocol import EngineError

SETTINGS = EngineSettings("/models/m", kv_capacity_tokens=4096, slots=8, context_tokens=1024, cpus=(1,), nice=5)


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_the_key_is_in_the_environment_and_never_on_the_command_line(kind: EngineKind) -> None:
    launch = engine_command(kind, SETTINGS, port=8123, api_key="secret", python=Path("/env/bin/python"))
    assert "secret" in launch.env.values()
    assert not any("secret" in word for word in launch.argv)
    assert launch.base_url == "http://127.0.0.1:8123"


def test_embedded_command_says_all_settings() -> None:
    words = " ".join(engine_command("embedded", SETTINGS, port=0, api_key="k").argv)
    for part in ("--model /models/m", "--kv-capacity-tokens 4096", "--slots 8", "--context-tokens 1024"):
        assert part in words
    assert "--cpus 1" in words
    assert "--nice 5" in words


def test_vllm_command_asks_for_what_the_contract_needs() -> None:
    python = Path("/env/bin/python")
    launch = engine_command("vllm", SETTINGS, port=8000, api_key="k", python=python)
    words = " ".join(launch.argv)
    assert words.startswith("nice -n 5 taskset -c 1 /env/bin/python -m vllm.entrypoints.openai.api_server")
    for part in (
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--scheduling-policy priority",
        "--enable-prompt-tokens-details",
        "--num-gpu-blocks-override 128",
        "--max-model-len 1024",
        "--dtype float32",
    ):
        assert part in words
    assert launch.env["VLLM_SERVER_DEV_MODE"] == "1"
    with pytest.raises(EngineError, match="port"):
        engine_command("vllm", SETTINGS, port=0, api_key="k", python=python)


def test_a_missing_vllm_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VENUSRL_VLLM_ENV", str(tmp_path / "none"))
    with pytest.raises(EngineMissing, match="venusrl engine install vllm"):
        engine_command("vllm", SETTINGS, port=8000, api_key="k")


class Steps:
    """Stands for the commands of an installation; makes what ``venv`` would make."""

    def __init__(self, directory: Path, fail_at: str = "") -> None:
        self.directory = directory
        self.fail_at = fail_at
        self.done: list[str] = []

    def __call__(self, what: str, argv: list[str], env: dict[str, str] | None = None) -> None:
        if what == self.fail_at:
            raise EngineMissing(f"could not {what}")
        self.done.append(what)
        (self.directory / "bin").mkdir(parents=True, exist_ok=True)
        (self.directory / "bin" / "python").touch()
        (self.directory / "pyvenv.cfg").touch()


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_NEEDED_BYTES", 0)


@pytest.mark.usefixtures("space")
def test_install_is_done_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "env"
    steps = Steps(directory)
    monkeypatch.setattr(install, "_step", steps)
    said: list[str] = []
    assert install_vllm(directory, said.append) == directory / "bin" / "python"
    assert steps.done == ["make the environment", "install", "remove what clashes", "import vLLM"]
    assert vllm_python(directory) == directory / "bin" / "python"
    install_vllm(directory, said.append)
    assert len(steps.done) == 4
    assert "already installed" in said[-1]


@pytest.mark.usefixtures("space")
def test_an_interrupted_install_does_not_count_and_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "env"
    monkeypatch.setattr(install, "_step", Steps(directory, fail_at="import vLLM"))
    with pytest.raises(EngineMissing, match="import vLLM"):
        install_vllm(directory, lambda line: None)
    assert vllm_python(directory) is None
    monkeypatch.setattr(install, "_step", Steps(directory))
    install_vllm(directory, lambda line: None)
    assert vllm_python(directory) is not None


@pytest.mark.usefixtures("space")
def test_a_directory_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(EngineMissing, match="not a Python environment"):
        install_vllm(tmp_path, lambda line: None)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_too_little_space_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(EngineMissing, match="VENUSRL_VLLM_ENV"):
        install_vllm(tmp_path / "env", lambda line: None)
    assert not (tmp_path / "env").exists()


def test_a_failed_command_is_told_with_its_last_words() -> None:
    with pytest.raises(EngineMissing, match=r"could not try(.|\n)*exit code 3(.|\n)*the reason"):
        install._step("try", ["/bin/sh", "-c", "echo the reason; exit 3"])
