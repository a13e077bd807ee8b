"""``venusrl env``: the environment service, its keys, and a look at it.

A service is started with ``serve``. The other commands talk to it over HTTP, with what its state directory holds
(``--state``) or with ``--url`` and the variables E2B_API_KEY and VENUSRL_ENV_ADMIN_KEY.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from venusrl.cli import env_template, env_view
from venusrl.cli.env_client import caller_for
from venusrl.cli.output import CommandError, print_json, stderr, stdout, warn

if TYPE_CHECKING:
    from rich.console import RenderableType

    from venusrl.sandboxes.manager.node import Node
    from venusrl.sandboxes.manager.serve import Server


class Share(StrEnum):
    """As ``templates/sharing.py`` has it; here so that ``--help`` stays quick."""

    TENANT = "tenant"
    ALL = "all"
    NONE = "none"


class Disk(StrEnum):
    """As ``runtimes/namespace/orders.py`` has it."""

    MEMORY = "memory"
    FILE = "file"


app = typer.Typer(no_args_is_help=True, help="Sandboxes as a service that E2B's SDKs can use.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys of the service.")
app.add_typer(keys_app, name="key")
app.add_typer(env_template.app, name="template")

_ANY_WIDTH = 10_000
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
_State = Annotated[Path | None, typer.Option("--state", help="State directory. Default: VENUSRL_ENV_STATE.")]
_Share = Annotated[Share, typer.Option(help="Which sandboxes may share pages of a template.")]
_Disk = Annotated[Disk, typer.Option(help="Where namespaces' files are: in memory, or in a file each (loop devices).")]
_Merge = Annotated[bool, typer.Option("--merge-memory", help="Hold equal memory of preloaded processes once (KSM).")]
_Url = Annotated[str, typer.Option("--url", help="The service. Default: the one of the state directory.")]


@app.command("serve")
def serve(
    state: _State = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the API.")] = "127.0.0.1:3000",
    traffic: Annotated[str, typer.Option(help="HOST:PORT for traffic to sandboxes. Default: the same port.")] = "",
    domain: Annotated[str, typer.Option(help="Sandboxes are {port}-{id}.DOMAIN. Default: localhost:PORT.")] = "",
    runtime: Annotated[list[str] | None, typer.Option(help="namespace, microvm, gvisor; the first is used.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory for all sandboxes. Default: the machine's.")] = None,
    reserve_mib: Annotated[int | None, typer.Option(help="Memory of it that sandboxes never get.")] = None,
    overload: Annotated[float | None, typer.Option(help="Probability of overload that is accepted.")] = None,
    share: _Share = Share.TENANT,
    merge_memory: _Merge = False,
    disk: _Disk = Disk.MEMORY,
    max_timeout: Annotated[float, typer.Option(help="Longest time to live that may be asked for, seconds.")] = 86400.0,
    internet: Annotated[bool, typer.Option(help="Whether sandboxes that say nothing may reach the internet.")] = False,
    node_grace: Annotated[float, typer.Option(help="Seconds of silence after which a node is lost.")] = 60.0,
    replicas: Annotated[Path | None, typer.Option(help="Directory for copies of paused sandboxes, snapshots.")] = None,
    replicas_mib: Annotated[int | None, typer.Option(help="What it may take. Default: what its disk has.")] = None,
    kill_on_exit: Annotated[bool, typer.Option("--kill-on-exit", help="End every sandbox at the end.")] = False,
    json_output: _Json = False,
) -> None:
    """Serve sandboxes until Ctrl-C; sandboxes go on, and the next serve takes them up again.

    Example:

    $ venusrl env serve --listen 127.0.0.1:3000
    """
    from venusrl.sandboxes.manager import node
    from venusrl.sandboxes.manager.asks import Settings
    from venusrl.sandboxes.manager.serve import ServeConfig, Server
    from venusrl.sandboxes.manager.state import default_state

    names = tuple(runtime or ("namespace",))
    config = ServeConfig(
        state=(state or default_state()).absolute(),
        listen=listen,
        traffic=traffic,
        domain=domain,
        runtimes=names,
        memory=None if memory_mib is None else memory_mib << 20,
        reserve=None if reserve_mib is None else reserve_mib << 20,
        overload=overload,
        share=share.value,
        merge=merge_memory,
        disk=disk.value,
        settings=Settings(runtime=names[0], max_timeout_s=max_timeout, internet=internet, node_grace_s=node_grace),
        replicas=None if replicas is None else replicas.absolute(),
        replicas_bytes=None if replicas_mib is None else replicas_mib << 20,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(Server(config, connect=node.connect), kill_on_exit, json_output))


async def _serve(server: Server, kill_on_exit: bool, json_output: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stderr().print("starting; the first start of a machine prepares its runtimes, which takes a while", markup=False)
    if not await _started(server.start(), stop):
        return
    try:
        (server.config.state / "url").write_text(server.url + "\n")
        _announce(server, json_output)
        await stop.wait()
    finally:
        living = server.living()
        ended = await server.stop(kill=kill_on_exit)
        console = stderr()
        if kill_on_exit:
            console.print(f"stopped; {ended} sandboxes were ended", markup=False)
        elif living:
            console.print(
                f"stopped; {living} sandboxes go on. To take them up again: venusrl env serve --state "
                f"{server.config.state}; to end them: the same with --kill-on-exit, then Ctrl-C",
                markup=False,
                soft_wrap=True,
            )
        else:
            console.print("stopped; there were no sandboxes", markup=False)


async def _started(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Whether it started; False when it was told to stop before."""
    starting = asyncio.create_task(start, name="start")
    stopping = asyncio.create_task(stop.wait(), name="told to stop")
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        stderr().print("stopped before it had started", markup=False)
        return False
    return True


def _announce(server: Server, json_output: bool) -> None:
    for address in server.open_to_others():
        warn(f"{address} is open to other machines, without TLS: whoever has a key can start sandboxes")
    variables = server.environment()
    if json_output:
        print_json({"url": server.url, "sandbox_url": server.sandbox_url, "environment": variables, "pid": os.getpid()})
        return
    console = stdout()
    settings = server.service.settings
    console.print(f"serving sandboxes at {server.url} (state {server.config.state})", markup=False)
    console.print(
        f"time to live: {settings.default_timeout_s:g} s unless asked for, at most {settings.max_timeout_s:g} s; "
        f"internet: {'yes' if settings.internet else 'no'} unless asked for",
        markup=False,
    )
    console.print("for E2B's SDK:", markup=False)
    for name, value in variables.items():
        console.print(f"  export {name}={value}", markup=False)
    if "E2B_API_KEY" not in variables:
        console.print("  export E2B_API_KEY=...   (one of your keys; venusrl env key create makes one)", markup=False)


@app.command("node")
def node_command(
    join: Annotated[str, typer.Option(help="URL of the service to join.")],
    key: Annotated[str, typer.Option(envvar="VENUSRL_ENV_JOIN_KEY", help="The service's join key (file join-key).")],
    state: _State = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT that the service reaches it at.")] = "127.0.0.1:3001",
    advertise: Annotated[str, typer.Option(help="Another HOST:PORT that the service is told.")] = "",
    name: Annotated[str, typer.Option(help="Its name. Default: the machine's.")] = "",
    runtime: Annotated[list[str] | None, typer.Option(help="namespace, microvm, gvisor.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory for all sandboxes. Default: the machine's.")] = None,
    reserve_mib: Annotated[int | None, typer.Option(help="Memory of it that sandboxes never get.")] = None,
    share: _Share = Share.TENANT,
    merge_memory: _Merge = False,
    disk: _Disk = Disk.MEMORY,
    json_output: _Json = False,
) -> None:
    """Give this machine to a service until Ctrl-C; sandboxes go on, and the next start takes them up again.

    Example:

    $ venusrl env node --join http://127.0.0.1:3000 --key "$(cat STATE/join-key)" --state /var/lib/venusrl-node
    """
    from venusrl.sandboxes.manager.node import Node, NodeConfig
    from venusrl.sandboxes.manager.state import default_state

    config = NodeConfig(
        state=(state or default_state() / "node").absolute(),
        join=join,
        key=key,
        listen=listen,
        advertise=advertise,
        name=name,
        runtimes=tuple(runtime or ("namespace",)),
        memory=None if memory_mib is None else memory_mib << 20,
        reserve=None if reserve_mib is None else reserve_mib << 20,
        share=share.value,
        merge=merge_memory,
        disk=disk.value,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_run_node(Node(config), json_output))


async def _run_node(node: Node, json_output: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stderr().print("starting; the first start of a machine prepares its runtimes, which takes a while", markup=False)
    if not await _started(node.start(), stop):
        return
    try:
        if node.open_to_others():
            warn(f"{node.config.listen} is open to other machines, without TLS: its key and all traffic can be read")
        if json_output:
            print_json({"name": node.name, "url": node.url, "pid": os.getpid()})
        else:
            stdout().print(f"node {node.name} at {node.url} joined {node.config.join}", markup=False)
        await stop.wait()
    finally:
        living = await node.living()
        await node.stop()
        stderr().print(f"stopped; {living} sandboxes go on, and the next start takes them up", markup=False)


class Setup(StrEnum):
    MICROVM = "microvm"


@app.command("setup")
def setup(
    what: Annotated[Setup, typer.Argument(help="The runtime to prepare.")],
    package: Annotated[Path | None, typer.Option(help="The kernel's .deb file. Default: fetched with apt.")] = None,
    state: _State = None,
) -> None:
    """Prepare a runtime that needs more than what is installed: the guest kernel of microVMs. Installs nothing."""
    from venusrl.sandboxes.manager.state import default_state, state_directory
    from venusrl.sandboxes.runtimes.microvm import setup as microvm

    folder = state_directory((state or default_state()).absolute() / "runtimes" / what.value)
    stdout().print(asyncio.run(microvm.setup(folder, package)), markup=False)


# Keys


@keys_app.command("create")
def create_key(
    name: Annotated[str, typer.Option(help="What it is for.")],
    max_sandboxes: Annotated[int, typer.Option(help="So many run at once.", min=1)] = 1000,
    creates_per_minute: Annotated[int, typer.Option(help="0 = no limit.", min=0)] = 0,
    tenant: Annotated[str, typer.Option(help="Keys of one tenant share sandboxes. Default: one of its own.")] = "",
    state: _State = None,
    json_output: _Json = False,
) -> None:
    """Make a key and print it: it is stored as a hash alone and cannot be shown again. The service may be running."""
    from venusrl.clock import SystemClock
    from venusrl.sandboxes.manager import keys
    from venusrl.sandboxes.manager.state import default_state, open_state

    store = open_state(state or default_state())
    with contextlib.closing(store):
        key, text = keys.create(
            store,
            SystemClock(),
            name,
            tenant=tenant,
            max_sandboxes=max_sandboxes,
            creates_per_minute=creates_per_minute,
        )
    if json_output:
        print_json({"id": key.id, "key": text, "tenant": key.tenant})
    else:
        stdout().print(text, markup=False)
        stderr().print(f"key {key.id}, tenant {key.tenant}; it will not be shown again", markup=False)


@keys_app.command("list")
def list_keys(state: _State = None, json_output: _Json = False) -> None:
    """The keys, without their text."""
    from venusrl.sandboxes.manager.state import default_state, open_state

    with contextlib.closing(open_state(state or default_state())) as store:
        found = store.all_keys()
    if json_output:
        import msgspec

        print_json([msgspec.to_builtins(key) for key in found])
        return
    rows = [
        (key.id, key.name, key.mask, key.tenant, str(key.max_sandboxes), env_view.ago(key.last_used)) for key in found
    ]
    columns = ("id", "name", "key", "tenant", "sandboxes", "used")
    _print(lambda width: env_view.fitting(columns, rows, width, right=("sandboxes",), least=("tenant", "key", "used")))


@keys_app.command("revoke")
def revoke_key(key: Annotated[str, typer.Argument(help="The key's id.")], state: _State = None) -> None:
    """Refuse a key from now on. Its sandboxes live until their time is up."""
    from venusrl.sandboxes.manager.state import default_state, open_state

    with contextlib.closing(open_state(state or default_state())) as store:
        if not store.remove_key(key):
            raise CommandError(f"there is no key {key!r}: see venusrl env key list")


# Look and act


@app.command("list")
def list_sandboxes(state: _State = None, url: _Url = "", json_output: _Json = False) -> None:
    """Every sandbox of the service, of all keys."""
    found = asyncio.run(_overview(state, url))["sandboxes"]
    if json_output:
        print_json(found)
    else:
        _print(lambda width: env_view.sandboxes(found, width))


@app.command("ps", hidden=True)
def ps(state: _State = None, url: _Url = "", json_output: _Json = False) -> None:
    """The same as list."""
    list_sandboxes(state, url, json_output)


@app.command("kill")
def kill(
    sandboxes: Annotated[list[str] | None, typer.Argument(help="Ids.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    state: _State = None,
    url: _Url = "",
) -> None:
    """End sandboxes, whoever's they are."""
    if bool(sandboxes) == everything:
        raise CommandError("name the sandboxes to end, or say --all")
    asyncio.run(_kill(sandboxes or [], state, url))


async def _kill(sandboxes: list[str], state: Path | None, url: str) -> None:
    async with caller_for(state, url) as call:
        names = sandboxes or [one["id"] for one in (await call("GET", "/admin/overview"))["sandboxes"]]
        for name in names:
            await call("DELETE", f"/admin/sandboxes/{name}", missing_ok=not sandboxes)
    stderr().print(f"{len(names)} sandboxes ended", markup=False)


@app.command("move")
def move(
    sandbox: Annotated[str, typer.Argument(help="Its id.")],
    node: Annotated[str, typer.Argument(help="The node. Default: where there is room.")] = "",
    state: _State = None,
    url: _Url = "",
    json_output: _Json = False,
) -> None:
    """Move a sandbox to another node; it keeps its id and, where its runtime can, goes on running.

    Example:

    $ venusrl env move SANDBOX NODE
    """
    answer = asyncio.run(_one(state, url, "POST", f"/admin/sandboxes/{sandbox}/move", {"to": node}))
    if json_output:
        print_json(answer)
    else:
        stdout().print(f"{sandbox} is on {answer['node']}: {env_view.how_it_moved(answer)}", markup=False)


@app.command("drain")
def drain(
    node: Annotated[str, typer.Argument(help="Its name.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take sandboxes again.")] = False,
    state: _State = None,
    url: _Url = "",
    json_output: _Json = False,
) -> None:
    """Admit nothing more on a node and move what it has elsewhere. Exit code 1 when something had to stay.

    It stays so when the service or the node starts again, until ``--undo``.
    """
    if undo:
        asyncio.run(_one(state, url, "POST", f"/nodes/{node}", {"status": "ready"}))
        stderr().print(f"{node} takes sandboxes again", markup=False)
        return
    answer = asyncio.run(_one(state, url, "POST", f"/nodes/{node}", {"status": "draining"}))
    if json_output:
        print_json(answer)
    else:
        stdout().print(f"{len(answer['moved'])} sandboxes moved, {len(answer['stayed'])} stayed", markup=False)
        for sandbox, reason in answer["stayed"].items():
            stdout().print(f"  {sandbox}: {reason}", markup=False)
    if answer["stayed"]:
        raise typer.Exit(1)


@app.command("top")
def top(
    state: _State = None,
    url: _Url = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 1.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one look as JSON, then end.")] = False,
) -> None:
    """A live view of nodes, templates and sandboxes; Ctrl-C ends it."""
    if json_output:
        print_json(asyncio.run(_overview(state, url)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(state, url, interval))


def _print(made: Callable[[int | None], RenderableType]) -> None:
    """A table as wide as the terminal, or, for a file or a program, as it wants to be."""
    console = stdout()
    if console.is_terminal:
        console.print(made(console.width))
        return
    console.width = _ANY_WIDTH  # that of a print is cut to the console's, which is 80 where there is no terminal
    console.print(made(None))


async def _watch(state: Path | None, url: str, interval: float) -> None:
    from rich.live import Live

    console = stdout()
    async with caller_for(state, url) as call:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                seen = await call("GET", "/admin/overview")
                live.update(env_view.top(seen, console.width, console.height), refresh=True)
                await asyncio.sleep(interval)


async def _overview(state: Path | None, url: str) -> dict[str, Any]:
    found: dict[str, Any] = await _one(state, url, "GET", "/admin/overview")
    return found


async def _one(state: Path | None, url: str, method: str, path: str, body: Any = None) -> Any:
    async with caller_for(state, url) as call:
        return await call(method, path, body)
