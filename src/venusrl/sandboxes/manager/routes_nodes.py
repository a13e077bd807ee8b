"""The administrator's routes: nodes that join, are looked at, drained, forgotten; moves; a look at everything.

Owns: the registry of nodes over HTTP. A node joins again and again: that is its sign of life to us, and our answer is
ours to it.

Must not know: how a remote host is spoken to (``connect`` is given).

Guarantees: only who knows the join key adds a node, only the administrator sees or changes them; a node that joined is
remembered over a restart; one that was drained stays so, over restarts of the service and of the node, until the
administrator undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from venusrl.sandboxes.host.api import Host
from venusrl.sandboxes.manager import tokens, wire
from venusrl.sandboxes.manager.errors import Conflict, Forbidden, Invalid, NotFound, Other
from venusrl.sandboxes.manager.fleet import Node
from venusrl.sandboxes.manager.records import NodeRecord, Record
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.manager.web_common import SERVICE, check_admin, json_answer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
JOIN_AGAIN_S = 5.0
Connector = Callable[[NodeRecord], Host]
JOIN_KEY: web.AppKey[str] = web.AppKey("join_key", str)
CONNECT: web.AppKey[Connector | None] = web.AppKey("connect")


class Join(msgspec.Struct):
    """A node's own description: where its host server answers, and the key that one asks for."""

    name: str
    url: str
    key: str


class NodeChange(msgspec.Struct):
    status: str


class Move(msgspec.Struct):
    to: str = ""


def add(app: web.Application) -> None:
    app.add_routes(
        [
            web.get("/nodes", nodes),
            web.post("/nodes", join),
            web.get("/nodes/{node}", node_detail),
            web.post("/nodes/{node}", change),
            web.delete("/nodes/{node}", forget),
            web.get("/admin/overview", overview),
            web.post("/admin/sandboxes/{sandbox}/move", move),
            web.delete("/admin/sandboxes/{sandbox}", kill_any),
        ]
    )


def add_known(service: Service, connect: Connector | None) -> None:
    """Nodes of an earlier process, and whether the service's own host was drained."""
    for record in service.store.nodes():
        if not record.url:
            if record.name in service.fleet.nodes:
                service.fleet.nodes[record.name].draining = record.draining
        elif connect is not None:
            service.add_host(connect(record), feeds=False, draining=record.draining)


async def join(request: web.Request) -> web.StreamResponse:
    service, connect = request.app[SERVICE], request.app[CONNECT]
    if not tokens.same(request.headers.get("X-Join-Key", ""), request.app[JOIN_KEY]):
        raise Forbidden("nodes join with the key in the file join-key of the service's state directory")
    if connect is None:
        raise Other(501, "this service was started without other nodes")
    body = wire.decoded(await request.read(), Join)
    if not _NAME.fullmatch(body.name) or urlsplit(body.url).scheme not in ("http", "https"):
        raise Invalid("a node has a name (letters, digits, . _ -) and an http URL")
    known = next((one for one in service.store.nodes() if one.name == body.name), None)
    record = NodeRecord(body.name, body.url, body.key, service.clock.time(), known is not None and known.draining)
    if known is None or (known.url, known.key) != (body.url, body.key) or body.name not in service.fleet.nodes:
        old = service.fleet.nodes.get(body.name)
        if old is not None and (known is None or not known.url):
            raise Conflict(f"the name {body.name!r} is taken by this service's own host")
        service.store.put_node(record)
        service.add_host(connect(record), feeds=False, draining=record.draining)
        if old is not None:
            await old.host.close()
        await service.fleet.refresh(body.name)
    return json_answer({"again_s": JOIN_AGAIN_S})


async def nodes(request: web.Request) -> web.StreamResponse:
    check_admin(request)
    service = request.app[SERVICE]
    return json_answer([_node(name, node) for name, node in sorted(service.fleet.nodes.items())])


async def node_detail(request: web.Request) -> web.StreamResponse:
    check_admin(request)
    name, node = _asked(request)
    shown = _node(name, node)
    if node.status is not None:
        shown["host"] = msgspec.to_builtins(node.status)
    return json_answer(shown)


async def change(request: web.Request) -> web.StreamResponse:
    """``draining`` answers when everything that can be moved is; ``ready`` undoes it."""
    check_admin(request)
    name, _ = _asked(request)
    service = request.app[SERVICE]
    body = wire.decoded(await request.read(), NodeChange)
    if body.status not in ("draining", "ready"):
        raise Invalid("a node's status can be set to draining, or back to ready")
    draining = body.status == "draining"
    if not draining:
        await service.upkeep.reconciler.undrain(name)
    known = next((one for one in service.store.nodes() if one.name == name), None)
    record = known or NodeRecord(name, "", "", service.clock.time())  # without a URL: the service's own
    service.store.put_node(msgspec.structs.replace(record, draining=draining))
    if not draining:
        return json_answer({})
    return json_answer(msgspec.to_builtins(await service.upkeep.reconciler.drain(name)))


async def forget(request: web.Request) -> web.StreamResponse:
    """A node that will not come back. What it still had is recorded as ended."""
    check_admin(request)
    name, node = _asked(request)
    service = request.app[SERVICE]
    if not node.lost and service.manager.book.on_host(name):
        raise Conflict(f"the node {name!r} has sandboxes: drain it first")
    service.upkeep.reconciler.abandon(name)
    await service.upkeep.reconciler.mover.released(name)
    service.store.remove_node(name)
    service.fleet.remove(name)
    await node.host.close()
    return web.Response(status=204)


async def move(request: web.Request) -> web.StreamResponse:
    check_admin(request)
    body = wire.decoded(await request.read(), Move, optional=True)
    mover = request.app[SERVICE].upkeep.reconciler.mover
    record, moved = await mover.move(request.match_info["sandbox"], to=body.to)
    return json_answer({"node": record.host, **msgspec.to_builtins(moved)})


async def kill_any(request: web.Request) -> web.StreamResponse:
    check_admin(request)
    manager = request.app[SERVICE].manager
    async with manager.book.turn(request.match_info["sandbox"]) as record:
        await manager.kill_now(record, "killed by the administrator")
    return web.Response(status=204)


async def overview(request: web.Request) -> web.StreamResponse:
    """What ``venusrl env top`` shows: nodes, templates, sandboxes, memory shared, private, paused."""
    check_admin(request)
    service = request.app[SERVICE]
    found = sorted(service.fleet.nodes.items())
    return json_answer(
        {
            "nodes": [_node(name, node) for name, node in found],
            "templates": _templates(service),
            "sandboxes": [_sandbox(service, one) for one in service.manager.book.records.values()],
            "snapshots": len(service.manager.snapshots),
            "operations": service.manager.counters,
            "parked": service.gateway.parked,
        }
    )


def _asked(request: web.Request) -> tuple[str, Node]:
    name = request.match_info["node"]
    node = request.app[SERVICE].fleet.nodes.get(name)
    if node is None:
        raise NotFound(f"there is no node {name!r}")
    return name, node


def _node(name: str, node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": name, "status": node.health, "failure": node.failure}
    if node.status is None:
        return shown
    status, view = node.status, node.status.view
    paused = [one for one in status.held if one.state == "paused"]
    return shown | {
        "sandboxCount": len(status.held),
        "pausedCount": len(paused),
        "runtimes": sorted(status.runtimes),
        "cpus": view.cpus,
        "cpuUsed": view.cpu_used,
        "pressure": view.pressure,
        "memory": {
            "total": status.memory_total,
            "reserve": status.memory_reserve,
            "capacity": view.capacity,
            "available": view.available,
            "shared": sum(view.shared.values()),
            "private": sum(one.footprint.total for one in status.held if one.state != "paused"),
            "paused": sum(one.footprint.total for one in paused),
        },
        "snapshots": len(status.snapshots),
        "counters": status.counters,
        "timeLimits": status.time_limits,
    }


def _templates(service: Service) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, node in service.fleet.nodes.items():
        if node.status is None:
            continue
        for template in {*node.status.view.shared, *(one.template for one in node.status.held)}:
            entry = found.setdefault(template, {"id": template, "nodes": [], "shared": 0, "private": 0, "sandboxes": 0})
            here = [one for one in node.status.held if one.template == template]
            entry["nodes"].append(name)
            entry["shared"] += node.status.view.shared.get(template, 0)
            entry["private"] += sum(one.footprint.total for one in here)
            entry["sandboxes"] += len(here)
    return sorted(found.values(), key=lambda entry: -entry["sandboxes"])


def _sandbox(service: Service, record: Record) -> dict[str, Any]:
    held = service.fleet.held(record.host, record.id)
    return {
        "id": record.id,
        "template": record.alias or record.template,
        "tenant": record.tenant,
        "node": record.host,
        "runtime": record.runtime,
        "state": record.state,
        "pausedBy": record.paused_by,
        "group": record.group,
        "priority": record.priority,
        "mandatory": record.mandatory,
        "created": record.created,
        "ends": record.ends,
        "replica": service.manager.recovery.told(record),
        "lost": service.manager.recovery.lost(record),
        "memory": None if held is None else msgspec.to_builtins(held.footprint) | {"total": held.footprint.total},
        "idle": None if held is None else held.idle_s,
    }
