"""The trainer of a simulated run: batches in, versions out.

Owns: when a step begins and ends, and when its product is published. Must not know: engines, trajectories beyond the
lengths that a batch is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from venusrl.scheduling import actions as act
from venusrl.scheduling import events as ev
from venusrl.simulation.core import Core
from venusrl.simulation.scenario import TrainerSpec


@dataclass(slots=True)
class Training:
    """One batch at the trainer. ``lengths``: tokens of its trajectories."""

    version: int
    groups: tuple[str, ...]
    lengths: list[int]
    formed_at: float
    began_at: float = 0.0
    trained_at: float = 0.0
    published_at: float = 0.0


class Trainer:
    """See the module. ``collect`` takes the groups of a batch away and answers their lengths; ``on_published`` hears
    of a version after the scheduler did."""

    def __init__(
        self,
        core: Core,
        spec: TrainerSpec,
        collect: Callable[[act.FormBatch], list[int]],
        on_published: Callable[[int], None],
    ) -> None:
        self.steps: list[Training] = []
        self.busy_s = 0.0
        self.published = 0
        self._core = core
        self._spec = spec
        self._collect = collect
        self._on_published = on_published
        self._free_at = 0.0
        self._publishing = False
        self._waiting: list[Training] = []
        """Trained, their products not on their way yet."""
        core.carry_out[act.FormBatch] = self._form
        core.after_timer.append(self._publish_next)

    @property
    def idle(self) -> bool:
        """Nothing to train and nothing to publish."""
        working = bool(self.steps) and not self.steps[-1].trained_at
        return not working and not (self._spec.publish_blocks and (self._publishing or self._waiting))

    def _form(self, action: act.FormBatch) -> None:
        now = self._core.now
        training = Training(action.version, action.groups, self._collect(action), formed_at=now)
        self.steps.append(training)
        if self._spec.publish_blocks and (self._publishing or self._waiting):
            return
        self._begin(training)

    def _begin(self, training: Training) -> None:
        training.began_at = self._core.now
        self._core.later(self._spec.step_s(training.lengths), self._trained, training)

    def _trained(self, training: Training) -> None:
        self._core.worked()
        training.trained_at = self._core.now
        self.busy_s += training.trained_at - training.began_at
        self._waiting.append(training)
        self._core.report(ev.BatchTrained(training.version))

    def _publish_next(self) -> None:
        """A version leaves as soon as the one before it has arrived and nothing in flight forbids it."""
        if not self._waiting or self._publishing or self._core.scheduler.window.publication_waits:
            return
        self._publishing = True
        self._core.later(self._spec.publish_s, self._published, self._waiting.pop(0))

    def _published(self, training: Training) -> None:
        self._core.worked()
        self._publishing = False
        training.published_at = self._core.now
        self.published = training.version + 1
        self._core.report(ev.VersionPublished(self.published))
        self._on_published(self.published)
        last = self.steps[-1]
        if self._spec.publish_blocks and not last.began_at and not self._waiting:
            self._begin(last)
