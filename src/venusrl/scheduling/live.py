"""What the scheduler remembers of a trajectory that is not over, and of a task to try again.

Owns: the two records. Must not know: how they change (``scheduler``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from venusrl.scheduling.window import Group


@dataclass(slots=True)
class Live:
    """A trajectory that is not over. ``doing``: starting, held, generating, tool, verifying, finished."""

    group: Group
    doing: str = "starting"
    denied: bool = False
    held: str | None = None


class Reissue(NamedTuple):
    """A task to try again: its dropped group, how often that makes, and why."""

    group: str
    times: int
    reason: str
