"""The second line: what to do when memory runs short although admission said it would not.

Owns: ``Guard``, with its thresholds and its state a host, and the order in which sandboxes are paused.

Must not know: forecasts, templates.

Guarantees: hysteresis (a host that stopped admitting starts again only well above the line that stopped it, one that
pauses goes on until well above the line that began it). Never a mandatory sandbox while another will do, never one with
a command running while an idle one will do, never one whose pause would free nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from venusrl.sandboxes.admission.api import HostView, Pause, SandboxView

Level = Literal["open", "closed", "relieving"]
_BANDS = 3


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory as a share of the host's capacity, pressure as PSI "some" over 10 s in percent.

    Below ``close`` (or above ``close_pressure``) nothing is admitted until ``open``; below ``relieve`` idle sandboxes
    are paused until ``close``; below ``critical`` those with a running command too. Pressure counts only below
    ``heeded``: with more memory left, who stalls is a sandbox at its own limit, and no neighbour pays for that.
    """

    open: float = 0.06
    close: float = 0.04
    relieve: float = 0.025
    critical: float = 0.012
    heeded: float = 0.15
    open_pressure: float = 5.0
    close_pressure: float = 10.0
    relieve_pressure: float = 30.0


class Guard:
    """One for all hosts; it remembers each one's level by name."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._at = thresholds or Thresholds()
        self._levels: dict[str, Level] = {}

    def level(self, host: HostView) -> Level:
        """Take note of the host's state and say what it calls for."""
        at, before = self._at, self._levels.get(host.name, "open")
        free = host.available / max(1, host.capacity)
        pressure = (host.pressure or 0.0) if free < at.heeded else 0.0
        severe = free < at.relieve or pressure > at.relieve_pressure
        short = free < at.close or pressure > at.close_pressure
        wary = free < at.open or pressure > at.open_pressure
        now: Level = "open"
        if severe or (before == "relieving" and short):
            now = "relieving"
        elif short or (before != "open" and wary):
            now = "closed"
        self._levels[host.name] = now
        return now

    def relieve(self, host: HostView) -> tuple[Pause, ...]:
        """Enough pauses to be above the line again, the cheapest memory first; none without need."""
        if self.level(host) != "relieving":
            return ()
        wanted = int(self._at.close * host.capacity) - host.available
        critical = host.available < self._at.critical * host.capacity
        reason = f"{host.available >> 20} MiB of memory left on {host.name}, pressure {host.pressure or 0.0:.0f}%"
        chosen: list[Pause] = []
        for view in order_of_pausing(host.sandboxes, busy_too=critical):
            if chosen and wanted <= 0:
                break
            chosen.append(Pause(view.id, reason))
            wanted -= freed_by_pausing(view)
        return tuple(chosen)

    def forget(self, host: str) -> None:
        self._levels.pop(host, None)


def freed_by_pausing(view: SandboxView) -> int:
    return view.private if view.reclaimable is None else view.reclaimable


def order_of_pausing(sandboxes: Iterable[SandboxView], *, busy_too: bool) -> list[SandboxView]:
    """Whom to pause first: not mandatory, idle, of the lower priorities, most memory per second of resuming.

    Priorities are compared by thirds of those present, so that memory decides among those that matter about as much.
    """
    able = [view for view in sandboxes if not view.paused and freed_by_pausing(view) > 0]
    able = [view for view in able if busy_too or view.idle_s is not None]
    priorities = sorted({view.priority for view in able})

    def band(view: SandboxView) -> int:
        return _BANDS * priorities.index(view.priority) // len(priorities)

    def key(view: SandboxView) -> tuple[bool, bool, int, float, str]:
        worth = freed_by_pausing(view) / max(1e-3, view.resume_cost_s)
        return (view.mandatory, view.idle_s is None, band(view), -worth, view.id)

    return sorted(able, key=key)
