"""The environment service as a process: its state directory, its own host, its sockets.

Owns: what is below the state directory, the order in which things start and stop, what the operator is told.

Must not know: the command line, signals.

Guarantees: one service a state directory; sandboxes go on when the service stops, unless it is told to end them; what
cannot start leaves nothing running.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from venusrl.clock import SystemClock
from venusrl.sandboxes.host import server
from venusrl.sandboxes.manager import app, keys, routes_nodes, tokens
from venusrl.sandboxes.manager.asks import Settings
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.gateway_listener import Listener
from venusrl.sandboxes.manager.local import LocalParts, assemble
from venusrl.sandboxes.manager.replicas import Replicas
from venusrl.sandboxes.manager.routes_nodes import Connector
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.manager.state import ADMIN_KEY, DEFAULT_KEY, JOIN_KEY, SECRET, open_state
from venusrl.sandboxes.manager.state import default_state as default_state
from venusrl.sandboxes.manager.store import StateLock, Store
from venusrl.sandboxes.manager.tokens import Secret
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.templates.sharing import Share

_log = logging.getLogger(__name__)
_GRACE_S = (3.0, 86400.0)
"""Nodes are asked once a second, and one that is busy may miss a second."""
_MOST_OVERLOAD = 0.5
_DOMAIN = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*(:[0-9]{1,5})?")


class ServeConfig(msgspec.Struct, frozen=True):
    """``listen`` and ``traffic`` are HOST:PORT; ``traffic`` "" = the same port. ``memory`` and ``reserve`` in bytes.

    ``replicas``: the directory for copies of what is paused, of at most ``replicas_bytes`` (None = its disk's)."""

    state: Path
    listen: str = "127.0.0.1:3000"
    traffic: str = ""
    domain: str = ""
    runtimes: tuple[str, ...] = ("namespace",)
    memory: int | None = None
    reserve: int | None = None
    overload: float | None = None
    share: Share = "tenant"
    merge: bool = False
    disk: Disk = "memory"
    settings: Settings = Settings()
    replicas: Path | None = None
    replicas_bytes: int | None = None


def address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises ManagerError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ManagerError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:3000")
    return host.strip("[]") or "127.0.0.1", int(port)


def check_free(text: str) -> None:
    """That HOST:PORT can be listened on, before runtimes start, which takes a while. Raises ManagerError."""
    host, port = address(text)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    failed = [why for place in places if (why := _trial(place[0], place[4])) is not None]
    for why in failed:  # a name may have an address of a family that is turned off here: one of them is enough
        if len(failed) == len(places) or why.errno == errno.EADDRINUSE:
            raise cannot_listen(host, port, why) from why


def _trial(family: int, where: Any) -> OSError | None:
    """Why an address cannot be bound now."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            trial.bind(where)
    except OSError as error:
        return error
    return None


def cannot_listen(host: str, port: int, error: OSError) -> ManagerError:
    """What to tell."""
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # asyncio's is longer
    return ManagerError(f"{host}:{port} cannot be listened on ({why}): choose another")


def beyond_loopback(host: str) -> bool:
    """Whether others than this machine can connect."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def _check(config: ServeConfig) -> None:
    """What can be known to be wrong before anything starts. Raises ManagerError."""
    address(config.listen)
    if config.traffic:
        address(config.traffic)
    grace, longest = config.settings.node_grace_s, config.settings.max_timeout_s
    if not _GRACE_S[0] <= grace <= _GRACE_S[1]:
        raise ManagerError(
            f"a node's grace is from {_GRACE_S[0]:g} to {_GRACE_S[1]:g} s, not {grace:g}: choose another --node-grace"
        )
    if not longest >= 1:
        raise ManagerError(f"--max-timeout is a second or more, not {longest:g}")
    if config.overload is not None and not 0 < config.overload < _MOST_OVERLOAD:
        raise ManagerError(f"--overload is a probability between 0 and {_MOST_OVERLOAD:g}, not {config.overload:g}")
    if config.replicas is None and config.replicas_bytes is not None:
        raise ManagerError("--replicas-mib is for copies, and there is no directory for them: name it with --replicas")
    if config.replicas_bytes is not None and config.replicas_bytes <= 0:
        raise ManagerError(f"--replicas-mib is 1 or more, not {config.replicas_bytes >> 20}")
    if config.domain and _DOMAIN.fullmatch(config.domain) is None:
        raise ManagerError(f"{config.domain!r} is no domain, such as sandboxes.example or localhost:3000 (--domain)")


class Server:
    """``await start()``, then it serves until ``await stop()``."""

    def __init__(
        self, config: ServeConfig, *, local: LocalParts | None = None, connect: Connector | None = None
    ) -> None:
        """``local``: parts to use instead of this machine's own (tests). ``connect``: how nodes that joined are spoken
        to."""
        self.config = config
        self._given = local
        self._connect = connect
        self._lock: StateLock | None = None
        self._listeners: list[Listener] = []
        self.service: Service
        self.local: LocalParts
        self.url = ""
        self.sandbox_url = ""
        self.api_key = ""
        self.join_key = ""
        self.admin_key = ""

    async def start(self) -> None:
        """Raises ManagerError, RuntimeUnavailable."""
        config = self.config
        host, port = address(config.listen)
        _check(config)
        store = open_state(config.state)
        replicas = None if config.replicas is None else Replicas(config.replicas, config.replicas_bytes)
        try:
            self._lock = StateLock.acquire(config.state)
            for text in (config.listen, config.traffic):
                if text:
                    check_free(text)
            self._keys(store)
            if replicas is not None:
                replicas.open()
            self.local = self._given or await assemble(
                config.state,
                config.runtimes,
                memory=config.memory,
                reserve=config.reserve,
                overload=config.overload,
                internet=config.settings.internet,
                listen=host,
                share=config.share,
                merge=config.merge,
                disk=config.disk,
            )
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            store.close()
            if replicas is not None:
                replicas.close()
            self._unlock()
            raise
        settings = msgspec.structs.replace(config.settings, domain=config.domain or f"localhost:{port}")
        self.service = Service(
            store,
            Secret.load(config.state / SECRET),
            self.local.admission,
            self.local.catalogue,
            clock=SystemClock(),
            settings=settings,
            replicas=replicas,
        )
        try:
            self.service.add_host(self.local.host, feeds=True)
            routes_nodes.add_known(self.service, self._connect)
            await self.service.start()
            await self._listen(host, port)
        except BaseException:  # as above
            await self.stop()
            raise

    async def _listen(self, host: str, port: int) -> None:
        config, service = self.config, self.service
        peer = self.local.host.peer
        control = app.build(
            service,
            admin_key=self.admin_key,
            join_key=self.join_key,
            templates=self.local.templates,
            connect=self._connect,
            peers=None if peer is None else server.for_peers(self.local.host, peer.key),
            with_traffic=not config.traffic,
        )
        port = await self._serve(Listener(control, service.gateway), host, port)
        self.url = self.sandbox_url = f"http://{_bracketed(host)}:{port}"
        if config.traffic:
            where, number = address(config.traffic)
            number = await self._serve(Listener(app.build_traffic(service), service.gateway), where, number)
            self.sandbox_url = f"http://{_bracketed(where)}:{number}"
        domain = config.domain or f"localhost:{self.sandbox_url.rpartition(':')[2]}"
        service.use_domain(domain)

    async def _serve(self, listener: Listener, host: str, port: int) -> int:
        self._listeners.append(listener)
        try:
            return await listener.start(host, port)
        except OSError as error:
            raise cannot_listen(host, port, error) from error

    def _keys(self, store: Store) -> None:
        state = self.config.state
        self.admin_key = tokens.secret_file(state / ADMIN_KEY, secrets.token_hex(24))
        self.join_key = tokens.secret_file(state / JOIN_KEY, secrets.token_hex(24))
        path = state / DEFAULT_KEY
        if path.exists():
            self.api_key = path.read_text().strip()
            if store.key(tokens.hashed(self.api_key)) is not None:
                return
            path.unlink()  # revoked: its text is of no use to anybody
        if not store.all_keys():
            _, text = keys.create(store, SystemClock(), "default")
            self.api_key = tokens.secret_file(path, text)
        else:
            self.api_key = ""

    def environment(self) -> Mapping[str, str]:
        """What E2B's SDK wants to find in its environment. No key when only its holder knows it."""
        return {
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.sandbox_url,
            **({"E2B_API_KEY": self.api_key} if self.api_key else {}),
        }

    def open_to_others(self) -> list[str]:
        """Addresses that other machines can connect to."""
        given = [self.config.listen, *([self.config.traffic] if self.config.traffic else [])]
        return [text for text in given if beyond_loopback(address(text)[0])]

    def living(self) -> int:
        return len(self.service.manager.book.records)

    async def stop(self, *, kill: bool = False) -> int:
        """Let go, or end every sandbox first; how many were ended."""
        ended = 0
        try:
            for listener in self._listeners:
                await listener.stop()
            if kill:
                ended = await self.service.kill_all()
        finally:
            await self.service.close()
            if self.local.templates is not None:
                await self.local.templates.close()
            if self.local.kept is not None:
                await self.local.kept.close()
            self._unlock()
        return ended

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
