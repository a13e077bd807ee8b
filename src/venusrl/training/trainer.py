"""The trainer process: batch in, weights out, until the run is over.

    python -m venusrl.training.trainer --run-dir D --url http://127.0.0.1:P      (key: VENUSRL_API_KEY)

Owns: the order of things. Weights of a version are on disk before they are reported; a batch is in the manifest of
the checkpoint that contains it, so it is never trained twice; one trainer at a time works on a run directory.

Must not know: how batches are formed or rewards come about.

Guarantees: exit code 0 when the coordinator says that the run is over, else 3 and a last message on stderr that
begins with ``trainer:`` and states the cause. A kill at any instant loses at most the step in progress.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from pydantic import ValidationError

from venusrl.leaving import leave
from venusrl.models import ModelError
from venusrl.recipe import Recipe
from venusrl.training import checkpoint as checkpoints
from venusrl.training.checkpoint import Manifest
from venusrl.training.client import RunOver, RunState, Trained, TrainerClient, Waiting
from venusrl.training.errors import (
    EXIT_FAILED,
    ApiError,
    BatchError,
    CheckpointError,
    CoordinatorLost,
    OutOfMemory,
    TrainingError,
)
from venusrl.training.gguf import materialise
from venusrl.training.launch import KEY_VARIABLE
from venusrl.training.learner import Learner
from venusrl.training.models import load_model
from venusrl.training.publisher import Publisher, restore
from venusrl.training.world import World, join_world
from venusrl.types import Batch

_log = logging.getLogger("venusrl.trainer")
POLL_S = 30.0
LOCK_WAIT_S = 20.0
"""A killed predecessor may take a moment to be gone."""


class Trainer:
    """One run's trainer. ``run`` drives it; every rank does the same, rank 0 alone talks and writes."""

    def __init__(self, recipe: Recipe, run_dir: Path, client: TrainerClient, world: World) -> None:
        self._recipe = recipe
        self._root = run_dir / "checkpoints"
        self._client = client
        self._world = world
        self._manifest = Manifest(version=0, batch_ids=[], checkpointed=True)
        self._mark = time.monotonic()
        """End of the previous step (or of the start), for the step's duration."""
        self._open()

    # --- start ------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        """Load the newest full checkpoint, or the recipe's model as version 0; ready when all ranks are."""
        if self._world.leads:
            checkpoints.clean(self._root)
        self._world.barrier()
        found = checkpoints.latest(self._root, on_ignored=lambda fault: _log.warning("ignored: %s", fault))
        origin = materialise(self._recipe.model.path)
        source = found.model if found else origin
        model = load_model(source)
        reference = load_model(origin) if self._recipe.training.kl_coefficient > 0 else None
        dtype = torch.bfloat16 if self._recipe.model.dtype == "bfloat16" else torch.float32
        self._learner = Learner(self._recipe, model, reference=reference, world=self._world)
        self._publisher = Publisher(self._root, model, source, dtype, self._world)
        if found:
            restore(self._learner, found)
            self._manifest = found.manifest
        else:
            self._publisher.publish(self._learner, self._manifest)
        self._world.barrier()
        _log.info("ready at version %d", self._manifest.version)

    def _greet(self) -> RunState:
        """Learn where the run stands, and report again what a crash may have kept from being reported."""
        state = self._client.state()
        own = self._manifest.version
        if own > state.version + 1:
            raise CheckpointError(
                f"the newest checkpoint is version {own}, but the run stands at {state.version}: "
                "the run store is older than the checkpoints"
            )
        if own > 0:
            self._report()
        return state

    # --- the loop ---------------------------------------------------------------------------------------------
    def run(self) -> str:
        """Train until the run is over; returns why it is."""
        state = self._world.share(self._greet)
        self._mark = time.monotonic()
        while True:
            started = time.monotonic()
            answer = self._next(state)
            if isinstance(answer, RunOver):
                self._finish()
                return answer.reason
            self._train(answer, wait_s=time.monotonic() - started, last_version=state.max_steps)

    def _next(self, state: RunState) -> Batch | RunOver:
        """Rank 0 asks; the others hear at least every poll, so no collective waits longer than that."""
        version = self._manifest.version
        reason = ""
        while True:
            answer = self._world.share(lambda: self._client.batch(version, POLL_S))
            if not isinstance(answer, Waiting):
                return answer
            if version < state.version:
                raise ApiError(
                    f"the run stands at version {state.version}, the newest checkpoint at {version}, and the "
                    f"coordinator no longer has the batch between them ({answer.reason})"
                )
            if answer.reason != reason:
                reason = answer.reason
                _log.info("version %d waits for a batch: %s", version, reason)

    def _train(self, batch: Batch, *, wait_s: float, last_version: int) -> None:
        if batch.id in self._manifest.batch_ids:
            raise BatchError(f"batch {batch.id} was already trained; it is in the manifest of {self._manifest.version}")
        started = time.monotonic()
        metrics = self._learner.step(batch)
        trained = time.monotonic()
        version = batch.version + 1
        full = version % self._recipe.training.checkpoint_every == 0 or version == last_version
        self._manifest = Manifest(
            version=version,
            batch_ids=[*self._manifest.batch_ids, batch.id],
            checkpointed=full,
            metrics={**metrics, "perf/trainer_wait_s": wait_s, "perf/train_s": trained - started},
        )
        self._publisher.publish(self._learner, self._manifest)
        written = time.monotonic()
        durations = {
            "perf/checkpoint_s": written - trained,
            "perf/step_s": written - self._mark,
            "perf/trainer_idle_fraction": wait_s / max(written - self._mark, 1e-9),
        }
        self._mark = written
        if self._world.leads:
            self._report(durations)
            checkpoints.prune(self._root, self._recipe.training.keep_checkpoints)
        _log.info("version %d: reward %.3f, loss %.5f", version, metrics["reward/mean"], metrics["train/loss"])

    def _report(self, durations: dict[str, float] | None = None) -> None:
        manifest = self._manifest
        self._client.report(
            Trained(
                batch_id=manifest.batch_ids[-1],
                version=manifest.version,
                model_path=str(checkpoints.path_of(self._root, manifest.version) / "model"),
                checkpointed=manifest.checkpointed,
                metrics={**manifest.metrics, **(durations or {})},
            )
        )

    def _finish(self) -> None:
        """Make the last version one that a later run can resume from."""
        if self._manifest.checkpointed:
            return
        self._manifest = Manifest(
            version=self._manifest.version,
            batch_ids=self._manifest.batch_ids,
            checkpointed=True,
            metrics=self._manifest.metrics,
        )
        self._publisher.publish(self._learner, self._manifest)
        if self._world.leads:
            try:
                self._report()
            except (CoordinatorLost, ApiError) as error:
                # The coordinator may be gone by now; a resumed trainer reports the checkpoint when it starts.
                _log.warning("the final checkpoint was not reported: %s", error)


# --- the process ------------------------------------------------------------------------------------------------
@contextmanager
def exclusive(run_dir: Path, world: World) -> Iterator[None]:
    """Hold the run directory's trainer lock; the kernel releases it however this process ends."""
    if not world.leads:
        yield
        return
    with (run_dir / "trainer.lock").open("a") as file:
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TrainingError(f"another trainer works on {run_dir}") from None
                time.sleep(0.2)
        yield


@contextmanager
def out_of_memory_named() -> Iterator[None]:
    """Turn the allocators' errors into one that names the option to change."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        cause = str(error).partition("\n")[0][:200]
        typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not typed and "can't allocate memory" not in cause and "out of memory" not in cause:
            raise
        raise OutOfMemory(f"out of memory; lower training.micro_batch_tokens ({cause})") from error


def read_recipe(run_dir: Path) -> Recipe:
    path = run_dir / "recipe.json"
    try:
        return Recipe.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise TrainingError(f"{path} is not a resolved recipe: {error}") from error


def train(run_dir: Path, url: str, key: str, *, patience_s: float) -> str:
    """Run the trainer in this process until the run is over; returns why it is. Raises TrainingError, ModelError."""
    recipe = read_recipe(run_dir)
    client = TrainerClient(url, key, patience_s=patience_s)
    with join_world(recipe.training) as world, exclusive(run_dir, world), out_of_memory_named():
        if not world.leads:
            logging.getLogger().setLevel(logging.WARNING)  # the others would say the same
        return Trainer(recipe, run_dir, client, world).run()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="venusrl.training.trainer", description="The trainer process of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--url", required=True, help="the coordinator's address")
    parser.add_argument("--patience-s", type=float, default=120.0, help="how long the coordinator may be away")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
    transformers.utils.logging.disable_progress_bar()
    try:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise TrainingError(f"the environment variable {KEY_VARIABLE} is not set")
        reason = train(options.run_dir, options.url, key, patience_s=options.patience_s)
    except (TrainingError, ModelError) as error:
        sys.stderr.write(f"trainer: {error}\n")
        return EXIT_FAILED
    _log.info("the run is over: %s", reason)
    return 0


if __name__ == "__main__":
    leave(main())
