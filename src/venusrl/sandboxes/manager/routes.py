"""E2B's control plane for sandboxes and snapshots, v1 and v2 paths.

Owns: the routes, their parameters and statuses.

Must not know: how anything is done.
"""

from __future__ import annotations

import logging
from urllib.parse import unquote

import msgspec
from aiohttp import web

from venusrl.sandboxes.manager import errors, listing, wire
from venusrl.sandboxes.manager.errors import Invalid
from venusrl.sandboxes.manager.listing import Query, Shown
from venusrl.sandboxes.manager.records import Key, Level, LogLine, Record
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.manager.web_common import SERVICE, json_answer, key_of, limit_of, number_of
from venusrl.sandboxes.protocol import SandboxError

_log = logging.getLogger(__name__)
_MAX_REFRESH_S = 3600
_MAX_LOGS = 1000
_LEVELS: tuple[Level, ...] = ("debug", "info", "warn", "error")
_STALE_SAMPLE_S = 1.0


def add(app: web.Application) -> None:
    """Every route, most specific first."""
    app.add_routes(
        [
            web.post("/sandboxes", create_v1),
            web.post("/v2/sandboxes", create_v2),
            web.get("/sandboxes", list_v1),
            web.get("/v2/sandboxes", list_v2),
            web.get("/sandboxes/metrics", metrics_of_several),
            web.get("/sandboxes/{sandbox}", detail),
            web.delete("/sandboxes/{sandbox}", kill),
            web.post("/sandboxes/{sandbox}/connect", connect),
            web.post("/v2/sandboxes/{sandbox}/connect", connect),
            web.post("/sandboxes/{sandbox}/resume", resume),
            web.post("/sandboxes/{sandbox}/pause", pause),
            web.post("/sandboxes/{sandbox}/timeout", set_timeout),
            web.post("/sandboxes/{sandbox}/refreshes", refresh),
            web.put("/sandboxes/{sandbox}/network", set_network),
            web.put("/sandboxes/{sandbox}/priority", set_priority),
            web.post("/sandboxes/{sandbox}/snapshots", snapshot),
            web.post("/sandboxes/{sandbox}/fork", fork),
            web.get("/sandboxes/{sandbox}/metrics", metrics),
            web.get("/sandboxes/{sandbox}/logs", logs_v1),
            web.get("/v2/sandboxes/{sandbox}/logs", logs_v2),
            web.get("/snapshots", snapshots),
        ]
    )


# Create


async def create_v1(request: web.Request) -> web.StreamResponse:
    """Older clients say whether they want an access token."""
    return await _create(request, secure_by_default=False)


async def create_v2(request: web.Request) -> web.StreamResponse:
    return await _create(request, secure_by_default=True)


async def _create(request: web.Request, *, secure_by_default: bool) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    data = await request.read()
    body = wire.decoded(data, wire.NewSandbox)
    settings = service.settings
    timeout_s = wire.bounded(body.timeout, settings.default_timeout_s, settings.max_timeout_s)
    ask = wire.ask_of(body, timeout_s, secure=secure_by_default if body.secure is None else body.secure)
    repeat = request.headers.get("Idempotency-Key")

    async def make(sandbox: str) -> bytes:
        record = await service.manager.create(key, msgspec.structs.replace(ask, id=sandbox))
        return service.answer(record)

    if repeat is None:
        answer = await make("")
        await _unless_gone(request, service, key, answer)
        return json_answer(answer, 201)
    answer, earlier = await service.repeats.once(key.tenant, repeat, request.path.encode() + b"\n" + data, make)
    return json_answer(answer, 201, {"Idempotency-Replayed": "true"} if earlier else None)


async def _unless_gone(request: web.Request, service: Service, key: Key, answer: bytes) -> None:
    """A client that left before the answer cannot know the id, and has no key to ask again with: end its sandbox."""
    if request.transport is not None and not request.transport.is_closing():
        return
    sandbox = msgspec.json.decode(answer)["sandboxID"]
    _log.info("the client that asked for %s left before it was told", sandbox)
    await service.manager.kill(key.tenant, sandbox, "its client left before it was made")


# Look


async def list_v1(request: web.Request) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    query = Query(metadata=listing.metadata_filter(request.query.get("metadata", "")), states=("running",))
    found = [one for one in service.manager.book.of_tenant(key.tenant) if query.matches(one)]
    return json_answer([wire.listed(one) for one in sorted(found, key=lambda one: -one.created)])


async def list_v2(request: web.Request) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    query = _query(request)
    page = listing.page(
        service.manager.book.of_tenant(key.tenant),
        query,
        limit_of(request),
        request.query.get("nextToken", ""),
        service.secret,
        key.tenant,
    )
    headers = {"X-Next-Token": page.next_token} if page.next_token else {}
    if "running" in query.states:
        headers["X-Total-Running"] = str(page.total_running)
    return json_answer([wire.listed(one) for one in page.records], headers=headers)


def _query(request: web.Request) -> Query:
    given = [part for text in request.query.getall("state", []) for part in text.split(",") if part]
    known: dict[str, Shown] = {"running": "running", "paused": "paused"}
    if wrong := [one for one in given if one not in known]:
        raise Invalid(f"state is running or paused, not {wrong[0]!r}")
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Invalid(f"order is asc or desc, not {order!r}")
    after = request.query.get("startedAfter")
    return Query(
        metadata=listing.metadata_filter(request.query.get("metadata", "")),
        states=tuple(sorted({known[one] for one in given})) or ("running", "paused"),
        newest_first=order == "desc",
        started_after=None if not after else wire.parsed_time(after.replace(" ", "+"), "startedAfter"),
        template=request.query.get("template", ""),
    )


async def detail(request: web.Request) -> web.StreamResponse:
    _, service, record = _asked(request)
    return json_answer(wire.detail(record, service.settings.domain, service.secret.envd_token(record.id)))


async def metrics(request: web.Request) -> web.StreamResponse:
    _, service, record = _asked(request)
    start = number_of(request, "start", -1)
    end = number_of(request, "end", -1)
    if -1 not in (start, end) and start > end:
        raise Invalid("start is after end")
    await _fresh(service, record)
    samples = service.manager.book.gauges.between(record.id, None if start < 0 else start, None if end < 0 else end)
    return json_answer([wire.metric(one) for one in samples])


async def metrics_of_several(request: web.Request) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    names = [one for text in request.query.getall("sandbox_ids", []) for one in text.split(",") if one]
    if not names or len(names) > listing.MAX_PAGE or len(set(names)) != len(names):
        raise Invalid(f"sandbox_ids holds 1 to {listing.MAX_PAGE} different ids, separated by commas")
    book = service.manager.book
    found = {}
    for name in names:
        record = book.records.get(name)
        if record is None or record.tenant != key.tenant:
            continue
        await _fresh(service, record)
        if (last := book.gauges.last(name)) is not None:
            found[name] = wire.metric(last)
    return json_answer({"sandboxes": found})


async def _fresh(service: Service, record: Record) -> None:
    """Idle sandboxes are not looked at in vain, so that they are looked at when somebody asks."""
    last = service.manager.book.gauges.last(record.id)
    if record.state == "running" and (last is None or service.clock.time() - last.at > _STALE_SAMPLE_S):
        await service.upkeep.sample(record)


async def logs_v1(request: web.Request) -> web.StreamResponse:
    lines = _logs(request, number_of(request, "start", 0))[: limit_of(request, _MAX_LOGS, _MAX_LOGS)]
    return json_answer(
        {"logs": [wire.log_line(one) for one in lines], "logEntries": [wire.log_entry(one) for one in lines]}
    )


async def logs_v2(request: web.Request) -> web.StreamResponse:
    """``cursor`` (milliseconds) is where to go on, in the direction asked for."""
    direction = request.query.get("direction", "forward")
    level = request.query.get("level", "debug")
    if direction not in ("forward", "backward") or level not in _LEVELS:
        raise Invalid(f"direction is forward or backward, level one of {', '.join(_LEVELS)}")
    backward = direction == "backward"
    cursor = number_of(request, "cursor", -1)
    lines = _logs(request, 0 if backward or cursor < 0 else cursor)
    if backward:
        lines = [one for one in reversed(lines) if cursor < 0 or one.at * 1000 <= cursor]
    search = request.query.get("search", "")
    shown = [one for one in lines if _LEVELS.index(one.level) >= _LEVELS.index(level) and search in one.message]
    return json_answer({"logs": [wire.log_entry(one) for one in shown[: limit_of(request, _MAX_LOGS, _MAX_LOGS)]]})


def _logs(request: web.Request, since_ms: float) -> list[LogLine]:
    key, service = key_of(request), request.app[SERVICE]
    lines = service.manager.book.logs(key.tenant, request.match_info["sandbox"])
    return [one for one in lines if one.at * 1000 >= since_ms]


# Change


async def kill(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    await service.manager.kill(key.tenant, record.id)
    return web.Response(status=204)


async def connect(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Connect, optional=True)
    settings = service.settings
    timeout_s = wire.bounded(body.timeout, settings.default_timeout_s, settings.max_timeout_s)
    made, resumed = await service.manager.connect(key, record.id, timeout_s, reboot=body.memory is False)
    return json_answer(service.answer(made), 201 if resumed else 200)


async def resume(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Resume, optional=True)
    settings = service.settings
    timeout_s = wire.bounded(body.timeout, settings.default_timeout_s, settings.max_timeout_s)
    made, _ = await service.manager.connect(
        key, record.id, timeout_s, reboot=body.memory is False, only_paused=True, auto_pause=body.auto_pause
    )
    return json_answer(service.answer(made), 201)


async def pause(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Pause, optional=True)
    await service.manager.pause(key.tenant, record.id, memory=body.memory, healthy=body.require_healthy_guest)
    return web.Response(status=204)


async def set_timeout(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Timeout)
    service.manager.set_timeout(key.tenant, record.id, wire.bounded(body.timeout, 0.0, service.settings.max_timeout_s))
    return web.Response(status=204)


async def refresh(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Refresh, optional=True)
    most = min(_MAX_REFRESH_S, service.settings.max_timeout_s)
    duration_s = wire.bounded(body.duration, service.settings.default_timeout_s, most, "duration")
    service.manager.refresh(key.tenant, record.id, duration_s)
    return web.Response(status=204)


async def set_network(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.NetworkBody)
    await service.manager.set_network(key.tenant, record.id, wire.egress_of(body, body.internet))
    return web.Response(status=204)


async def set_priority(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Priority)
    await service.manager.set_priority(key.tenant, record.id, body.priority, body.mandatory)
    return web.Response(status=204)


# Snapshots and forks


async def snapshot(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Snapshot, optional=True)
    made = await service.forks.snapshot(key.tenant, record.id, body.name or "", memory=body.memory)
    return json_answer(wire.snapshot(made), 201)


async def snapshots(request: web.Request) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    found = service.forks.of(key.tenant, request.query.get("sandboxID", ""), request.query.get("name", ""))
    shown, token = listing.snapshot_page(
        found, limit_of(request), request.query.get("nextToken", ""), service.secret, key.tenant
    )
    return json_answer([wire.snapshot(one) for one in shown], headers={"X-Next-Token": token} if token else None)


async def fork(request: web.Request) -> web.StreamResponse:
    key, service, record = _asked(request)
    body = wire.decoded(await request.read(), wire.Fork, optional=True)
    settings = service.settings
    timeout_s = wire.bounded(body.timeout, settings.default_timeout_s, settings.max_timeout_s)
    results = await service.forks.fork(key, record.id, body.count, timeout_s)
    return json_answer([_fork_result(service, one) for one in results], 201)


def _fork_result(service: Service, result: Record | SandboxError) -> dict[str, object]:
    if isinstance(result, Record):
        return {"sandbox": msgspec.Raw(service.answer(result))}
    return {"error": errors.body(errors.refused(result))}


def _asked(request: web.Request) -> tuple[Key, Service, Record]:
    """Who asks, and the living sandbox asked for. Raises Unauthorized, NotFound."""
    key, service = key_of(request), request.app[SERVICE]
    return key, service, service.manager.book.get(key.tenant, unquote(request.match_info["sandbox"]))
