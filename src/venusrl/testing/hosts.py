"""What a ``LocalHost`` needs beside a runtime, at its simplest.

Owns: ``AdmitAll`` (an admission without a limit, or with one on the count), ``FixedImages``, ``PlainDoor``.

Must not know: E2B, footprints.

Guarantees: each keeps what it was told, for a test to look at.
"""

from __future__ import annotations

from aiohttp import web

from venusrl.sandboxes.admission.api import Admit, Deny, HostView, Pause, Request
from venusrl.sandboxes.agent.api import Agent
from venusrl.sandboxes.envd.about import About
from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.templates.api import Image


class AdmitAll:
    """Implements ``Admission``. ``most`` running sandboxes a host; ``pauses`` is what ``relieve`` answers next."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.observed: list[tuple[str, int]] = []
        self.gone: list[str] = []
        self.pauses: tuple[Pause, ...] = ()
        self.displace: tuple[Pause, ...] = ()
        self.requests: list[Request] = []

    def observe(self, template: str, group: str, sandbox: str, age_s: float, private: int) -> None:
        self.observed.append((sandbox, private))

    def ended(self, sandbox: str) -> None:
        self.gone.append(sandbox)

    def place(self, hosts: tuple[HostView, ...], request: Request) -> Admit | Deny:
        self.requests.append(request)
        for host in hosts:
            running = [view for view in host.sandboxes if not view.paused]
            if not host.draining and (self.most is None or len(running) < self.most):
                pauses, self.displace = self.displace, ()
                return Admit(host.name, pauses)
        return Deny("full", f"every host has {self.most} sandboxes", 2.0)

    def relieve(self, host: HostView) -> tuple[Pause, ...]:
        pauses, self.pauses = self.pauses, ()
        return pauses


class FixedImages:
    """Implements ``host.local.Images`` over the images given; the name ``host`` is always there."""

    def __init__(self, *images: Image) -> None:
        self._images = {"host": Image("host", "host"), **{image.name: image for image in images}}

    async def resolve(self, template: str, tenant: str) -> Image:
        for image in self._images.values():
            if template in (image.id, image.name):
                return image
        raise TemplateNotFound(f"there is no template {template!r}")

    def names(self) -> tuple[str, ...]:
        return tuple(image.id for image in self._images.values())

    def counters(self) -> dict[str, float]:
        return {}


class PlainDoor:
    """Implements ``host.local.Door``: says which sandbox and port a request came to, and echoes its body."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def serve(
        self, request: web.Request, agent: Agent, sandbox: str, port: int, about: About
    ) -> web.StreamResponse:
        body = await request.read()
        return web.json_response(
            {
                "sandbox": sandbox,
                "port": port,
                "method": request.method,
                "path": request.raw_path,
                "headers": {name.lower(): value for name, value in request.headers.items()},
                "body": body.decode(errors="replace"),
            }
        )

    def forget(self, sandbox: str) -> None:
        self.forgotten.append(sandbox)
