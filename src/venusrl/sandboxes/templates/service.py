"""Templates, as the manager and the command line use them.

Owns: ``Templates``: names, tags and builds of tenants; imports; uploads; what a name means to a host.

Must not know: HTTP, API keys, hosts.

Guarantees: a build runs in the background, supervised; at most some at once, some more wait. One that a crash cut short
is an error after the next ``start``. A tag moves to a build only when that is ready. A tenant sees what is its own and
what is everybody's. All errors are SandboxErrors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from venusrl.sandboxes import ownership
from venusrl.sandboxes.protocol import SandboxDenied, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.base import Runtime
from venusrl.sandboxes.templates import directory, oci
from venusrl.sandboxes.templates.api import Image, Start
from venusrl.sandboxes.templates.build import Builder
from venusrl.sandboxes.templates.capture import capture_of
from venusrl.sandboxes.templates.errors import BadTemplate, BuildFailed, TemplateBusy
from venusrl.sandboxes.templates.records import (
    DEFAULT_TAG,
    RESERVED,
    Build,
    Level,
    LogEntry,
    Reason,
    Records,
    Tag,
    Template,
    checked_name,
)
from venusrl.sandboxes.templates.requests import USUAL, BuildRequest, Rules, Sizes
from venusrl.sandboxes.templates.sharing import Share, Sharing
from venusrl.sandboxes.templates.store import Collected, Store, disk_errors
from venusrl.sandboxes.templates.uploads import Uploads

_log = logging.getLogger(__name__)
HOST = RESERVED[0]
BASE = "base"
_BASE_IMAGES = ("e2bdev/base", "e2bdev/code-interpreter")
"""What E2B's clients build on when told nothing: here the base template."""
_LATEST = "latest"
"""An image's tag when none is named."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Templates:
    """All templates below one directory. ``runtime`` builds; without one only imports and look-ups work."""

    def __init__(
        self, state: Path, runtime: Runtime | None = None, rules: Rules | None = None, share: Share = "all"
    ) -> None:
        self.store = Store(state)
        self.sharing = Sharing(share, self.store)
        self.records = Records(state / "records")
        self._runtime = runtime
        self._rules = rules or Rules()
        self._uploads = Uploads(state / "uploads", self._rules.upload_bytes)
        self._running = asyncio.Semaphore(self._rules.at_once)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._base = asyncio.Lock()
        self._internet = False

    async def start(self, *, internet: bool = False) -> None:
        """Make the directories; builds whose process died are errors. ``internet``: steps may reach it."""
        self._internet = internet
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        self.store.prepare()
        self.records.prepare()
        self._uploads.prepare()
        for build in self.records.builds():
            if build.state == "building" and not _alive(build.maker):
                self._finish(build, error=Reason("the service ended during the build: start it again"))

    async def close(self) -> None:
        """Builds that run are given up (and say so)."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what a name means

    async def resolve(self, template: str, tenant: str = "") -> Image:
        """A template's id or name (with or without tag), a build's or an image's id. Raises TemplateNotFound."""
        if template == HOST:
            return Image(id=HOST, name=HOST)
        if template.startswith("img-"):
            return self._visible(self.store.image(template), tenant)
        name, _, tag = template.partition(":")
        if name == BASE:
            await self._ensure_base(tenant)
        found = self.records.find(tenant, name)
        return self._image(found, tag or DEFAULT_TAG)

    def names(self) -> tuple[str, ...]:
        """Ids and names of the templates that are ready here, and ids of their images."""
        ready = [t for t in self.records.everything() if t.tags]
        return (HOST, *(word for t in ready for word in (t.id, *t.names)), *self.store.images())

    def counters(self) -> dict[str, float]:
        """Nothing is counted here: what is on this machine need not be fetched."""
        return {}

    def _image(self, template: Template, tag: str) -> Image:
        build = template.tags.get(tag)
        if build is None:
            known = ", ".join(sorted(template.tags)) or "none: no build of it is ready yet"
            raise TemplateNotFound(f"the template {template.names[0]} has no tag {tag!r} (it has {known})")
        image = self.store.image(self.records.build(build.build).image)
        return msgspec.structs.replace(image, name=template.names[0])

    def _visible(self, image: Image, tenant: str) -> Image:
        if image.owner not in ("", tenant):
            raise TemplateNotFound(f"there is no image {image.id}")
        return image

    async def _ensure_base(self, tenant: str) -> None:
        async with self._base:
            with suppress(TemplateNotFound):
                if self.records.find(tenant, BASE).tags:
                    return
            await self.from_directory("", BASE, None)

    # -- making

    async def from_directory(
        self, tenant: str, name: str, source: Path | None, start: Start | None = None, sizes: Sizes = USUAL
    ) -> Build:
        """A root file system directory becomes a template; None = ``base`` from this machine's own packages."""
        note = f"importing {source}" if source else "making the base template of this machine's own packages"

        def make(scratch: Path) -> oci.Imported:
            layer = scratch / "directory"
            if source is None:
                directory.copy_base(layer)
            else:
                directory.copy(source, layer, self._rules.build.bounds)
            return oci.Imported((self.store.add(layer).digest,))

        return await self._imported(tenant, name, note, make, start, sizes)

    async def from_oci(
        self, tenant: str, name: str, source: Path, start: Start | None = None, ref: str = "", sizes: Sizes = USUAL
    ) -> Build:
        """An OCI image layout directory, or an archive of one or of docker save, becomes a template."""
        bounds = self._rules.build.bounds
        return await self._imported(
            tenant, name, f"importing {source}", lambda s: oci.read(self.store, source, s, bounds, ref), start, sizes
        )

    async def from_image(
        self, tenant: str, name: str, reference: str, start: Start | None = None, sizes: Sizes = USUAL
    ) -> Build:
        """An image of a registry becomes a template."""
        bounds = self._rules.build.bounds
        return await self._imported(
            tenant, name, f"pulling {reference}", lambda s: oci.pull(self.store, reference, s, bounds), start, sizes
        )

    async def _imported(
        self,
        tenant: str,
        name: str,
        note: str,
        make: Callable[[Path], oci.Imported],
        start: Start | None,
        sizes: Sizes,
    ) -> Build:
        build = self.create(tenant, name, sizes=sizes)
        self._begin(build)
        self._say(build.id, "info", note, "base")
        try:
            image = await asyncio.to_thread(self._import, build, tenant, make, start)
        except BaseException as error:  # recorded whatever it was, cancelled included, then raised on
            self._finish(self.records.build(build.id), error=Reason(str(error) or "it was cancelled", "base"))
            raise
        return self._finish(self.records.build(build.id), image=image.id)

    def _import(self, build: Build, tenant: str, make: Callable[[Path], oci.Imported], start: Start | None) -> Image:
        with disk_errors(self.store.root), self.store.making(), self.store.staging() as scratch:
            return self.store.put_image(self._based(build, tenant, make(scratch), start, scratch))

    def _based(self, build: Build, tenant: str, made: oci.Imported, start: Start | None, scratch: Path) -> Image:
        """An image of what was imported, with what every sandbox needs."""
        layers = [self.store.layer(digest).path for digest in made.layers]
        extra = directory.provision([Path(path) for path in layers], scratch / "provision", made.workdir)
        if extra is not None:
            layers.append(self.store.add(extra).path)
        return Image(
            id="",
            name=self.records.find(tenant, build.template).names[0],
            layers=tuple(layers),
            env=made.env,
            workdir=made.workdir,
            cpus=build.cpus,
            memory_mib=build.memory_mib,
            disk_mib=build.disk_mib,
            start=start,
            owner=tenant,
        )

    # -- building

    def create(
        self,
        tenant: str,
        name: str,
        *,
        tags: tuple[str, ...] = (),
        sizes: Sizes = USUAL,
    ) -> Build:
        """A build that waits for ``build``; its template is made if need be. Raises BadTemplate, TemplateTaken."""
        name, _, tag = name.partition(":")
        wanted = tuple(dict.fromkeys((*((tag,) if tag else ()), *tags))) or (DEFAULT_TAG,)
        for word in wanted:
            _check_tag(word)
        rules = self._rules
        for value, most, what in (
            (sizes.cpus, rules.most_cpus, "processors"),
            (sizes.memory_mib, rules.most_memory_mib, "MiB of memory"),
            (sizes.disk_mib, rules.most_disk_mib, "MiB of disk"),
        ):
            if not 1 <= value <= most:
                raise BadTemplate(f"{value} {what} cannot be had: ask for 1 to {most}")
        now = time.time()
        template = self.records.create(tenant, checked_name(name), now)
        measures = (sizes.cpus, sizes.memory_mib, sizes.disk_mib)
        build = Build(new_build_id(), template.id, "waiting", now, now, *measures, wanted)
        self.records.put_build(build)
        self.records.change(
            template.id, lambda t: msgspec.structs.replace(t, builds=(*t.builds, build.id), updated=now)
        )
        return build

    async def build(self, tenant: str, template: str, build: str, request: BuildRequest) -> None:
        """Start a build in the background. Raises BadTemplate, TemplateBusy, SandboxDenied."""
        waiting = self._own_build(tenant, template, build)
        if waiting.state != "waiting" or build in self._tasks:
            raise TemplateBusy(f"the build {build} was started before: create another")
        if bool(request.from_image) == bool(request.from_template):
            raise BadTemplate("give exactly one of fromImage and fromTemplate")
        if len(self._tasks) >= self._rules.at_once + self._rules.waiting:
            raise SandboxDenied(f"{len(self._tasks)} builds run or wait already", retry_after_s=30.0)
        self._begin(waiting)
        task = asyncio.create_task(self._supervised(tenant, waiting, request), name=f"template build {build}")
        self._tasks[build] = task
        task.add_done_callback(lambda _: self._tasks.pop(build, None))

    async def wait(self, build: str) -> Build:
        """Until it has ended (in this process)."""
        task = self._tasks.get(build)
        if task is not None:
            await asyncio.wait((task,))
        return self.records.build(build)

    async def cancel(self, tenant: str, template: str, build: str) -> None:
        """Idempotent."""
        self._own_build(tenant, template, build)
        task = self._tasks.get(build)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def status(
        self, tenant: str, template: str, build: str, *, offset: int = 0, limit: int = 100
    ) -> tuple[Build, list[LogEntry]]:
        """A build and at most ``limit`` entries of its log from ``offset`` on."""
        found = self._own_build(tenant, template, build)
        return found, self.records.logs(build, max(0, offset), max(0, min(limit, 1000)))

    async def _supervised(self, tenant: str, build: Build, request: BuildRequest) -> None:
        try:
            async with self._running:
                image = await self._build(tenant, build, request)
        except BuildFailed as error:
            self._fail(build, str(error), error.step)
        except SandboxError as error:
            self._fail(build, str(error), "base")
        except asyncio.CancelledError:
            self._fail(build, "the build was cancelled", "")
            raise
        except Exception:  # noqa: BLE001 - the boundary of a background task: recorded for its user, logged for us
            _log.exception("the build %s failed by a fault of ours", build.id)
            self._fail(build, "an internal fault: see the service's log", "")
        else:
            self._finish(build, image=image.id)

    async def _build(self, tenant: str, build: Build, request: BuildRequest) -> Image:
        runtime = self._runtime
        if runtime is None:
            raise SandboxError("no runtime to build with: start the service as root with the namespace runtime")

        def log(level: Level, message: str, step: str) -> None:
            self._say(build.id, level, message, step)

        builder = Builder(
            self.store, runtime, capture_of(runtime), self._rules.build, self.sharing, internet=self._internet
        )
        async with self.making():
            log("info", f"base: {request.from_image or request.from_template}", "base")
            base = await self._base_of(tenant, build, request)
            image = await builder.run(
                base, request.steps, lambda h: self._uploads.find(tenant, h), log, force=request.force
            )
            start = Start(request.start_cmd, request.ready_cmd) if request.start_cmd or request.ready_cmd else None
            image = msgspec.structs.replace(image, start=start or image.start)
            if start is not None:
                await builder.try_start(image, log)
            return await asyncio.to_thread(self.store.put_image, image)

    async def _base_of(self, tenant: str, build: Build, request: BuildRequest) -> Image:
        """What a build begins with, as the tenant's and with the build's sizes."""
        source = request.from_image.removeprefix("docker.io/").removeprefix("library/")
        template = request.from_template or self._standing_for(source)
        if template:
            base = await self.resolve(template, tenant)
            if not base.layers:
                raise BadTemplate(f'"{base.name}" has no layers to build on: use fromTemplate "{BASE}"')
            return msgspec.structs.replace(
                base, cpus=build.cpus, memory_mib=build.memory_mib, disk_mib=build.disk_mib, owner=tenant
            )
        bounds = self._rules.build.bounds

        def pull() -> Image:
            with self.store.staging() as scratch:
                login = request.from_image_registry
                made = oci.pull(self.store, source, scratch, bounds, login, outward_only=bool(tenant))
                return self._based(build, tenant, made, None, scratch)

        return await asyncio.to_thread(pull)

    def _standing_for(self, image: str) -> str:
        """The template that is used for an image of a registry, "" = it is fetched: ``base`` for E2B's own images, and
        what the operator imported under the very name and tag."""
        name, _, tag = image.partition(":")
        if name in _BASE_IMAGES:
            return BASE
        known = (one for one in self.records.all("") if not one.tenant and name in one.names)
        return next((f"{one.id}:{tag or _LATEST}" for one in known if (tag or _LATEST) in one.tags), "")

    # -- uploads

    def has_upload(self, tenant: str, files_hash: str) -> bool:
        return self._uploads.has(tenant, files_hash)

    async def put_upload(self, tenant: str, files_hash: str, data: AsyncIterator[bytes]) -> None:
        """Keep an archive for COPY steps. Raises BadTemplate when it is too large."""
        await self._uploads.put(tenant, files_hash, data)

    # -- looking and changing

    def find(self, tenant: str, wanted: str) -> Template:
        """By id or name. Raises TemplateNotFound."""
        return self.records.find(tenant, wanted)

    def visible(self, tenant: str) -> list[Template]:
        """What the tenant sees, its own first."""
        return self.records.all(tenant)

    def builds_of(self, template: Template) -> list[Build]:
        """Newest first."""
        return [self.records.build(build) for build in reversed(template.builds)]

    def set_public(self, tenant: str, wanted: str, public: bool) -> Template:
        template = self._own(tenant, wanted)
        return self.records.change(template.id, lambda t: msgspec.structs.replace(t, public=public))

    async def remove(self, tenant: str, wanted: str) -> None:
        """The template and its builds; their layers go with the next ``collect``. Raises TemplateNotFound."""
        template = self._own(tenant, wanted)
        for build in template.builds:
            await self.cancel(tenant, template.id, build)
        self.records.remove(template.id)

    def assign_tags(self, tenant: str, target: str, tags: Iterable[str]) -> tuple[str, tuple[str, ...]]:
        """``target`` is name:tag; more tags for the same build. The build and the tags."""
        template = self._own(tenant, target)
        tag = target.partition(":")[2] or DEFAULT_TAG
        named = template.tags.get(tag)
        if named is None:
            raise TemplateNotFound(f"the template {template.names[0]} has no tag {tag!r}")
        new = tuple(_check_tag(word) for word in tags)
        now = time.time()
        self.records.change(
            template.id,
            lambda t: msgspec.structs.replace(t, tags={**t.tags, **{w: Tag(named.build, now) for w in new}}),
        )
        return named.build, new

    def remove_tags(self, tenant: str, wanted: str, tags: Iterable[str]) -> None:
        gone = set(tags)
        template = self._own(tenant, wanted)
        self.records.change(
            template.id,
            lambda t: msgspec.structs.replace(t, tags={k: v for k, v in t.tags.items() if k not in gone}),
        )

    async def collect(self, in_use: Iterable[str] = (), cache_age_s: float | None = None) -> Collected:
        """Remove layers nobody needs. ``in_use``: images of sandboxes and snapshots.

        ``cache_age_s``: how long what steps gave is kept unasked for; None = as the rules say.
        """
        keep = {build.image for build in self.records.builds() if build.image} | set(in_use)
        age = self._rules.cache_age_s if cache_age_s is None else cache_age_s
        return await asyncio.to_thread(self.store.collect, keep, age)

    # -- within

    @asynccontextmanager
    async def making(self) -> AsyncIterator[None]:
        """``Store.making``, waited for off the event loop: a collection may be under way."""
        making = self.store.making()
        await asyncio.to_thread(making.__enter__)
        try:
            yield
        finally:
            making.__exit__(None, None, None)

    def _own(self, tenant: str, wanted: str) -> Template:
        template = self.records.find(tenant, wanted)
        if template.tenant != tenant:
            raise TemplateNotFound(f"the template {wanted} is not yours to change")
        return template

    def _own_build(self, tenant: str, template: str, build: str) -> Build:
        found = self.records.build(build)
        if found.template != self._own(tenant, template).id:
            raise TemplateNotFound(f"there is no build {build!r} of the template {template}")
        return found

    def _begin(self, build: Build) -> None:
        now = time.time()
        self.records.put_build(msgspec.structs.replace(build, state="building", updated=now, maker=_me()))

    def _fail(self, build: Build, message: str, step: str) -> None:
        self._say(build.id, "error", message, step)
        self._finish(build, error=Reason(message, step))

    def _finish(self, build: Build, *, image: str = "", error: Reason | None = None) -> Build:
        now = time.time()
        state = "error" if error is not None else "ready"
        done = msgspec.structs.replace(
            build, state=state, updated=now, finished=now, image=image, reason=error, maker=""
        )
        self.records.put_build(done)
        if error is None:
            tags = {tag: Tag(build.id, now) for tag in build.tags}
            self.records.change(
                build.template, lambda t: msgspec.structs.replace(t, tags={**t.tags, **tags}, updated=now)
            )
        return done

    def _say(self, build: str, level: Level, message: str, step: str) -> None:
        self.records.log(build, LogEntry(time.time(), level, message, step))


def new_build_id() -> str:
    """A UUID: E2B's clients parse it as one."""
    bits = secrets.token_hex(16)
    return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-8{bits[17:20]}-{bits[20:]}"


def _check_tag(tag: str) -> str:
    if _TAG.fullmatch(tag) is None:
        raise BadTemplate(f"{tag!r} cannot be a tag: use letters, digits, '_', '.' and '-', at most 128")
    return tag


def _me() -> str:
    process = ownership.process_of(os.getpid())
    return f"{process.pid}:{process.start_time}" if process is not None else ""


def _alive(maker: str) -> bool:
    pid, _, started = maker.partition(":")
    if not pid.isdigit() or not started.isdigit():
        return False
    return ownership.process_of(int(pid)) == ownership.Process(int(pid), int(started))
