"""The run's predictor of lengths between its events: fitted beside the run, kept with it.

Owns: the file of what was learned, and when a model is fitted: in a thread, so that no turn waits for it. Must not
know: what a forecast is used for.

Guarantees: a resumed run goes on with what it had learned; a file that cannot be used costs what was learned, with a
line that says why, and never the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from venusrl.scheduling.predictor import Predictor, StateError
from venusrl.scheduling.predictor.learned import Learned

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_SAVE_EVERY = 15
"""Looks between two saves."""


class Forecasts:
    """See the module. Without a predictor it has nothing to do."""

    def __init__(
        self, predictor: Predictor | None, path: Path, on_event: Callable[[str, dict[str, object]], None]
    ) -> None:
        self.predictor = predictor
        self._path = path
        self._on_event = on_event

    def load(self) -> None:
        """Before any event: go on from the file, if there is one."""
        if self.predictor is None or not self._path.is_file():
            return
        try:
            self.predictor.load(self._path.read_bytes())
        except (OSError, StateError) as error:
            _log.warning("the length predictor starts anew: %s", error)
            self._on_event("predictor_reset", {"cause": str(error)})

    async def keep(self) -> None:
        """For ever: fit when it is due, save now and then."""
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.refit()
            looks += 1
            if looks % _SAVE_EVERY == 0:
                self.try_to_save()

    async def refit(self) -> bool:
        """Fit if that is due; the slow part in a thread. Says whether a new model answers now."""
        if not isinstance(self.predictor, Learned):
            return False
        self.predictor.look()
        job = self.predictor.prepare()
        if job is None:
            return False
        self.predictor.adopt(await asyncio.to_thread(job.run))
        quality = self.predictor.quality()
        figures = {"spearman": quality.spearman, "coverage": quality.coverage, "refits": quality.refits}
        self._on_event("predictor_fitted", {"active": quality.active, **figures})
        return True

    def try_to_save(self) -> None:
        """As ``save``; a full disk costs what was learned (the run's own record says of it what matters)."""
        try:
            self.save()
        except OSError as error:
            _log.warning("what the length predictor learned is not saved: %s", error)

    def save(self) -> None:
        """What was learned, to the file (atomically). Raises OSError."""
        state = b"" if self.predictor is None else self.predictor.state()
        if not state:
            return
        staging = self._path.with_name(self._path.name + ".partial")
        staging.write_bytes(state)
        os.replace(staging, self._path)
