"""What the manager keeps on disk.

Owns: one SQLite database (write-ahead log) below the state directory, and the lock that gives it one service at a time.

Must not know: hosts, HTTP, what a record means.

Guarantees: what a method wrote is there after the process is killed at any instant; other processes (``venusrl env
key``) may read and write keys meanwhile; every failure is a ``ManagerError`` that names the mend.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.records import Key, LogLine, NodeRecord, Record, SnapshotRecord

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x56454E56
_BUSY_S = 10.0
LOG_LINES = 1000
"""Kept a sandbox."""
_SCHEMA = """
CREATE TABLE sandboxes (id TEXT PRIMARY KEY, alive INTEGER NOT NULL, ended REAL NOT NULL, body BLOB NOT NULL) STRICT;
CREATE INDEX sandboxes_ended ON sandboxes (ended) WHERE alive = 0;
CREATE TABLE keys (id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, last_used REAL NOT NULL, body BLOB NOT NULL) STRICT;
CREATE TABLE snapshots (id TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE nodes (name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE requests (
    tenant TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, sandbox TEXT NOT NULL, created REAL NOT NULL,
    answer BLOB, PRIMARY KEY (tenant, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE logs (
    sandbox TEXT NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (sandbox, number)
) STRICT, WITHOUT ROWID;
"""


class Remembered(msgspec.Struct, frozen=True):
    """A request with an Idempotency-Key. ``answer`` None = it is not known how it went."""

    digest: str
    sandbox: str
    answer: bytes | None


class StateLock:
    """One service a state directory. The kernel holds it: it ends with its process however that dies."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, state: Path) -> StateLock:
        path = state / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ManagerError(
                f"the state directory {state} is in use by another service (process {holder}): stop that one, or "
                "choose another --state"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ManagerError(
                f"{path} cannot be locked ({error.strerror}): choose a --state on a local disk"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Store:
    """One connection, used from one thread. Every write is one transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._translated():
            self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)
        try:
            with self._translated():
                self._prepare()
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            self._db.close()
            raise

    # Sandboxes

    def put(self, record: Record) -> None:
        with self._translated():
            self._db.execute(
                "INSERT INTO sandboxes VALUES (?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET alive = excluded.alive, ended = excluded.ended, body = excluded.body",
                (record.id, record.alive, record.ended, msgspec.json.encode(record)),
            )

    def living(self) -> list[Record]:
        with self._translated():
            rows = self._db.execute("SELECT body FROM sandboxes WHERE alive = 1").fetchall()
        return [msgspec.json.decode(body, type=Record) for (body,) in rows]

    def sandbox(self, name: str) -> Record | None:
        """Living or ended."""
        with self._translated():
            row = self._db.execute("SELECT body FROM sandboxes WHERE id = ?", (name,)).fetchone()
        return msgspec.json.decode(row[0], type=Record) if row else None

    def forget(self, name: str) -> None:
        """A sandbox that never was (its create failed)."""
        with self._translated():
            self._db.execute("DELETE FROM sandboxes WHERE id = ?", (name,))

    def prune(self, before: float) -> None:
        """Drop what ended before then, with its log, and requests of that age."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM logs WHERE sandbox IN (SELECT id FROM sandboxes WHERE alive = 0 AND ended < ?)", (before,)
            )
            self._db.execute("DELETE FROM sandboxes WHERE alive = 0 AND ended < ?", (before,))
            self._db.execute("DELETE FROM requests WHERE created < ?", (before,))

    # Keys

    def add_key(self, key: Key, digest: str) -> None:
        with self._translated():
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", (key.id, digest, 0.0, msgspec.json.encode(key)))

    def key(self, digest: str) -> Key | None:
        with self._translated():
            row = self._db.execute("SELECT body, last_used FROM keys WHERE hash = ?", (digest,)).fetchone()
        return _key(*row) if row else None

    def all_keys(self) -> list[Key]:
        with self._translated():
            rows = self._db.execute("SELECT body, last_used FROM keys").fetchall()
        return sorted((_key(*row) for row in rows), key=lambda key: key.created)

    def used_key(self, name: str, now: float) -> None:
        with self._translated():
            self._db.execute("UPDATE keys SET last_used = ? WHERE id = ?", (now, name))

    def remove_key(self, name: str) -> bool:
        with self._translated():
            return self._db.execute("DELETE FROM keys WHERE id = ?", (name,)).rowcount > 0

    # Snapshots

    def put_snapshot(self, snapshot: SnapshotRecord) -> None:
        self._put_all([snapshot])

    def put_snapshots(self, snapshots: Iterable[SnapshotRecord]) -> None:
        """All of them or none."""
        self._put_all(snapshots)

    def snapshots(self) -> list[SnapshotRecord]:
        with self._translated():
            rows = self._db.execute("SELECT body FROM snapshots").fetchall()
        return [msgspec.json.decode(body, type=SnapshotRecord) for (body,) in rows]

    def remove_snapshot(self, name: str) -> None:
        with self._translated():
            self._db.execute("DELETE FROM snapshots WHERE id = ?", (name,))

    # Nodes

    def put_node(self, node: NodeRecord) -> None:
        with self._translated():
            self._db.execute(
                "INSERT INTO nodes VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
                (node.name, msgspec.json.encode(node)),
            )

    def nodes(self) -> list[NodeRecord]:
        with self._translated():
            rows = self._db.execute("SELECT body FROM nodes ORDER BY name").fetchall()
        return [msgspec.json.decode(body, type=NodeRecord) for (body,) in rows]

    def remove_node(self, name: str) -> None:
        with self._translated():
            self._db.execute("DELETE FROM nodes WHERE name = ?", (name,))

    # Requests that may be repeated

    def remember(self, tenant: str, key: str, digest: str, sandbox: str, now: float) -> None:
        with self._translated():
            self._db.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, NULL)", (tenant, key, digest, sandbox, now))

    def answered(self, tenant: str, key: str, answer: bytes) -> None:
        with self._translated():
            self._db.execute("UPDATE requests SET answer = ? WHERE tenant = ? AND key = ?", (answer, tenant, key))

    def remembered(self, tenant: str, key: str) -> Remembered | None:
        with self._translated():
            row = self._db.execute(
                "SELECT digest, sandbox, answer FROM requests WHERE tenant = ? AND key = ?", (tenant, key)
            ).fetchone()
        return Remembered(*row) if row else None

    def unanswered(self) -> list[tuple[str, str, str]]:
        """Tenant, key and sandbox of requests of an earlier process that are not known to have been answered."""
        with self._translated():
            return self._db.execute("SELECT tenant, key, sandbox FROM requests WHERE answer IS NULL").fetchall()

    def forget_request(self, tenant: str, key: str) -> None:
        with self._translated():
            self._db.execute("DELETE FROM requests WHERE tenant = ? AND key = ?", (tenant, key))

    # Logs

    def log(self, sandbox: str, line: LogLine) -> None:
        with self._transaction():
            row = self._db.execute("SELECT max(number) FROM logs WHERE sandbox = ?", (sandbox,)).fetchone()
            number = (row[0] or 0) + 1
            self._db.execute("INSERT INTO logs VALUES (?, ?, ?)", (sandbox, number, msgspec.json.encode(line)))
            self._db.execute("DELETE FROM logs WHERE sandbox = ? AND number <= ?", (sandbox, number - LOG_LINES))

    def logs(self, sandbox: str) -> list[LogLine]:
        """Oldest first."""
        with self._translated():
            rows = self._db.execute("SELECT body FROM logs WHERE sandbox = ? ORDER BY number", (sandbox,)).fetchall()
        return [msgspec.json.decode(body, type=LogLine) for (body,) in rows]

    def close(self) -> None:
        self._db.close()

    # Inside

    def _put_all(self, snapshots: Iterable[SnapshotRecord]) -> None:
        with self._transaction():
            for snapshot in snapshots:
                self._db.execute(
                    "INSERT INTO snapshots VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                    (snapshot.id, msgspec.json.encode(snapshot)),
                )

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if tables and application != _APPLICATION_ID:
            raise ManagerError(f"{self._path} is not an environment manager's database: choose another --state")
        if version > SCHEMA_VERSION:
            raise ManagerError(f"{self._path} was written by a newer VenusRL: update this one")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            self._create()
        os.chmod(self._path, 0o600)

    def _create(self) -> None:
        with self._transaction():
            if self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                return  # another process was quicker
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _typed(error, self._path) from error
        except msgspec.MsgspecError as error:
            raise ManagerError(f"{self._path} is damaged ({error}): restore it, or choose another --state") from error


def _key(body: bytes, last_used: float) -> Key:
    return msgspec.structs.replace(msgspec.json.decode(body, type=Key), last_used=last_used)


def _typed(error: sqlite3.Error, path: Path) -> ManagerError:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return ManagerError(f"no room to write {path}: free some space; what was answered is kept")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return ManagerError(f"{path} is damaged ({error}): restore it from a copy, or choose another --state")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ManagerError(f"{path} cannot be opened to write ({error}): choose another --state")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ManagerError(f"{path} is held by another program for more than {_BUSY_S:.0f} s")
    return ManagerError(f"{path}: {error}")
