"""This machine as a host: runtimes, templates, admission and door put together.

Owns: which parts a host is made of, and where below the state directory each keeps its own.

Must not know: HTTP routes, records, keys.

Guarantees: a runtime's module is imported only when that runtime is asked for.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from venusrl.clock import SystemClock
from venusrl.sandboxes.admission.api import Admission
from venusrl.sandboxes.admission.footprint import FootprintAdmission, FootprintConfig
from venusrl.sandboxes.envd.door import Door
from venusrl.sandboxes.host.api import Host, Peer
from venusrl.sandboxes.host.local import HostConfig, Images, LocalHost
from venusrl.sandboxes.host.machine import reserve_of
from venusrl.sandboxes.manager.asks import Catalogue
from venusrl.sandboxes.manager.errors import ManagerError
from venusrl.sandboxes.manager.learnt import KeptFootprints
from venusrl.sandboxes.runtimes.base import Runtime
from venusrl.sandboxes.runtimes.namespace.orders import Disk
from venusrl.sandboxes.templates.fetch import FetchedTemplates, Origin
from venusrl.sandboxes.templates.service import Templates
from venusrl.sandboxes.templates.sharing import Share

LEARNED = "learned-footprints.json"
RUNTIMES = ("namespace", "microvm", "gvisor")


class LocalParts(msgspec.Struct, frozen=True):
    """A host and what the manager shares with it."""

    host: Host
    admission: Admission
    catalogue: Catalogue
    templates: Templates | None = None
    fetched: FetchedTemplates | None = None
    """Where templates are another machine's."""
    kept: KeptFootprints | None = None


async def assemble(
    state: Path,
    names: Iterable[str],
    *,
    memory: int | None = None,
    reserve: int | None = None,
    overload: float | None = None,
    internet: bool = False,
    name: str = "local",
    listen: str = "127.0.0.1",
    origin: Origin | None = None,
    share: Share = "tenant",
    merge: bool = False,
    disk: Disk = "memory",
) -> LocalParts:
    """A started host, ``name`` being what it goes by and ``listen`` the address at which sandboxes of other hosts
    arrive. ``origin``: whose templates it runs; None = its own. ``share``: which sandboxes may share pages.
    ``merge``: equal memory of preloaded processes is held once. ``disk``: where the files of namespaces are.

    Raises RuntimeUnavailable, ManagerError.
    """
    names = tuple(names)
    _check_memory(memory, reserve)
    if disk != "memory" and "namespace" not in names:
        raise ManagerError(f"--disk {disk} is for the namespace runtime; {', '.join(names)} keep files on disk anyway")
    runtimes = {one: _runtime(one, state / "runtimes" / one, disk) for one in names}
    admission = FootprintAdmission(FootprintConfig() if overload is None else FootprintConfig(target=overload))
    templates = Templates(state / "templates", runtimes.get("namespace"), share=share)
    templates.sharing.merge = merge and _can_merge(share)
    await templates.start(internet=internet)
    fetched = None if origin is None else FetchedTemplates(templates, origin)
    images: Images = fetched or templates
    config = HostConfig(name=name, memory=memory, reserve=reserve, listen=listen)
    host = LocalHost(state / "host", runtimes, images, admission, Door(), config, sharing=templates.sharing)
    if origin is None:  # nodes are told the key with every move to this host
        host.peer = Peer(name, "", secrets.token_hex(24))
    kept = KeptFootprints(state / LEARNED, admission, SystemClock())
    kept.start()  # first: starting the host measures what it takes up
    try:
        await host.start()
    except BaseException:  # whatever it was: nothing may go on writing
        await kept.close()
        raise
    return LocalParts(host, admission, templates, templates, fetched, kept)


def _check_memory(memory: int | None, reserve: int | None) -> None:
    """Raises ManagerError."""
    for given, option in ((memory, "--memory-mib"), (reserve, "--reserve-mib")):
        if given is not None and given < 0:
            raise ManagerError(f"{option} cannot be less than nothing ({given >> 20})")
    if memory is not None and memory <= (kept := reserve_of(memory, reserve)):
        raise ManagerError(
            f"--memory-mib {memory >> 20} leaves nothing for sandboxes: {kept >> 20} MiB are kept back (--reserve-mib)"
        )


def _can_merge(share: Share) -> bool:
    """Raises ManagerError."""
    from venusrl.sandboxes.runtimes.namespace import merging

    why_not = "no sandboxes may share (--share none)" if share == "none" else merging.why_not()
    if why_not is not None:
        raise ManagerError(f"--merge-memory: {why_not}")
    return True


def _runtime(name: str, state: Path, disk: Disk) -> Runtime:
    if name == "namespace":
        from venusrl.sandboxes.runtimes.namespace.runtime import NamespaceRuntime

        return NamespaceRuntime(state, disk=disk)
    if name == "microvm":
        from venusrl.sandboxes.runtimes.microvm.runtime import MicroVmRuntime

        return MicroVmRuntime(state)
    if name == "gvisor":
        from venusrl.sandboxes.runtimes.gvisor.runtime import GvisorRuntime

        return GvisorRuntime(state)
    raise ManagerError(f"there is no runtime {name!r}: choose of {', '.join(RUNTIMES)}")
