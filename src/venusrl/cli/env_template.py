"""``venusrl env template``: make, list and remove what sandboxes start from.

Works on the service's state directory, whether or not the service runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from venusrl.cli.output import EXIT_FAILED, CommandError, print_json, stderr, stdout, table

if TYPE_CHECKING:
    from venusrl.sandboxes.templates.api import Start
    from venusrl.sandboxes.templates.records import Build
    from venusrl.sandboxes.templates.requests import Sizes
    from venusrl.sandboxes.templates.service import Templates

app = typer.Typer(no_args_is_help=True, help="Templates: what sandboxes start from.")
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
_State = Annotated[Path | None, typer.Option("--state", help="State directory. Default: VENUSRL_ENV_STATE.")]
_BUILDERS_IDS = 0x7FFD_0000
"""Host ids of sandboxes that build: the last of the default range, so that a running service's are others."""


@app.command("build")
def build(
    words: Annotated[list[str], typer.Argument(metavar="[DIRECTORY] NAME", help="A root file system, and the name.")],
    oci: Annotated[Path | None, typer.Option("--oci", help="An OCI image layout, or an archive of an image.")] = None,
    image: Annotated[str, typer.Option("--image", help="An image of a registry (needs skopeo).")] = "",
    dockerfile: Annotated[
        Path | None, typer.Option("--dockerfile", help="Build its steps; its folder is the context.")
    ] = None,
    ref: Annotated[str, typer.Option(help="Which image of --oci, when it holds several.")] = "",
    start: Annotated[str, typer.Option(help="A command that runs in every sandbox from the beginning.")] = "",
    ready: Annotated[str, typer.Option(help="A command that succeeds once --start is ready.")] = "",
    cpus: Annotated[int, typer.Option(help="Processors of a sandbox.", min=1)] = 1,
    memory: Annotated[int, typer.Option(help="MiB of memory of a sandbox.", min=1)] = 512,
    disk: Annotated[
        int | None, typer.Option(help="MiB that a sandbox may write. Default: 512; 1024 with --dockerfile.", min=1)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run every step again (--dockerfile).")] = False,
    state: _State = None,
    json_output: _Json = False,
) -> None:
    """Make a template of a directory, an image, or a Dockerfile.

    Example:

    $ venusrl env template build --image python:3.12-slim py312

    $ venusrl env template build --dockerfile env/Dockerfile my-env:v2
    """
    *folders, name = words
    sources = [source for source in (*folders, oci, image, dockerfile) if source]
    if len(sources) > 1 or (not sources and name != "base"):
        raise CommandError('name one source: a directory, --oci, --image or --dockerfile (none at all makes "base")')
    for given, option, wanted, there in (
        (ref, "--ref", "--oci", oci),
        (force, "--force", "--dockerfile", dockerfile),
        (ready, "--ready", "--start", start or dockerfile),
    ):
        if given and not there:
            raise CommandError(f"{option} means nothing without {wanted}")
    sizes = (cpus, memory, disk or (1024 if dockerfile else 512))
    source = Path(folders[0]) if folders else None
    request = _Request(name, source, oci, image, dockerfile, ref, start, ready, sizes, force)
    done = asyncio.run(_build(state, request, quiet=json_output))
    if json_output:
        print_json(_shown(done))
    elif done.state == "ready":
        stdout().print(f"{name} is ready ({done.image})", markup=False)
    if done.state != "ready":
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True)
class _Request:
    """What is to be built. ``command``, ``ready``: of its start; ``measures``: processors, MiB of memory, of disk."""

    name: str
    directory: Path | None
    oci: Path | None
    image: str
    dockerfile: Path | None
    ref: str
    command: str
    ready: str
    measures: tuple[int, int, int]
    force: bool

    def start(self) -> Start | None:
        from venusrl.sandboxes.templates.api import Start

        return Start(self.command, self.ready) if self.command else None

    def sizes(self) -> Sizes:
        from venusrl.sandboxes.templates.requests import Sizes

        return Sizes(*self.measures)


async def _build(state: Path | None, request: _Request, *, quiet: bool) -> Build:
    async with _open(state, build=request.dockerfile is not None) as templates:
        if request.dockerfile is not None:
            return await _build_steps(templates, request, request.dockerfile, quiet)
        name, start, sizes = request.name, request.start(), request.sizes()
        with stderr().status(f"making {name}", speed=0.5):
            if request.oci is not None:
                return await templates.from_oci("", name, request.oci, start, request.ref, sizes)
            if request.image:
                return await templates.from_image("", name, request.image, start, sizes)
            return await templates.from_directory("", name, request.directory, start, sizes)


async def _build_steps(templates: Templates, request: _Request, dockerfile: Path, quiet: bool) -> Build:
    from venusrl.sandboxes.protocol import TemplateNotFound
    from venusrl.sandboxes.templates import dockerfile as reader
    from venusrl.sandboxes.templates.requests import BuildRequest
    from venusrl.sandboxes.templates.service import BASE

    if not dockerfile.is_file():  # noqa: ASYNC240 - nothing else runs
        raise CommandError(f"there is no file {dockerfile}")
    recipe = reader.read(dockerfile.read_text(), dockerfile.parent)  # noqa: ASYNC240
    for digest, archive in recipe.uploads.items():
        await templates.put_upload("", digest, _once(archive))
    waiting = templates.create("", request.name, sizes=request.sizes())
    try:
        local = recipe.base == BASE or bool(templates.find("", recipe.base))
    except TemplateNotFound:
        local = False
    wanted = BuildRequest(
        from_template=recipe.base if local else "",
        from_image="" if local else recipe.base,
        force=request.force,
        steps=recipe.steps,
        start_cmd=request.command or recipe.start,
        ready_cmd=request.ready,
    )
    await templates.build("", waiting.template, waiting.id, wanted)
    shown, done = 0, waiting
    while True:
        done, entries = templates.status("", waiting.template, waiting.id, offset=shown)
        for entry in entries:
            if not quiet:
                stderr().print(entry.message, markup=False, style="red" if entry.level == "error" else None)
        shown += len(entries)
        if done.state in ("ready", "error") and not entries:
            return done
        await asyncio.sleep(0.1)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


@asynccontextmanager
async def _open(state: Path | None, *, build: bool = False) -> AsyncIterator[Templates]:
    """The templates of the state directory; with ``build`` also a runtime of our own to build in."""
    from venusrl.sandboxes.manager.state import default_state, state_directory
    from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime
    from venusrl.sandboxes.templates.service import Templates

    root = state_directory((state or default_state()).absolute())
    runtime = internet = None
    if build:
        runtime = NamespaceRuntime(root / "template-builds", uid_base=_BUILDERS_IDS)
        internet = (await runtime.start()).egress
        await runtime.sweep(set())
    templates = Templates(root / "templates", runtime)
    await templates.start(internet=bool(internet))
    try:
        yield templates
    finally:
        await templates.close()
        if runtime is not None:
            await runtime.close()


@app.command("list")
def list_templates(state: _State = None, json_output: _Json = False) -> None:
    """The templates that are here."""
    rows = asyncio.run(_rows(state))
    if json_output:
        print_json(rows)
        return
    shown = [(r["name"], r["id"], r["tags"], r["state"], f"{r['mib']:.0f}", str(r["layers"]), r["made"]) for r in rows]
    columns = ("name", "id", "tags", "state", "MiB", "layers", "made")
    stdout().print(table(columns, shown, right=("MiB", "layers")))


async def _rows(state: Path | None) -> list[dict[str, Any]]:
    async with _open(state) as templates:
        found = []
        for template in sorted(templates.records.everything(), key=lambda t: (t.tenant, t.names)):
            builds = templates.builds_of(template)
            ready = next((each for each in builds if each.image), None)
            layers = templates.store.image(ready.image).layers if ready else ()
            sizes = [templates.store.layer(templates.store.digest_of(path)).bytes for path in layers]
            found.append(
                {
                    "name": template.names[0],
                    "id": template.id,
                    "tenant": template.tenant,
                    "tags": " ".join(sorted(template.tags)),
                    "state": builds[0].state if builds else "empty",
                    "image": ready.image if ready else "",
                    "layers": len(layers),
                    "mib": sum(sizes) / 2**20,
                    "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(template.updated)),
                }
            )
        return found


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(help="Name or id.")],
    tenant: Annotated[str, typer.Option(help="Whose template; default: everybody's.")] = "",
    state: _State = None,
) -> None:
    """Forget a template. Sandboxes made from it go on; its layers go with ``gc``."""

    async def work() -> None:
        async with _open(state) as templates:
            await templates.remove(tenant, name)

    asyncio.run(work())
    stdout().print(f"removed {name}", markup=False)


@app.command("gc")
def collect(
    cache_days: Annotated[float, typer.Option(help="Keep what build steps gave for so long; 0 = not at all.")] = 30.0,
    state: _State = None,
    json_output: _Json = False,
) -> None:
    """Remove layers that no template, sandbox, snapshot or recent build needs.

    What a service made of a removed template (the memory of microVMs) goes within a minute, or when it next starts.
    """
    from venusrl.sandboxes.manager.state import default_state

    async def work() -> Any:
        async with _open(state) as templates:
            in_use = await asyncio.to_thread(_in_use, (state or default_state()).absolute())
            return await templates.collect(in_use, cache_days * 86400.0 if cache_days else -1.0)

    done = asyncio.run(work())
    if json_output:
        print_json(
            {"layers": done.layers, "bytes": done.bytes, "kept": done.kept_layers, "kept_bytes": done.kept_bytes}
        )
        return
    stdout().print(f"removed {done.layers} layers ({done.bytes >> 20} MiB), kept {done.kept_layers}", markup=False)


def _in_use(state: Path) -> set[str]:
    """Images of sandboxes and snapshots, whose templates may have been removed: of this host, and, as the service
    records them, of all nodes."""
    import msgspec

    from venusrl.sandboxes.host import records, snapshots
    from venusrl.sandboxes.manager.state import DATABASE, open_state

    host = state / "host"
    kinds: dict[str, type[records.Record] | type[snapshots.Kept]] = {
        "sandboxes/*.json": records.Record,
        "snapshots/*/record.json": snapshots.Kept,
    }
    found = set()
    if (state / DATABASE).exists():
        with closing(open_state(state)) as store:
            found |= {one.template for one in store.living()} | {one.template for one in store.snapshots()}
    for pattern, kind in kinds.items():
        for path in sorted(host.glob(pattern)):
            try:
                found.add(msgspec.json.decode(path.read_bytes(), type=kind).image.id)
            except FileNotFoundError:
                continue  # ended meanwhile
            except msgspec.MsgspecError as error:
                raise CommandError(f"{path} cannot be read ({error}): put it right before collecting") from None
    return found


def _shown(build: Build) -> dict[str, Any]:
    reason = {"message": build.reason.message, "step": build.reason.step} if build.reason else None
    return {"build": build.id, "template": build.template, "state": build.state, "image": build.image, "reason": reason}
