"""The SQLite file of a run: schema, connection, transactions, errors.

Owns: ``store.sqlite`` (WAL), its schema and version. Must not know: what the rows mean to the run.

Guarantees: a transaction is whole or absent after a crash at any instant; every SQLite error leaves as a
``StoreError``; a file of another release is refused, never misread.

On durability. A commit in WAL mode is a write() into the log: it survives the death of any process, kill -9
included, with synchronous=NORMAL, and a power cut cannot damage the file, only lose the last commits. That is
enough for a trajectory (it would be sampled again). It is not for what others build upon: a batch that the
trainer has put into a checkpoint must not be forgotten, or its tasks would be trained twice. Those few commits
(``durable=True``, about two a step) run with synchronous=FULL, which syncs the log and all commits before.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from venusrl.coordinator.errors import StoreConflict, StoreCorrupt, StoreError, StoreFull, StoreVersionError

NAME = "store.sqlite"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x56524C31
_NO_ROOM = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
"""What SQLite calls a write that a quota or a file size limit cut short; it keeps SQLITE_FULL for ENOSPC."""
_BUSY_S = 5.0
"""Only a reader that checkpoints, or a backup, ever holds the file beside us."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE tasks (id TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;

CREATE TABLE batches (
    id TEXT PRIMARY KEY,
    version INTEGER NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('formed', 'trained', 'closed'))
) STRICT;

CREATE TABLE groups (
    id TEXT PRIMARY KEY,
    ordinal INTEGER NOT NULL,
    task_id TEXT NOT NULL REFERENCES tasks (id),
    size INTEGER NOT NULL CHECK (size > 0),
    state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'batched', 'trained', 'closed')),
    start_version INTEGER,
    reason TEXT,
    reissue_of TEXT REFERENCES groups (id),
    batch_id TEXT REFERENCES batches (id),
    batch_position INTEGER,
    CHECK ((state = 'closed') = (reason IS NOT NULL)),
    CHECK ((state IN ('batched', 'trained')) = (batch_id IS NOT NULL)),
    CHECK (state NOT IN ('complete', 'batched', 'trained') OR start_version IS NOT NULL)
) STRICT;
CREATE UNIQUE INDEX groups_live ON groups (ordinal) WHERE state != 'closed';
CREATE INDEX groups_ordinal ON groups (ordinal);
CREATE UNIQUE INDEX groups_batch ON groups (batch_id, batch_position) WHERE batch_id IS NOT NULL;
CREATE INDEX groups_state ON groups (state);

CREATE TABLE trajectories (
    id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups (id),
    place INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'failed')),
    start_version INTEGER,
    tokens INTEGER NOT NULL DEFAULT 0,
    reward REAL,
    end_reason TEXT,
    failure_kind TEXT,
    failure_reason TEXT,
    failure_message TEXT,
    vacant INTEGER NOT NULL DEFAULT 0,
    segment INTEGER, offset INTEGER, length INTEGER, checksum INTEGER,
    UNIQUE (group_id, place, attempt),
    CHECK (state != 'finished' OR (reward IS NOT NULL AND start_version IS NOT NULL AND segment IS NOT NULL)),
    CHECK (state != 'failed' OR failure_reason IS NOT NULL),
    CHECK (vacant = 0 OR state = 'failed')
) STRICT;
CREATE UNIQUE INDEX trajectories_place ON trajectories (group_id, place) WHERE state IN ('running', 'finished');
CREATE INDEX trajectories_failed ON trajectories (failure_reason, tokens) WHERE state = 'failed';
CREATE INDEX trajectories_running ON trajectories (id) WHERE state = 'running';

CREATE TABLE versions (
    version INTEGER PRIMARY KEY,
    model_path TEXT NOT NULL,
    checkpointed INTEGER NOT NULL,
    metrics TEXT NOT NULL
) STRICT;

CREATE TABLE evaluations (
    version INTEGER NOT NULL,
    mode TEXT NOT NULL,
    finished INTEGER NOT NULL,
    reward REAL,
    samples INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    wall_s REAL NOT NULL DEFAULT 0,
    segment INTEGER, offset INTEGER, length INTEGER, checksum INTEGER,
    PRIMARY KEY (version, mode)
) STRICT;

CREATE TABLE discards (reason TEXT PRIMARY KEY, tokens INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""


class Database:
    """One connection, usable from any thread, one transaction at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._full_sync = False
        with self._translated():
            uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
            self._connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_S
            )
        self._connection.row_factory = sqlite3.Row
        try:
            with self._translated():
                self._prepare(read_only)
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            self._connection.close()
            raise

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction: committed when the block ends, undone when it raises."""
        with self._lock, self._translated():
            if durable != self._full_sync:
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._full_sync = durable
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:  # SQLite undoes some failed transactions by itself
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """One consistent view for all the queries of the block."""
        with self._lock, self._translated():
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _prepare(self, read_only: bool) -> None:
        connection = self._connection
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        tables = int(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
        if tables and application != _APPLICATION_ID:
            raise StoreVersionError(f"{self._path} is not a VenusRL run store: choose another --run-dir")
        if version > SCHEMA_VERSION:
            raise StoreVersionError(
                f"{self._path} was written by a newer VenusRL (store version {version}, this one reads "
                f"{SCHEMA_VERSION}): update VenusRL to go on with this run"
            )
        connection.execute("PRAGMA foreign_keys = ON")
        if read_only:
            return
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            self._create()

    def _create(self) -> None:
        with self.write(durable=True) as connection:
            for statement in _SCHEMA.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _typed(error, self._path) from error


def _typed(error: sqlite3.Error, path: Path) -> StoreError:
    extended = getattr(error, "sqlite_errorcode", None) or 0
    code = extended & 0xFF
    if code == sqlite3.SQLITE_FULL or extended in _NO_ROOM:
        return StoreFull(f"no room to write {path}: free some space, then resume; nothing finished is lost")
    if code == sqlite3.SQLITE_NOTADB:
        return StoreVersionError(f"{path} is not a VenusRL run store: choose another --run-dir")
    if code == sqlite3.SQLITE_CORRUPT:
        return StoreCorrupt(f"{path} is damaged ({error}): restore it from a copy, or start a new run")
    if code == sqlite3.SQLITE_CONSTRAINT:
        return StoreConflict(f"{path} refuses what contradicts it: {error}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"{path} is held by another program for more than {_BUSY_S:.0f} s: {error}")
    return StoreError(f"{path}: {error}")
