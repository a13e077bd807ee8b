"""E2B's template routes.

Owns: the routes, their parameters and statuses. Removing a template whose id is a snapshot's removes the snapshot, as
E2B has it.

Must not know: how templates are built or kept.

Guarantees: an upload link is good for one tenant and one hash, for an hour, and needs no key: E2B's clients send none.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlencode

import msgspec
from aiohttp import web

from venusrl.sandboxes.manager import tokens, wire
from venusrl.sandboxes.manager.errors import Forbidden, Invalid, NotFound, Other
from venusrl.sandboxes.manager.listing import MAX_PAGE
from venusrl.sandboxes.manager.records import Key
from venusrl.sandboxes.manager.web_common import SERVICE, json_answer, key_of, limit_of, number_of
from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.templates.records import Build, LogEntry, Template
from venusrl.sandboxes.templates.requests import BuildRequest, Sizes
from venusrl.sandboxes.templates.service import BASE, HOST, Templates

_LINK_S = 3600.0
TEMPLATES: web.AppKey[Templates | None] = web.AppKey("templates")


class NewTemplate(msgspec.Struct):
    name: str = ""
    alias: str = ""
    tags: list[str] = []
    cpus: int = msgspec.field(name="cpuCount", default=1)
    memory_mib: int = msgspec.field(name="memoryMB", default=512)


class Change(msgspec.Struct):
    public: bool | None = None


class AssignTags(msgspec.Struct):
    target: str
    tags: list[str]


class DeleteTags(msgspec.Struct):
    name: str
    tags: list[str]


def add(app: web.Application) -> None:
    app.add_routes(
        [
            web.post("/v3/templates", create),
            web.get("/templates", list_all),
            web.get("/v2/templates", list_pages),
            web.post("/templates/tags", assign_tags),
            web.delete("/templates/tags", delete_tags),
            web.get("/templates/aliases/{alias}", alias),
            web.get("/templates/{template}", detail),
            web.delete("/templates/{template}", remove),
            web.patch("/templates/{template}", change),
            web.patch("/v2/templates/{template}", change),
            web.get("/templates/{template}/tags", tags),
            web.get("/templates/{template}/files/{hash}", upload_link),
            web.put("/templates/{template}/files/{hash}", upload),
            web.post("/v2/templates/{template}/builds/{build}", start_build),
            web.get("/templates/{template}/builds/{build}/status", build_status),
            web.get("/templates/{template}/builds/{build}/logs", build_logs),
        ]
    )


# Builds


async def create(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    body = wire.decoded(await request.read(), NewTemplate)
    name = body.name or body.alias
    if not name:
        raise Invalid("a template has a name")
    made = templates.create(key.tenant, name, tags=tuple(body.tags), sizes=Sizes(body.cpus, body.memory_mib))
    names = list(templates.find(key.tenant, made.template).names)
    answer = {"templateID": made.template, "buildID": made.id, "public": False, "tags": list(made.tags)}
    return json_answer(answer | {"names": names, "aliases": names}, 202)


async def start_build(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    body = wire.decoded(await request.read(), BuildRequest)
    await templates.build(key.tenant, _template(request), request.match_info["build"], body)
    return json_answer({}, 202)


async def build_status(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    offset = int(number_of(request, "logsOffset", 0))
    found, entries = templates.status(
        key.tenant,
        _template(request),
        request.match_info["build"],
        offset=offset,
        limit=int(number_of(request, "limit", MAX_PAGE, most=MAX_PAGE)),
    )
    answer: dict[str, Any] = {
        "templateID": found.template,
        "buildID": found.id,
        "status": found.state,
        "logs": [entry.message for entry in entries],
        "logEntries": [_entry(entry) for entry in entries],
    }
    if found.reason is not None:
        answer["reason"] = {"message": found.reason.message, "step": found.reason.step, "logEntries": []}
    return json_answer(answer)


async def build_logs(request: web.Request) -> web.StreamResponse:
    """``cursor`` (milliseconds) is where to go on."""
    key, templates = _asked(request)
    cursor = number_of(request, "cursor", 0)
    _, entries = templates.status(key.tenant, _template(request), request.match_info["build"], limit=1000)
    shown = [entry for entry in entries if entry.time * 1000 >= cursor]
    if request.query.get("direction") == "backward":
        shown.reverse()
    return json_answer({"logs": [_entry(entry) for entry in shown[: limit_of(request)]]})


# Uploads


async def upload_link(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    files_hash = request.match_info["hash"]
    answer: dict[str, Any] = {"present": templates.has_upload(key.tenant, files_hash)}
    if not answer["present"]:
        ends = int(request.app[SERVICE].clock.time() + _LINK_S)
        token = request.app[SERVICE].secret.upload_token(f"{key.tenant} {files_hash} {ends}")
        query = urlencode({"tenant": key.tenant, "ends": ends, "token": token})
        answer["url"] = f"{request.scheme}://{request.host}{request.path}?{query}"
    return json_answer(answer, 201)


async def upload(request: web.Request) -> web.StreamResponse:
    templates, service = _templates(request), request.app[SERVICE]
    tenant, ends, token = (request.query.get(name, "") for name in ("tenant", "ends", "token"))
    files_hash = request.match_info["hash"]
    if not tokens.same(token, service.secret.upload_token(f"{tenant} {files_hash} {ends}")):
        raise Forbidden("this upload link is not one of ours")
    if service.clock.time() > float(ends):
        raise Forbidden("this upload link has run out: ask for another")
    await templates.put_upload(tenant, files_hash, request.content.iter_chunked(1 << 18))
    return web.Response(status=200)


# Templates


async def alias(request: web.Request) -> web.StreamResponse:
    """Whether a name is in use, ready or not. The names that are always there are not made for the question's sake."""
    key = key_of(request)
    name = unquote(request.match_info["alias"])
    templates = request.app[TEMPLATES]
    if templates is None:
        image = await request.app[SERVICE].manager.catalogue.resolve(name, key.tenant)
        return json_answer({"templateID": image.id, "public": not image.owner})
    try:
        found = templates.find(key.tenant, name)
    except TemplateNotFound:
        if name not in (BASE, HOST):
            raise
        return json_answer({"templateID": name, "public": True})
    return json_answer({"templateID": found.id, "public": found.public or not found.tenant})


async def list_all(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    return json_answer([_shown(templates, one) for one in templates.visible(key.tenant)])


async def list_pages(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    secret, scope = request.app[SERVICE].secret, f"templates {key.tenant}"
    found = sorted(templates.visible(key.tenant), key=lambda one: one.id)
    if token := request.query.get("nextToken", ""):
        after = secret.page_position(token, scope)
        found = [one for one in found if one.id > after]
    shown = found[: limit_of(request)]
    more = len(found) > len(shown) and shown
    headers = {"X-Next-Token": secret.page_token(shown[-1].id, scope)} if more else None
    return json_answer([_shown(templates, one) for one in shown], headers=headers)


async def detail(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    found = templates.find(key.tenant, _template(request))
    builds = [
        {
            "buildID": one.id,
            "status": one.state,
            "createdAt": wire.stamp(one.created),
            "updatedAt": wire.stamp(one.updated),
            "cpuCount": one.cpus,
            "memoryMB": one.memory_mib,
            "diskSizeMB": one.disk_mib,
            "envdVersion": wire.ENVD_VERSION,
        }
        | ({"finishedAt": wire.stamp(one.finished)} if one.finished is not None else {})
        for one in templates.builds_of(found)
    ]
    return json_answer(_shown(templates, found) | {"builds": builds[: limit_of(request)]})


async def change(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    body = wire.decoded(await request.read(), Change)
    found = templates.find(key.tenant, _template(request))
    if body.public is not None:
        found = templates.set_public(key.tenant, found.id, body.public)
    return json_answer({"names": list(found.names)})


async def remove(request: web.Request) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    name = _template(request)
    if service.manager.find_snapshot(key.tenant, name) is not None:
        await service.forks.remove(key.tenant, name)
        return web.Response(status=204)
    templates = request.app[TEMPLATES]
    if templates is None:
        raise NotFound(f"there is no template or snapshot {name!r}")
    await templates.remove(key.tenant, name)
    return web.Response(status=204)


# Tags


async def tags(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    found = templates.find(key.tenant, _template(request))
    return json_answer(
        [
            {"tag": name, "buildID": tag.build, "createdAt": wire.stamp(tag.assigned)}
            for name, tag in sorted(found.tags.items())
        ]
    )


async def assign_tags(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    body = wire.decoded(await request.read(), AssignTags)
    build, given = templates.assign_tags(key.tenant, body.target, body.tags)
    return json_answer({"tags": list(given), "buildID": build}, 201)


async def delete_tags(request: web.Request) -> web.StreamResponse:
    key, templates = _asked(request)
    body = wire.decoded(await request.read(), DeleteTags)
    templates.remove_tags(key.tenant, body.name, body.tags)
    return web.Response(status=204)


# Shared


def _asked(request: web.Request) -> tuple[Key, Templates]:
    return key_of(request), _templates(request)


def _templates(request: web.Request) -> Templates:
    templates = request.app[TEMPLATES]
    if templates is None:
        raise Other(501, "this service builds and keeps no templates")
    return templates


def _template(request: web.Request) -> str:
    return unquote(request.match_info["template"])


def _entry(entry: LogEntry) -> dict[str, Any]:
    shown = {"timestamp": wire.stamp(entry.time), "level": entry.level, "message": entry.message}
    return shown | ({"step": entry.step} if entry.step else {})


def _shown(templates: Templates, template: Template) -> dict[str, Any]:
    builds = templates.builds_of(template)
    last = next((one for one in builds if one.state == "ready"), builds[0] if builds else None)
    return {
        "templateID": template.id,
        "buildID": last.id if last else "",
        "cpuCount": last.cpus if last else 1,
        "memoryMB": last.memory_mib if last else 512,
        "diskSizeMB": last.disk_mib if last else 0,
        "public": template.public or not template.tenant,
        "aliases": list(template.names),
        "names": list(template.names),
        "createdAt": wire.stamp(template.created),
        "updatedAt": wire.stamp(template.updated),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(builds),
        "envdVersion": wire.ENVD_VERSION,
        "buildStatus": _status(builds),
        "description": template.description,
    }


def _status(builds: list[Build]) -> str:
    return builds[0].state if builds else "waiting"
