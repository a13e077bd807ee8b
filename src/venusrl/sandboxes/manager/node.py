"""A machine that joins a service: its own host, a server for the manager to ask, and the lease that it renews.

Owns: ``Node``: what is below its state directory, the order of start and stop, joining again and again.

Must not know: the command line, signals, users' keys.

Guarantees: sandboxes go on when it stops, and the next start takes them up; while the manager does not answer it goes
on serving and tries again; a manager that refuses it (another join key, a name that is taken) ends the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from venusrl.sandboxes.host import server
from venusrl.sandboxes.host.api import Peer
from venusrl.sandboxes.host.remote import RemoteHost
from venusrl.sandboxes.manager import tokens
from venusrl.sandboxes.manager.app import PEERS
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.local import LocalParts, assemble
from venusrl.sandboxes.manager.origin import ServiceTemplates
from venusrl.sandboxes.manager.records import NodeRecord
from venusrl.sandboxes.manager.serve import address, beyond_loopback, cannot_listen, check_free
from venusrl.sandboxes.manager.state import is_url, state_directory
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.templates.sharing import Share

_log = logging.getLogger(__name__)
NODE_KEY = "node-key"
_RENEW_S = 5.0
_JOIN_S = 10.0
_MOST_TOLD = 300


class NodeConfig(msgspec.Struct, frozen=True):
    """``join`` is the manager's URL, ``key`` its join key. ``listen`` is HOST:PORT; the manager is told
    ``advertise`` where there is one, else that. ``name`` "" = the machine's."""

    state: Path
    join: str
    key: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    name: str = ""
    runtimes: tuple[str, ...] = ("namespace",)
    memory: int | None = None
    reserve: int | None = None
    internet: bool = False
    share: Share = "tenant"
    merge: bool = False
    disk: Disk = "memory"


def connect(record: NodeRecord) -> RemoteHost:
    """How a manager speaks to a node that joined."""
    return RemoteHost(record.name, record.url, record.key)


class Node:
    """``await start()``, then it serves until ``await stop()``."""

    def __init__(self, config: NodeConfig, *, local: LocalParts | None = None) -> None:
        """``local``: parts to use instead of this machine's own (tests)."""
        self.config = config
        self.name = config.name or socket.gethostname()
        self.url = ""
        self.failure = ""
        """Why the last renewal did not work; "" = it did."""
        self._given = local
        self._local: LocalParts | None = None
        self._runner: web.AppRunner | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._key = ""

    async def start(self) -> None:
        """Raises ManagerError, RuntimeUnavailable."""
        config = self.config
        host, port = address(config.listen)
        if not is_url(config.join):
            raise ManagerError(f"{config.join!r} is not the URL of a service, such as http://manager:3000 (--join)")
        check_free(config.listen)
        state_directory(config.state)
        self._key = tokens.secret_file(config.state / NODE_KEY, secrets.token_hex(24))
        self._local = self._given or await assemble(
            config.state,
            config.runtimes,
            memory=config.memory,
            reserve=config.reserve,
            internet=config.internet,
            name=self.name,
            listen=host,
            share=config.share,
            merge=config.merge,
            disk=config.disk,
            origin=ServiceTemplates(config.join, self.name, self._key),
        )
        try:
            await self._listen(host, port)
            await self._join()
        except BaseException:  # whatever it was: give back what was opened, and pass it on
            await self.stop()
            raise
        self._renewing = asyncio.create_task(self._renew(), name="renew the lease")

    async def stop(self) -> None:
        """Let go; sandboxes go on."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._local is not None:
            if self._local.fetched is not None:
                await self._local.fetched.close()
            await self._local.host.close()
            if self._local.templates is not None:
                await self._local.templates.close()
            if self._local.kept is not None:
                await self._local.kept.close()

    def open_to_others(self) -> bool:
        return beyond_loopback(address(self.config.listen)[0])

    async def living(self) -> int:
        """How many sandboxes it has."""
        return 0 if self._local is None else len((await self._local.host.status()).held)

    # -- inside

    def _connect_peer(self, peer: Peer) -> RemoteHost:
        """How it speaks to another host that a sandbox is to move to."""
        return RemoteHost(peer.name, peer.url or self.config.join.rstrip("/") + PEERS, peer.key)

    async def _listen(self, host: str, port: int) -> None:
        assert self._local is not None
        self._runner = server.runner(server.application(self._local.host, self._key, self._connect_peer))
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        port = self._runner.addresses[0][1]
        if self.config.advertise:
            host, port = address(self.config.advertise)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await self._join()
            except ManagerError as error:
                if str(error) != self.failure:
                    _log.warning("%s; trying again every %g s", error, _RENEW_S)
                self.failure = str(error)
            else:
                if self.failure:
                    _log.info("joined %s again", self.config.join)
                self.failure = ""

    async def _join(self) -> None:
        """Raises ManagerError."""
        url = self.config.join.rstrip("/") + "/nodes"
        body = {"name": self.name, "url": self.url, "key": self._key}
        timeout = aiohttp.ClientTimeout(total=_JOIN_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.post(url, json=body, headers={"X-Join-Key": self.config.key}) as answer,
            ):
                if answer.status < 300:
                    return
                text = (await answer.text())[:_MOST_TOLD]
                if "json" not in answer.content_type:
                    text = f"status {answer.status}, and not in JSON: is it an environment service (--join)?"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ManagerError(
                f"{self.config.join} cannot be joined: no answer ({why}); --join is the URL that venusrl env serve "
                "prints, at an address that this machine reaches"
            ) from error
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            text = msgspec.json.decode(text)["message"]
        raise ManagerError(f"{self.config.join} refuses the node {self.name}: {text}")
