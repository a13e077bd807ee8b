"""A service to measure against: one of our own on a free port of loopback, or one that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from venusrl.sandboxes.manager.serve import ServeConfig, Server


@dataclass(frozen=True)
class Service:
    """Where it answers, and a key for it."""

    url: str
    key: str


@contextlib.asynccontextmanager
async def started(url: str, key: str, state: Path, domain: str) -> AsyncIterator[Service]:
    """``url`` "" = start one, with its state below ``state``; its sandboxes end with it."""
    if url:
        yield Service(url, key)
        return
    server = Server(ServeConfig(state=state, listen="127.0.0.1:0", domain=domain))
    await server.start()
    try:
        yield Service(server.url, server.api_key)
    finally:
        await server.stop(kill=True)
