"""What is asked of the manager, and what it is told at its start: data, and the reading of wishes.

Owns: ``Settings``, ``Ask``, ``Source``, the metadata keys of a scheduler, how the admission policy is asked.

Must not know: hosts, HTTP, the store.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from venusrl.sandboxes.admission.api import Deny, Request, SandboxView
from venusrl.sandboxes.host.api import Order
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.manager import lifecycle
from venusrl.sandboxes.manager.errors import Busy, Invalid
from venusrl.sandboxes.manager.records import Egress, Record, SnapshotRecord
from venusrl.sandboxes.protocol import (
    HostDiskFull,
    Limits,
    RuntimeUnavailable,
    SandboxDenied,
    TemplateNotFound,
)
from venusrl.sandboxes.templates.api import Image

MIB = 1 << 20
NOT_HERE = (SandboxDenied, HostDiskFull, RuntimeUnavailable, TemplateNotFound, HostLost, OSError)
"""What one host may refuse and another not."""
GROUP, PRIORITY, MANDATORY, RUNTIME = "venusrl.group", "venusrl.priority", "venusrl.mandatory", "venusrl.runtime"
"""Metadata keys by which a scheduler says what matters."""


class Catalogue(Protocol):
    """Templates by name or id."""

    async def resolve(self, template: str, tenant: str) -> Image:
        """Raises TemplateNotFound."""
        ...


class Settings(msgspec.Struct, frozen=True):
    """What an operator may choose. ``internet``: for sandboxes that say nothing of it. ``grace_s``: how long what no
    record knows is left alone on a host. ``node_grace_s``: how long a node may be silent before it is taken for lost.

    ``history_s``: how long ended sandboxes and repeated requests are remembered."""

    domain: str = "localhost"
    runtime: str = "namespace"
    default_timeout_s: float = 300.0
    max_timeout_s: float = 86400.0
    internet: bool = False
    turn_s: float = 60.0
    grace_s: float = 60.0
    node_grace_s: float = 60.0
    history_s: float = 86400.0
    sample_s: float = 5.0
    refresh_s: float = 1.0
    reconcile_s: float = 15.0


class Ask(msgspec.Struct, frozen=True):
    """A sandbox that somebody wants. ``id`` "" = any."""

    template: str
    timeout_s: float
    id: str = ""
    on_timeout: lifecycle.OnTimeout = "kill"
    pause_memory: bool = True
    auto_resume: bool = False
    secure: bool = True
    egress: Egress = Egress()
    metadata: dict[str, str] = {}
    env: dict[str, str] = {}


class Source(msgspec.Struct, frozen=True):
    """What a sandbox is made from. ``hosts`` None = any host."""

    template: str
    alias: str
    runtime: str
    limits: Limits
    hosts: tuple[str, ...] | None = None
    learnt_as: str = ""
    """The template whose footprint it will have."""


def snapshot_source(snapshot: SnapshotRecord, asked: str) -> Source:
    """A snapshot can be had where it is kept."""
    alias = asked if asked != snapshot.id else ""
    return Source(snapshot.id, alias, snapshot.runtime, snapshot.limits, (snapshot.host,), snapshot.template)


def denied(answer: Deny) -> Busy:
    return Busy(
        f"{answer.message} ({answer.reason})",
        error_code="sandbox_capacity_unavailable",
        retry_after_s=answer.retry_after_s,
    )


def wishes(metadata: dict[str, str]) -> tuple[float, bool]:
    """Priority and whether it is mandatory, from metadata. Raises Invalid."""
    text = metadata.get(PRIORITY, "0")
    try:
        priority = float(text)
    except ValueError:
        priority = float("nan")
    if not abs(priority) < 1e12:
        raise Invalid(f"metadata {PRIORITY} is a number, not {text!r}")
    mandatory = metadata.get(MANDATORY, "false").lower()
    if mandatory not in ("true", "false", "1", "0"):
        raise Invalid(f"metadata {MANDATORY} is true or false, not {mandatory!r}")
    return priority, mandatory in ("true", "1")


def order(record: Record, internet: bool) -> Order:
    """What its host is told of a sandbox to make."""
    return Order(
        id=record.id,
        template=record.template,
        runtime=record.runtime,
        network=record.egress.network(internet),
        env=record.env,
        tenant=record.tenant,
        group=record.group,
        priority=record.priority,
        mandatory=record.mandatory,
    )


def request(record: Record, template: str, private: int | None = None) -> Request:
    """How the admission policy is asked for room."""
    return Request(
        template=template,
        group=record.group,
        declared=record.limits.memory_mib * MIB,
        cpus=record.limits.cpus,
        priority=record.priority,
        mandatory=record.mandatory,
        private=private,
    )


def view(record: Record, template: str) -> SandboxView:
    """A sandbox that its host's status does not show yet."""
    return SandboxView(
        id=record.id,
        template=template,
        group=record.group,
        age_s=0.0,
        private=0,
        declared=record.limits.memory_mib * MIB,
        priority=record.priority,
        mandatory=record.mandatory,
        idle_s=0.0,
        cpus=record.limits.cpus,
    )
