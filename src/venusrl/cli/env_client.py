"""How the command line speaks to an environment service as its administrator.

Owns: finding the service and its administrator's key, one request, its errors as words.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from venusrl.cli.output import CommandError

Caller = Callable[..., Awaitable[Any]]
_TIMEOUT_S = 600.0


@asynccontextmanager
async def caller_for(state: Path | None, url: str) -> AsyncIterator[Caller]:
    """``await call(method, path, body)``; raises CommandError."""
    import aiohttp

    where, key = _service(state, url)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=5.0)
    async with aiohttp.ClientSession(where, headers={"X-Admin-Token": key}, timeout=timeout) as session:

        async def call(method: str, path: str, body: Any = None, *, missing_ok: bool = False) -> Any:
            try:
                async with session.request(method, path, json=body) as response:
                    answer = await response.json() if "json" in response.content_type else None
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                raise CommandError(
                    f"no service answers at {where} ({error}): start one with venusrl env serve"
                ) from error
            if response.status >= 400 and not (missing_ok and response.status == 404):
                message = answer.get("message", "") if isinstance(answer, dict) else ""
                raise CommandError(
                    message or f"{where} answers {method} {path} with {response.status}: is it an environment service?"
                )
            return answer

        yield call


def _service(state: Path | None, url: str) -> tuple[str, str]:
    from venusrl.sandboxes.manager.state import ADMIN_KEY, URL, default_state, is_url

    where = state or default_state()
    key = os.environ.get("VENUSRL_ENV_ADMIN_KEY") or _read(where / ADMIN_KEY)
    address = url or _read(where / URL)
    if not address:
        raise CommandError(f"no service has been started with the state directory {where}: say --url or --state")
    if not is_url(address):
        raise CommandError(f"{address!r} is not the URL of a service, such as http://127.0.0.1:3000 (--url)")
    if not key:
        raise CommandError(f"no administrator's key in {where}: set VENUSRL_ENV_ADMIN_KEY, or say --state")
    return address, key


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
