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
async def started(url: str, key: str, state: Path, domain: str, images: tuple[str, ...] = ()) -> AsyncIterator[Service]:
    """``url`` "" = start one, with its state below ``state``; its sandboxes end with it. ``images``: names of images of
    a registry for which this machine's own packages stand."""
    if url:
        yield Service(url, key)
        return
    server = Server(ServeConfig(state=state, listen="127.0.0.1:0", domain=domain))
    await server.start()
    try:
        assert server.local.templates is not None
        for image in images:
            await server.local.templates.from_directory("", image, None)
        yield Service(server.url, server.api_key)
    finally:
        await server.stop(kill=True)
