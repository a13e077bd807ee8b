"""What every route of the control plane shares.

Owns: who asks (keys, the administrator), how errors are answered, how parameters are read, what is counted of requests.

Must not know: what the routes do.

Guarantees: every answer that is not a success has E2B's error body; nothing of an unexpected failure but its kind
reaches the client; a request without a valid key learns nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from venusrl.sandboxes.manager import errors, tokens
from venusrl.sandboxes.manager.errors import Forbidden, Invalid, Refused, Unauthorized
from venusrl.sandboxes.manager.listing import MAX_PAGE
from venusrl.sandboxes.manager.measures import Measures
from venusrl.sandboxes.manager.records import Key
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.protocol import SandboxError

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
ADMIN: web.AppKey[str] = web.AppKey("admin", str)
MEASURES: web.AppKey[Measures] = web.AppKey("measures", Measures)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error_answer(error: Refused) -> web.Response:
    return json_answer(errors.body(error), error.status, errors.headers(error))


def key_of(request: web.Request) -> Key:
    """Who asks. Raises Unauthorized."""
    text = request.headers.get("X-API-Key", "")
    if not text:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            # Older clients send an access token to the template routes; here both are one.
            text = token.strip().replace("sk_e2b_", tokens.KEY_PREFIX, 1)
    return request.app[SERVICE].manager.keys.check(text)


def check_admin(request: web.Request) -> None:
    """Raises Unauthorized, Forbidden."""
    given = request.headers.get("X-Admin-Token", "")
    if not given:
        raise Unauthorized("this needs X-Admin-Token: what the file admin-key of the state directory holds")
    if not tokens.same(given, request.app[ADMIN]):
        raise Forbidden("this is not the administrator's token")


def limit_of(request: web.Request, default: int = MAX_PAGE, most: int = MAX_PAGE) -> int:
    """Raises Invalid."""
    return int(number_of(request, "limit", default, least=1, most=most))


def number_of(request: web.Request, name: str, default: float, *, least: float = 0, most: float = 2**62) -> float:
    """A whole number of the query. Raises Invalid."""
    text = request.query.get(name)
    if text is None or text == "":
        return default
    try:
        value = int(text)
    except ValueError:
        raise Invalid(f"{name} is a whole number, not {text!r}") from None
    if not least <= value <= most:
        raise Invalid(f"{name} is from {least:g} to {most:g}")
    return value


@web.middleware
async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn failures into answers, and count."""
    began = time.perf_counter()
    response = await _answered(request, handler)
    route = request.match_info.route.resource
    request.app[MEASURES].request(
        request.method, route.canonical if route else "unknown", response.status, time.perf_counter() - began
    )
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return json_answer({"code": error.status, "message": error.reason}, error.status, _allow(error))
    except SandboxError as error:
        answer = errors.refused(error)
        if answer.status == 500:
            _log.error("%s %s failed: %s", request.method, request.path, error, exc_info=error)
        return error_answer(answer)
    except Exception as error:  # noqa: BLE001 - the boundary: a fault is logged, its inside not told
        _log.exception("%s %s failed", request.method, request.path)
        return error_answer(Refused(f"internal error ({type(error).__name__}): see the service's log"))


def _allow(error: web.HTTPException) -> dict[str, str] | None:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
