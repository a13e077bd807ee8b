"""API keys and their quotas.

Owns: making, checking and revoking keys; how many sandboxes a key may run and how fast it may create them.

Must not know: HTTP, hosts.

Guarantees: a key is stored as its hash alone; a revoked key is refused at the next request, whichever process revoked
it; a quota counts what is being created too, so that a burst cannot pass it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from venusrl.clock import Clock
from venusrl.sandboxes.manager import tokens
from venusrl.sandboxes.manager.errors import TooMany, Unauthorized
from venusrl.sandboxes.manager.records import Key
from venusrl.sandboxes.manager.store import Store

_USED_EVERY_S = 60.0
_QUOTA_RETRY_S = 5.0


def create(
    store: Store, clock: Clock, name: str, *, tenant: str = "", max_sandboxes: int = 1000, creates_per_minute: int = 0
) -> tuple[Key, str]:
    """A new key, and its secret text, seen here for the only time. Without ``tenant`` it is one of its own."""
    text = tokens.new_key()
    number = tokens.new_id("key_")
    key = Key(
        id=number,
        name=name,
        tenant=tenant or number,
        mask=f"{text[:6]}...{text[-4:]}",
        created=clock.time(),
        max_sandboxes=max_sandboxes,
        creates_per_minute=creates_per_minute,
    )
    store.add_key(key, tokens.hashed(text))
    return key, text


class Keys:
    """Checks keys and holds them to their quotas."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._used: dict[str, float] = {}
        self._starting: dict[str, int] = {}

    def check(self, text: str) -> Key:
        """The key with this text. Raises Unauthorized."""
        if not text:
            raise Unauthorized("no API key: send one as X-API-Key (venusrl env key create makes one)")
        key = self._store.key(tokens.hashed(text)) if len(text) <= 256 else None
        if key is None:
            raise Unauthorized("this API key is not known here, or was revoked")
        now = self._clock.time()
        if now - self._used.get(key.id, 0.0) >= _USED_EVERY_S:
            self._used[key.id] = now
            self._store.used_key(key.id, now)
        return key

    def starting(self, key: Key, running: int, count: int = 1, *, new: bool = True) -> Starting:
        """Reserve room for ``count`` more sandboxes beside ``running``; released when the block ends.

        Raises TooMany. ``new`` False: a resume, which the rate of creation does not limit.
        """
        if running + self._starting.get(key.id, 0) + count > key.max_sandboxes:
            raise TooMany(
                f"the key {key.name!r} may run {key.max_sandboxes} sandboxes at once: end or pause some, or raise "
                "--max-sandboxes",
                error_code="concurrency_limit",
                retry_after_s=_QUOTA_RETRY_S,
            )
        if new and key.creates_per_minute:
            bucket = self._buckets.setdefault(key.id, Bucket(key.creates_per_minute, self._clock.monotonic()))
            bucket.rate_per_minute = key.creates_per_minute
            wait = bucket.take(count, self._clock.monotonic())
            if wait > 0:
                raise TooMany(
                    f"the key {key.name!r} may create {key.creates_per_minute} sandboxes a minute",
                    error_code="rate_limit",
                    retry_after_s=wait,
                )
        self._starting[key.id] = self._starting.get(key.id, 0) + count

        def release() -> None:
            left = self._starting[key.id] - count
            if left:
                self._starting[key.id] = left
            else:
                del self._starting[key.id]

        return Starting(release)


class Starting(AbstractContextManager[None]):
    """A reservation; leave the block when the sandbox counts as running, or never will."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._release()


class Bucket:
    """A token bucket: a minute's worth at once, then at the rate. Pure: time is an argument."""

    def __init__(self, rate_per_minute: int, now: float) -> None:
        self.rate_per_minute = rate_per_minute
        self._tokens = float(rate_per_minute)
        self._at = now

    def take(self, count: int, now: float) -> float:
        """0 when taken, else the seconds until it could be."""
        rate = self.rate_per_minute / 60.0
        self._tokens = min(float(self.rate_per_minute), self._tokens + (now - self._at) * rate)
        self._at = now
        if self._tokens >= count:
            self._tokens -= count
            return 0.0
        return (count - self._tokens) / rate
