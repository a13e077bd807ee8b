"""What the sandboxes of a host really use, measured in rotation.

Owns: whom to measure next, how long to rest between two measurements, what pausing and resuming has cost so far.

Must not know: how a footprint is measured, admission's formulae.

Guarantees: measuring takes at most its share of one core, however many sandboxes there are; each is measured before any
is measured again; new ones first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from venusrl.clock import Clock
from venusrl.sandboxes.admission.api import Admission, SandboxView
from venusrl.sandboxes.host.cells import Cell, Cells
from venusrl.sandboxes.protocol import SandboxError, SandboxPaused

CPU_SHARE = 0.03
_AGAIN_S = 1.0
"""No sandbox is measured more often than this."""
_LONGEST_REST_S = 2.0
_WEIGHT = 0.2
"""Of a new measurement in a running average."""


class Learned:
    """What a pause frees and a resume takes, by runtime."""

    def __init__(self) -> None:
        self._resume_s: dict[str, float] = {}
        self._freed: dict[str, float] = {}

    def resumed(self, runtime: str, seconds: float) -> None:
        self._resume_s[runtime] = _blend(self._resume_s.get(runtime), seconds)

    def paused(self, runtime: str, before: int, after: int) -> None:
        if before > 0:
            self._freed[runtime] = _blend(self._freed.get(runtime), max(0.0, 1.0 - after / before))

    def resume_s(self, runtime: str) -> float:
        return self._resume_s.get(runtime, 0.1)

    def reclaimable(self, runtime: str, private: int) -> int | None:
        """None while nothing was paused yet."""
        share = self._freed.get(runtime)
        return None if share is None else round(private * share)

    def view(self, cell: Cell, now: float, wall: float) -> SandboxView:
        """A sandbox as admission sees it; ``now`` is monotonic, ``wall`` since the epoch."""
        record = cell.record
        private = record.footprint.total
        return SandboxView(
            id=cell.id,
            template=record.image.id,
            group=record.order.group,
            age_s=max(0.0, wall - record.created),
            private=private,
            declared=cell.limits.memory_mib << 20,
            paused=record.state in ("paused", "pausing"),
            priority=record.order.priority,
            mandatory=record.order.mandatory,
            idle_s=cell.idle_s(now),
            resume_cost_s=self.resume_s(record.order.runtime),
            cpus=cell.limits.cpus,
            reclaimable=self.reclaimable(record.order.runtime, private),
        )


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)


class Footprints:
    """The rotation. ``shared`` is called now and then to measure the templates too."""

    def __init__(self, cells: Cells, admission: Admission, clock: Clock, shared: Callable[[], Awaitable[None]]) -> None:
        self._cells = cells
        self._admission = admission
        self._clock = clock
        self._shared = shared
        self._shared_at: float | None = None

    async def step(self) -> None:
        """Measure one sandbox, or what templates share, and rest."""
        began = self._clock.monotonic()
        if self._shared_at is None or began - self._shared_at >= 5.0:
            await self._shared()
            self._shared_at = self._clock.monotonic()
        else:
            cell = self._next(began)
            if cell is None:
                await self._clock.sleep(_AGAIN_S / 4)
                return
            await self.measure(cell)
        await self._clock.sleep(rest(self._clock.monotonic() - began))

    async def measure(self, cell: Cell) -> None:
        """Look at one sandbox and tell admission."""
        cell.sampled = self._clock.monotonic()
        try:
            footprint = await cell.alive().footprint()
        except SandboxPaused:
            return
        except SandboxError:
            self._cells.count("footprints_failed")
            return
        cell.record.footprint = footprint
        if not cell.paused:
            record = cell.record
            age = max(0.0, self._clock.time() - record.created)
            self._admission.observe(record.image.id, record.order.group, cell.id, age, footprint.total)

    def _next(self, now: float) -> Cell | None:
        """The running one that was measured longest ago; never before first."""
        due = [
            cell
            for cell in self._cells.made()
            if cell.record.state == "running" and not cell.doomed and not cell.lacks
            if cell.sampled is None or now - cell.sampled >= _AGAIN_S
        ]
        return min(due, key=lambda cell: -1.0 if cell.sampled is None else cell.sampled, default=None)


def rest(spent: float, share: float = CPU_SHARE) -> float:
    """How long to rest after ``spent`` seconds of measuring, so that it takes ``share`` of one core."""
    return min(_LONGEST_REST_S, max(0.001, spent / share - spent))
