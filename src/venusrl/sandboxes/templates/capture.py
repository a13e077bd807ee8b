"""A sandbox's changes become a layer.

Owns: how each runtime's sandboxes give up what they changed over their template.

Must not know: builds, where layers are kept.

Guarantees: the result is a layer in overlayfs form with owners as seen inside. Anything in it that only means something
to the old mount is refused rather than kept.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Instance, Runtime
from venusrl.sandboxes.runtimes.namespace import archive
from venusrl.sandboxes.runtimes.namespace.instance import FILES
from venusrl.sandboxes.runtimes.namespace.orders import UPPER
from venusrl.sandboxes.templates.build import Capture

_FOREIGN = ("trusted.overlay.redirect", "trusted.overlay.metacopy", "user.overlay.redirect", "user.overlay.metacopy")
_EMPTIED = ("proc", "sys", "dev", "run")
"""Mount points: what a step left under them is not the template's."""


def capture_of(runtime: Runtime) -> Capture:
    """How sandboxes of ``runtime`` are captured. Raises SandboxError where it is not known."""
    if runtime.name == "namespace":
        return namespace_changes
    raise SandboxError(
        f"templates cannot be built in sandboxes of the {runtime.name} runtime: build them with the namespace runtime "
        "(their layers serve every runtime), or import an image"
    )


async def namespace_changes(instance: Instance, directory: Path) -> None:
    """From a files-only snapshot, which is the upper directory of the sandbox's overlay."""
    kept = directory.with_name(f"{directory.name}.snapshot")
    await instance.snapshot(kept, memory=False)
    await asyncio.to_thread(_unfold, kept, directory)


def _unfold(kept: Path, directory: Path) -> None:
    whole = directory.with_name(f"{directory.name}.whole")
    (whole / UPPER).mkdir(parents=True)
    archive.unpack(kept / FILES, whole, 0)
    upper = whole / UPPER
    for folder, names, _ in os.walk(upper):
        for name in ("", *names):
            path = Path(folder, name)
            for attribute in _FOREIGN:
                with suppress(OSError):
                    os.getxattr(path, attribute, follow_symlinks=False)
                    raise SandboxError(
                        "this kernel keeps renamed directories by reference: turn overlay's redirect_dir off"
                    )
    for name in _EMPTIED:
        place = upper / name
        if place.is_dir() and not place.is_symlink():
            for entry in place.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    upper.rename(directory)
