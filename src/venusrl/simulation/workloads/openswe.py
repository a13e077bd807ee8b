"""``openswe``: long software-engineering episodes, fitted to published measurements.

Owns: the fit and where each figure comes from. Sources:

- *P16*: ThunderAgent's pass@16 profile (``examples/datagen/harbor/docs/pass16-v3-profiling.md``): SWE-bench Verified,
  OpenHands, a 4B Qwen3, 500 tasks x 16, cap of 100 iterations;
- *TL*: TraceLab, arXiv 2606.30560: tool latencies of 432,510 calls;
- *CC*: 710 recorded coding sessions (see ``data/README.md``), for how much varies inside a session and between them.

What follows from them:

- **Turns.** P16 under its cap: solved mean 67.2, median 65; unsolved 84.8, median 98 (the cap hides the rest); mean
  of all 77.5. Lognormals around the two medians with sigma 0.42 give these means; here the cap is 300.
- **Tokens a turn.** P16: 183 median, p90 290, and 15.1k mean, 13.5k median, 41.0k p99 for a trajectory. With at most
  100 turns 41k needs 410 tokens a turn *on average*, so the 0.36 that p90/p50 gives is the spread between
  trajectories; CC has 0.36 between sessions too, and 0.84 inside them.
- **Context.** P16: 31.8k prompt tokens a turn on average, 2.57M a trajectory. A first prompt of 2k to 10k (shared by
  the group) and observations of 435 tokens on average meet both; their spread inside a session (1.6) is CC's.
- **Tools.** TL: median 0.3 s, 61% under 1 s, 27% 1 to 10 s, 8% 10 to 60 s, 4% more; p90 13.6, p99 of shells 235 s. Cut
  at 600 s, the usual time limit of a command. CC: 15% of the variance of (log) latencies lies between sessions.
- **Set-up, verification.** P16: medians 2.6 and 8 s, p90 11.2 and 60, p99 102 and 294; at most 1.7 h.
- **Reward.** P16's histogram of solved attempts out of 16 (it sums to 500; the prose beside it disagrees).
- **Group.** Members resemble one another: the slowest of 16 takes 1.92 times the mean in P16, which one common factor
  with rho 0.25 to 0.3 reproduces; without it stragglers are overstated.

Not known from data, and neutral: exit codes (15% failures, independent of everything).
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random
from typing import NamedTuple

import msgspec

from venusrl.simulation.scenario import Script, TurnScript
from venusrl.simulation.workloads.draws import Quantiles, correlated, stream

SOLVED_OF_16 = (157, 40, 26, 23, 17, 13, 16, 11, 12, 4, 14, 17, 23, 22, 27, 31, 47)
"""Tasks by how many of 16 attempts solved them (P16)."""
TOOL_S = Quantiles(((0.5, 0.3), (0.61, 1.0), (0.88, 10.0), (0.9, 13.6), (0.96, 60.0), (0.99, 235.0)), 0.03, 86400.0)
SETUP_S = Quantiles(((0.5, 2.6), (0.9, 11.2), (0.99, 102.0)), 0.5, 600.0)
VERIFY_S = Quantiles(((0.5, 8.0), (0.9, 60.0), (0.99, 294.0)), 0.5, 6120.0)
TOOL_SHARE = 0.15
"""Of the variance of log latencies: between trajectories (CC)."""
FAILED_COMMANDS = 0.15


class OpenSwe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="openswe"):
    """See the module. ``length``: multiplies the number of turns. ``thinking``: turns as long as those of a thinking
    Qwen3-8B in mini-SWE (628 tokens median, sigma 0.70 between turns; 1.5% run away to ``max_turn_tokens``)."""

    max_turns: int = 300
    max_output_tokens: int = 131_072
    max_turn_tokens: int = 16_384
    context_tokens: int = 262_144
    tool_timeout_s: float = 600.0
    rho: float = 0.3
    length: float = 1.0
    thinking: bool = False
    order: int | None = None
    """Tasks in the order; None = endless, all different."""

    @property
    def name(self) -> str:
        return "openswe"

    @property
    def tasks(self) -> int | None:
        return self.order

    def script(self, seed: int, ordinal: int, index: int, attempt: int) -> Script:
        task = _task(seed, ordinal)
        own = stream("openswe", seed, ordinal, index, attempt)
        solved = _solved(task, own, index, attempt)
        sigma_turns, sigma_verbosity, sigma_observed = 0.42, 0.36, 0.2
        z_turns, z_verbosity, z_tool, z_observed = (correlated(self.rho, z, own.gauss()) for z in task.common)
        turns = self.length * (65.0 if solved else 98.0) * math.exp(sigma_turns * z_turns)
        pace = _Pace(
            tokens=(628.0 if self.thinking else 183.0) * math.exp(sigma_verbosity * z_verbosity),
            observed=435.0 * math.exp(sigma_observed * z_observed - sigma_observed**2 / 2),
            tool_z=z_tool,
        )
        return Script(
            prompt=task.prompt,
            shared_prefix=task.prompt,
            turns=self._turns(own, min(max(8, round(turns)), self.max_turns), task.prompt, pace),
            reward=float(solved),
            setup_s=SETUP_S.at(own.gauss()),
            verify_s=VERIFY_S.at(own.gauss()),
            max_turn_tokens=self.max_turn_tokens,
        )

    def _turns(self, own: Random, count: int, context: int, pace: _Pace) -> tuple[TurnScript, ...]:
        """Turns until ``count``, or until output or context are used up."""
        made, output = [], 0
        sigma = 0.6 if self.thinking else 0.84
        mean_log = math.log(pace.tokens) + (0.36**2 - sigma**2 if self.thinking else -(sigma**2)) / 2
        for _ in range(count):
            room = min(self.max_turn_tokens, self.max_output_tokens - output, self.context_tokens - context)
            if room < 1:
                break
            runaway = self.thinking and own.random() < 0.015
            wanted = room if runaway else round(math.exp(mean_log + sigma * own.gauss()))
            generated = min(max(1, wanted), room)
            tool_s = min(TOOL_S.at(correlated(TOOL_SHARE, pace.tool_z, own.gauss())), self.tool_timeout_s)
            observation = min(8192, round(pace.observed * math.exp(1.6 * own.gauss() - 1.28)))
            failed = own.random() < FAILED_COMMANDS
            made.append(TurnScript(generated, tool_s, observation, int(failed)))
            output += generated
            context += generated + observation
        return tuple(made)


class _Pace(NamedTuple):
    """What the turns of one trajectory share. ``tokens``: mean a turn; ``observed``: likewise."""

    tokens: float
    observed: float
    tool_z: float


class _Task(NamedTuple):
    prompt: int
    solved_of_16: int
    order: tuple[int, ...]
    common: tuple[float, ...]


@lru_cache(maxsize=1024)
def _task(seed: int, ordinal: int) -> _Task:
    """What the members of a group have in common."""
    draws = stream("openswe task", seed, ordinal)
    return _Task(
        prompt=round(draws.uniform(2_000, 10_000)),
        solved_of_16=draws.choices(range(17), SOLVED_OF_16)[0],
        order=tuple(draws.sample(range(16), 16)),
        common=tuple(draws.gauss() for _ in range(4)),
    )


def _solved(task: _Task, own: Random, index: int, attempt: int) -> bool:
    """The first 16 attempts at a task hold exactly the drawn number of solutions, as the histogram counts them."""
    lot = own.random()
    if attempt == 0 and index < 16:
        return task.order[index] < task.solved_of_16
    return lot < task.solved_of_16 / 16
