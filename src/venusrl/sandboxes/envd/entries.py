"""Files as E2B shows them.

Owns: the conversion of an agent's ``Entry``: names, modes as text, times, where a symbolic link leads.

Must not know: HTTP, requests.

Guarantees: a link is followed at most ``MAX_HOPS`` times, inside the sandbox and as the asking user.
"""

from __future__ import annotations

import posixpath
from datetime import UTC, datetime
from typing import Any

from venusrl.sandboxes.agent.api import Agent, AgentError, Entry

MAX_HOPS = 40
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_UNKNOWN = "FILE_TYPE_UNSPECIFIED"
_FIRST = {"file": "-", "directory": "d", "symlink": "L", "other": "?"}
_YEAR_10000_NS = 253_402_300_800 * 10**9


def home_relative(path: str) -> str:
    """What the agent is asked for: "~" and "" are the home directory, where relative paths start."""
    if path in ("", "~"):
        return "."
    return (path[2:] or ".") if path.startswith("~/") else path


def printable(text: str) -> str:
    """A file's name may be any bytes; a protobuf string may not."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def permissions(entry: Entry) -> str:
    """As ``ls`` writes them, with E2B's letters for the type."""
    bits = "".join(
        letter if entry.mode >> shift & 1 else "-" for shift, letter in zip(range(8, -1, -1), "rwx" * 3, strict=True)
    )
    return _FIRST[entry.kind] + bits


def timestamp(ns: int) -> str:
    """RFC 3339, whatever a sandbox says its files' times are."""
    ns = min(max(ns, 0), _YEAR_10000_NS - 1)
    seconds, rest = divmod(ns, 10**9)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest:09d}Z"


async def follow(agent: Agent, entry: Entry, user: str) -> Entry | None:
    """What a symbolic link leads to in the end; None when it leads nowhere."""
    for _ in range(MAX_HOPS):
        if entry.kind != "symlink" or entry.target is None:
            return entry
        path = posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), entry.target))
        try:
            entry = await agent.stat(path, user)
        except AgentError:
            return None
    return None


async def shown(agent: Agent, entry: Entry, user: str) -> dict[str, Any]:
    """An ``EntryInfo``: of a link its own size and owner, but type and mode of what it leads to."""
    info: dict[str, Any] = {
        "name": printable(posixpath.basename(entry.path)) or "/",
        "type": _TYPES.get(entry.kind, _UNKNOWN),
        "path": printable(entry.path),
        "size": str(entry.size),
        "mode": entry.mode & 0o777,
        "permissions": permissions(entry),
        "owner": printable(entry.owner),
        "group": printable(entry.group),
        "modifiedTime": timestamp(entry.modified_ns),
    }
    if entry.kind == "symlink":
        end = await follow(agent, entry, user)
        info["symlinkTarget"] = printable(entry.path if end is None else end.path)
        info["type"] = _UNKNOWN if end is None else _TYPES.get(end.kind, _UNKNOWN)
        info["mode"] = 0 if end is None else end.mode & 0o777
    if entry.attributes:
        info["metadata"] = _metadata(entry)
    return info


def uploaded(entry: Entry) -> dict[str, Any]:
    """What the answer to an upload says of a file."""
    info: dict[str, Any] = {
        "path": printable(entry.path),
        "name": printable(posixpath.basename(entry.path)),
        "type": "file",
    }
    if entry.attributes:
        info["metadata"] = _metadata(entry)
    return info


def _metadata(entry: Entry) -> dict[str, str]:
    return {printable(name): printable(value) for name, value in entry.attributes.items()}


def in_order(entries: list[Entry]) -> list[Entry]:
    """Depth first, names in byte order: a directory stands before what is in it."""
    return sorted(
        entries, key=lambda entry: [part.encode("utf-8", "surrogateescape") for part in entry.path.split("/")]
    )
