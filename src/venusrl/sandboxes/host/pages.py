"""The pages that a host's sandboxes have in common: made ready, measured, let go.

Owns: what was derived of which template (once, however many ask), whose copies of a template's pages are in use, how
much of them is resident.

Must not know: who may share with whom (``templates/sharing.py`` says), records on disk, admission.

Guarantees: a sandbox is made of no other pages than it may share. What was made for one sandbox alone goes with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from venusrl.clock import Clock
from venusrl.sandboxes.host.background import Background
from venusrl.sandboxes.host.cells import Cells
from venusrl.sandboxes.host.errors import within
from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Runtime, Spec
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.sharing import Sharing

_log = logging.getLogger(__name__)
_FORGET_EVERY_S = 15.0
"""Templates are removed by another process, which tells nobody."""


class Pages:
    """``shared``: template to resident bytes, all copies together; ``copies``: template to the ids of its copies."""

    def __init__(
        self, sharing: Sharing, cells: Cells, runtimes: Mapping[str, Runtime], background: Background, clock: Clock
    ) -> None:
        self.shared: dict[str, int] = {}
        self.copies: dict[str, tuple[str, ...]] = {}
        self._sharing = sharing
        self._cells = cells
        self._runtimes = runtimes
        self._background = background
        self._clock = clock
        self._prepared: dict[tuple[str, str, bool], asyncio.Task[None]] = {}
        self._merging: dict[str, str] = {}

    def asked(self, image: Image, runtime: str, tenant: str, sandbox: str) -> str:
        """The id of the pages that a sandbox would share. Raises BadTemplate for what cannot be kept apart; one that is
        here already (it resumes) keeps what it has."""
        others = {cell.id: cell.record.order.tenant for cell in self._cells if cell.record.image.id == image.id}
        if sandbox not in others:
            self._sharing.check(image, runtime, tenant, others.values())
        return self._sharing.pages(image.id, tenant, sandbox) if image.layers else image.id

    async def ready(self, runtime: Runtime, spec: Spec) -> Spec:
        """The sandbox, of pages that it may share, with what is derived from them made."""
        spec = msgspec.structs.replace(spec, merge=self._merges(spec))
        seconds = self._cells.time_limits.prepare
        async with within(seconds, "prepare", f"layers of sandbox {spec.id}"):
            spec = await self._sharing.made_of(spec)
        await self._prepare(runtime, spec.image, spec.network.reaches_out)
        return spec

    async def _prepare(self, runtime: Runtime, image: Image, network: bool) -> None:
        seconds = self._cells.time_limits.prepare
        key = (runtime.name, image.id, network)
        task = self._prepared.get(key)
        if task is None:

            async def prepare() -> None:
                async with within(seconds, "prepare", f"template {image.name or image.id}"):
                    await runtime.prepare(image, network=network)

            task = self._background.operation(f"prepare {image.id}", prepare())
            self._prepared[key] = task
        try:
            await asyncio.shield(task)
        except SandboxError:
            if self._prepared.get(key) is task:
                del self._prepared[key]
            raise

    def known(self, template: str) -> None:
        """It has sandboxes from now on; how much of it is resident is measured later."""
        self.shared.setdefault(template, 0)

    async def measure(self) -> None:
        """Look at every copy in use, over all runtimes."""
        shared: dict[str, int] = {}
        copies: dict[str, list[str]] = {}
        made = [(cell.record.image.id, cell.instance) for cell in self._cells]
        in_use = sorted({(one, instance.spec.image.id) for one, instance in made if instance})
        for template, pages in in_use:
            shared[template] = 0
            copies.setdefault(template, []).append(pages)
        for runtime in self._runtimes.values():
            found = await runtime.shared([pages for _, pages in in_use])
            for template, pages in in_use:
                shared[template] += found.get(pages, 0)
        self.shared, self.copies = shared, {template: tuple(found) for template, found in copies.items()}

    def _merges(self, spec: Spec) -> bool:
        """Whether what its start command leaves in memory is merged with its like. Nothing may be awaited within."""
        if spec.image.start is None or not self._sharing.may_merge(spec.tenant, self._merging.values()):
            return False
        self._merging[spec.id] = spec.tenant
        return True

    async def sweep(self) -> None:
        """After a restart: know who merges and what is shared; remove what was made for sandboxes that have gone."""
        held = [(cell.record.order.runtime, cell.instance.spec) for cell in self._cells if cell.instance is not None]
        self._merging = {spec.id: spec.tenant for _, spec in held if spec.merge}
        kinds = {(name, spec.image.id, spec.network.reaches_out): spec.image for name, spec in held}
        for (name, _, network), image in kinds.items():
            # Until then nothing of it is counted.
            self._background.watch(f"prepare {image.id} again", self._prepare(self._runtimes[name], image, network))
        await self._sharing.sweep(cell.id for cell in self._cells)

    async def forget_gone(self, needed: Callable[[], set[str]]) -> None:
        """A loop's step: let go of what was derived of templates that are neither ``needed`` nor any sandbox's."""
        for name, runtime in self._runtimes.items():
            for pages in sorted(await runtime.derived()):
                # Asked for anew each time: while one was forgotten, a sandbox of another may have been begun.
                images = needed() | {cell.record.image.id for cell in self._cells}
                if not any(pages == image or pages.startswith(f"{image}-") for image in images):
                    for network in (False, True):
                        self._prepared.pop((name, pages, network), None)
                    await runtime.forget(pages)
                    _log.info("what %s had derived of the removed template %s is gone", name, pages)
        await self._clock.sleep(_FORGET_EVERY_S)

    def ended(self, sandbox: str) -> None:
        self._merging.pop(sandbox, None)
        if self._sharing.share == "none":
            self._background.operation(f"let go of the pages of {sandbox}", self._let_go(sandbox))

    async def _let_go(self, sandbox: str) -> None:
        suffix = self._sharing.pages("", "", sandbox)
        for key in [key for key in self._prepared if key[1].endswith(suffix)]:
            await asyncio.wait((self._prepared.pop(key),))
            await self._runtimes[key[0]].forget(key[1])
        await self._sharing.let_go(sandbox)
