"""``short``: one turn, no tools, no sandbox; where nothing but the tail of lengths makes a difference.

Owns: its three figures. Answers of 7.5k tokens on average, as a reasoning benchmark measured for Qwen3 (ML.ENERGY
leaderboard, gpqa: 7k to 8k); a lognormal with sigma 0.8, cut at 32k. Members of a group are alike as single-turn
reasoning is (Seer, arXiv 2511.14617, builds on it): rho 0.5. Sigma and rho are assumptions, the sources give
no more than that.
"""

from __future__ import annotations

import math

import msgspec

from venusrl.simulation.scenario import Script, TurnScript
from venusrl.simulation.workloads.draws import correlated, stream


class Short(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="short"):
    """See the module."""

    mean_tokens: float = 7_500.0
    sigma: float = 0.8
    max_tokens: int = 32_768
    rho: float = 0.5
    order: int | None = None

    @property
    def name(self) -> str:
        return "short"

    @property
    def tasks(self) -> int | None:
        return self.order

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        task = stream("short task", seed, ordinal)
        prompt, common, chance = round(task.uniform(100, 500)), task.gauss(), task.betavariate(0.5, 0.5)
        own = stream("short", seed, ordinal, index, attempt)
        z = correlated(self.rho, common, own.gauss())
        tokens = self.mean_tokens * math.exp(self.sigma * z - self.sigma**2 / 2)
        return Script(
            prompt=prompt,
            shared_prefix=prompt,
            turns=(TurnScript(min(max(1, round(tokens)), self.max_tokens)),),
            reward=float(own.random() < chance),
            verify_s=0.1,
            max_turn_tokens=self.max_tokens,
        )
