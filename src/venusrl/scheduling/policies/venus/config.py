"""What the ``venus`` policy can be told.

Owns: ``VenusConfig``: one switch a mechanism (for ablations) and the few numbers behind them. Must not know: how any
of it is done. The defaults are meant for every workload: nothing here is to be tuned by cell.
"""

from __future__ import annotations

import msgspec


class VenusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Switches first: each one off gives the policy without that mechanism."""

    frontier: bool = True
    """Order groups by the best admissible batch; off: by age alone."""
    longest_first: bool = True
    """Among those due together, trajectories expected to be longest first; off: in the order of their requests."""
    retention: bool = True
    """Hold a gap's KV by value; off: until somebody needs the room, the least recently used first."""
    late_binding: bool = True
    """What holds no KV goes wherever there is room; off: back to its last worker only."""
    sticky: bool = True
    """Residents go on before anybody enters; off: the first of the queue may take a resident's place at every turn."""
    pacing: bool = True
    """New trajectories start only where the working set still fits as it grows; off: wherever they fit now."""
    interference: bool = True
    """Background enters workers of the frontier only while its prefill takes less than ``interference_share``."""
    preemption: bool = True
    """Abort a long background turn for a waiting frontier trajectory."""
    migration: bool = True
    """Move at a turn's boundary, by transfer or re-prefill, where that pays."""
    sandboxes: bool = True
    """Ask for sandboxes in order of need and pause background ones for the frontier."""

    watermark: float = 0.92
    """Share of a worker's KV that admission fills."""
    overcommit: float = 2.0
    """Share of a worker's KV that residents, half-way through what they have left, may come to need together."""
    refresh_s: float = 5.0
    """How often ranks follow the predictions when nothing structural happened."""
    ageing_s: float = 1800.0
    """A turn held that long counts as frontier."""
    displace_after_s: float = 10.0
    """Background residents yield their KV at a turn's boundary to a frontier turn that waited that long."""
    claim_after_s: float = 30.0
    """A frontier or aged turn that waited that long keeps the room of one worker for itself."""
    interference_share: float = 0.2
    preempt_after_s: float = 30.0
    max_preemptions: int = 2
    """Of one trajectory."""
    migration_margin: float = 1.5
    """A move must save that many times what it costs."""
    scan: int = 24
    """Waiting turns looked at when room appears: what a big one leaves unused, smaller ones behind it may use."""

    def __post_init__(self) -> None:
        if not 0 < self.watermark <= 1:
            raise ValueError("watermark must lie in (0, 1]")
        positive = ("refresh_s", "ageing_s", "claim_after_s", "preempt_after_s", "migration_margin", "scan")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
