"""Options of ``venusrl env serve`` that make no sense: each is refused before anything starts, naming the option."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from venusrl.sandboxes.manager import node, serve
from venusrl.sandboxes.manager.asks import Settings
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.local import assemble
from venusrl.sandboxes.manager.node import Node, NodeConfig
from venusrl.sandboxes.manager.serve import ServeConfig, Server

MIB = 1 << 20


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """HOST:PORT that somebody listens on; whoever starts a runtime nevertheless fails the test."""

    async def too_early(*_: object, **__: object) -> None:
        raise AssertionError("runtimes were started before the port was looked at")

    for module in (serve, node):
        monkeypatch.setattr(module, "assemble", too_early)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


async def test_a_busy_port_is_told_before_anything_starts(tmp_path: Path, busy: str) -> None:
    state = tmp_path / "state"
    for config in (ServeConfig(state, listen=busy), ServeConfig(state, listen="127.0.0.1:0", traffic=busy)):
        with pytest.raises(ManagerError, match=r"Address already in use.*choose another"):
            await Server(config).start()
    with pytest.raises(ManagerError, match=r"Address already in use.*choose another"):
        await Node(NodeConfig(tmp_path / "node", "http://127.0.0.1:1", "k", listen=busy)).start()


async def test_an_address_that_is_not_this_machines_is_told_before_anything_starts(tmp_path: Path, busy: str) -> None:
    with pytest.raises(ManagerError, match=r"cannot be listened on.*choose another"):
        await Server(ServeConfig(tmp_path / "state", listen="192.0.2.1:3000")).start()


@pytest.mark.parametrize("url", ["127.0.0.1:3000", "manager", "ftp://manager:3000", "http://", "http://manager:x", ""])
async def test_a_node_joins_a_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(ManagerError, match="--join"):
        await Node(NodeConfig(tmp_path / "node", url, "k")).start()
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"listen": "3000"}, "not HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "not HOST:PORT"),
        ({"traffic": "here"}, "not HOST:PORT"),
        ({"settings": Settings(max_timeout_s=0.0)}, "--max-timeout"),
        ({"settings": Settings(max_timeout_s=float("nan"))}, "--max-timeout"),
        ({"settings": Settings(node_grace_s=1.0)}, "--node-grace"),
        ({"overload": 0.0}, "--overload"),
        ({"overload": 0.5}, "--overload"),
        ({"replicas_bytes": 5 * MIB}, "--replicas"),
        ({"replicas": Path("copies"), "replicas_bytes": 0}, "--replicas-mib"),
        ({"domain": "ba d"}, "--domain"),
        ({"domain": "https://a.b"}, "--domain"),
    ],
)
async def test_what_makes_no_sense_is_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    state = tmp_path / "state"
    with pytest.raises(ManagerError, match=told):
        await Server(ServeConfig(state, **options)).start()
    assert not state.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory": -5 * MIB}, "--memory-mib cannot be less"),
        ({"reserve": -1 * MIB}, "--reserve-mib cannot be less"),
        ({"memory": 100 * MIB, "reserve": 200 * MIB}, "200 MiB are kept back"),
        ({"memory": 400 * MIB}, "512 MiB are kept back"),
        ({"disk": "file"}, "--disk file"),
    ],
)
async def test_a_host_that_could_hold_nothing_is_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ManagerError, match=told):
        await assemble(tmp_path, ("gvisor",), **options)
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - nothing else runs


@pytest.mark.parametrize("domain", ["localhost:3000", "sandboxes.example", "a-b.example:8443"])
async def test_a_domain_is_a_name_and_perhaps_a_port(tmp_path: Path, domain: str) -> None:
    """Refused for the next thing that is wrong."""
    with pytest.raises(ManagerError, match="no runtime 'none'"):
        await Server(ServeConfig(tmp_path / "state", domain=domain, runtimes=("none",))).start()
