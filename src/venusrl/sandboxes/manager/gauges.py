"""What sandboxes used, for as long as somebody may ask.

Owns: a ring of samples a sandbox. Pure.

Must not know: who samples, HTTP.

Guarantees: bounded memory a sandbox; samples in the order of their times.
"""

from __future__ import annotations

from collections import deque

import msgspec

from venusrl.sandboxes.agent.api import Usage

RING = 720
"""Samples kept a sandbox: an hour, one every five seconds."""


class Sample(msgspec.Struct, frozen=True):
    """One look at a sandbox; ``at`` since the epoch."""

    at: float
    usage: Usage


class Gauges:
    """Samples by sandbox."""

    def __init__(self, ring: int = RING) -> None:
        self._ring = ring
        self._samples: dict[str, deque[Sample]] = {}

    def add(self, sandbox: str, at: float, usage: Usage) -> None:
        ring = self._samples.setdefault(sandbox, deque(maxlen=self._ring))
        if not ring or ring[-1].at <= at:
            ring.append(Sample(at, usage))

    def last(self, sandbox: str) -> Sample | None:
        ring = self._samples.get(sandbox)
        return ring[-1] if ring else None

    def between(self, sandbox: str, start: float | None, end: float | None) -> list[Sample]:
        """Inclusive; E2B asks in whole seconds, so that an end within its second counts."""
        return [
            one
            for one in self._samples.get(sandbox, ())
            if (start is None or one.at >= start) and (end is None or one.at < end + 1)
        ]

    def forget(self, sandbox: str) -> None:
        self._samples.pop(sandbox, None)
