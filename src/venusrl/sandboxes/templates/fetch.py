"""Templates of another machine, brought here when a sandbox of one is to run here.

Owns: ``FetchedTemplates``, the ``host.local.Images`` of a machine that joined; ``Origin``, what it asks of the other.

Must not know: HTTP, who the other machine is, runtimes. Layers travel and nothing that was made of them: a virtual
machine's memory belongs to one QEMU and one processor, and is made here in less time than it takes to send.

Guarantees: names mean what the origin says, whatever is here; only layers that are not here travel, each once however
many wait for it; what arrives is what was asked for, by its digest, or nothing is kept. A layer that breaks off is
asked for again a few times; what arrived before stays. Whoever waits gets the error of what it waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from venusrl.clock import Clock, SystemClock
from venusrl.sandboxes.host.errors import HostLost
from venusrl.sandboxes.protocol import HostDiskFull, RuntimeUnavailable, SandboxError, TemplateNotFound
from venusrl.sandboxes.templates import transfer
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.service import HOST, Templates
from venusrl.sandboxes.templates.store import disk_errors
from venusrl.sandboxes.templates.unpack import Bounds

_log = logging.getLogger(__name__)
_TRIES = 3
_PAUSE_S = 0.5
_OVERHEAD = 16 << 20
"""So much more than a layer's files may its archive be, besides what the names take."""
_A_NAME = 4096


class OfferedLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer by its digest: bytes and entries once unpacked."""

    digest: str
    bytes: int
    entries: int


class OfferedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image without paths, and its layers, lowest first."""

    image: Image
    layers: tuple[OfferedLayer, ...]


class Origin(Protocol):
    """The machine that has the templates."""

    async def describe(self, template: str, tenant: str) -> OfferedImage:
        """By id or name. Raises TemplateNotFound, SandboxError."""
        ...

    def layer(self, digest: str) -> AsyncIterator[bytes]:
        """What ``transfer.send`` writes. Raises TemplateNotFound, SandboxError; one that breaks off is an error too."""
        ...


class FetchedTemplates:
    """``templates`` is where they are kept. The counters are totals, but ``templates_arriving``."""

    def __init__(self, templates: Templates, origin: Origin, clock: Clock | None = None) -> None:
        self._templates = templates
        self._store = templates.store
        self._origin = origin
        self._clock = clock or SystemClock()
        self._coming: dict[str, asyncio.Task[Image]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._counted = {"template_layers_fetched": 0.0, "template_bytes_fetched": 0.0, "template_fetches_failed": 0.0}

    async def resolve(self, template: str, tenant: str) -> Image:
        """Here, or brought here. Raises TemplateNotFound, SandboxError."""
        if template == HOST:
            return await self._templates.resolve(HOST)
        if template.startswith("img-"):
            with contextlib.suppress(TemplateNotFound):
                return await self._templates.resolve(template, tenant)
        offered = await self._origin.describe(template, tenant)
        task = self._coming.get(offered.image.id)
        if task is None:
            task = asyncio.create_task(self._bring(offered), name=f"template {offered.image.id} arrives")
            self._coming[offered.image.id] = task
            task.add_done_callback(lambda done: self._arrived(offered.image.id, done))
        placed = await asyncio.shield(task)  # it goes on without whoever gives up: others wait, or will come
        return msgspec.structs.replace(placed, name=offered.image.name)

    def names(self) -> tuple[str, ...]:
        """Ids of the images that are here."""
        return (HOST, *self._store.images())

    def counters(self) -> dict[str, float]:
        return {**self._counted, "templates_arriving": float(len(self._coming))}

    async def close(self) -> None:
        """Transfers are given up; whole layers stay."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arrived(self, identity: str, task: asyncio.Task[Image]) -> None:
        del self._coming[identity]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._counted["template_fetches_failed"] += 1
            _log.warning("template %s did not arrive: %s", identity, error)

    async def _bring(self, offered: OfferedImage) -> Image:
        _log.info("template %s (%s) is fetched", offered.image.name, offered.image.id)
        async with self._templates.making():
            for layer in offered.layers:
                async with self._locks.setdefault(layer.digest, asyncio.Lock()):
                    if await asyncio.to_thread(transfer.missing, self._store, [layer.digest]):
                        await self._layer(layer, offered.image)
            digests = [layer.digest for layer in offered.layers]
            placed = await asyncio.to_thread(transfer.place, self._store, offered.image, digests)
        _log.info("template %s (%s) is here", placed.name, placed.id)
        return placed

    async def _layer(self, layer: OfferedLayer, image: Image) -> None:
        for left in reversed(range(_TRIES)):
            try:
                await self._receive(layer)
            except (TemplateNotFound, RuntimeUnavailable, HostDiskFull):
                raise  # asking again changes nothing
            except SandboxError as error:
                what = f"layer {layer.digest[:12]} of template {image.name or image.id}"
                if not left:
                    raise HostLost(f"the {what} cannot be had: {error}") from error
                _log.warning("the %s broke off (%s): it is asked for again", what, error)
                await self._clock.sleep(_PAUSE_S)
            else:
                self._counted["template_layers_fetched"] += 1
                return

    async def _receive(self, layer: OfferedLayer) -> None:
        bounds = Bounds(bytes=layer.bytes + _OVERHEAD, entries=layer.entries + 1)
        most = layer.bytes + _OVERHEAD + layer.entries * _A_NAME
        with self._store.staging() as scratch:
            archive = scratch / "archive"
            with disk_errors(self._store.root), archive.open("xb") as file:
                async for piece in self._origin.layer(layer.digest):
                    most -= len(piece)
                    if most < 0:
                        raise BadTemplate(f"the layer {layer.digest[:12]} is larger than was announced")
                    await asyncio.to_thread(file.write, piece)
                    self._counted["template_bytes_fetched"] += len(piece)
            with archive.open("rb") as file:
                magic = file.read(4)
                file.seek(0)
                await asyncio.to_thread(transfer.receive, self._store, layer.digest, file, magic, bounds)
