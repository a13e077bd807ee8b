"""Task directories, the generated repair tasks, and the verdict."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S

from venusrl.recipe import TasksSection
from venusrl.sandboxes.protocol import CommandResult
from venusrl.tasks import TaskError, load_tasks
from venusrl.tasks.harbor import environment_files, read, read_set
from venusrl.tasks.repair import code, write
from venusrl.tasks.verify import judge
from venusrl.training.demo_policy import sessions
from venusrl.types import FailureKind


@given(seed=st.integers(0, 10**9), family=st.sampled_from(code.FAMILIES), held_out=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_fault_fails_and_its_fix_passes(seed: int, family: str, held_out: bool) -> None:
    module = code.faulty(random.Random(seed), family, write.nouns(held_out))
    sound = code.fix(module)
    expected = code.evaluate(sound, module.function, module.calls)
    assert code.evaluate(module.source, module.function, module.calls) != expected
    assert module.fault is not None
    assert module.fault.family == family


@given(seed=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_pre_training_never_holds_the_rl_instruction(seed: int) -> None:
    text = "\n".join(message.content for message in sessions.session(random.Random(seed)))
    assert "its tests fail." not in text


def test_train_and_held_out_share_no_function_and_no_module() -> None:
    train = list(write.modules(200, 0, (), held_out=False))
    held_out = list(write.modules(100, 0, (), held_out=True))
    assert not set(write.nouns(True)) & set(write.nouns(False))
    assert not {m.function for m in train} & {m.function for m in held_out}
    assert not {m.source for m in train} & {m.source for m in held_out}


def _set(folder: Path, seed: int = 0) -> Path:
    return write.write_set(folder, 12, seed, (), held_out=False)


def test_a_set_is_written_once_and_the_same_for_a_seed(tmp_path: Path) -> None:
    first, again, other = _set(tmp_path / "a"), _set(tmp_path / "b"), _set(tmp_path / "c", seed=1)
    texts = [
        [p.read_bytes() for p in sorted(f.rglob("*")) if p.is_file() and p.name != ".manifest.json"]
        for f in (first, again, other)
    ]
    assert texts[0] == texts[1] != texts[2]
    touched = first / "train-00000" / "instruction.md"
    touched.write_text("kept")
    assert _set(tmp_path / "a") == first
    assert touched.read_text() == "kept"


def test_the_reference_solution_turns_every_check_from_0_to_1(tmp_path: Path) -> None:
    for directory in sorted(_set(tmp_path / "set").iterdir()):
        if directory.is_dir():
            work = directory / "environment"
            assert _check(directory, work) == "0"
            subprocess.run(["sh", "../solution/solve.sh"], cwd=work, check=True)
            assert _check(directory, work) == "1"


def _check(directory: Path, work: Path) -> str:
    argv = [sys.executable, "-I", "-S", str(directory / "tests" / "check.py"), str(work)]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout.strip()


HOSTILE = {
    "claims on every descriptor": (
        "import os\nfor fd in range(10):\n    try: os.write(fd, b'1')\n    except OSError: pass\nos._exit(0)"
    ),
    "reads the expected results": "F = open('/tests/cases.json').read()\ndef {f}(*a): return F",
    "looks for them in memory": "import gc\ndef {f}(*a): return [o for o in gc.get_objects() if type(o) is list][0]",
    "never ends": "while True: pass",
    "leaves at import": "raise SystemExit(0)",
    "equals everything": "class E:\n    def __eq__(self, o): return True\ndef {f}(*a): return E()",
    "eats memory": "x = 'a' * (1 << 40)",
    "floods": "import os\nwhile True: os.write(3, b'1' * 4096)",
    "is not Python": "def (",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_code_that_cheats_the_check_scores_0(tmp_path: Path, attack: str) -> None:
    directory = _set(tmp_path / "set") / "train-00000"
    (file,) = (directory / "environment").iterdir()
    function = read(directory).instruction.split()[2]
    file.write_text(HOSTILE[attack].replace("{f}", function))
    assert _check(directory, directory / "environment") == "0"


def _result(exit_code: int) -> CommandResult:
    return CommandResult(exit_code=exit_code, output="log", truncated_bytes=0, wall_s=0.1)


def test_a_verdict_needs_a_number_and_a_good_end() -> None:
    assert judge("1\n", _result(0)).reward == 1.0
    assert judge("0", _result(1)).failure is None
    for text, exit_code, reason in (
        ("1", 1, "verifier_crashed"),
        ("nan", 0, "verifier_bad_reward"),
        ("", 0, "verifier_bad_reward"),
        ("7", 0, "verifier_bad_reward"),
    ):
        failure = judge(text, _result(exit_code)).failure
        assert failure is not None
        assert (failure.kind, failure.reason) == (FailureKind.INFRASTRUCTURE, reason)


def test_a_harbor_directory_reads(tmp_path: Path) -> None:
    directory = _harbor(tmp_path)
    task = read(directory)
    assert (task.id, task.instruction, task.agent_timeout_s, task.family) == ("fix-it", "Fix it.", 30.0, "bugs")
    assert environment_files(task) == {"a/b.txt": b"x"}


def _harbor(folder: Path) -> Path:
    directory = folder / "fix-it"
    (directory / "environment" / "a").mkdir(parents=True)
    (directory / "tests").mkdir()
    (directory / "environment" / "a" / "b.txt").write_text("x")
    (directory / "instruction.md").write_text("Fix it.\n")
    (directory / "task.toml").write_text('[metadata]\ncategory = "bugs"\n[agent]\ntimeout_sec = 30\n')
    (directory / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return directory


def test_bad_tasks_are_named(tmp_path: Path) -> None:
    directory = _harbor(tmp_path)
    (directory / "environment" / "Dockerfile").write_text("FROM debian")
    with pytest.raises(TaskError, match="Dockerfile"):
        read(directory)
    (directory / "environment" / "Dockerfile").unlink()
    (directory / "task.toml").write_text("[environment]\ntemplate = 'nowhere'\n")
    with pytest.raises(TaskError, match="nowhere"):
        read(directory)
    (directory / "task.toml").write_text("= broken")
    with pytest.raises(TaskError, match="not TOML"):
        read(directory)
    (directory / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"no tests/test\.sh"):
        read_set(tmp_path)
    with pytest.raises(TaskError, match="no task folder"):
        read_set(tmp_path / "absent")
    with pytest.raises(TaskError, match="unknown"):
        load_tasks(TasksSection(families=("typo",)), tmp_path)


def test_loading_can_be_given_up_and_the_next_one_makes_the_set_whole(tmp_path: Path) -> None:
    section = TasksSection(train_count=8, held_out_count=4)
    begun: list[int] = []

    def third_is_too_much() -> None:
        begun.append(1)
        if len(begun) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        load_tasks(section, tmp_path, before_each=third_is_too_much)
    sets = load_tasks(section, tmp_path)
    assert (len(sets.train), len(sets.held_out)) == (8, 4)
