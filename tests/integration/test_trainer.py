"""The trainer process against a made-up coordinator: kills, lost answers, full disks, two ranks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from tests.waiting import PATIENCE_S
from transformers import AutoTokenizer

from venusrl.models import ModelError
from venusrl.recipe import Recipe, resolve
from venusrl.testing.batches import make_batch
from venusrl.testing.tiny_model import build_tiny_model
from venusrl.testing.trainer_api import FakeTrainerApi, Report
from venusrl.training import checkpoint as checkpoints
from venusrl.training import trainer as trainer_module
from venusrl.training.checkpoint import latest, path_of, versions
from venusrl.training.errors import (
    EXIT_FAILED,
    ApiError,
    BatchError,
    CheckpointError,
    CoordinatorLost,
    OutOfMemory,
    TrainingError,
)
from venusrl.training.launch import KEY_VARIABLE, trainer_command
from venusrl.training.trainer import exclusive, main, out_of_memory_named, train
from venusrl.training.world import World
from venusrl.types import Batch

STEPS = 4


def batches(version: int) -> Batch:
    return make_batch(version, seed=3, groups=3, size=4, staleness=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def api() -> AsyncIterator[FakeTrainerApi]:
    fake = FakeTrainerApi(batches, last=STEPS)
    await fake.start()
    yield fake
    await fake.stop()


def run_directory(path: Path, model: Path, *, dtype: str = "float32", **training: Any) -> Path:
    recipe: Recipe = resolve(
        {
            "run": {"name": "t"},
            "model": {"path": str(model), "dtype": dtype},
            "training": {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2, **training},
        }
    )
    path.mkdir(parents=True)
    (path / "recipe.json").write_text(recipe.model_dump_json())
    return path


async def train_here(run_dir: Path, api: FakeTrainerApi, *, patience_s: float = PATIENCE_S) -> str:
    return await asyncio.to_thread(train, run_dir, api.url, "key", patience_s=patience_s)


def start(run_dir: Path, api: FakeTrainerApi, *, ranks: int = 1, prefix: tuple[str, ...] = (), **env: str) -> Trainer:
    return Trainer([*prefix, *trainer_command(run_dir=run_dir, url=api.url, ranks=ranks)], env)


class Trainer:
    """A trainer process; its stderr is read when it ends."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        environment = {**os.environ, KEY_VARIABLE: "key", "OMP_NUM_THREADS": "1", **env}
        self._process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    async def ended(self, timeout_s: float = 240.0) -> tuple[int, str]:
        try:
            _, errors = await asyncio.to_thread(self._process.communicate, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise
        return self._process.returncode, errors


def weights(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    file = path_of(run_dir / "checkpoints", version) / "model" / "model.safetensors"
    loaded: dict[str, torch.Tensor] = load_file(file)
    return loaded


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], rtol=0, atol=tolerance), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, list[Report]]:
    """Four steps without any disturbance."""
    run_dir = run_directory(tmp_path_factory.mktemp("straight") / "run", model, keep_checkpoints=9)

    async def whole_run() -> list[Report]:
        api = FakeTrainerApi(batches, last=STEPS)
        await api.start()
        try:
            assert await train_here(run_dir, api) == "all steps are trained"
            return api.reports
        finally:
            await api.stop()

    return run_dir, asyncio.run(whole_run())


# --- a run without disturbance --------------------------------------------------------------------------------------
def test_every_step_is_reported_after_its_weights_are_there(straight: tuple[Path, list[Report]]) -> None:
    run_dir, reports = straight
    assert [report.version for report in reports] == [1, 2, 3, 4]
    assert [report.batch_id for report in reports] == [batches(version).id for version in range(STEPS)]
    assert all(report.checkpointed for report in reports)
    assert [Path(report.model_path) for report in reports] == [
        run_dir / "checkpoints" / f"v{version:06d}" / "model" for version in range(1, 5)
    ]
    assert {
        "train/loss",
        "train/kl",
        "train/clip_fraction",
        "train/grad_norm",
        "train/entropy",
        "train/lr",
        "train/logprob_diff_all_mean",
        "rollout/staleness_max",
        "reward/mean",
        "reward/std",
        "perf/trainer_wait_s",
        "perf/train_s",
        "perf/checkpoint_s",
        "perf/step_s",
        "perf/trainer_idle_fraction",
    } <= reports[0].metrics.keys()
    assert [report.metrics["train/lr"] for report in reports] == [0.005, 0.01, 0.01, 0.01]


def test_every_version_is_a_whole_model_directory(straight: tuple[Path, list[Report]], model: Path) -> None:
    root = straight[0] / "checkpoints"
    assert versions(root) == [0, 1, 2, 3, 4]
    assert_equal_weights(weights(straight[0], 0), load_file(model / "model.safetensors"))
    for version in versions(root):
        tokenizer = AutoTokenizer.from_pretrained(path_of(root, version) / "model")
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("<|im_s")
    newest = latest(root)
    assert newest is not None
    assert newest.manifest.batch_ids == [batches(version).id for version in range(STEPS)]


def lost_from(version: int, api: FakeTrainerApi) -> Callable[[Report], None]:
    """A coordinator that dies while it receives the report of ``version``."""

    def lose(report: Report) -> None:
        if report.version >= version:
            raise web.HTTPBadGateway

    return lose


# --- kills and resumption -----------------------------------------------------------------------------------------
async def test_a_killed_and_resumed_run_equals_one_that_was_not(
    tmp_path: Path, model: Path, api: FakeTrainerApi, straight: tuple[Path, list[Report]]
) -> None:
    run_dir = run_directory(tmp_path / "run", model)
    api.hold = 2
    first = start(run_dir, api)
    await api.until(lambda: api.asked.count(2) > 0)
    first.kill()
    assert (await first.ended())[0] == -signal.SIGKILL
    api.hold = None
    code, errors = await start(run_dir, api).ended()
    assert code == 0, errors
    assert "the run is over: all steps are trained" in errors
    assert [report.version for report in api.reports] == [1, 2, 2, 3, 4], "the newest is reported again"
    assert_equal_weights(weights(run_dir, 4), weights(straight[0], 4))


async def test_sparse_checkpoints_retrain_the_recorded_batches(
    tmp_path: Path, model: Path, api: FakeTrainerApi, straight: tuple[Path, list[Report]]
) -> None:
    run_dir = run_directory(tmp_path / "run", model, checkpoint_every=2)
    api.on_report = lost_from(3, api)
    with pytest.raises(CoordinatorLost):
        await train_here(run_dir, api, patience_s=0.3)
    assert [report.checkpointed for report in api.reports] == [False, True]
    assert versions(run_dir / "checkpoints") == [0, 1, 2, 3]
    api.on_report, api.asked, api.version = None, [], 3  # the answer was lost, not the report
    assert await train_here(run_dir, api) == "all steps are trained"
    assert api.asked[0] == 2, "version 3 had weights only, so its batch is trained again"
    assert_equal_weights(weights(run_dir, 4), weights(straight[0], 4))


async def test_a_report_lost_with_the_coordinator_is_made_after_the_restart(
    tmp_path: Path, model: Path, api: FakeTrainerApi
) -> None:
    run_dir = run_directory(tmp_path / "run", model)
    api.on_report = lost_from(2, api)
    with pytest.raises(CoordinatorLost):
        await train_here(run_dir, api, patience_s=0.3)
    assert api.version == 1
    api.on_report, api.asked = None, []
    assert await train_here(run_dir, api) == "all steps are trained"
    assert [report.version for report in api.reports] == [1, 2, 3, 4]
    assert api.reports[1].metrics["train/loss"] != 0
    assert 1 not in api.asked, "a batch in the manifest is never trained again"


async def test_a_coordinator_that_restarts_goes_unnoticed(tmp_path: Path, model: Path, api: FakeTrainerApi) -> None:
    run_dir = run_directory(tmp_path / "run", model)
    api.hold = 1
    training = asyncio.create_task(train_here(run_dir, api))
    await api.until(lambda: api.asked.count(1) > 0)
    await api.stop()
    await asyncio.sleep(0.5)  # time in which the trainer asks in vain
    api.hold = None
    await api.start()
    assert await training == "all steps are trained"


async def test_the_end_of_a_run_leaves_a_checkpoint_to_resume_from(tmp_path: Path, model: Path) -> None:
    api = FakeTrainerApi(batches, last=3)
    await api.start()
    run_dir = run_directory(tmp_path / "run", model, checkpoint_every=100)
    try:
        await train_here(run_dir, api)
        assert [(report.version, report.checkpointed) for report in api.reports] == [(1, False), (2, False), (3, True)]
    finally:
        await api.stop()
    newest = latest(run_dir / "checkpoints")
    assert newest is not None
    assert newest.manifest.version == 3


async def test_a_run_that_is_stopped_early_makes_its_last_version_resumable(
    tmp_path: Path, model: Path, api: FakeTrainerApi
) -> None:
    run_dir = run_directory(tmp_path / "run", model, checkpoint_every=100)
    api.hold = 2
    training = asyncio.create_task(train_here(run_dir, api))
    await api.until(lambda: api.asked.count(2) > 0)
    api.end("stopped by the user")
    assert await training == "stopped by the user"
    newest = latest(run_dir / "checkpoints")
    assert newest is not None
    assert newest.manifest.version == 2
    assert [(r.version, r.checkpointed) for r in api.reports] == [(1, False), (2, False), (2, True)]


async def test_bfloat16_publishes_half_and_resumes_exactly(tmp_path: Path, model: Path, api: FakeTrainerApi) -> None:
    whole = run_directory(tmp_path / "whole", model, dtype="bfloat16")
    await train_here(whole, api)
    assert {tensor.dtype for tensor in weights(whole, 4).values()} == {torch.bfloat16}
    broken = run_directory(tmp_path / "broken", model, dtype="bfloat16")
    api.version, api.hold = 0, 2
    training = asyncio.create_task(train_here(broken, api))
    await api.until(lambda: api.asked[-1] == 2)
    api.end("stop")
    await training
    api.end(None)
    api.hold = None
    await train_here(broken, api)
    assert_equal_weights(weights(broken, 4), weights(whole, 4))


# --- faults ---------------------------------------------------------------------------------------------------------
async def test_the_cause_is_the_last_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(version: int) -> Batch:
        return make_batch(version, rewards=[[float("nan")] * 4] * 2)

    api = FakeTrainerApi(broken, last=STEPS)
    await api.start()
    monkeypatch.setenv(KEY_VARIABLE, "key")
    arguments = ["--run-dir", str(run_directory(tmp_path / "run", model)), "--url", api.url]
    try:
        assert await asyncio.to_thread(main, arguments) == EXIT_FAILED
    finally:
        await api.stop()
    assert capsys.readouterr().err.splitlines()[-1] == "trainer: trajectory g0-0/0: reward nan is not a finite number"


async def test_a_wrong_key_is_refused_at_once(tmp_path: Path, model: Path, api: FakeTrainerApi) -> None:
    run_dir = run_directory(tmp_path / "run", model)
    with pytest.raises(ApiError, match="401: a bearer key is needed"):
        await asyncio.to_thread(train, run_dir, api.url, "other", patience_s=60)


async def test_a_model_that_is_none_is_named(tmp_path: Path, api: FakeTrainerApi) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="not a Hugging Face model directory"):
        await train_here(run_directory(tmp_path / "run", tmp_path / "empty"), api)


async def test_damaged_weights_are_named(tmp_path: Path, model: Path, api: FakeTrainerApi) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelError, match="cannot be loaded"):
        await train_here(run_directory(tmp_path / "run", damaged), api)


async def test_a_batch_is_never_trained_twice(tmp_path: Path, model: Path) -> None:
    api = FakeTrainerApi(lambda version: msgspec.structs.replace(batches(version), id="always-me"), last=STEPS)
    await api.start()
    try:
        with pytest.raises(BatchError, match="always-me was already trained"):
            await train_here(run_directory(tmp_path / "run", model), api)
    finally:
        await api.stop()
    assert api.version == 1


async def test_checkpoints_ahead_of_the_store_are_an_error(tmp_path: Path, model: Path, api: FakeTrainerApi) -> None:
    run_dir = run_directory(tmp_path / "run", model)
    await train_here(run_dir, api)
    api.version = 1
    with pytest.raises(CheckpointError, match="run store is older"):
        await train_here(run_dir, api)


async def test_a_corrupt_newest_checkpoint_is_passed_over(
    tmp_path: Path, model: Path, api: FakeTrainerApi, straight: tuple[Path, list[Report]]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir)
    (path_of(run_dir / "checkpoints", 4) / "optimizer.pt").write_bytes(b"cut")
    api.version = 4
    await train_here(run_dir, api)
    assert api.asked[0] == 3
    assert_equal_weights(weights(run_dir, 4), weights(straight[0], 4))


async def test_one_trainer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LOCK_WAIT_S", 0.0)
    with exclusive(tmp_path, World()):
        with pytest.raises(TrainingError, match="another trainer works"), exclusive(tmp_path, World()):
            pass
        with exclusive(tmp_path, World(rank=1, size=2)):
            pass
    with exclusive(tmp_path, World()):
        pass


def test_out_of_memory_names_the_option() -> None:
    with pytest.raises(OutOfMemory, match=r"lower training\.micro_batch_tokens"), out_of_memory_named():
        torch.empty(1 << 55)
    with pytest.raises(RuntimeError, match="something else"), out_of_memory_named():
        raise RuntimeError("something else")


async def test_a_full_disk_ends_with_one_message_and_earlier_versions(
    tmp_path: Path, model: Path, api: FakeTrainerApi
) -> None:
    """A file system with room for version 0 and not for version 1, in a mount namespace of its own."""
    run_dir = run_directory(tmp_path / "run", model)
    root = run_dir / "checkpoints"
    root.mkdir()
    copied = tmp_path / "after"
    script = f'mount -t tmpfs -o size=1350k tmpfs {root} || exit 77; "$@"; code=$?; cp -r {root} {copied}; exit $code'
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine")
    code, errors = await start(run_dir, api, prefix=prefix).ended()
    if code == 77 or "unshare failed" in errors:
        pytest.skip("no mount namespaces for this user")
    assert code == EXIT_FAILED
    assert errors.splitlines()[-1].startswith(f"trainer: the disk of {root} is full; earlier checkpoints are intact")
    assert sorted(path.name for path in copied.iterdir()) == ["v000000"]
    assert checkpoints.read(copied, 0).manifest.checkpointed


# --- ranks ----------------------------------------------------------------------------------------------------------
SLOW_SECOND_RANK = """
import os, pathlib, time
if os.environ.get("RANK") == "1":
    time.sleep(4)
    pathlib.Path(os.environ["RANK_1_STARTED"]).write_text(str(time.time()))
"""


async def test_T47_two_ranks_are_ready_together_and_train_as_one(
    tmp_path: Path, model: Path, api: FakeTrainerApi, straight: tuple[Path, list[Report]]
) -> None:
    run_dir = run_directory(tmp_path / "run", model, micro_batch_tokens=60)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_SECOND_RANK)
    started = tmp_path / "started"
    running = start(run_dir, api, ranks=2, PYTHONPATH=str(tmp_path / "site"), RANK_1_STARTED=str(started))
    ended = asyncio.create_task(running.ended())
    await api.until(lambda: bool(api.asked), 240)
    asked_at = time.time()
    assert started.exists(), "asked before the second rank was there"
    assert float(started.read_text()) < asked_at
    code, errors = await ended
    assert code == 0, errors
    expected = [report.metrics for report in straight[1]]
    for metrics, alone in zip([report.metrics for report in api.reports], expected, strict=True):
        for name in ("train/loss", "train/kl", "train/entropy", "train/logprob_diff_all_mean", "train/grad_norm"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name
        assert metrics["train/sampled_tokens"] == alone["train/sampled_tokens"]
    # Adam magnifies rounding in near-zero gradients to a share of the learning rate (1e-2).
    assert_equal_weights(weights(run_dir, 4), weights(straight[0], 4), tolerance=4e-3)
    api.version = 4
    assert await train_here(run_dir, api) == "all steps are trained", "one rank resumes what two wrote"


def test_the_package_says_how_it_is_started(tmp_path: Path) -> None:
    assert trainer_command(run_dir=tmp_path, url="u")[:3] == [sys.executable, "-m", "venusrl.training.trainer"]
    assert "--nproc-per-node=2" in trainer_command(run_dir=tmp_path, url="u", ranks=2)
