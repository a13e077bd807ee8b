"""The command line: one clear message a mistake, exit codes, JSON on stdout alone, nothing heavy imported."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.commands import Command, Left, command
from tests.waiting import PATIENCE_S

from venusrl import models
from venusrl.cli import doctor
from venusrl.cli.main import main
from venusrl.coordinator import run as coordinator
from venusrl.coordinator.errors import RunFailed
from venusrl.coordinator.run import RunSummary
from venusrl.observe.recorder import RunRecorder
from venusrl.observe.status import Status
from venusrl.observe.summary import write_summary
from venusrl.rollout.engines import install as engine_install
from venusrl.sandboxes.probe import Check


@pytest.fixture
def venusrl(workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in an empty directory: ``venusrl("train", "demo")``."""
    return command(monkeypatch, capsys)


@pytest.fixture
def model(workdir: Path) -> Path:
    """A directory that passes for a model."""
    directory = workdir / "model"
    directory.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


# --- mistakes: one message, exit code not 0, nothing left behind ------------------------------------------
def test_a_run_without_a_recipe_names_those_that_ship(venusrl: Command) -> None:
    result = venusrl("train")
    assert result.code == 1
    assert "demo" in result.err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["train", "nothing"], 2, "there is no recipe 'nothing'"),
        (["train", "demo", "--set", "training.step=3"], 2, "did you mean steps?"),
        (["train", "demo", "--set", "training.steps"], 2, "write it as section.key=value"),
        (["train", "demo", "--set", "model.path=no-such-model"], 1, "there is no directory no-such-model"),
        (["train", "demo", "--set", "model.path=builtin:x"], 1, "there is no builtin model 'x'"),
        (["train", "demo", "--resume"], 1, "there is no run to resume in runs/demo"),
        (["train", "--resume", "--run-dir", "none"], 1, "there is no run to resume in none"),
        (["train", "--resume"], 1, "say which run goes on"),
        (["runs", "show", "none"], 1, "there is no run 'none'"),
        (["runs", "plot", "none"], 1, "there is no run 'none'"),
        (["tasks", "check", "none"], 1, "there is no folder none"),
        (["tasks", "show", "none"], 1, "none"),
        (["nonsense"], 2, "nonsense"),
        (["train", "--nonsense"], 2, "--nonsense"),
    ],
)
def test_a_mistake_is_one_message(venusrl: Command, workdir: Path, argv: list[str], code: int, says: str) -> None:
    result = venusrl(*argv)
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert list(workdir.iterdir()) == []


def test_a_model_path_that_is_not_one_says_what_is_missing(venusrl: Command, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    result = venusrl("train", "demo", "--set", f"model.path={model}")
    assert (result.code, "no tokenizer.json" in result.err) == (1, True)


def test_a_second_run_on_the_same_directory_is_refused_and_names_resume(
    venusrl: Command, workdir: Path, model: Path
) -> None:
    run_dir = workdir / "runs" / "demo"
    run_dir.mkdir(parents=True)
    (run_dir / "store.sqlite").write_bytes(b"earlier")
    result = venusrl("train", "demo", "--set", f"model.path={model}")
    assert result.code == 1
    assert "--resume" in result.err
    assert [f.name for f in run_dir.iterdir()] == ["store.sqlite"]


def test_a_directory_that_is_not_a_run_is_left_alone(venusrl: Command, workdir: Path, model: Path) -> None:
    (workdir / "mine").mkdir()
    (workdir / "mine" / "thesis.tex").write_text("x")
    result = venusrl("train", "demo", "--set", f"model.path={model}", "--run-dir", "mine")
    assert (result.code, "not empty and not a run" in result.err) == (1, True)
    (workdir / "file").write_text("x")
    result = venusrl("train", "demo", "--set", f"model.path={model}", "--run-dir", "file")
    assert (result.code, "is not a directory" in result.err) == (1, True)


def test_mistakes_are_json_too_when_asked(venusrl: Command) -> None:
    result = venusrl("train", "nothing", "--json")
    assert (result.code, json.loads(result.out)["kind"]) == (2, "RecipeError")
    assert "there is no recipe" in result.err


def test_debug_shows_the_traceback(venusrl: Command) -> None:
    result = venusrl("--debug", "train", "nothing")
    assert (result.code, "Traceback" in result.err) == (2, True)


# --- dry run ----------------------------------------------------------------------------------------------
def test_a_dry_run_prints_a_recipe_and_what_it_means(venusrl: Command, workdir: Path, model: Path) -> None:
    result = venusrl("train", "demo", "--dry-run", "--set", f"model.path={model}", "--set", "schedule.async_factor=1.5")
    assert result.code == 0
    assert "window_groups = 20" in result.out
    # 2 (keys, values) x 2 layers x 2 heads x 16 x 4 bytes
    assert "kv_bytes_per_token = 512" in result.out
    (workdir / "again.toml").write_text(result.out)
    again = venusrl("train", "again.toml", "--dry-run")
    assert (again.code, again.out) == (0, result.out)


def test_a_dry_run_speaks_json_and_warns_of_what_is_missing_here(venusrl: Command, workdir: Path) -> None:
    result = venusrl("train", "qwen3-4b-swe", "--dry-run", "--json")
    plan = json.loads(result.out)
    assert result.code == 0
    assert plan["derived"]["window_trajectories"] == 640
    assert plan["derived"]["kv_bytes_per_token"] == 147456
    assert any("models/Qwen3-4B" in warning for warning in plan["warnings"])
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "order"), [("embedded", "in the order that the scheduler wishes"), ("vllm", "least recently used")]
)
def test_a_dry_run_says_what_the_engines_do_not_do_for_the_scheduler(
    venusrl: Command, model: Path, engine: str, order: str
) -> None:
    settings = (f"model.path={model}", f"rollout.engine={engine}", "schedule.policy=thunderagent")
    result = venusrl("train", "demo", "--dry-run", *(word for s in settings for word in ("--set", s)))
    assert order in result.out
    assert "real engines tell them when a turn ends" in result.err


def test_a_dry_run_warns_of_pins_and_memory_that_this_machine_lacks(venusrl: Command, model: Path) -> None:
    beyond = max(os.sched_getaffinity(0)) + 1
    settings = [f"model.path={model}", f"training.cpus=[{beyond}]", "rollout.kv_capacity_tokens=100000000000"]
    result = venusrl("train", "demo", "--dry-run", *(word for s in settings for word in ("--set", s)))
    assert "training.cpus names CPUs" in result.err
    assert "lower rollout.kv_capacity_tokens" in result.err


# --- a run, with the coordinator replaced ------------------------------------------------------------------
def fake_run(
    outcome: str = "finished", version: int = 2, error: Exception | None = None, interrupt: bool = False
) -> Any:
    async def run_training(recipe: Any, run_dir: Path, **given: Any) -> RunSummary:
        recorder: RunRecorder = given["recorder"]
        (run_dir / "store.sqlite").touch()
        recorder.event("run_started", version=0)
        recorder.evaluation(0, "sampled", [[0.0], [1.0]])
        recorder.scalars(1, {"reward/mean": 0.5})
        given["on_status"](Status(name=recipe.run.name, version=1, max_steps=2, phase="training"))
        if error is not None:
            raise error
        if interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(given["stop"].wait(), timeout=PATIENCE_S)
        recorder.event("run_finished", reason=outcome)
        return RunSummary(
            outcome=outcome,
            reason="",
            run_dir=str(run_dir),
            version=version,
            max_steps=2,
            wall_s=1.0,
            summary=write_summary(run_dir),
        )

    return run_training


def train(venusrl: Command, model: Path, *more: str) -> Left:
    return venusrl("train", "demo", "--set", f"model.path={model}", *more)


def test_a_run_ends_with_its_summary_and_its_picture(
    venusrl: Command, workdir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "run_training", fake_run())
    result = train(venusrl, model)
    assert result.code == 0, result.err
    assert "held-out reward" in result.out
    assert "runs/demo/reward.png" in result.out
    assert "step 1/2" in result.err
    assert (workdir / "runs" / "demo" / "reward.png").exists()
    listed = json.loads(venusrl("runs", "list", "--json").out)
    assert [(run["run"], run["outcome"], run["steps"]) for run in listed] == [("demo", "finished", 1)]
    assert "0.500" in venusrl("runs", "list").out
    assert "0.095 .. 0.905" in venusrl("runs", "show", "demo").out
    assert json.loads(venusrl("runs", "show", "runs/demo", "--json").out)["eval_reward_start"] == 0.5
    assert venusrl("runs", "plot", "demo", "--output", "mine.png").out.strip() == "mine.png"
    assert (workdir / "mine.png").exists()


def test_json_is_all_there_is_on_stdout(venusrl: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "run_training", fake_run())
    result = train(venusrl, model, "--json")
    assert (result.code, json.loads(result.out)["outcome"]) == (0, "finished")


def test_ctrl_c_once_finishes_cleanly_and_says_how_to_resume(
    venusrl: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "run_training", fake_run("stopped", version=1, interrupt=True))
    result = train(venusrl, model, "--run-dir", "my run")
    assert result.code == 130
    assert "Finishing cleanly" in result.err
    assert "venusrl train --resume --run-dir 'my run'" in result.out


def test_a_failed_run_gives_its_cause_its_log_and_the_way_on(
    venusrl: Command, workdir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "run_training", fake_run(error=RunFailed("all groups fail: 8 sandbox_died")))
    result = train(venusrl, model)
    assert result.code == 1
    assert "error: all groups fail: 8 sandbox_died" in result.err
    assert "venusrl train --resume --run-dir runs/demo" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in (workdir / "runs" / "demo" / "logs" / "coordinator.log").read_text()


def test_a_fault_of_ours_is_not_hidden(venusrl: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "run_training", fake_run(error=KeyError("bug")))
    monkeypatch.setattr(sys, "argv", ["venusrl", "train", "demo", "--set", f"model.path={model}"])
    with pytest.raises(KeyError, match="bug"):
        main()


def test_resume_without_a_recipe_takes_the_runs_own(
    venusrl: Command, workdir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    async def run_training(recipe: Any, run_dir: Path, **given: Any) -> RunSummary:
        seen.append((recipe.training.steps, recipe.schedule.batch_groups, given["resume"]))
        raise RunFailed("enough")

    monkeypatch.setattr(coordinator, "run_training", run_training)
    run_dir = workdir / "kept"
    run_dir.mkdir()
    (run_dir / "store.sqlite").touch()
    written = venusrl("train", "demo", "--dry-run", "--set", f"model.path={model}", "--set", "schedule.batch_groups=3")
    (run_dir / "recipe.toml").write_text(written.out)
    venusrl("train", "--resume", "--run-dir", "kept", "--set", "training.steps=99")
    assert seen == [(99, 3, True)]


# --- the rest ---------------------------------------------------------------------------------------------
def test_no_runs_yet_says_how_to_begin(venusrl: Command) -> None:
    result = venusrl("runs", "list")
    assert (result.code, "venusrl train demo" in result.err) == (0, True)
    assert json.loads(venusrl("runs", "list", "--json").out) == []


def write_task(directory: Path, *, tests: bool = True) -> None:
    directory.mkdir(parents=True)
    (directory / "instruction.md").write_text("Mend it.\n")
    (directory / "task.toml").write_text('[metadata]\nfamily = "off-by-one"\n')
    if tests:
        (directory / "tests").mkdir()
        (directory / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")


def test_tasks_are_listed_shown_and_checked(venusrl: Command, workdir: Path) -> None:
    write_task(workdir / "tasks" / "one")
    assert "off-by-one" in venusrl("tasks", "list", "tasks").out
    assert json.loads(venusrl("tasks", "list", "tasks", "--json").out)["tasks"][0]["id"] == "one"
    assert "/logs/verifier/reward.txt" in venusrl("tasks", "show", "tasks/one").out
    assert venusrl("tasks", "check", "tasks").code == 0
    write_task(workdir / "tasks" / "two", tests=False)
    result = venusrl("tasks", "check", "tasks")
    assert (result.code, "1 of 2 tasks are usable" in result.out) == (1, True)
    assert "two has no tests/test.sh" in result.err
    faults = json.loads(venusrl("tasks", "check", "tasks", "--json").out)["faults"]
    assert list(faults) == ["tasks/two"]


@pytest.mark.parametrize("broken", ["", "required", "optional"])
def test_the_doctor_fails_only_for_what_the_demo_needs(
    venusrl: Command, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    found = [
        Check("bubblewrap", broken != "required", "detail", "" if broken != "required" else "pip install it"),
        Check("vllm", broken != "optional", "detail", "" if broken != "optional" else "install it", required=False),
    ]
    monkeypatch.setattr(doctor, "checks", lambda: found)
    result = venusrl("doctor")
    assert result.code == (1 if broken == "required" else 0)
    assert ("mend: pip install it" in result.out) == (broken == "required")
    assert json.loads(venusrl("doctor", "--json").out)["ok"] == (broken != "required")


def test_the_doctor_looks_at_this_machine() -> None:
    found = {check.name: check for check in doctor.checks()}
    assert found["python"].ok
    assert found["torch"].ok
    assert all(check.mend for check in found.values() if not check.ok)


def test_help_teaches_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['venusrl', '--help']\n"
        "from venusrl.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy', 'matplotlib', 'tensorboardX', 'aiohttp', 'pydantic'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "venusrl train demo" in result.stdout
    assert result.stdout.rstrip().endswith("heavy: []")


def test_ctrl_c_twice_leaves_at_once_and_says_how_to_resume(workdir: Path, model: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from venusrl.coordinator import run\n"
        "from venusrl.cli.main import main\n"
        "async def endless(*_, **given):\n"
        "    print('ready', flush=True)\n"
        "    await given['stop'].wait()\n"
        "    print('heard', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "run.run_training = endless\n"
        f"sys.argv = ['venusrl', 'train', 'demo', '--set', 'model.path={model}']\n"
        "main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for expected in (b"ready\n", b"heard\n"):
                assert process.stdout.readline() == expected
                process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"Finishing cleanly" in errors
    assert b"Left at once. Resume with: venusrl train --resume --run-dir runs/demo" in errors


def test_the_demo_policy_is_known_by_its_hash(venusrl: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "resolve", lambda path: model)
    config = json.loads((model / "config.json").read_text()) | {
        "vocab_size": 896,
        "architectures": ["Qwen3ForCausalLM"],
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "recipe.json").write_text(json.dumps({"sha256": hashlib.sha256(b"").hexdigest()}))
    assert json.loads(venusrl("demo-policy", "info", "--json").out)["as_built"] is True
    (model / "model.safetensors").write_bytes(b"other")
    result = venusrl("demo-policy", "info")
    assert (result.code, "not the ones" in result.err) == (1, True)
    assert venusrl("demo-policy", "info", "--json").code == 1


def test_an_engine_is_installed_where_it_was_asked_for(venusrl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(path: Path | None, echo: Callable[[str], None]) -> Path:
        echo("making it")
        if path == Path("full"):
            raise engine_install.EngineMissing("vLLM needs about 6 GiB while it installs")
        return Path("env/bin/python")

    monkeypatch.setattr(engine_install, "install_vllm", install)
    result = venusrl("engine", "install", "vllm")
    assert (result.code, result.out, result.err) == (0, "env/bin/python\n", "making it\n")
    result = venusrl("engine", "install", "vllm", "--path", "full")
    assert (result.code, "needs about 6 GiB" in result.err) == (1, True)
    assert venusrl("engine", "install", "sglang").code == 2
