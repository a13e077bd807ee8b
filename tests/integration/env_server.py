"""The environment service on a free port, in a thread of its own, with the namespace runtime."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from venusrl.sandboxes.manager.serve import ServeConfig, Server
from venusrl.sandboxes.protocol import RuntimeUnavailable

DOMAIN = "sandboxes.test"


@contextmanager
def served(state: Path) -> Iterator[Server]:
    """Skips where this machine cannot isolate, saying what it lacks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="environment service")
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=240)

    server = Server(ServeConfig(state=state, listen="127.0.0.1:0", domain=DOMAIN))
    try:
        try:
            call(server.start())
        except RuntimeUnavailable as error:
            pytest.skip(f"no namespaces here: {error}")
        try:
            yield server
        finally:
            call(server.stop(kill=True))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def connection(server: Server) -> dict[str, Any]:
    """What E2B's SDK is given."""
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.sandbox_url, "domain": DOMAIN}
