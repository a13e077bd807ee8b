"""E2B's JSON: what requests hold and what answers look like.

Owns: the bodies of the control plane, their checks, the rendering of records.

Must not know: aiohttp, hosts.

Guarantees: a body of the wrong types is refused with the field's name; unknown fields are ignored, as E2B does; what we
do not support is refused by name, never dropped in silence.
"""

from __future__ import annotations

import ipaddress
import re
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from venusrl.sandboxes.manager import lifecycle
from venusrl.sandboxes.manager.asks import Ask
from venusrl.sandboxes.manager.errors import Invalid
from venusrl.sandboxes.manager.gauges import Sample
from venusrl.sandboxes.manager.records import Egress, LogLine, Record, SnapshotRecord

T = TypeVar("T")
ENVD_VERSION = "0.6.13"
CLIENT_ID = "venusrl"
MAX_BODY = 1 << 20
_ALL = ("0.0.0.0/0", "::/0")
_DOMAIN = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.I)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_METADATA_BYTES = 64 << 10


class AutoResume(msgspec.Struct):
    enabled: bool = False


class NetworkBody(msgspec.Struct, rename="camel"):
    allow_public_traffic: bool | None = None
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    mask_request_host: str | None = None
    egress_proxy: Any = None
    rules: Any = None
    dns_servers: list[str] | None = None
    https_ports: list[int] | None = None
    internet: bool | None = msgspec.field(name="allow_internet_access", default=None)


class NewSandbox(msgspec.Struct, rename="camel"):
    template: str = msgspec.field(name="templateID")
    timeout: int | None = None
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    internet: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: NetworkBody | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: Any = None
    iam: Any = None
    volume_mounts: list[Any] | None = None


class Connect(msgspec.Struct):
    timeout: int | None = None
    memory: bool | None = None


class Resume(msgspec.Struct, rename="camel"):
    timeout: int | None = None
    auto_pause: bool | None = None
    memory: bool | None = None


class Timeout(msgspec.Struct):
    timeout: int


class Refresh(msgspec.Struct):
    duration: int | None = None


class Pause(msgspec.Struct, rename="camel"):
    memory: bool = True
    require_healthy_guest: bool = False


class Snapshot(msgspec.Struct):
    name: str | None = None
    memory: bool = True


class Fork(msgspec.Struct):
    timeout: int | None = None
    count: int = 1


class Priority(msgspec.Struct):
    """Not E2B's: how a scheduler changes what matters."""

    priority: float
    mandatory: bool = False


def decoded(data: bytes, kind: type[T], *, optional: bool = False) -> T:
    """The body of a request. Raises Invalid."""
    if not data and optional:
        data = b"{}"
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Invalid(f"the body is not valid: {error}") from None


def bounded(value: int | None, default: float, most: float, what: str = "timeout") -> float:
    """Seconds. Raises Invalid."""
    if value is None:
        return default
    if not 0 <= value <= most:
        raise Invalid(f"{what} is from 0 to {most:g} seconds (--max-timeout raises that), not {value}")
    return float(value)


def ask_of(body: NewSandbox, timeout_s: float, *, secure: bool) -> Ask:
    """Raises Invalid."""
    # "mcp" is for the client: it starts the gateway itself, by a command, and says so when the template has none.
    for name, value in (("iam", body.iam), ("volumeMounts", body.volume_mounts)):
        if value:
            raise Invalid(f"{name} is not supported by this service: leave it out")
    if not body.template:
        raise Invalid("templateID is empty")
    metadata, env = body.metadata or {}, body.env_vars or {}
    if sum(len(key) + len(value) for key, value in [*metadata.items(), *env.items()]) > _METADATA_BYTES:
        raise Invalid(f"metadata and envVars together are at most {_METADATA_BYTES} characters")
    wrong = [key for key, value in env.items() if not _NAME.fullmatch(key) or "\0" in value]
    if wrong:
        raise Invalid(f"envVars: {wrong[0]!r} is no name of a variable, or its value holds a NUL")
    return Ask(
        template=body.template,
        timeout_s=timeout_s,
        on_timeout="pause" if body.auto_pause else "kill",
        pause_memory=body.auto_pause_memory,
        auto_resume=body.auto_resume is not None and body.auto_resume.enabled,
        secure=secure,
        egress=egress_of(body.network or NetworkBody(), body.internet),
        metadata=metadata,
        env=env,
    )


def egress_of(body: NetworkBody, internet: bool | None) -> Egress:
    """Raises Invalid."""
    unsupported = [
        name
        for name, value in (
            ("egressProxy", body.egress_proxy),
            ("rules", body.rules),
            ("dnsServers", body.dns_servers),
            ("httpsPorts", body.https_ports),
        )
        if value
    ]
    if unsupported:
        raise Invalid(f"network.{unsupported[0]} is not supported by this service: leave it out")
    allow, deny = tuple(body.allow_out or ()), tuple(body.deny_out or ())
    for entry in allow:
        if not _is_block(entry) and not _DOMAIN.fullmatch(entry):
            raise Invalid(f"network.allowOut: {entry!r} is neither an address, a CIDR block nor a host name")
    for entry in deny:
        if not _is_block(entry):
            raise Invalid(f"network.denyOut: {entry!r} is neither an address nor a CIDR block")
    if any(not _is_block(entry) for entry in allow) and not set(deny) & set(_ALL) and internet is not False:
        raise Invalid("network.allowOut with host names needs denyOut to hold 0.0.0.0/0: else nothing is kept out")
    return Egress(
        internet=internet if body.internet is None else body.internet,
        allow=allow,
        deny=deny,
        public=body.allow_public_traffic is not False,
        mask_host=body.mask_request_host or "",
    )


def _is_block(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


# Answers


def stamp(seconds: float) -> str:
    """RFC 3339, in microseconds."""
    micros = round(seconds * 1e6)
    whole = datetime.fromtimestamp(micros // 1_000_000, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{micros % 1_000_000:06d}Z"


def parsed_time(text: str, name: str) -> float:
    """Raises Invalid."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{name} is not an RFC 3339 time: {text!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def sandbox(record: Record, domain: str, envd_token: str, traffic_token: str) -> dict[str, Any]:
    """The answer to create, connect and resume."""
    answer: dict[str, Any] = {
        "templateID": record.template,
        "sandboxID": record.id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "domain": domain or None,
        "trafficAccessToken": None if record.egress.public else traffic_token,
    }
    if record.alias:
        answer["alias"] = record.alias
    if record.secure:
        answer["envdAccessToken"] = envd_token
    return answer


def listed(record: Record) -> dict[str, Any]:
    """One entry of a list."""
    entry: dict[str, Any] = {
        "templateID": record.template,
        "sandboxID": record.id,
        "clientID": CLIENT_ID,
        "startedAt": stamp(record.created),
        "endAt": stamp(min(record.ends, lifecycle.FOREVER)),
        "envdVersion": ENVD_VERSION,
        "cpuCount": max(1, round(record.limits.cpus)),
        "memoryMB": record.limits.memory_mib,
        "diskSizeMB": record.limits.disk_mib,
        "state": record.shown,
        "metadata": record.metadata,
    }
    if record.alias:
        entry["alias"] = record.alias
    return entry


def detail(record: Record, domain: str, envd_token: str) -> dict[str, Any]:
    """Everything about one sandbox."""
    entry = listed(record) | {
        "domain": domain or None,
        "allowInternetAccess": record.egress.internet,
        "lifecycle": {"autoResume": record.auto_resume, "onTimeout": record.on_timeout},
        "network": _network(record.egress),
    }
    if record.secure:
        entry["envdAccessToken"] = envd_token
    if record.shown == "paused":
        entry["pauseMode"] = "full" if record.memory_kept else "filesystem"
    return entry


def _network(egress: Egress) -> dict[str, Any]:
    shown: dict[str, Any] = {"allowPublicTraffic": egress.public}
    if egress.allow:
        shown["allowOut"] = list(egress.allow)
    if egress.deny:
        shown["denyOut"] = list(egress.deny)
    if egress.mask_host:
        shown["maskRequestHost"] = egress.mask_host
    return shown


def metric(sample: Sample) -> dict[str, Any]:
    usage = sample.usage
    return {
        "timestamp": stamp(sample.at),
        "timestampUnix": int(sample.at),
        "cpuCount": usage.cpus,
        "cpuUsedPct": usage.cpu_percent,
        "memUsed": usage.memory_used,
        "memTotal": usage.memory_total,
        "memCache": usage.memory_cache,
        "diskUsed": usage.disk_used,
        "diskTotal": usage.disk_total,
    }


def snapshot(record: SnapshotRecord) -> dict[str, Any]:
    return {"snapshotID": record.id, "names": list(record.names)}


def log_entry(line: LogLine) -> dict[str, Any]:
    return {"timestamp": stamp(line.at), "level": line.level, "message": line.message, "fields": line.fields}


def log_line(line: LogLine) -> dict[str, Any]:
    return {"timestamp": stamp(line.at), "line": line.message}
