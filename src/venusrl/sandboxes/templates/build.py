"""How a template is built: from a base, step by step.

Owns: the meaning of E2B's build steps, running a step in a sandbox and keeping what it changed as a layer, the cache of
steps, trying out the start command.

Must not know: names, tags, tenants' rights, HTTP.

Guarantees: a step runs in a sandbox as hostile code does. The same step on the same layers is not run again (unless
forced). A failure is a BuildFailed that names the step; cancelled or failed, no sandbox is left.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec

from venusrl.sandboxes.agent.api import Agent, AgentError, Exit, Output, ProcessSpec
from venusrl.sandboxes.protocol import Limits, SandboxError
from venusrl.sandboxes.runtimes.base import Instance, Network, Runtime, Spec
from venusrl.sandboxes.templates import copying, tree
from venusrl.sandboxes.templates.api import Image, Start
from venusrl.sandboxes.templates.compose import Composer, find_account
from venusrl.sandboxes.templates.errors import BadTemplate, BuildFailed
from venusrl.sandboxes.templates.records import Level
from venusrl.sandboxes.templates.sharing import Sharing
from venusrl.sandboxes.templates.store import CacheEntry, Store
from venusrl.sandboxes.templates.unpack import Bounds

Log = Callable[[Level, str, str], None]
"""Level, message, step."""
Capture = Callable[[Instance, Path], Awaitable[None]]
"""Write what a sandbox changed over its template into a new directory, in the form of a layer."""
_SHELLS = ("/bin/bash", "/bin/sh")
_STEPS = ("RUN", "COPY", "ENV", "WORKDIR", "USER")
_READY_POLL_S = 0.2
_LINE = 4096


class Step(msgspec.Struct, frozen=True, rename={"kind": "type", "files_hash": "filesHash"}):
    """One step as E2B's clients send it."""

    kind: str
    args: tuple[str, ...] = ()
    files_hash: str = ""
    force: bool = False


class BuildRules(msgspec.Struct, frozen=True):
    """Limits of a build. Time in seconds."""

    step_timeout_s: float = 3600.0
    ready_timeout_s: float = 300.0
    pids: int = 1024
    bounds: Bounds = Bounds()


class Builder:
    """Builds in sandboxes of ``runtime``; ``capture`` is how its sandboxes become layers."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        capture: Capture,
        rules: BuildRules,
        sharing: Sharing,
        *,
        internet: bool,
    ) -> None:
        self._store = store
        self._sharing = sharing
        self._runtime = runtime
        self._capture = capture
        self._rules = rules
        self._internet = internet

    async def run(
        self, base: Image, steps: tuple[Step, ...], files: Callable[[str], Path], log: Log, *, force: bool = False
    ) -> Image:
        """All steps on ``base``. ``files`` finds an upload by its hash. Raises BuildFailed."""
        image = base
        for number, step in enumerate(steps, 1):
            force = force or step.force
            name = str(number)
            log("info", f"[{number}/{len(steps)}] {step.kind} {' '.join(step.args)}"[:_LINE], name)
            async with _named(name):
                image = await self._step(image, step, name, files, log, force=force)
        return image

    async def try_start(self, image: Image, log: Log) -> None:
        """The start command runs and gets ready. Raises BuildFailed."""
        start = image.start
        if start is None:
            return
        log("info", f"start command: {start.command}"[:_LINE], "finalize")
        async with _named("finalize"), self._sandbox(image) as instance:
            agent = instance.agent
            if start.command:
                process = await agent.start(self._process(image, start.command, image.user))
                follower = asyncio.create_task(_follow(process.events(), log, "finalize"), name="start command output")
                try:
                    await self._ready(agent, image, start, follower)
                finally:
                    follower.cancel()
                    await asyncio.gather(follower, return_exceptions=True)
            else:
                await self._ready(agent, image, start, None)
        log("info", "the template is ready", "finalize")

    async def _ready(self, agent: Agent, image: Image, start: Start, follower: asyncio.Task[Exit] | None) -> None:
        if not start.ready:
            return
        try:
            async with asyncio.timeout(self._rules.ready_timeout_s):
                while await _exit_code(agent, self._process(image, start.ready, image.user)) != 0:
                    if follower is not None and follower.done() and follower.result().code != 0:
                        raise BuildFailed(
                            f"the start command ended with {_words(follower.result())} before it was ready", "finalize"
                        )
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            limit = self._rules.ready_timeout_s
            raise BuildFailed(
                f"the ready command did not succeed within {limit:.0f} s: {start.ready}", "finalize"
            ) from None

    async def _step(
        self, image: Image, step: Step, name: str, files: Callable[[str], Path], log: Log, *, force: bool
    ) -> Image:
        kind, args = step.kind.upper(), step.args
        match kind:
            case "ENV":
                return msgspec.structs.replace(image, env={**image.env, **_pairs(args)})
            case "USER":
                user = _one(args, "USER")
                find_account(self._merged(image), user)
                return msgspec.structs.replace(image, user=user)
            case "WORKDIR":
                path = posixpath.normpath(
                    posixpath.join("/", image.workdir or self._home(image), _one(args, "WORKDIR"))
                )
                layers = await self._cached(image, step, force, log, name, lambda f: self._workdir(image, path, f))
                return msgspec.structs.replace(image, layers=layers, workdir=path)
            case "COPY":
                copy = copying.parse(args, image.workdir or self._home(image), image.user)
                archive = files(step.files_hash)
                layers = await self._cached(
                    image, step, force, log, name, lambda f: self._copy(image, copy, archive, f)
                )
                return msgspec.structs.replace(image, layers=layers)
            case "RUN":
                if not args or not args[0].strip():
                    raise BadTemplate("RUN needs a command")
                user = args[1] if len(args) > 1 and args[1] else image.user
                layers = await self._cached(
                    image, step, force, log, name, lambda f: self._command(image, args[0], user, f, log, name)
                )
                return msgspec.structs.replace(image, layers=layers)
        raise BadTemplate(f"the step {step.kind!r} is not known: use {', '.join(_STEPS)}")

    async def _cached(
        self, image: Image, step: Step, force: bool, log: Log, name: str, make: Callable[[Path], Awaitable[Path]]
    ) -> tuple[str, ...]:
        """The image's layers and the step's own, made by ``make`` in a scratch directory unless it was made before."""
        key = self._key(image, step)
        entry = None if force else await asyncio.to_thread(self._store.recall, key)
        if entry is not None:
            log("info", "cached", name)
            return (*image.layers, *(self._store.layer(digest).path for digest in entry.layers))
        with self._store.staging() as scratch:
            made = await make(scratch)
            layer = await asyncio.to_thread(self._store.add, made)
            await asyncio.to_thread(self._store.remember, key, CacheEntry((layer.digest,)))
        log("debug", f"layer {layer.digest[:12]}: {layer.entries} entries, {layer.bytes} bytes", name)
        return (*image.layers, layer.path)

    async def _command(self, image: Image, command: str, user: str, scratch: Path, log: Log, name: str) -> Path:
        async with self._sandbox(image) as instance:
            try:
                process = await instance.agent.start(self._process(image, command, user))
            except AgentError as error:
                what = f"failed to run command '{command[:200]}': command failed"
                raise BuildFailed(f"{what}: {error.code}: {error}", name) from error
            try:
                async with asyncio.timeout(self._rules.step_timeout_s):
                    end = await _follow(process.events(), log, name)
            except TimeoutError:
                raise BuildFailed(f"the command took more than {self._rules.step_timeout_s:.0f} s", name) from None
            if end.code != 0:
                raise BuildFailed(f"the command ended with {_words(end)}: {command[:200]}", name)
            await self._capture(instance, scratch / "layer")
        return scratch / "layer"

    async def _workdir(self, image: Image, path: str, scratch: Path) -> Path:
        def make() -> Path:
            composer = Composer(scratch / "layer", self._merged(image))
            account = find_account(self._merged(image), image.user)
            composer.folder(path, (account.uid, account.gid))
            return scratch / "layer"

        return await asyncio.to_thread(make)

    async def _copy(self, image: Image, copy: copying.Copy, archive: Path, scratch: Path) -> Path:
        return await asyncio.to_thread(
            copying.make_layer, archive, copy, self._merged(image), scratch, self._rules.bounds
        )

    @asynccontextmanager
    async def _sandbox(self, image: Image) -> AsyncIterator[Instance]:
        """A sandbox of the image so far, without its start command."""
        limits = Limits(memory_mib=image.memory_mib, pids=self._rules.pids, cpus=image.cpus, disk_mib=image.disk_mib)
        bare = self._store.put_image(msgspec.structs.replace(image, start=None))
        spec = Spec(
            id=f"build-{secrets.token_hex(8)}",
            image=bare,
            limits=limits,
            network=Network(internet=self._internet),
            tenant=image.owner,
        )
        try:
            instance = await self._runtime.create(await self._sharing.made_of(spec))
            try:
                yield instance
            finally:
                await asyncio.shield(instance.kill())
        finally:
            await asyncio.shield(self._sharing.let_go(spec.id))

    def _process(self, image: Image, command: str, user: str) -> ProcessSpec:
        merged = self._merged(image)
        shell = next((s for s in _SHELLS if merged.find(merged.resolve(s)) is not None), _SHELLS[-1])
        return ProcessSpec(args=(shell, "-c", command), user=user, env=image.env, cwd=image.workdir)

    def _home(self, image: Image) -> str:
        return find_account(self._merged(image), image.user).home

    def _merged(self, image: Image) -> tree.Merged:
        return tree.Merged([Path(path) for path in image.layers])

    def _key(self, image: Image, step: Step) -> str:
        """What a step's result depends on. Uploads are told apart by tenant: their hash is the client's word."""
        digests = [self._store.digest_of(path) for path in image.layers]
        whole = [digests, sorted(image.env.items()), image.user, image.workdir, image.owner]
        whole += [step.kind.upper(), list(step.args), step.files_hash]
        return hashlib.sha256(msgspec.json.encode(whole)).hexdigest()


async def _follow(events: AsyncIterator[Output | Exit], log: Log, step: str) -> Exit:
    """Log a process's output by lines until it ends."""
    rest: dict[str, bytes] = {}
    async with aclosing(events) as open_events:  # type: ignore[type-var]
        async for event in open_events:
            if isinstance(event, Exit):
                for stream, tail in rest.items():
                    if tail:
                        _say(log, stream, tail, step)
                return event
            *lines, tail = (rest.get(event.stream, b"") + event.data).split(b"\n")
            for line in lines:
                _say(log, event.stream, line, step)
            if len(tail) > _LINE:
                _say(log, event.stream, tail, step)
                tail = b""
            rest[event.stream] = tail
    raise BuildFailed("the sandbox ended during the step: give the template more memory", step)


def _say(log: Log, stream: str, line: bytes, step: str) -> None:
    log("warn" if stream == "stderr" else "info", line[:_LINE].decode(errors="replace").rstrip("\r"), step)


async def _exit_code(agent: Agent, spec: ProcessSpec) -> int:
    process = await agent.start(spec)
    async for event in process.events():
        if isinstance(event, Exit):
            return event.code
    return -1


def _words(end: Exit) -> str:
    if end.signal == 9:
        return "signal 9 (killed: perhaps out of memory; give the template more)"
    return f"signal {end.signal}" if end.signal is not None else f"exit code {end.code}"


def _pairs(args: tuple[str, ...]) -> dict[str, str]:
    if len(args) % 2 or not args:
        raise BadTemplate("ENV needs names and values in turn")
    found = dict(zip(args[::2], args[1::2], strict=True))
    if any(not name or "=" in name or "\0" in name + value for name, value in found.items()):
        raise BadTemplate("ENV: a name is empty or has '=' in it")
    return found


def _one(args: tuple[str, ...], what: str) -> str:
    if len(args) < 1 or not args[0]:
        raise BadTemplate(f"{what} needs an argument")
    return args[0]


@asynccontextmanager
async def _named(step: str) -> AsyncIterator[None]:
    """Whatever fails within is that step's failure."""
    try:
        yield
    except BuildFailed:
        raise
    except AgentError as error:
        raise BuildFailed(f"{error} ({error.code})", step) from error
    except SandboxError as error:
        raise BuildFailed(str(error), step) from error
