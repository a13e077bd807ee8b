"""What a template is to a runtime and to the manager.

Owns: the data. ``templates/store.py`` keeps templates on a host, content-addressed; ``templates/build.py`` makes them.

Must not know: runtimes, HTTP.
"""

from __future__ import annotations

import msgspec

DEFAULT_USER = "user"


class Start(msgspec.Struct, frozen=True):
    """A command whose running state is part of the template; ``ready`` is polled until it exits with 0."""

    command: str
    ready: str = ""


class Image(msgspec.Struct, frozen=True):
    """A template as a runtime needs it.

    ``layers`` are absolute paths of root file system directories, lowest first, each read-only and shared by every
    template that has it (overlay lower directories, with overlayfs whiteouts and opaque marks). The name ``host``
    has no layers: this machine's own directories (namespace runtime only). ``id`` is content-addressed: equal ids are
    equal templates, so that whatever a runtime derives from one (a disk image, a virtual machine's memory) is kept
    under that id.
    """

    id: str
    name: str
    layers: tuple[str, ...] = ()
    env: dict[str, str] = {}
    user: str = DEFAULT_USER
    workdir: str = ""
    cpus: int = 1
    memory_mib: int = 512
    disk_mib: int = 512
    start: Start | None = None
    owner: str = ""
    """The tenant that built it: with ``share = "tenant"`` its pages are shared among that tenant's sandboxes only."""
