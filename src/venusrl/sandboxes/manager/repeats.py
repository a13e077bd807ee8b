"""Requests that may come twice and must count once.

Owns: E2B's Idempotency-Key: who is first, what the others are answered.

Must not know: what the request does.

Guarantees: of requests with the same tenant, key and body exactly one is carried out at a time, and once one
succeeded all get its answer, after a restart too; a failed one leaves nothing, so that trying again tries again; the
same key with another body is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable

from venusrl.clock import Clock
from venusrl.sandboxes.manager import tokens
from venusrl.sandboxes.manager.errors import Invalid, Unprocessable
from venusrl.sandboxes.manager.store import Store

_KEY = re.compile(r"[A-Za-z0-9_-]{1,255}")


class Repeats:
    """``rebuild`` gives the answer for a sandbox whose create an earlier process did not get to answer."""

    def __init__(self, store: Store, clock: Clock, rebuild: Callable[[str], bytes | None]) -> None:
        self._store = store
        self._clock = clock
        self._rebuild = rebuild
        self._running: dict[tuple[str, str], tuple[str, asyncio.Event]] = {}

    async def once(
        self, tenant: str, key: str, body: bytes, make: Callable[[str], Awaitable[bytes]]
    ) -> tuple[bytes, bool]:
        """``make`` (given the id of the sandbox to create) or an earlier answer; whether it was an earlier one."""
        if not _KEY.fullmatch(key):
            raise Invalid("Idempotency-Key must be 1 to 255 letters, digits, - or _")
        digest = hashlib.sha256(body).hexdigest()
        while (ahead := self._running.get((tenant, key))) is not None:
            self._check(ahead[0], digest)
            await ahead[1].wait()
        known = self._store.remembered(tenant, key)
        if known is not None:
            self._check(known.digest, digest)
            answer = known.answer or self._rebuild(known.sandbox)
            if answer is not None:
                return answer, True
            self._store.forget_request(tenant, key)
        return await self._first(tenant, key, digest, make), False

    async def _first(self, tenant: str, key: str, digest: str, make: Callable[[str], Awaitable[bytes]]) -> bytes:
        done = asyncio.Event()
        self._running[tenant, key] = (digest, done)
        sandbox = tokens.new_id("s")
        try:
            self._store.remember(tenant, key, digest, sandbox, self._clock.time())
            try:
                answer = await make(sandbox)
            except BaseException:  # whatever it was: it may be tried again
                self._store.forget_request(tenant, key)
                raise
            self._store.answered(tenant, key, answer)
            return answer
        finally:
            del self._running[tenant, key]
            done.set()

    @staticmethod
    def _check(known: str, digest: str) -> None:
        if known != digest:
            raise Unprocessable("this Idempotency-Key was used with another request: use a new one for each request")
