"""What nodes that joined ask of the service: templates, layer by layer.

Owns: two routes and who may use them.

Must not know: how layers are kept or packed, which node needs what.

Guarantees: nothing is told to whoever is not a node with its key; an archive that could not be sent whole is broken
off, never ended in order; a node that takes nothing is let go.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from aiohttp import web

from venusrl.sandboxes.host.wire import KEY_HEADER
from venusrl.sandboxes.manager import tokens
from venusrl.sandboxes.manager.errors import Forbidden
from venusrl.sandboxes.manager.routes_templates import TEMPLATES
from venusrl.sandboxes.manager.web_common import SERVICE
from venusrl.sandboxes.protocol import SandboxError, TemplateNotFound
from venusrl.sandboxes.templates import transfer
from venusrl.sandboxes.templates.fetch import OfferedImage, OfferedLayer
from venusrl.sandboxes.templates.service import Templates

_log = logging.getLogger(__name__)
_STALL_S = 60.0


def add(app: web.Application) -> None:
    app.add_routes(
        [
            web.get("/nodes/{node}/template", describe),
            web.get("/nodes/{node}/layers/{digest}", layer),
        ]
    )


async def describe(request: web.Request) -> web.StreamResponse:
    """What the template of that name or id is, for that tenant."""
    templates = _templates(request)
    image = await templates.resolve(request.query.get("template", ""), request.query.get("tenant", ""))

    def look() -> OfferedImage:
        bare, digests = transfer.describe(templates.store, image)
        found = [templates.store.layer(digest) for digest in digests]
        return OfferedImage(bare, tuple(OfferedLayer(one.digest, one.bytes, one.entries) for one in found))

    body = msgspec.json.encode(await asyncio.to_thread(look))
    return web.Response(body=body, content_type="application/json")


async def layer(request: web.Request) -> web.StreamResponse:
    """A layer as ``transfer.send`` writes it."""
    templates = _templates(request)
    digest = (await asyncio.to_thread(templates.store.layer, request.match_info["digest"])).digest
    response = web.StreamResponse(headers={"Content-Type": "application/zstd"})
    await response.prepare(request)
    try:
        await asyncio.to_thread(transfer.send, templates.store, digest, _Outlet(response))
        await response.write_eof()
    except (SandboxError, OSError, TimeoutError) as error:
        _log.warning("the layer %s was not sent whole to %s: %s", digest[:12], request.match_info["node"], error)
        if request.transport is not None:
            request.transport.abort()
    return response


class _Outlet:
    """A response as a file that another thread writes to."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes, /) -> int:
        asyncio.run_coroutine_threadsafe(self._send(bytes(data)), self._loop).result()
        return len(data)

    def flush(self) -> None:
        """Everything written is on its way."""

    async def _send(self, data: bytes) -> None:
        async with asyncio.timeout(_STALL_S):
            await self._response.write(data)


def _templates(request: web.Request) -> Templates:
    """For a node that proves to be one. Raises Forbidden, TemplateNotFound."""
    given = request.headers.get(KEY_HEADER, "")
    for record in request.app[SERVICE].store.nodes():
        if record.key and record.name == request.match_info["node"] and tokens.same(given, record.key):
            break
    else:
        raise Forbidden(f"{KEY_HEADER} is not the key of a node of that name that joined")
    templates = request.app[TEMPLATES]
    if templates is None:
        raise TemplateNotFound("this service keeps no templates")
    return templates
