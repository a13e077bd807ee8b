"""Preloaded processes of several sandboxes hold their equal pages once: the kernel merges them (KSM).

Owns: whether this machine does that, and why not.

Must not know: who may merge with whom (``templates/sharing.py``), how a sandbox asks for it (``maker.c``).

Guarantees: the machine's setting is its operator's, and left alone. Nothing inside a sandbox can join by itself
(``seccomp.py``): whoever merges learns, by how long a write takes, what others hold.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_KSM = Path("/sys/kernel/mm/ksm/run")
_SINCE = (6, 7)
"""Kernels from then on keep the wish over an exec."""


def why_not(run: Path = _KSM, release: str = os.uname().release) -> str | None:
    """None where memory is merged, else what is lacking."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) < _SINCE or not run.exists():
        return "equal memory of preloaded processes is not merged: that needs Linux 6.7 or newer with KSM"
    if run.read_text().strip() != "1":
        return f"equal memory of preloaded processes is not merged: echo 1 > {run}"
    return None
