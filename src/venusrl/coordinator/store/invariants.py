"""Whether a store keeps what it promises; the kill -9 tests stand on this.

Owns: the list of checks. Must not know: how the rows came to be: every check reads rows and blobs alone.

Guarantees: one sentence a fault; an empty list means that every check ran and held.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import msgspec

from venusrl.coordinator.errors import StoreCorrupt
from venusrl.coordinator.store import pruning, queries
from venusrl.coordinator.store.blobs import BlobFiles, BlobRef
from venusrl.coordinator.store.order import TaskOrder
from venusrl.coordinator.store.records import EvaluationSample
from venusrl.recipe import Recipe
from venusrl.types import Trajectory


def faults(db: sqlite3.Connection, blobs: BlobFiles, recipe: Recipe) -> list[str]:
    return [
        *_file(db),
        *_order(db),
        *_batches(db, recipe.schedule.batch_groups),
        *_versions(db),
        *_members(db),
        *_trajectories(db, blobs, recipe.schedule.staleness_bound),
        *_evaluations(db, blobs),
    ]


def _file(db: sqlite3.Connection) -> Iterator[str]:
    for row in db.execute("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield f"the database is damaged: {row[0]}"
    for row in db.execute("PRAGMA foreign_key_check"):
        yield f"a row of {row[0]} refers to a row of {row[2]} that is not there"


def _order(db: sqlite3.Connection) -> Iterator[str]:
    """Trained, pending and closed groups are a prefix of the order; one live group a place, or a closed one."""
    groups = db.execute("SELECT id, ordinal, task_id, state, reissue_of FROM groups ORDER BY ordinal").fetchall()
    if not groups:
        return
    settings = queries.meta(db)
    tasks = [row[0] for row in db.execute("SELECT id FROM tasks")]
    order = TaskOrder(tasks, int(settings["order_seed"]), int(settings["order_epochs"]))
    by_ordinal: dict[int, list[sqlite3.Row]] = {}
    for group in groups:
        by_ordinal.setdefault(group["ordinal"], []).append(group)
        if group["task_id"] != order.task_at(group["ordinal"]):
            yield f"group {group['id']} took {group['task_id']}, not the task that the order has at its place"
    if skipped := sorted(set(range(max(by_ordinal) + 1)) - by_ordinal.keys()):
        yield f"places {skipped} of the order were skipped"
    for ordinal, those in by_ordinal.items():
        live = [group["id"] for group in those if group["state"] != "closed"]
        if len(live) > 1:
            yield f"place {ordinal} of the order is taken by {live}"
        firsts = [group["id"] for group in those if group["reissue_of"] is None]
        if len(firsts) != 1:
            yield f"place {ordinal} of the order was opened {len(firsts)} times: {firsts}"


def _batches(db: sqlite3.Connection, batch_groups: int) -> Iterator[str]:
    current = queries.current_version(db)
    for expected, batch in enumerate(queries.batches(db, "1")):
        if batch.version != expected:
            yield f"batch {batch.id} trains version {batch.version}; version {expected} was next"
        if len(batch.group_ids) != batch_groups:
            yield f"batch {batch.id} holds {len(batch.group_ids)} groups, not {batch_groups}"
        if (batch.state == "formed") == (batch.version < current):
            yield f"batch {batch.id} is {batch.state} while version {current} is current"
        wanted = "batched" if batch.state == "formed" else "trained"
        wrong = db.execute("SELECT id FROM groups WHERE batch_id = ? AND state != ?", (batch.id, wanted)).fetchall()
        if wrong:
            yield f"groups {[row[0] for row in wrong]} of batch {batch.id} ({batch.state}) are not {wanted}"


def _versions(db: sqlite3.Connection) -> Iterator[str]:
    versions = queries.versions(db)
    numbers = [version.version for version in versions]
    if numbers and numbers not in (list(range(numbers[-1] + 1)), list(range(1, numbers[-1] + 1))):
        yield f"versions are not consecutive: {numbers}"
    newest = max((version.version for version in versions if version.checkpointed), default=0)
    for batch in queries.batches(db, "state = 'trained'"):
        if batch.version < newest:
            yield f"batch {batch.id} is in the checkpoint of version {newest} but was not closed"
    for batch in queries.batches(db, "state = 'closed'"):
        if batch.version >= newest:
            yield f"batch {batch.id} is closed but no checkpoint contains it"
    if pruning.kept_from(db) > newest:
        yield f"trajectories were deleted up to version {pruning.kept_from(db)}, past the checkpoint of {newest}"


def _members(db: sqlite3.Connection) -> Iterator[str]:
    settled = "('complete', 'batched', 'trained')"
    for row in db.execute(f"SELECT id, start_version FROM groups WHERE state IN {settled}").fetchall():
        if unsettled := queries.unsettled_places(db, row["id"]):
            yield f"group {row['id']} went on while places {unsettled} were not settled"
        if (start := queries.group_start(db, row["id"])) != row["start_version"]:
            yield f"group {row['id']} says it started at {row['start_version']}, its trajectories at {start}"
    query = "SELECT t.id FROM trajectories AS t JOIN groups AS g ON g.id = t.group_id WHERE g.state = 'closed'"
    for row in db.execute(f"{query} AND (t.state = 'running' OR t.vacant = 1)"):
        yield f"trajectory {row[0]} goes on in a closed group"


def _trajectories(db: sqlite3.Connection, blobs: BlobFiles, bound: int) -> Iterator[str]:
    query = (
        "SELECT t.*, g.task_id, b.version AS trained_on FROM trajectories AS t JOIN groups AS g ON g.id = t.group_id "
        "LEFT JOIN batches AS b ON b.id = g.batch_id WHERE t.segment IS NOT NULL"
    )
    for row in db.execute(query).fetchall():
        if pruning.is_gone(db, row["id"]):
            continue
        try:
            raw = blobs.read(BlobRef(row["segment"], row["offset"], row["length"], row["checksum"]))
            kept = msgspec.msgpack.decode(raw, type=Trajectory)
        except (StoreCorrupt, msgspec.MsgspecError) as error:
            yield f"trajectory {row['id']} does not read back: {error}"
            continue
        written = (kept.id, kept.group_id, kept.task_id, kept.index, kept.attempt)
        if written != tuple(row[key] for key in ("id", "group_id", "task_id", "place", "attempt")):
            yield f"trajectory {row['id']} reads back as another one: {written}"
        if row["state"] != "finished":
            continue
        if (kept.reward, kept.start_version) != (row["reward"], row["start_version"]):
            yield f"trajectory {row['id']} reads back with another reward or start"
        if row["trained_on"] is not None:
            yield from _staleness(kept, row["trained_on"], bound)


def _staleness(trajectory: Trajectory, trained_on: int, bound: int) -> Iterator[str]:
    sampled = [span.version for segment in trajectory.segments for span in segment.spans]
    oldest = min([*sampled, trajectory.start_version or 0])
    newest = max([*sampled, trajectory.start_version or 0])
    if trained_on - oldest > bound:
        yield f"trajectory {trajectory.id} of version {oldest} is in the batch of {trained_on}: bound {bound}"
    if newest > trained_on:
        yield f"trajectory {trajectory.id} has tokens of version {newest}, newer than its batch's {trained_on}"


def _evaluations(db: sqlite3.Connection, blobs: BlobFiles) -> Iterator[str]:
    for row in db.execute("SELECT * FROM evaluations WHERE finished = 1").fetchall():
        name = f"the {row['mode']} evaluation of version {row['version']}"
        try:
            raw = blobs.read(BlobRef(row["segment"], row["offset"], row["length"], row["checksum"]))
        except StoreCorrupt as error:
            yield f"{name} does not read back: {error}"
            continue
        samples = msgspec.msgpack.decode(raw, type=list[EvaluationSample])
        if any(sample.version != row["version"] for sample in samples) or len(samples) != row["samples"]:
            yield f"{name} holds other samples than it says"
