"""ThunderAgent as it counted in the published runs.

Owns: ``CountingCharacters``. The baseline of the comparisons counts prompts exactly, in ThunderAgent's favour; the
original divides characters by a ratio that begins at 5, becomes that of the first response and follows later ones
slowly. Where the text has fewer characters to a token it admits too many programs at first, and that is what its
measured hit rates show.
"""

from __future__ import annotations

from typing import Any

import msgspec

from venusrl.scheduling import events as ev
from venusrl.scheduling.policies import PendingTurn
from venusrl.scheduling.policies.programs import Program
from venusrl.scheduling.policies.thunderagent import ThunderAgent

FIRST_RATIO = 5.0
MEMORY = 0.8


class CountingCharacters(ThunderAgent):
    """``characters_per_token``: of the text; the router learns it. Options as ``ThunderAgent``'s, but ``order`` is that
    of programs in their first step alone, as in the study of it."""

    def __init__(self, characters_per_token: float, **options: Any) -> None:
        super().__init__(**options)
        self._true_ratio = characters_per_token
        self._ratio: float | None = None

    def _request(self, turn: PendingTurn) -> None:
        believed = int(turn.prompt_tokens * self._true_ratio / (self._ratio or FIRST_RATIO))
        super()._request(msgspec.structs.replace(turn, prompt_tokens=believed))
        # A response says how many they were.
        self.programs[turn.trajectory].prompt = turn.prompt_tokens + turn.resumed

    def _precedence(self, program: Program, now: float) -> float:
        return super()._precedence(program, now) if program.step == 1 else program.paused_tokens

    def _turn_finished(self, event: ev.TurnFinished, now: float) -> None:
        super()._turn_finished(event, now)
        known = self._ratio
        self._ratio = self._true_ratio if known is None else MEMORY * known + (1 - MEMORY) * self._true_ratio
