"""Secrets of the service: tokens derived from one key on disk, and ids nobody can guess.

Owns: ``Secret`` (its file, what is derived from it) and the making of ids and keys.

Must not know: records, HTTP.

Guarantees: a sandbox's tokens are the same after a restart without being stored; comparisons take the same time
whatever is wrong; a page token cannot be made up, nor used with other filters than its own.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from venusrl.sandboxes.manager.errors import Invalid, ManagerError

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_MAC_BYTES = 16
KEY_PREFIX = "e2b_"


def new_id(prefix: str, length: int = 20) -> str:
    """Lower-case letters and digits: fit for a host name, a file name and a URL."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length - len(prefix)))


def new_key() -> str:
    """An API key as E2B's clients check it: ``e2b_`` and hexadecimal digits."""
    return KEY_PREFIX + secrets.token_hex(20)


def hashed(key: str) -> str:
    """How a key is stored. Keys have 160 random bits: one round of SHA-256 is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


def secret_file(path: Path, make: str) -> str:
    """The secret in ``path``, or ``make``, put there for nobody else to read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        text = path.read_text().strip()
        if not text:
            raise ManagerError(f"{path} is empty: remove it to have a new one made") from None
        return text
    with os.fdopen(descriptor, "w") as file:
        file.write(make + "\n")
        file.flush()
        os.fsync(file.fileno())
    return make


class Secret:
    """Derives tokens."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ManagerError("the service's secret is too short: remove its file to have a new one made")
        self._key = key

    @classmethod
    def load(cls, path: Path) -> Secret:
        return cls(bytes.fromhex(secret_file(path, secrets.token_hex(32))))

    def envd_token(self, sandbox: str) -> str:
        """For a sandbox's own services."""
        return self._mac(f"envd:{sandbox}").hex()

    def traffic_token(self, sandbox: str) -> str:
        """For the ports of a sandbox without public traffic."""
        return self._mac(f"traffic:{sandbox}").hex()

    def upload_token(self, what: str) -> str:
        """For an upload link."""
        return self._mac(f"upload:{what}").hex()

    def page_token(self, position: str, filters: str) -> str:
        """An opaque cursor, good for these filters only."""
        mac = self._mac(f"page:{filters}\n{position}")[:_MAC_BYTES]
        return base64.urlsafe_b64encode(mac + position.encode()).decode().rstrip("=")

    def page_position(self, token: str, filters: str) -> str:
        """What ``page_token`` was given. Raises Invalid."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            position = raw[_MAC_BYTES:].decode()
        except (ValueError, UnicodeDecodeError):
            raise Invalid("nextToken is not one of ours") from None
        if not hmac.compare_digest(raw[:_MAC_BYTES], self._mac(f"page:{filters}\n{position}")[:_MAC_BYTES]):
            raise Invalid("nextToken is not one of ours, or belongs to a list with other filters")
        return position

    def _mac(self, text: str) -> bytes:
        return hmac.digest(self._key, text.encode(), "sha256")


def same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
