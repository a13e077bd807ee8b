"""Evaluations as rows and blobs.

Owns: the ``evaluations`` table and the blob of its samples. Must not know: who evaluates, or when.

Guarantees: an evaluation that was asked for stays pending until its results are on disk; every sample carries
the version that triggered it, and one of another version is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from venusrl.coordinator.errors import StoreConflict
from venusrl.coordinator.store.blobs import BlobRef, pack
from venusrl.coordinator.store.records import EvaluationKey, EvaluationRecord, EvaluationSample


def ask(db: sqlite3.Connection, key: EvaluationKey) -> None:
    db.execute("INSERT OR IGNORE INTO evaluations (version, mode, finished) VALUES (?, ?, 0)", (key.version, key.mode))


def packed(version: int, samples: Sequence[EvaluationSample]) -> bytes:
    if strays := {sample.version for sample in samples if sample.version != version}:
        raise StoreConflict(f"an evaluation of version {version} holds samples of {sorted(strays)}")
    return pack(msgspec.msgpack.encode(samples))


def unpacked(raw: bytes) -> list[EvaluationSample]:
    return msgspec.msgpack.decode(raw, type=list[EvaluationSample])


def finish(
    db: sqlite3.Connection, key: EvaluationKey, samples: Sequence[EvaluationSample], ref: BlobRef, wall_s: float
) -> EvaluationRecord:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    record = EvaluationRecord(
        version=key.version,
        mode=key.mode,
        finished=True,
        reward=sum(rewards) / len(rewards) if rewards else None,
        samples=len(samples),
        failed=len(samples) - len(rewards),
        wall_s=wall_s,
    )
    changed = db.execute(
        "UPDATE evaluations SET finished = 1, reward = ?, samples = ?, failed = ?, wall_s = ?, "
        "segment = ?, offset = ?, length = ?, checksum = ? WHERE version = ? AND mode = ? AND finished = 0",
        (
            record.reward,
            record.samples,
            record.failed,
            wall_s,
            *msgspec.structs.astuple(ref),
            key.version,
            key.mode,
        ),
    )
    if changed.rowcount != 1:
        raise StoreConflict(f"no {key.mode} evaluation of version {key.version} is pending")
    return record


def records(db: sqlite3.Connection) -> list[EvaluationRecord]:
    rows = db.execute(
        "SELECT version, mode, finished, reward, samples, failed, wall_s FROM evaluations ORDER BY version, mode"
    )
    return [EvaluationRecord(row[0], row[1], bool(row[2]), *row[3:]) for row in rows]
