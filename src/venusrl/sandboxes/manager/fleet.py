"""The hosts, as the manager sees them, and the choice among them.

Owns: which hosts there are, their last status, whether they answer, and what was decided since that status (so that
two requests at once do not get the same room).

Must not know: records, keys, HTTP.

Guarantees: a host that has not answered for ``lease_s`` takes nothing new, one that has not for ``grace_s`` is lost
until it answers again; the admission policy sees every sandbox once, those just placed included; asking a host for its
status takes bounded time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Literal

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.admission.api import Admission, Admit, Deny, HostView, Request, SandboxView
from venusrl.sandboxes.host.api import Held, Host, HostStatus
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.protocol import SandboxError

_log = logging.getLogger(__name__)
_NO_HOST_RETRY_S = 5.0
_LEASE_S = 15.0
Health = Literal["joining", "ready", "draining", "silent", "lost"]


class Node:
    """One host and what is known of it. ``feeds``: it tells the admission policy of footprints itself."""

    def __init__(self, host: Host, now: float, *, feeds: bool) -> None:
        self.host = host
        self.feeds = feeds
        self.status: HostStatus | None = None
        self.held: dict[str, Held] = {}
        """What that status says of each sandbox."""
        self.answered = now
        self.asked = now
        """When its last status was asked for."""
        self.failure = ""
        self.silent = False
        """It has not answered lately: it takes nothing new."""
        self.lost = False
        """It has not for so long that it is taken for dead."""
        self.draining = False
        self.placed: dict[str, tuple[float, SandboxView]] = {}
        self.removed: dict[str, float] = {}
        self.seen: set[str] = set()

    @property
    def health(self) -> Health:
        if self.lost:
            return "lost"
        if self.status is None:
            return "joining"
        if self.silent:
            return "silent"
        return "draining" if self.draining or self.status.view.draining else "ready"

    def view(self) -> HostView | None:
        """Its last view, with what was decided since. None while it cannot take anything."""
        if self.status is None or self.silent or self.lost:
            return None
        view = self.status.view
        here = tuple(one for one in view.sandboxes if one.id not in self.placed and one.id not in self.removed)
        return msgspec.structs.replace(
            view,
            sandboxes=here + tuple(one for _, one in self.placed.values()),
            draining=view.draining or self.draining,
        )


class Fleet:
    """All hosts by name."""

    def __init__(self, admission: Admission, clock: Clock, *, grace_s: float = 60.0, call_s: float = 5.0) -> None:
        self._admission = admission
        self._clock = clock
        self._grace_s = grace_s
        self._lease_s = min(_LEASE_S, grace_s)
        self._call_s = call_s
        self.nodes: dict[str, Node] = {}

    def add(self, host: Host, *, feeds: bool, draining: bool = False) -> Node:
        """A host that joined. One that joins again under its name takes its own place."""
        node = Node(host, self._clock.monotonic(), feeds=feeds)
        node.draining = draining
        self.nodes[host.name] = node
        return node

    def remove(self, name: str) -> None:
        self.nodes.pop(name, None)

    def host(self, name: str) -> Host:
        """A host that answers. Raises HostLost."""
        node = self.nodes.get(name)
        if node is None or node.lost:
            raise HostLost(f"the node {name!r} does not answer")
        return node.host

    # What hosts say

    async def refresh(self, name: str) -> bool:
        """Ask one host; whether it answered."""
        node = self.nodes[name]
        asked = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._call_s):
                status = await node.host.status()
        except (SandboxError, TimeoutError, OSError) as error:
            node.failure = f"{type(error).__name__}: {error}"
            return False
        node.status, node.asked, node.failure = status, asked, ""
        node.answered = self._clock.monotonic()
        node.held = {one.id: one for one in status.held}
        node.placed = {one: entry for one, entry in node.placed.items() if entry[0] >= asked}
        node.removed = {one: when for one, when in node.removed.items() if when >= asked}
        if not node.feeds:
            self._observe(node, status)
        return True

    async def refresh_all(self) -> tuple[list[str], list[str]]:
        """Ask every host; the names of those that are lost, and of those that answer again (with old copies, maybe)."""
        names = list(self.nodes)
        failing = {name for name in names if self.nodes[name].failure}
        await asyncio.gather(*(self.refresh(name) for name in names))
        lost, back = [], []
        now = self._clock.monotonic()
        for name in names:
            node = self.nodes.get(name)
            if node is None:
                continue
            silence = now - node.answered if node.failure else 0.0  # whoever else was slow this round
            node.silent = silence > self._lease_s
            if not node.failure and (node.lost or name in failing):
                node.lost = False
                back.append(name)
            elif not node.lost and silence > self._grace_s:
                node.lost = True
                _log.warning("node %s has not answered for %.0f s and is lost: %s", name, silence, node.failure)
                await node.host.hang_up()
            if node.lost:
                lost.append(name)
        return lost, back

    def held(self, name: str, sandbox: str) -> Held | None:
        """What that host last said of a sandbox."""
        node = self.nodes.get(name)
        return None if node is None else node.held.get(sandbox)

    def copies(self, sandbox: str) -> dict[str, int]:
        """The hosts that hold it, by what those that answer last said, each with its epoch."""
        return {
            name: held.epoch
            for name, node in self.nodes.items()
            if not node.lost and (held := node.held.get(sandbox)) is not None
        }

    # Placement

    def place(
        self, request: Request, *, only: Iterable[str] | None = None, exclude: Iterable[str] = ()
    ) -> Admit | Deny:
        """Ask the policy, of all hosts or of some."""
        wanted = None if only is None else set(only)
        unwanted = set(exclude)
        views = [
            view
            for name, node in self.nodes.items()
            if name not in unwanted and (wanted is None or name in wanted) and (view := node.view()) is not None
        ]
        if not views:
            return Deny("no_host", "no node that could take it answers", _NO_HOST_RETRY_S)
        return self._admission.place(tuple(views), request)

    def placed(self, name: str, view: SandboxView) -> None:
        """A decision the host's status does not show yet."""
        node = self.nodes.get(name)
        if node is not None:
            node.placed[view.id] = (self._clock.monotonic(), view)
            node.removed.pop(view.id, None)

    def removed(self, name: str, sandbox: str) -> None:
        """It ended or went elsewhere."""
        node = self.nodes.get(name)
        if node is not None:
            node.placed.pop(sandbox, None)
            node.removed[sandbox] = self._clock.monotonic()

    def _observe(self, node: Node, status: HostStatus) -> None:
        now = self._clock.time()
        here = set()
        for one in status.held:
            here.add(one.id)
            if one.state == "running" and one.footprint.total:
                self._admission.observe(one.template, one.group, one.id, now - one.created, one.footprint.total)
        for gone in node.seen - here:
            self._admission.ended(gone)
        node.seen = here
