"""Where a service keeps its state, and what the files there are called.

Owns: the place of the state directory, the names in it, how its database is opened.

Must not know: HTTP, hosts. Imports nothing heavy: the command line uses it for keys.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.store import Store

DEFAULT_KEY, ADMIN_KEY, JOIN_KEY, SECRET, DATABASE, URL = (
    "api-key",
    "admin-key",
    "join-key",
    "secret",
    "manager.db",
    "url",
)


def default_state() -> Path:
    """``VENUSRL_ENV_STATE``, else below the user's state directory."""
    given = os.environ.get("VENUSRL_ENV_STATE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "venusrl" / "env"


def state_directory(state: Path) -> Path:
    """A directory to keep state in, made if need be. Raises ManagerError."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ManagerError(f"{state} cannot be made ({error.strerror}): choose another --state") from error
    if not os.access(state, os.W_OK | os.X_OK):
        raise ManagerError(f"{state} cannot be written to (as user {os.geteuid()}): choose another --state")
    return state


def open_state(state: Path) -> Store:
    """The database of a state directory, made if need be. Raises ManagerError."""
    return Store(state_directory(state) / DATABASE)


def is_url(text: str) -> bool:
    """Whether a service could be at ``text``: http(s)://HOST:PORT."""
    with contextlib.suppress(ValueError):
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    return False
