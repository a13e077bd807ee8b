"""A small synthetic workload with a handful of knobs: for tests and validation.

Owns: ``Synthetic``. Every draw comes from a generator seeded by (seed, ordinal, index, attempt), and what a group
shares from one seeded by (seed, ordinal).
"""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

from venusrl.simulation.scenario import Script, TurnScript


class Synthetic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ranges are uniform. ``spread`` is the sigma of a lognormal factor on a trajectory's number of turns, of which
    ``correlation`` (of the variance) is common to a group."""

    turns: tuple[int, int] = (4, 12)
    prompt: tuple[int, int] = (400, 800)
    own_prompt: tuple[int, int] = (0, 0)
    generated: tuple[int, int] = (50, 200)
    observation: tuple[int, int] = (20, 300)
    tool_s: tuple[float, float] = (0.1, 5.0)
    setup_s: tuple[float, float] = (0.0, 2.0)
    verify_s: tuple[float, float] = (0.0, 5.0)
    spread: float = 0.0
    correlation: float = 0.3
    tasks: int | None = None
    name: Literal["synthetic"] = "synthetic"

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        group = random.Random(f"{seed}/{ordinal}")
        own = random.Random(f"{seed}/{ordinal}/{index}/{attempt}")
        shared = group.randint(*self.prompt)
        common, private = group.gauss(0, 1), own.gauss(0, 1)
        z = math.sqrt(self.correlation) * common + math.sqrt(1 - self.correlation) * private
        turns = max(1, round(own.uniform(*self.turns) * math.exp(self.spread * z)))
        return Script(
            prompt=shared + own.randint(*self.own_prompt),
            shared_prefix=shared,
            turns=tuple(self._turn(own, last=k == turns - 1) for k in range(turns)),
            reward=float(own.random() < 0.5),
            setup_s=own.uniform(*self.setup_s),
            verify_s=own.uniform(*self.verify_s),
        )

    def _turn(self, own: random.Random, *, last: bool) -> TurnScript:
        generated = own.randint(*self.generated)
        if last:
            return TurnScript(generated)
        return TurnScript(generated, own.uniform(*self.tool_s), own.randint(*self.observation))
