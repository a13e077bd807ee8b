"""What a dead vLLM said of its end.

Owns: finding the first failure in the log of a vLLM that ended. It leaves with exit code 0, and the last lines of its
log are about leaked objects: what happened stands a hundred lines above, where the process that failed first wrote it.

Must not know: processes, restarts.
"""

from __future__ import annotations

import re
from pathlib import Path

_READ_BYTES = 1 << 20
_START = "\n--- "
"""Before the first line of every start in a log that several starts share (``coordinator.processes``)."""
_FAILURE = re.compile(
    r"^\([^)]*pid=\d+\) (?:ERROR \S+ \S+ \[[^\]]*\] )?(?P<failure>[A-Za-z_][\w.]*(?:Error|Exception): .+)",
    re.MULTILINE,
)


def first_failure(log: Path) -> str | None:
    """The first error that one of vLLM's processes wrote in its last start; None if none did, or the log is gone."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    found = _FAILURE.search(text.rpartition(_START)[2])
    return found["failure"].strip() if found else None
