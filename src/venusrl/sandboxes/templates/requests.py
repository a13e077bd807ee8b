"""What may be asked of templates, and how much of it: data alone.

Owns: ``BuildRequest``, ``Sizes``, ``Rules``.

Must not know: how anything is built or kept.
"""

from __future__ import annotations

import msgspec

from venusrl.sandboxes.templates import oci
from venusrl.sandboxes.templates.build import BuildRules, Step


class BuildRequest(msgspec.Struct, frozen=True, rename="camel"):
    """A build as E2B's clients ask for it."""

    from_image: str = ""
    from_template: str = ""
    from_image_registry: oci.Login | None = None
    force: bool = False
    steps: tuple[Step, ...] = ()
    start_cmd: str = ""
    ready_cmd: str = ""


class Sizes(msgspec.Struct, frozen=True):
    """Of a template's sandboxes: processors, and MiB."""

    cpus: int = 1
    memory_mib: int = 512
    disk_mib: int = 512


USUAL = Sizes()


class Rules(msgspec.Struct, frozen=True):
    """Limits of the service. ``most_*`` bound what a template may ask for."""

    at_once: int = 2
    waiting: int = 32
    most_cpus: int = 8
    most_memory_mib: int = 16384
    most_disk_mib: int = 32768
    upload_bytes: int = 4 << 30
    cache_age_s: float = 30 * 86400.0
    build: BuildRules = BuildRules()
