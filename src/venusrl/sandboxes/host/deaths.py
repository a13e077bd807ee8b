"""Deaths, told to whoever listens.

Owns: the listeners of one host. Must not know: how a sandbox died.

Guarantees: each listener gets every death from when it began to listen, in order; one that does not read is let go,
with an error, before it costs memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from venusrl.sandboxes.host.api import Died
from venusrl.sandboxes.protocol import SandboxError

_UNREAD = 10_000


class Deaths:
    """``tell`` and ``listen``."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[Died]] = set()
        self._slow: set[asyncio.Queue[Died]] = set()

    def tell(self, death: Died) -> None:
        for queue in list(self._listeners):
            if queue.full():
                self._listeners.discard(queue)
                self._slow.add(queue)
            else:
                queue.put_nowait(death)

    def listen(self) -> AsyncIterator[Died]:
        """Listening begins with this call, not with the first step of the iterator."""
        queue: asyncio.Queue[Died] = asyncio.Queue(_UNREAD)
        self._listeners.add(queue)
        return self._follow(queue)

    async def _follow(self, queue: asyncio.Queue[Died]) -> AsyncIterator[Died]:
        try:
            while queue not in self._slow or not queue.empty():
                yield await queue.get()
            raise SandboxError(f"a listener left {_UNREAD} deaths unread: ask the host for its status and listen anew")
        finally:
            self._listeners.discard(queue)
            self._slow.discard(queue)
