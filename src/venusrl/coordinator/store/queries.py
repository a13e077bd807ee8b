"""What the store's rows say. Reads only.

Owns: the queries behind the store's answers. Must not know: files, locks, who asks.

Guarantees: nothing is written; sums are computed from the rows, so they cannot disagree with them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from venusrl.coordinator.store.blobs import BlobRef
from venusrl.coordinator.store.records import (
    BatchRecord,
    BatchState,
    ClosedGroup,
    EvaluationKey,
    FinishedTrajectory,
    GroupState,
    RecoveredGroup,
    RecoveredState,
    RunTotals,
    Vacancy,
    VersionRecord,
)
from venusrl.types import FailureKind

Row = dict[str, Any]


def meta(db: sqlite3.Connection) -> dict[str, str]:
    return dict(db.execute("SELECT key, value FROM meta"))


def next_ordinal(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(ordinal) + 1, 0) FROM groups").fetchone()[0])


def next_batch_version(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(version) + 1, 0) FROM batches").fetchone()[0])


def current_version(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(version), 0) FROM versions").fetchone()[0])


def versions(db: sqlite3.Connection, where: str = "1", values: tuple[Any, ...] = ()) -> list[VersionRecord]:
    rows = db.execute(
        f"SELECT version, model_path, checkpointed, metrics FROM versions WHERE {where} ORDER BY version", values
    )
    return [VersionRecord(row[0], row[1], bool(row[2]), json.loads(row[3])) for row in rows]


def unsettled_places(db: sqlite3.Connection, group_id: str) -> list[int]:
    rows = db.execute(
        "SELECT place FROM trajectories WHERE group_id = ? AND (state = 'running' OR vacant = 1) ORDER BY place",
        (group_id,),
    )
    return [row[0] for row in rows]


def group_start(db: sqlite3.Connection, group_id: str) -> int | None:
    """The smallest start among the members that may train; None without any."""
    row = db.execute(
        "SELECT min(start_version) FROM trajectories WHERE group_id = ? AND state = 'finished'", (group_id,)
    ).fetchone()
    return None if row[0] is None else int(row[0])


def blob_ref(db: sqlite3.Connection, table: str, where: str, values: tuple[Any, ...]) -> BlobRef | None:
    row = db.execute(f"SELECT segment, offset, length, checksum FROM {table} WHERE {where}", values).fetchone()
    return BlobRef(*row) if row is not None and row[0] is not None else None


def batches(db: sqlite3.Connection, where: str, values: tuple[Any, ...] = ()) -> list[BatchRecord]:
    found = []
    for row in db.execute(f"SELECT id, version, state FROM batches WHERE {where} ORDER BY version", values).fetchall():
        groups = db.execute("SELECT id FROM groups WHERE batch_id = ? ORDER BY batch_position", (row[0],))
        found.append(BatchRecord(row[0], row[1], BatchState(row[2]), tuple(group[0] for group in groups)))
    return found


def batch_parts(db: sqlite3.Connection, version: int) -> Row | None:
    """A ``Batch`` as nested dicts, blob references in place of trajectories."""
    batch = db.execute("SELECT id FROM batches WHERE version = ?", (version,)).fetchone()
    if batch is None:
        return None
    groups = []
    for row in db.execute("SELECT * FROM groups WHERE batch_id = ? ORDER BY batch_position", (batch[0],)).fetchall():
        members = db.execute(
            "SELECT segment, offset, length, checksum FROM trajectories "
            "WHERE group_id = ? AND state = 'finished' ORDER BY place",
            (row["id"],),
        )
        groups.append(
            {key: row[key] for key in ("id", "task_id", "ordinal", "start_version")}
            | {"trajectories": [BlobRef(*member) for member in members]}
        )
    return {"id": batch[0], "version": version, "groups": groups}


def recovered(db: sqlite3.Connection, *, lost_trajectories: int, lost_tokens: int) -> RecoveredState:
    version = current_version(db)
    newest = versions(db, "version = ?", (version,))
    waiting = db.execute("SELECT * FROM groups WHERE state IN ('open', 'complete') ORDER BY ordinal").fetchall()
    pending = db.execute("SELECT version, mode FROM evaluations WHERE finished = 0 ORDER BY version, mode")
    return RecoveredState(
        version=version,
        model_path=newest[0].model_path if newest else None,
        next_ordinal=next_ordinal(db),
        groups=tuple(_recovered_group(db, row) for row in waiting),
        closed=tuple(_closed_groups(db)),
        pending_batches=tuple(batches(db, "state = 'formed'")),
        unclosed_batches=tuple(batches(db, "state = 'trained'")),
        pending_evaluations=tuple(EvaluationKey(*row) for row in pending),
        lost_trajectories=lost_trajectories,
        lost_tokens=lost_tokens,
    )


def _closed_groups(db: sqlite3.Connection) -> Iterator[ClosedGroup]:
    """Those that no group was opened in place of, oldest place first."""
    rows = db.execute(
        "SELECT id, reason, (SELECT count(*) FROM groups AS h WHERE h.ordinal = g.ordinal) - 1 FROM groups AS g "
        "WHERE state = 'closed' AND NOT EXISTS (SELECT 1 FROM groups AS h WHERE h.reissue_of = g.id) ORDER BY ordinal"
    )
    return (ClosedGroup(*row) for row in rows.fetchall())


def _recovered_group(db: sqlite3.Connection, row: sqlite3.Row) -> RecoveredGroup:
    finished = db.execute(
        "SELECT id, place, attempt, start_version, reward, tokens FROM trajectories "
        "WHERE group_id = ? AND state = 'finished' ORDER BY place",
        (row["id"],),
    )
    vacancies = db.execute(
        "SELECT place, attempt + 1, (SELECT count(*) FROM trajectories AS earlier WHERE earlier.group_id = t.group_id "
        "AND earlier.place = t.place AND earlier.failure_kind = ?) "
        "FROM trajectories AS t WHERE group_id = ? AND vacant = 1 ORDER BY place",
        (FailureKind.INFRASTRUCTURE, row["id"]),
    )
    return RecoveredGroup(
        id=row["id"],
        ordinal=row["ordinal"],
        task_id=row["task_id"],
        size=row["size"],
        state=GroupState(row["state"]),
        start_version=group_start(db, row["id"]),
        finished=tuple(FinishedTrajectory(*member) for member in finished),
        vacancies=tuple(Vacancy(*place) for place in vacancies),
        reissues=db.execute("SELECT count(*) - 1 FROM groups WHERE ordinal = ?", (row["ordinal"],)).fetchone()[0],
    )


def totals(db: sqlite3.Connection) -> RunTotals:
    trained = db.execute(
        "SELECT count(*), coalesce(sum(t.tokens), 0), avg(b.version - t.start_version), "
        "max(b.version - t.start_version) FROM trajectories AS t JOIN groups AS g ON g.id = t.group_id "
        "JOIN batches AS b ON b.id = g.batch_id WHERE t.state = 'finished' AND g.state = 'trained'"
    ).fetchone()
    return RunTotals(
        groups=_counts(db, "SELECT state, count(*) FROM groups GROUP BY state"),
        trajectories=_counts(db, "SELECT state, count(*) FROM trajectories GROUP BY state"),
        closed_groups=_counts(db, "SELECT reason, count(*) FROM groups WHERE state = 'closed' GROUP BY reason"),
        failures=_counts(
            db,
            "SELECT failure_kind || '/' || failure_reason, count(*) FROM trajectories "
            "WHERE failure_kind IS NOT NULL GROUP BY 1",
        ),
        trained_trajectories=trained[0],
        trained_tokens=trained[1],
        staleness_mean=trained[2] or 0.0,
        staleness_max=trained[3] or 0,
        discarded_tokens=discarded_tokens(db),
    )


def discarded_tokens(db: sqlite3.Connection) -> dict[str, int]:
    """Every sampled token that will not train, by reason: of failed trajectories, of closed groups, and others.

    Costs as much as there is to count (indexes lead to it), not as long as the run is: a live view may ask often.
    """
    return _counts(
        db,
        "SELECT reason, sum(tokens) FROM ("
        "  SELECT failure_reason AS reason, tokens FROM trajectories WHERE state = 'failed'"
        "  UNION ALL SELECT g.reason, t.tokens FROM groups AS g CROSS JOIN trajectories AS t ON t.group_id = g.id"
        "    WHERE t.state = 'finished' AND g.state = 'closed'"
        "  UNION ALL SELECT reason, tokens FROM discards"
        ") GROUP BY reason HAVING sum(tokens) > 0 ORDER BY reason",
    )


def _counts(db: sqlite3.Connection, query: str) -> dict[str, int]:
    return {row[0]: int(row[1]) for row in db.execute(query)}
