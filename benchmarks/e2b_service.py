"""A service to measure against: `venusrl env serve` on a free port of loopback, or one that runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Service:
    """Where it answers, and a key for it."""

    url: str
    key: str


@contextlib.asynccontextmanager
async def started(url: str, key: str, state: Path, domain: str) -> AsyncIterator[Service]:
    if not url or not key:
        raise SystemExit(f"give --api-url and --key ({state}, {domain})")
    yield Service(url, key)
