"""Which sandboxes may share pages: all of a host, those of one tenant, none.

Owns: ``Share`` and ``Sharing``: the image that a sandbox is really made of, so that what is shared by way of it (the
page cache of its layers, a virtual machine's sealed memory, which runtimes keep under the image's id) is shared with
those it may be shared with and no others.

Must not know: runtimes' insides, hosts, admission.

Guarantees: with "tenant" no page of a template is mapped or read by sandboxes of two tenants; with "none" by no two
sandboxes. What cannot be kept apart is refused. The first tenant that uses a layer uses the layer itself, each other a
copy of its own: a service with one tenant pays nothing. Copies for one sandbox go with it. Not meant: what every
sandbox of a host has (its kernel, the agent's program, which nothing inside can map).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from venusrl.sandboxes.runtimes.base import Spec
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.store import Store

Share = Literal["tenant", "all", "none"]
CHOICES: tuple[Share, ...] = get_args(Share)
_ALONE = "s-"


class Sharing:
    """The rule of one host. ``store`` is where its layers are kept; without one nothing can be kept apart."""

    def __init__(self, share: Share = "all", store: Store | None = None) -> None:
        self.share = share
        self.merge = False
        """Whether sandboxes' own memory may be merged at all: the kernel merges it with that of whoever else on the
        machine takes part, so its operator is to say so."""
        self._store = store
        self._locks: dict[str, asyncio.Lock] = {}

    def pages(self, image: str, tenant: str, sandbox: str) -> str:
        """The id under which the sandbox's pages are kept: two with the same one share them."""
        domain = self._domain(tenant, sandbox)
        return f"{image}-{domain}" if domain else image

    def check(self, image: Image, runtime: str, tenant: str, others: Iterable[str]) -> None:
        """``others``: the tenants of this host's sandboxes of the same image. Raises BadTemplate for what cannot be
        kept apart."""
        if self.share == "none" and runtime == "microvm":
            raise BadTemplate(
                "microVMs of one template are clones of one memory, and this service shares no pages: use the "
                "namespace or the gvisor runtime, or have the service started with --share tenant"
            )
        if image.layers or self.share == "all":
            return
        if self.share == "none" or any(other != tenant for other in others):
            raise BadTemplate(
                f'the template "{image.name}" is this machine\'s own directories, whose pages all its sandboxes share: '
                f'use "base", or have the service started with --share all (it is {self.share})'
            )

    def may_merge(self, tenant: str, others: Iterable[str]) -> bool:
        """Whether a sandbox's own memory may be merged with that of the ones that merge here, of the tenants
        ``others``: with "tenant" it is one tenant's at a time."""
        if not self.merge or self.share == "none":
            return False
        return self.share == "all" or all(other == tenant for other in others)

    async def made_of(self, spec: Spec) -> Spec:
        """The same sandbox, of pages that it may have. Raises SandboxError, HostDiskFull."""
        domain = self._domain(spec.tenant, spec.id)
        if not domain or not spec.image.layers:
            return spec
        if self._store is None:
            raise BadTemplate(f"this host keeps no layers, so that it cannot keep pages apart (--share {self.share})")
        layers = [await self._layer(self._store, layer, domain) for layer in spec.image.layers]
        image = msgspec.structs.replace(
            spec.image, id=self.pages(spec.image.id, spec.tenant, spec.id), layers=tuple(layers)
        )
        return msgspec.structs.replace(spec, image=image)

    async def let_go(self, sandbox: str) -> None:
        """A sandbox ended: remove what was copied for it alone. Idempotent."""
        if self.share == "none" and self._store is not None:
            await asyncio.to_thread(self._store.drop_copies, lambda domain: domain == f"{_ALONE}{sandbox}")

    async def sweep(self, alive: Iterable[str]) -> None:
        """Remove what was copied for single sandboxes but those ``alive``, whatever the rule was then."""
        keep = {f"{_ALONE}{sandbox}" for sandbox in alive}
        if self._store is not None:
            await asyncio.to_thread(
                self._store.drop_copies, lambda domain: domain.startswith(_ALONE) and domain not in keep
            )

    def _domain(self, tenant: str, sandbox: str) -> str:
        if self.share == "all":
            return ""
        if self.share == "none":
            return f"{_ALONE}{sandbox}"
        return f"t-{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"

    async def _layer(self, store: Store, layer: str, domain: str) -> str:
        """One copy is made at a time for each domain: of many sandboxes that begin at once, one makes it."""
        lock = self._locks.setdefault(f"{domain} {layer}", asyncio.Lock())
        try:
            async with lock:
                return await asyncio.to_thread(store.apart, layer, domain, first_may_have_it=self.share == "tenant")
        finally:
            if not lock.locked():
                self._locks.pop(f"{domain} {layer}", None)
