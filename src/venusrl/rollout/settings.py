"""What the gateway is told once: pins and limits of every turn.

Owns: ``GatewaySettings``, and what a recipe means for it. Must not know: engines, trajectories.
"""

from __future__ import annotations

import msgspec

from venusrl.recipe import Recipe
from venusrl.rollout.turns import Asked
from venusrl.types import SamplingParams


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling`` is pinned. ``pinned_version``: every token must come from exactly this version.

    ``turn_timeout_s`` is the one limit on a turn's stay at an engine: past it the turn is aborted and asked
    again, which counts as a loss. The wait for a dispatch is the scheduler's to bound, and the episode's.
    ``keep_partials``: an aborted turn resumes where it stopped, possibly with newer weights.
    """

    sampling: SamplingParams
    context_tokens: int
    max_turn_tokens: int
    keep_partials: bool = True
    turn_timeout_s: float = 300.0
    turn_reissues: int = 4
    abort_grace_s: float = 10.0
    pinned_version: int | None = None
    salt_by_version: bool = True

    @classmethod
    def of(cls, recipe: Recipe, stop_token_ids: tuple[int, ...]) -> GatewaySettings:
        """What a recipe says about training rollouts. Only ``in_flight`` updates may mix versions in a turn."""
        rollout = recipe.rollout
        return cls(
            sampling=SamplingParams(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop_token_ids=stop_token_ids,
            ),
            context_tokens=rollout.context_tokens,
            max_turn_tokens=recipe.agent.max_turn_tokens,
            keep_partials=rollout.weight_update == "in_flight",
            turn_timeout_s=rollout.turn_timeout_s,
            turn_reissues=rollout.turn_reissues,
        )

    def overridden(self, max_tokens: int, asked: Asked | None) -> list[str]:
        """Names of what an agent asked for and does not get, because the rollout pins it."""
        names = []
        if asked is not None:
            for name in ("temperature", "top_p", "top_k", "seed"):
                value = getattr(asked, name)
                if value is not None and value != getattr(self.sampling, name):
                    names.append(name)
            names += ["stop"] if asked.stop else []
            names += ["penalties"] if asked.penalties else []
        return names + (["max_tokens"] if max_tokens > self.max_turn_tokens else [])
