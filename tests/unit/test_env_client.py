"""What the command line says of a service that is not there, or is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from venusrl.cli.env_client import caller_for
from venusrl.cli.output import CommandError


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENUSRL_ENV_ADMIN_KEY", "k")


async def ask(state: Path, url: str) -> None:
    async with caller_for(state, url) as call:
        await call("GET", "/admin/overview")


@pytest.mark.parametrize("url", ["127.0.0.1:3000", "ftp://a", "http://127.0.0.1:x", "http://"])
async def test_what_is_no_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(CommandError, match="--url"):
        await ask(tmp_path, url)


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no service answers at http://127.0.0.1:1 "):
        await ask(tmp_path, "http://127.0.0.1:1")


async def test_something_else_there(tmp_path: Path) -> None:
    async with TestServer(web.Application()) as other:
        with pytest.raises(CommandError, match=r"404: is it an environment service"):
            await ask(tmp_path, str(other.make_url("/")).rstrip("/"))


async def test_no_service_yet(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no service has been started"):
        await ask(tmp_path, "")
