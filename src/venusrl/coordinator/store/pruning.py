"""Which trajectories a long run may forget, so that its disk does not fill.

Owns: the mark below which trajectories are gone, and the removal of segments that hold nothing else. Must not know:
who asks, how long somebody wants to keep them.

Guarantees: the mark is in the database before a byte is deleted, and only rises, so that a kill in between leaves
files that the next call removes, never a row that promises what is gone. It passes no batch that a checkpoint does
not contain yet. Rows stay: rewards, tokens, failures and staleness can be summed for ever.
"""

from __future__ import annotations

import sqlite3

from venusrl.coordinator.errors import StorePruned
from venusrl.coordinator.store import queries, rows
from venusrl.coordinator.store.blobs import BlobFiles

_MARK = "trajectories_kept_from"

_GONE = (
    "coalesce((SELECT version FROM batches WHERE id = g.batch_id), "
    "CASE WHEN g.state = 'closed' THEN coalesce(t.start_version, 0) END) < ?"
)
"""Of a trajectory ``t`` in a group ``g``: trained on, or started and given up with its group, below the mark."""


def kept_from(db: sqlite3.Connection) -> int:
    """The first version whose batch still has its trajectories."""
    return int(queries.meta(db).get(_MARK, "0"))


def raise_mark(db: sqlite3.Connection, steps: int) -> int:
    """Give up all but the newest ``steps`` trained batches; returns the mark."""
    unclosed = db.execute("SELECT min(version) FROM batches WHERE state != 'closed'").fetchone()[0]
    newest = queries.current_version(db)
    mark = max(kept_from(db), min(newest - steps, newest if unclosed is None else unclosed))
    rows.set_meta(db, {_MARK: str(mark)})
    return mark


def is_gone(db: sqlite3.Connection, trajectory_id: str) -> bool:
    query = f"SELECT 1 FROM trajectories AS t JOIN groups AS g ON g.id = t.group_id WHERE t.id = ? AND {_GONE}"
    return db.execute(query, (trajectory_id, kept_from(db))).fetchone() is not None


def check_kept(db: sqlite3.Connection, version: int) -> None:
    """Raises StorePruned when the batch that trained ``version`` has its trajectories no more."""
    if version < kept_from(db):
        raise StorePruned(
            f"the trajectories of the batch of version {version} are gone: run.keep_trajectories_of_steps kept "
            f"those from version {kept_from(db)} on"
        )


def remove_segments(db: sqlite3.Connection, blobs: BlobFiles, *others: BlobFiles) -> int:
    """Delete the segments that nothing kept refers to and none of the writers is at; returns how many."""
    mark = kept_from(db)
    removed = 0
    for segment in set(blobs.left_segments()).intersection(*(other.left_segments() for other in others)):
        # The newest rows first: a segment in use is recognised at once.
        held = db.execute(
            "SELECT 1 FROM trajectories AS t JOIN groups AS g ON g.id = t.group_id "
            f"WHERE t.segment = ? AND ({_GONE}) IS NOT TRUE ORDER BY t.rowid DESC LIMIT 1",
            (segment, mark),
        ).fetchone()
        held = held or db.execute("SELECT 1 FROM evaluations WHERE segment = ?", (segment,)).fetchone()
        if held is None:
            blobs.remove(segment)
            removed += 1
    return removed
