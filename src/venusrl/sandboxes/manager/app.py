"""The service as one aiohttp application: control plane, administrator's routes, and traffic to sandboxes.

Owns: the order of middlewares, health and Prometheus routes, the application's keys.

Must not know: sockets, signals, where the state is.
"""

from __future__ import annotations

from aiohttp import web

from venusrl.sandboxes.manager import routes, routes_layers, routes_nodes, routes_templates, wire
from venusrl.sandboxes.manager.measures import CONTENT_TYPE, Measures
from venusrl.sandboxes.manager.routes_nodes import CONNECT, JOIN_KEY, Connector
from venusrl.sandboxes.manager.routes_templates import TEMPLATES
from venusrl.sandboxes.manager.service import Service
from venusrl.sandboxes.manager.web_common import ADMIN, MEASURES, SERVICE, answering
from venusrl.sandboxes.templates.service import Templates

PEERS = "/host"
"""Below this path."""


def build(
    service: Service,
    *,
    admin_key: str,
    join_key: str,
    templates: Templates | None = None,
    connect: Connector | None = None,
    peers: web.Application | None = None,
    with_traffic: bool = True,
) -> web.Application:
    """``with_traffic``: sandboxes are reached on the same port (by Host or headers). ``peers``: what nodes ask of this
    service's own host (``server.for_peers``)."""
    # The gateway comes first: what is meant for a sandbox is none of the control plane's routes.
    before = [service.gateway.middleware] if with_traffic else []
    app = web.Application(middlewares=[*before, answering], client_max_size=wire.MAX_BODY)
    app[SERVICE] = service
    app[ADMIN] = admin_key
    app[JOIN_KEY] = join_key
    app[CONNECT] = connect
    app[TEMPLATES] = templates
    app[MEASURES] = Measures(service)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    routes.add(app)
    routes_templates.add(app)
    routes_nodes.add(app)
    routes_layers.add(app)
    if peers is not None:
        app.add_subapp(PEERS, peers)
    return app


def build_traffic(service: Service) -> web.Application:
    """Traffic to sandboxes alone, for a port of its own."""
    app = web.Application(client_max_size=wire.MAX_BODY)
    app.router.add_route("*", "/{path:.*}", service.gateway.handle)
    return app


async def _health(_: web.Request) -> web.StreamResponse:
    return web.Response(status=200)


async def _metrics(request: web.Request) -> web.StreamResponse:
    return web.Response(body=request.app[MEASURES].text(), headers={"Content-Type": CONTENT_TYPE})
