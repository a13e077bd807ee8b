"""``mini-swe``: short commands, a thinking 8B model, the history kept whole.

Owns: the fit to one published profile: SWE-bench Lite, mini-SWE-agent, Qwen3-8B (chosen-ox's fork of ThunderAgent,
``scripts/swe_bench_analysis_output.txt``; 100 tasks, one attempt each). Its quantiles are the distributions:

- steps p10 2, p50 9, p75 19.5, p90 49, p99 135;
- completion tokens a step p10 365, p50 628, p75 958, p90 1540, p99 36.5k (runaways);
- tool seconds p50 0.11, p75 0.20, p90 0.31, p99 2.56, max 8.9.

Its prompts are p50 6.5k, p90 17.6k, max 40.9k a step, but its outputs p50 13.5k, p90 58.2k, p99 90.8k a task: thoughts
do not stay in that history. A script's context only grows, so here a completion counts whole and prompts come out about
twice as long as measured; a limit of 98,304 tokens ends the outputs where the measured ones end. The group correlation
(one factor on the number of steps) is that of ``openswe``: this profile has no groups.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec

from venusrl.simulation.scenario import Script, TurnScript
from venusrl.simulation.workloads.draws import Quantiles, correlated, stream
from venusrl.simulation.workloads.openswe import SETUP_S, VERIFY_S

STEPS = Quantiles(((0.1, 2.0), (0.5, 9.0), (0.75, 19.5), (0.9, 49.0), (0.99, 135.0)), 1.0, 250.0)
COMPLETION = Quantiles(((0.1, 365.0), (0.5, 628.0), (0.75, 958.0), (0.9, 1540.0), (0.99, 36_500.0)), 32.0, 36_500.0)
TOOL_S = Quantiles(((0.5, 0.11), (0.75, 0.20), (0.9, 0.31), (0.99, 2.56)), 0.02, 8.9)


class MiniSwe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mini-swe"):
    """See the module."""

    context_tokens: int = 98_304
    rho: float = 0.3
    order: int | None = None

    @property
    def name(self) -> str:
        return "mini-swe"

    @property
    def tasks(self) -> int | None:
        return self.order

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        prompt, common, chance = _task(seed, ordinal)
        own = stream("mini-swe", seed, ordinal, index, attempt)
        steps = max(1, round(STEPS.at(correlated(self.rho, common, own.gauss()))))
        context, turns = prompt, []
        for _ in range(steps):
            generated = min(round(COMPLETION.at(own.gauss())), self.context_tokens - context)
            if generated < 1:
                break
            observation = min(4096, round(80 * math.exp(1.2 * own.gauss())))
            turns.append(TurnScript(generated, TOOL_S.at(own.gauss()), observation, int(own.random() < 0.15)))
            context += generated + observation
        return Script(
            prompt=prompt,
            shared_prefix=prompt,
            turns=tuple(turns),
            reward=float(own.random() < chance),
            setup_s=SETUP_S.at(own.gauss()),
            verify_s=VERIFY_S.at(own.gauss()),
            max_turn_tokens=self.context_tokens,
        )


@lru_cache(maxsize=1024)
def _task(seed: int, ordinal: int) -> tuple[int, float, float]:
    """First prompt, the factor of its group, chance of being solved."""
    draws = stream("mini-swe task", seed, ordinal)
    return round(draws.uniform(1_200, 3_000)), draws.gauss(), draws.betavariate(0.4, 0.8)
