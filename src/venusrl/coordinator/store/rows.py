"""How the store's rows are written and checked, one statement or two at a time.

Owns: the small writes that several methods of the store share. Must not know: files, locks, transactions: the
caller has one open.

Guarantees: a state that does not allow the change is a ``StoreConflict`` before anything is written.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from venusrl.coordinator.errors import StoreConflict
from venusrl.coordinator.store.records import OpenedTrajectory


def expect(db: sqlite3.Connection, table: str, key: str, states: set[str]) -> dict[str, Any]:
    row = db.execute(f"SELECT * FROM {table} WHERE id = ?", (key,)).fetchone()
    if row is None:
        raise StoreConflict(f"there is no {key} among the {table}")
    if row["state"] not in states:
        raise StoreConflict(f"{key} is {row['state']}, not {' or '.join(sorted(states))}")
    return dict(row)


def open_trajectory(db: sqlite3.Connection, group: str, index: int, attempt: int) -> OpenedTrajectory:
    opened = OpenedTrajectory(id=f"{group}.{index}.{attempt}", group_id=group, index=index, attempt=attempt)
    db.execute(
        "INSERT INTO trajectories (id, group_id, place, attempt, state) VALUES (?, ?, ?, ?, 'running')",
        (opened.id, group, index, attempt),
    )
    return opened


def reissued(db: sqlite3.Connection, group_id: str) -> tuple[int, str, str]:
    closed = expect(db, "groups", group_id, {"closed"})
    times = db.execute("SELECT count(*) FROM groups WHERE ordinal = ?", (closed["ordinal"],)).fetchone()[0]
    return closed["ordinal"], closed["task_id"], f"g{closed['ordinal']:06d}r{times}"


def put_version(
    db: sqlite3.Connection, version: int, model_path: str, checkpointed: bool, metrics: dict[str, float]
) -> None:
    db.execute(
        "INSERT INTO versions (version, model_path, checkpointed, metrics) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (version) DO UPDATE SET model_path = excluded.model_path, "
        "metrics = iif(excluded.metrics = '{}', metrics, excluded.metrics), "
        "checkpointed = max(checkpointed, excluded.checkpointed)",
        (version, model_path, checkpointed, json.dumps(metrics)),
    )


def set_meta(db: sqlite3.Connection, values: dict[str, str]) -> None:
    db.executemany(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        values.items(),
    )


def task_difference(recorded: list[str], given: list[str]) -> str:
    missing, added = sorted(set(recorded) - set(given)), sorted(set(given) - set(recorded))
    what = "; ".join(
        f"{word} {len(ids)} ({', '.join(ids[:3])}{'...' if len(ids) > 3 else ''})"
        for word, ids in (("missing", missing), ("new", added))
        if ids
    )
    return f"a run goes on with the tasks it was started with: {what or 'their order was seeded otherwise'}"
