"""A whole environment service over fake hosts and a virtual clock, for the manager's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from venusrl.sandboxes.manager import app, keys, routes_nodes
from venusrl.sandboxes.manager.asks import Settings
from venusrl.sandboxes.manager.records import Key
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.manager.routes_nodes import Connector
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.manager.store import Store
from venusrl.sandboxes.manager.tokens import Secret
from venusrl.sandboxes.templates.api import Image
from venusrl.testing.clock import VirtualClock
from venusrl.testing.env_host import FakeHost
from venusrl.testing.hosts import AdmitAll, FixedImages

ADMIN = "admin-secret"
JOIN = "join-secret"


class Environment:
    """The service, its fake hosts, and a client of the REST API."""

    def __init__(
        self, state: Path, hosts: list[FakeHost], clock: VirtualClock, settings: Settings, copies: bool
    ) -> None:
        self.state = state
        self.clock = clock
        self.hosts = hosts
        self.admission = AdmitAll()
        self.replicas = Replicas(state / "replicas") if copies else None
        if self.replicas is not None:
            self.replicas.open()
        self.store = Store(state / "manager.db")
        self.service = Service(
            self.store,
            Secret.load(state / "secret"),
            self.admission,
            FixedImages(Image("base-id", "base")),
            clock=clock,
            settings=settings,
            replicas=self.replicas,
        )
        for host in hosts:
            self.service.add_host(host, feeds=True)
        self.manager = self.service.manager
        self.book = self.manager.book
        self.client: TestClient[Any, Any]
        self.key: Key
        self.text = ""

    def new_key(self, name: str = "tests", **options: Any) -> tuple[Key, str]:
        return keys.create(self.store, self.clock, name, **options)

    async def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded body and headers of one request."""
        sent = {"X-API-Key": self.text if key is None else key, **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.client.request(method, path, json=body, headers=sent) as response:
            data = await response.read()
            parsed = await response.json() if data and "json" in response.content_type else data
            return response.status, parsed, dict(response.headers)

    async def create(self, **body: Any) -> str:
        status, answer, _ = await self.call("POST", "/v2/sandboxes", {"templateID": "base", **body})
        assert status == 201, answer
        return str(answer["sandboxID"])


def fake_hosts(clock: VirtualClock, count: int = 1, **options: Any) -> list[FakeHost]:
    return [
        FakeHost(f"host-{number}", clock=clock, templates=("base-id", "host"), **options)
        for number in range(1, count + 1)
    ]


@asynccontextmanager
async def environment(
    state: Path,
    *,
    hosts: list[FakeHost] | None = None,
    clock: VirtualClock | None = None,
    connect: Connector | None = None,
    copies: bool = False,
    **settings: Any,
) -> AsyncIterator[Environment]:
    """``copies``: of what is paused, in a directory below ``state``."""
    clock = clock or VirtualClock()
    made = Environment(state, fake_hosts(clock) if hosts is None else hosts, clock, Settings(**settings), copies)
    made.key, made.text = made.new_key()
    routes_nodes.add_known(made.service, connect)
    await made.service.start()
    server = app.build(made.service, admin_key=ADMIN, join_key=JOIN, connect=connect)
    async with TestClient(TestServer(server)) as client:
        made.client = client
        try:
            yield made
        finally:
            await made.service.close()
