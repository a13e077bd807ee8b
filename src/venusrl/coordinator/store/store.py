"""The run store: what a run has done, on disk.

Owns: a run directory's ``lock``, ``store.sqlite`` and ``blobs/``; the life of groups, trajectories, batches,
versions and evaluations as recorded facts; the order of tasks and how far it was taken.

Must not know: the scheduler, processes, HTTP, torch. It decides nothing: it records, refuses contradictions
(``StoreConflict``) and answers.

Guarantees:
- What a method acknowledged is there after kill -9 of this process at any later instant; what it did not is
  absent as a whole. A trajectory's blob is on the disk before its row says finished.
- Trained, pending and closed-with-a-reason groups together are a prefix of the order of tasks, each task of it
  once. A group is in at most one batch, batches have consecutive versions, and ``form_batch`` refuses a batch
  that breaks the staleness bound.
- One process at a time: opening locks the directory.
- A trajectory reads back as it was written, until ``prune`` gave it up.
- Thread-safe. A call takes about 0.05 ms, so that an event loop makes it directly, but three wait for the disk
  (4 ms on a busy laptop, more on others): ``finish_trajectory`` and ``fail_trajectory`` with a transcript, which
  belong in ``asyncio.to_thread``, where they hold up no other call; and the few commits a step that are synced.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from venusrl.coordinator.errors import StoreConflict, StoreExists, StoreMissing, TasksChanged
from venusrl.coordinator.store import database, evaluations, identity, invariants, lock, pruning, queries, rows
from venusrl.coordinator.store.blobs import BlobFiles, BlobRef, pack
from venusrl.coordinator.store.database import Database
from venusrl.coordinator.store.disk import translated
from venusrl.coordinator.store.order import TaskOrder
from venusrl.coordinator.store.records import (
    BatchRecord,
    EvaluationKey,
    EvaluationRecord,
    EvaluationSample,
    OpenedGroup,
    OpenedTrajectory,
    RecoveredState,
    RunIdentity,
    RunTotals,
    TrainedReport,
    VersionRecord,
)
from venusrl.recipe import Recipe
from venusrl.types import Batch, Failure, FailureKind, Trajectory

BLOBS = "blobs"


class RunStore:
    """Make one with ``open`` (to run) or ``read`` (to look); ``close`` it, or use it as a context manager."""

    def __init__(self, run_dir: Path, db: Database, held: lock.RunLock | None) -> None:
        self.run_dir = run_dir
        self._db = db
        self._lock = held
        self._blobs = BlobFiles(run_dir / BLOBS)
        # Apart, so that an evaluation keeps no segment of trajectories from being removed.
        self._samples = BlobFiles(run_dir / BLOBS)
        self._order: TaskOrder | None = None
        self._bound = 0

    # --- opening ------------------------------------------------------------------------------------
    @classmethod
    def open(cls, run_dir: Path, recipe: Recipe, *, resume: bool = False) -> RunStore:
        """Lock ``run_dir`` and start a run there, or go on with the one it holds.

        Raises StoreLocked, StoreExists, StoreMissing, StoreVersionError, RecipeChanged, StoreFull.
        """
        begun = (run_dir / lock.NAME).exists() or (run_dir / database.NAME).exists()
        if resume and not begun:
            raise StoreMissing(f"there is no run in {run_dir} to resume: leave --resume out, or check --run-dir")
        with translated(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        held = lock.RunLock.acquire(run_dir)
        try:
            store = cls(run_dir, Database(run_dir / database.NAME), held)
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            held.release()
            raise
        try:
            store._identify(recipe, resume)
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            store.close()
            raise
        return store

    @classmethod
    def read(cls, run_dir: Path) -> RunStore:
        """Look at a run, going on or over; writes raise StoreError. Raises StoreMissing, StoreVersionError."""
        path = run_dir / database.NAME
        if not path.is_file():
            raise StoreMissing(f"there is no run in {run_dir}")
        store = cls(run_dir, Database(path, read_only=True), None)
        try:
            store.identity()
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            store.close()
            raise
        return store

    def close(self) -> None:
        """Idempotent."""
        self._blobs.close()
        self._samples.close()
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def identity(self) -> RunIdentity:
        meta = self._meta()
        if "run_id" not in meta:
            raise StoreMissing(f"the run in {self.run_dir} was never started")
        return RunIdentity(
            run_id=meta["run_id"],
            created_at=float(meta["created_at"]),
            recipe_hash=meta["recipe_hash"],
            resumes=int(meta["resumes"]),
        )

    def recipe(self) -> Recipe:
        """As the run was last started or resumed."""
        return identity.decode(self._meta()["recipe"])

    def _identify(self, recipe: Recipe, resume: bool) -> None:
        meta = self._meta()
        if "run_id" in meta:
            if not resume:
                raise StoreExists(f"{self.run_dir} holds a run already: add --resume, or choose another --run-dir")
            identity.check_same(identity.decode(meta["recipe"]), recipe)
            changed = {"resumes": str(int(meta["resumes"]) + 1)}
        else:
            changed = {"run_id": uuid.uuid4().hex, "created_at": repr(time.time()), "resumes": "0"}
        changed |= {"recipe": identity.encode(recipe), "recipe_hash": identity.fingerprint(recipe)}
        self._bound = recipe.schedule.staleness_bound
        with self._db.write(durable=True) as db:
            rows.set_meta(db, changed)

    def _meta(self) -> dict[str, str]:
        with self._db.read() as db:
            return dict(db.execute("SELECT key, value FROM meta"))

    # --- the order of tasks -------------------------------------------------------------------------
    def set_task_order(self, task_ids: Iterable[str], *, seed: int, epochs: int) -> None:
        """Fix the tasks of the run the first time; later check that they are the same. Raises TasksChanged.

        Only ``epochs``, where the order ends, may be another one each time.
        """
        order = TaskOrder(task_ids, seed, epochs)
        with self._db.write(durable=True) as db:
            recorded = [row[0] for row in db.execute("SELECT id FROM tasks ORDER BY id")]
            if not recorded:
                db.executemany("INSERT INTO tasks (id) VALUES (?)", [(task,) for task in order.task_ids])
                rows.set_meta(db, {"order_seed": str(seed)})
            elif recorded != order.task_ids or queries.meta(db)["order_seed"] != str(seed):
                raise TasksChanged(rows.task_difference(recorded, order.task_ids))
            taken = queries.next_ordinal(db)
            if taken and order.task_at(taken - 1) is None:
                raise TasksChanged(f"the run is past {epochs} epochs of its tasks already: raise tasks.epochs")
            rows.set_meta(db, {"order_epochs": str(epochs)})
        self._order = order

    # --- groups -------------------------------------------------------------------------------------
    def open_group(self, size: int, *, reissue_of: str | None = None) -> OpenedGroup | None:
        """Open a group of ``size`` running trajectories for the next task of the order, None past its end.

        ``reissue_of`` takes the task and the place in the order of that closed group instead.
        """
        if self._order is None:
            raise StoreConflict("set_task_order comes before open_group")
        with self._db.write() as db:
            if reissue_of is None:
                ordinal = queries.next_ordinal(db)
                task = self._order.task_at(ordinal)
                if task is None:
                    return None
                group = f"g{ordinal:06d}"
            else:
                ordinal, task, group = rows.reissued(db, reissue_of)
            db.execute(
                "INSERT INTO groups (id, ordinal, task_id, size, state, reissue_of) VALUES (?, ?, ?, ?, 'open', ?)",
                (group, ordinal, task, size, reissue_of),
            )
            members = tuple(rows.open_trajectory(db, group, index, 0) for index in range(size))
        return OpenedGroup(id=group, ordinal=ordinal, task_id=task, trajectories=members)

    def complete_group(self, group_id: str) -> int:
        """Say that no more trajectories will join; returns the group's start version.

        Every place must be finished or given up, and at least one finished.
        """
        with self._db.write() as db:
            rows.expect(db, "groups", group_id, {"open"})
            if unsettled := queries.unsettled_places(db, group_id):
                raise StoreConflict(f"group {group_id} is not complete: places {unsettled} are not settled")
            start = queries.group_start(db, group_id)
            if start is None:
                raise StoreConflict(f"group {group_id} has no finished trajectory: close it")
            db.execute("UPDATE groups SET state = 'complete', start_version = ? WHERE id = ?", (start, group_id))
        return start

    def close_group(self, group_id: str, reason: str) -> None:
        """Take the group out of the run without training it. Its running members are cancelled for ``reason``."""
        with self._db.write() as db:
            rows.expect(db, "groups", group_id, {"open", "complete"})
            db.execute("UPDATE groups SET state = 'closed', reason = ? WHERE id = ?", (reason, group_id))
            db.execute(
                "UPDATE trajectories SET state = 'failed', failure_kind = ?, failure_reason = ?, failure_message = '' "
                "WHERE group_id = ? AND state = 'running'",
                (FailureKind.CANCELLED, reason, group_id),
            )
            db.execute("UPDATE trajectories SET vacant = 0 WHERE group_id = ?", (group_id,))

    # --- trajectories -------------------------------------------------------------------------------
    def record_progress(self, trajectory_id: str, start_version: int, tokens: int) -> None:
        """``tokens`` sampled so far, so that a crash can count what it cost. Cheap; once a turn."""
        with self._db.write() as db:
            changed = db.execute(
                "UPDATE trajectories SET start_version = ?, tokens = ? WHERE id = ? AND state = 'running'",
                (start_version, tokens, trajectory_id),
            )
            if changed.rowcount != 1:
                raise StoreConflict(f"trajectory {trajectory_id} is not running")

    def finish_trajectory(self, trajectory: Trajectory) -> None:
        """Keep a trajectory that may train: on the disk, with its reward, when this returns."""
        if not trajectory.trainable:
            raise StoreConflict(f"trajectory {trajectory.id} may not train: use fail_trajectory")
        failure = trajectory.failure or Failure(FailureKind.POLICY, "")
        self._settle(trajectory.id, "finished", sampled_tokens(trajectory), trajectory, failure, vacant=False)

    def fail_trajectory(
        self,
        trajectory_id: str,
        failure: Failure,
        *,
        vacant: bool,
        tokens: int | None = None,
        transcript: Trajectory | None = None,
    ) -> None:
        """The trajectory will not train. ``vacant``: its place waits for ``replace_trajectory``, now or after a
        resumption; otherwise the group goes on without it. ``tokens`` sampled in vain, by default those of the
        transcript or of the last progress. A transcript is kept for whoever looks into the failure.
        """
        if tokens is None and transcript is not None:
            tokens = sampled_tokens(transcript)
        self._settle(trajectory_id, "failed", tokens, transcript, failure, vacant=vacant)

    def replace_trajectory(self, group_id: str, index: int) -> OpenedTrajectory:
        """Open the next attempt at a vacant place."""
        with self._db.write() as db:
            rows.expect(db, "groups", group_id, {"open"})
            row = db.execute(
                "SELECT id, attempt FROM trajectories WHERE group_id = ? AND place = ? AND vacant = 1",
                (group_id, index),
            ).fetchone()
            if row is None:
                raise StoreConflict(f"place {index} of group {group_id} is not vacant")
            db.execute("UPDATE trajectories SET vacant = 0 WHERE id = ?", (row[0],))
            return rows.open_trajectory(db, group_id, index, row[1] + 1)

    def give_up_place(self, group_id: str, index: int) -> None:
        """Leave a vacant place empty: the group goes on without it."""
        with self._db.write() as db:
            rows.expect(db, "groups", group_id, {"open"})
            db.execute("UPDATE trajectories SET vacant = 0 WHERE group_id = ? AND place = ?", (group_id, index))

    def trajectory(self, trajectory_id: str) -> Trajectory | None:
        """As it was finished, or as its transcript was kept; None when there is none (any more)."""
        with self._db.read() as db:
            if pruning.is_gone(db, trajectory_id):
                return None
            ref = queries.blob_ref(db, "trajectories", "id = ?", (trajectory_id,))
        return msgspec.msgpack.decode(self._blobs.read(ref), type=Trajectory) if ref else None

    def _settle(
        self,
        trajectory_id: str,
        state: str,
        tokens: int | None,
        content: Trajectory | None,
        failure: Failure,
        *,
        vacant: bool,
    ) -> None:
        ref = self._keep(trajectory_id, content) if content is not None else None
        with self._blobs.recording(ref), self._db.write() as db:
            rows.expect(db, "trajectories", trajectory_id, {"running"})
            db.execute(
                "UPDATE trajectories SET state = ?, vacant = ?, tokens = coalesce(?, tokens), "
                "start_version = coalesce(?, start_version), reward = ?, end_reason = ?, failure_kind = ?, "
                "failure_reason = ?, failure_message = ?, segment = ?, offset = ?, length = ?, checksum = ? "
                "WHERE id = ?",
                (
                    state,
                    vacant,
                    tokens,
                    content.start_version if content else None,
                    content.reward if content else None,
                    content.end if content else None,
                    failure.kind if failure.reason else None,
                    failure.reason or None,
                    failure.message or None,
                    *(msgspec.structs.astuple(ref) if ref else (None,) * 4),
                    trajectory_id,
                ),
            )

    def _keep(self, trajectory_id: str, content: Trajectory) -> BlobRef:
        # Outside the transaction: waiting for the disk must not hold up those who only write a row.
        with self._db.read() as db:
            row = rows.expect(db, "trajectories", trajectory_id, {"running"})
        if (content.id, content.group_id, content.index) != (trajectory_id, row["group_id"], row["place"]):
            raise StoreConflict(f"trajectory {trajectory_id} was handed the content of {content.id}")
        return self._blobs.append(pack(msgspec.msgpack.encode(content)))

    # --- batches and versions -----------------------------------------------------------------------
    def form_batch(self, version: int, group_ids: Sequence[str]) -> str:
        """Record the batch that weight version ``version`` trains on, before anybody sees it; returns its id."""
        batch = f"b{version:06d}"
        with self._db.write(durable=True) as db:
            expected = queries.next_batch_version(db)
            if version != expected:
                raise StoreConflict(f"the next batch trains version {expected}, not {version}")
            db.execute("INSERT INTO batches (id, version, state) VALUES (?, ?, 'formed')", (batch, version))
            for position, group in enumerate(group_ids):
                start = rows.expect(db, "groups", group, {"complete"})["start_version"]
                if not 0 <= version - start <= self._bound:
                    raise StoreConflict(f"group {group} started at {start}: too stale for version {version}")
                db.execute(
                    "UPDATE groups SET state = 'batched', batch_id = ?, batch_position = ? WHERE id = ?",
                    (batch, position, group),
                )
        return batch

    def batch_for(self, version: int) -> Batch | None:
        """The batch that trains ``version``, whatever became of it; None while there is none. Raises StorePruned."""
        body = self.batch_bytes(version)
        return msgspec.msgpack.decode(body, type=Batch) if body is not None else None

    def batch_bytes(self, version: int) -> bytes | None:
        """The same as msgpack, put together from the stored records without decoding them."""
        with self._db.read() as db:
            parts = queries.batch_parts(db, version)
            pruning.check_kept(db, version)
        if parts is None:
            return None
        for group in parts["groups"]:
            group["trajectories"] = [msgspec.Raw(self._blobs.read(ref)) for ref in group["trajectories"]]
        return msgspec.msgpack.encode(parts)

    def batch_record(self, version: int) -> BatchRecord | None:
        with self._db.read() as db:
            return next(iter(queries.batches(db, "version = ?", (version,))), None)

    def mark_trained(self, report: TrainedReport) -> bool:
        """Record a step, and close the batches that its checkpoint contains. Returns whether it was news.

        Saying it again is allowed, also with another path or after a trainer went back to an older checkpoint.
        """
        with self._db.write(durable=True) as db:
            state = rows.expect(db, "batches", report.batch_id, {"formed", "trained", "closed"})
            if state["version"] != report.version - 1:
                raise StoreConflict(
                    f"batch {report.batch_id} leads to version {state['version'] + 1}, not {report.version}"
                )
            if state["state"] == "formed":
                if queries.current_version(db) != state["version"]:
                    raise StoreConflict(f"version {state['version']} is not trained yet; version {report.version} is")
                db.execute("UPDATE batches SET state = 'trained' WHERE id = ?", (report.batch_id,))
                db.execute("UPDATE groups SET state = 'trained' WHERE batch_id = ?", (report.batch_id,))
            rows.put_version(db, report.version, report.model_path, report.checkpointed, report.metrics)
            if report.checkpointed:
                db.execute("UPDATE batches SET state = 'closed' WHERE version < ?", (report.version,))
        return bool(state["state"] == "formed")

    def prune(self, steps: int) -> int:
        """Forget trajectories older than the newest ``steps`` trained batches, but none that a checkpoint does not
        contain; returns how many files that removed. What a kill interrupted the next call completes."""
        with self._db.write(durable=True) as db:
            pruning.raise_mark(db, steps)
        with self._db.read() as db:
            return pruning.remove_segments(db, self._blobs, self._samples)

    def record_version(self, version: int, model_path: str, *, checkpointed: bool) -> None:
        """Where the weights of ``version`` are, when no step said so (version 0) or they moved."""
        with self._db.write(durable=True) as db:
            if version > (queries.current_version(db) if queries.versions(db) else 0):
                raise StoreConflict(f"version {version} was not trained")
            rows.put_version(db, version, model_path, checkpointed, {})

    def current_version(self) -> int:
        with self._db.read() as db:
            return queries.current_version(db)

    def version(self, version: int) -> VersionRecord | None:
        with self._db.read() as db:
            return next(iter(queries.versions(db, "version = ?", (version,))), None)

    def versions(self) -> list[VersionRecord]:
        with self._db.read() as db:
            return queries.versions(db)

    # --- evaluations --------------------------------------------------------------------------------
    def open_evaluation(self, version: int, mode: str) -> None:
        """Ask for an evaluation; it is pending, over crashes too, until it is finished. Idempotent."""
        with self._db.write(durable=True) as db:
            evaluations.ask(db, EvaluationKey(version, mode))

    def finish_evaluation(
        self, version: int, mode: str, samples: Sequence[EvaluationSample], *, wall_s: float
    ) -> EvaluationRecord:
        """Keep the results of an evaluation that was asked for. Every sample must be of its version."""
        ref = self._samples.append(evaluations.packed(version, samples))
        with self._samples.recording(ref), self._db.write(durable=True) as db:
            return evaluations.finish(db, EvaluationKey(version, mode), samples, ref, wall_s)

    def evaluations(self) -> list[EvaluationRecord]:
        """By version, then mode; pending ones included."""
        with self._db.read() as db:
            return evaluations.records(db)

    def evaluation_samples(self, version: int, mode: str) -> list[EvaluationSample]:
        """Empty while the evaluation is pending."""
        with self._db.read() as db:
            ref = queries.blob_ref(db, "evaluations", "version = ? AND mode = ?", (version, mode))
        return evaluations.unpacked(self._blobs.read(ref)) if ref else []

    # --- sums -----------------------------------------------------------------------------------------
    def discard(self, reason: str, tokens: int) -> None:
        """Count sampled tokens that were lost apart from a failed trajectory or a closed group."""
        with self._db.write() as db:
            db.execute(
                "INSERT INTO discards (reason, tokens) VALUES (?, ?) "
                "ON CONFLICT (reason) DO UPDATE SET tokens = tokens + excluded.tokens",
                (reason, tokens),
            )

    def discarded_tokens(self) -> dict[str, int]:
        """Sampled tokens that will not train, by reason. Cheap, also late in a long run."""
        with self._db.read() as db:
            return queries.discarded_tokens(db)

    def totals(self) -> RunTotals:
        """Everything there is to sum; takes 0.1 s after 64,000 trajectories, so not for a live view."""
        with self._db.read() as db:
            return queries.totals(db)

    # --- after a crash --------------------------------------------------------------------------------
    def recover(self) -> RecoveredState:
        """Cancel what was in flight (reason ``crash``, its place vacant again) and say where the run stands.

        Idempotent; of a run that stopped cleanly it changes nothing. A group without vacancies that is still
        ``open`` lost only its ``complete_group``.
        """
        with self._db.write(durable=True) as db:
            lost = db.execute("SELECT count(*), coalesce(sum(tokens), 0) FROM trajectories WHERE state = 'running'")
            trajectories, tokens = lost.fetchone()
            db.execute(
                "UPDATE trajectories SET state = 'failed', vacant = 1, failure_kind = ?, failure_reason = 'crash', "
                "failure_message = 'the coordinator died' WHERE state = 'running'",
                (FailureKind.CANCELLED,),
            )
            return queries.recovered(db, lost_trajectories=trajectories, lost_tokens=tokens)

    def check_invariants(self) -> list[str]:
        """Read everything back and return what contradicts the guarantees above; empty when all is well."""
        recipe = self.recipe()
        with self._db.read() as db:
            return invariants.faults(db, self._blobs, recipe)


def sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens the policy sampled, hence those that training on it would use."""
    return sum(sum(segment.loss_mask) for segment in trajectory.segments)
