"""How a sandbox's record changes, as pure functions.

Owns: time to live (what each call does to it), what a timeout does, who may wake a paused sandbox.

Must not know: hosts, the store, HTTP.

Guarantees: ``connected`` never brings the end nearer; a paused sandbox has no end; an ended one never lives again.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from venusrl.sandboxes.manager.records import PausedBy, Record

OnTimeout = Literal["kill", "pause"]
FOREVER = 4_102_444_800.0
"""The end of what has no end, as a date that every client can read (2100-01-01)."""
WAKE_MIN_S = 300.0
"""A sandbox woken by traffic lives at least this long: whoever talks to it asked for no time."""


def running(record: Record, now: float, timeout_s: float, host: str) -> Record:
    """Made, or resumed by a request."""
    return _up(record, host, ends=now + timeout_s, timeout_s=timeout_s)


def woken(record: Record, now: float, host: str) -> Record:
    """Resumed by traffic. After a pause for memory's sake its old end still holds."""
    if record.paused_by == "pressure":
        return _up(record, host, ends=record.ends, timeout_s=record.timeout_s)
    return _up(record, host, ends=now + max(record.timeout_s, WAKE_MIN_S), timeout_s=record.timeout_s)


def _up(record: Record, host: str, *, ends: float, timeout_s: float) -> Record:
    """Running: no copy of an earlier pause stands for it."""
    return replace(
        record,
        state="running",
        host=host,
        ends=ends,
        timeout_s=timeout_s,
        paused_by="",
        memory_kept=True,
        replica="",
    )


def connected(record: Record, now: float, timeout_s: float) -> Record:
    """A running sandbox that somebody connects to."""
    if now + timeout_s <= record.ends:
        return record
    return replace(record, ends=now + timeout_s, timeout_s=timeout_s)


def retimed(record: Record, now: float, timeout_s: float) -> Record:
    """``timeout``: from now on, shorter or longer. A paused one takes it up when it is resumed."""
    if record.state == "paused" and record.paused_by != "pressure":
        return replace(record, timeout_s=timeout_s)
    return replace(record, ends=now + timeout_s, timeout_s=timeout_s)


def paused(record: Record, by: PausedBy, memory: bool) -> Record:
    """Its processes kept (``memory``) or ended. Paused by the host for memory's sake, its time runs on: its user
    did not ask for the pause and does not see it."""
    ends = record.ends if by == "pressure" else FOREVER
    return replace(record, state="paused", paused_by=by, memory_kept=memory, ends=ends)


def ended(record: Record, now: float, cause: str) -> Record:
    if record.state == "ended":
        return record
    return replace(record, state="ended", ended=now, cause=cause)


def wakes_on_traffic(record: Record) -> bool:
    """Whether traffic may resume it. Without its memory only its user may: whatever answered is not running."""
    if record.state != "paused":
        return False
    return record.paused_by == "pressure" or (record.auto_resume and record.memory_kept)
