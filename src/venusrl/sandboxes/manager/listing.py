"""Lists of sandboxes: filters, order, pages.

Owns: the meaning of E2B's list parameters. Pure.

Must not know: HTTP, the store.

Guarantees: pages of one list neither repeat nor lose a sandbox that existed throughout, whatever is created or ended
meanwhile: a page starts after a position in time, not at a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal
from urllib.parse import unquote, unquote_plus

import msgspec

from venusrl.sandboxes.manager.errors import Invalid
from venusrl.sandboxes.manager.records import Record, SnapshotRecord
from venusrl.sandboxes.manager.tokens import Secret

MAX_PAGE = 100
Shown = Literal["running", "paused"]


class Query(msgspec.Struct, frozen=True):
    """What to list."""

    metadata: dict[str, str] = {}
    states: tuple[Shown, ...] = ("running", "paused")
    newest_first: bool = True
    started_after: float | None = None
    template: str = ""

    def matches(self, record: Record) -> bool:
        if not record.alive or record.state == "creating" or record.shown not in self.states:
            return False
        if self.started_after is not None and micros(record.created) < micros(self.started_after):
            return False
        if self.template and self.template not in (record.template, record.alias):
            return False
        return all(record.metadata.get(name) == value for name, value in self.metadata.items())


class Page(msgspec.Struct, frozen=True):
    """One page; ``next_token`` "" = the last one."""

    records: tuple[Record, ...]
    next_token: str
    total_running: int


def micros(seconds: float) -> int:
    """Times go over the wire in microseconds: compared as they were shown."""
    return round(seconds * 1e6)


def metadata_filter(text: str) -> dict[str, str]:
    """``k=v&k=v`` as a form, of keys and values that were quoted before (so E2B's clients do). Raises Invalid."""
    found = {}
    for pair in filter(None, text.split("&")):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise Invalid(f"metadata filter {pair!r} is not of the form key=value")
        found[unquote(unquote_plus(name))] = unquote(unquote_plus(value))
    return found


def page(records: Iterable[Record], query: Query, limit: int, token: str, secret: Secret, scope: str) -> Page:
    """The page after ``token``. ``scope`` (the tenant) is bound into tokens too. Raises Invalid."""
    filters = f"{scope}\n" + msgspec.json.encode(query).decode()
    found = sorted((one for one in records if query.matches(one)), key=_position, reverse=query.newest_first)
    running = sum(one.shown == "running" for one in found)
    rest = found
    if token:
        start = _parsed(secret.page_position(token, filters))
        rest = [one for one in found if (_position(one) < start if query.newest_first else _position(one) > start)]
    shown = rest[:limit]
    more = secret.page_token(_written(shown[-1]), filters) if len(rest) > len(shown) and shown else ""
    return Page(tuple(shown), more, running)


def snapshot_page(
    snapshots: Iterable[SnapshotRecord], limit: int, token: str, secret: Secret, scope: str
) -> tuple[list[SnapshotRecord], str]:
    """Snapshots, newest first; as ``page``."""
    filters = f"snapshots\n{scope}"
    found = sorted(snapshots, key=_position, reverse=True)
    if token:
        start = _parsed(secret.page_position(token, filters))
        found = [one for one in found if _position(one) < start]
    shown = found[:limit]
    return shown, secret.page_token(_written(shown[-1]), filters) if len(found) > len(shown) and shown else ""


def _position(one: Record | SnapshotRecord) -> tuple[int, str]:
    return micros(one.created), one.id


def _written(one: Record | SnapshotRecord) -> str:
    created, name = _position(one)
    return f"{created} {name}"


def _parsed(position: str) -> tuple[int, str]:
    created, _, name = position.partition(" ")
    return int(created), name
