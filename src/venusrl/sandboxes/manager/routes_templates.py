"""E2B's template routes.

Owns: the routes, their parameters and statuses. Removing a template whose id is a snapshot's removes the snapshot, as
E2B has it.

Must not know: how templates are built or kept.
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import unquote

from aiohttp import web

from venusrl.sandboxes.manager.errors import NotFound
from venusrl.sandboxes.manager.web_common import SERVICE, json_answer, key_of


class TemplateService(Protocol):
    """What the template routes need."""

    async def remove(self, tenant: str, template: str) -> None:
        """Raises TemplateNotFound."""
        ...


TEMPLATES: web.AppKey[TemplateService | None] = web.AppKey("templates")


def add(app: web.Application) -> None:
    app.add_routes(
        [
            web.delete("/templates/{template}", remove),
            web.get("/templates/aliases/{alias}", alias),
        ]
    )


async def alias(request: web.Request) -> web.StreamResponse:
    key = key_of(request)
    image = await request.app[SERVICE].manager.catalogue.resolve(unquote(request.match_info["alias"]), key.tenant)
    return json_answer({"templateID": image.id, "public": not image.owner})


async def remove(request: web.Request) -> web.StreamResponse:
    key, service = key_of(request), request.app[SERVICE]
    name = unquote(request.match_info["template"])
    if service.manager.find_snapshot(key.tenant, name) is not None:
        await service.forks.remove(key.tenant, name)
        return web.Response(status=204)
    templates = request.app[TEMPLATES]
    if templates is None:
        raise NotFound(f"there is no template or snapshot {name!r}")
    await templates.remove(key.tenant, name)
    return web.Response(status=204)
