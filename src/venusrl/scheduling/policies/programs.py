"""ThunderAgent's bookkeeping: programs and what they weigh on a worker.

Owns: ``Program``, ``Backend`` and the capacity formula. Must not know: when anybody is paused or resumed.

Guarantees: ``room`` costs O(1) (O(programs) with decay), and a program counts on one backend at most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from venusrl.scheduling.policies import PendingTurn

BUFFER_TOKENS = 100
"""Set aside for every program on a worker."""


@dataclass(slots=True)
class Program:
    """One trajectory. ``backend``: its worker, None while it is paused; ``origin``: the last one it had."""

    name: str
    group: str
    shared: int
    tokens: int = 0
    prompt: int = 0
    """Tokens with which the present or last request began."""
    step: int = 0
    reasoning: bool = True
    acting_since: float = 0.0
    marked: bool = False
    backend: str | None = None
    origin: str | None = None
    turn: PendingTurn | None = None
    """The request that waits for it to be resumed or its worker to be willing."""
    paused_tokens: int = 0
    paused_at: float = 0.0


@dataclass(slots=True)
class Backend:
    """One worker. ``share_prefixes``: whether what members of a group have in common counts once."""

    name: str
    capacity: int
    share_prefixes: bool
    acting_weight: float
    programs: dict[str, Program] = field(default_factory=dict)
    reasoning: int = 0
    acting: int = 0
    marked: int = 0
    """Tokens of programs that will be paused when their turns end, buffers included."""
    saved: int = 0
    """Tokens that are counted more than once in the above and take room once."""
    _groups: Counter[str] = field(default_factory=Counter)

    def put(self, program: Program) -> None:
        self.programs[program.name] = program
        self._count(program, 1)
        self._groups[program.group] += 1
        if self.share_prefixes and self._groups[program.group] > 1:
            self.saved += program.shared

    def drop(self, program: Program) -> None:
        """Before any of its fields changes."""
        del self.programs[program.name]
        self._count(program, -1)
        self._groups[program.group] -= 1
        if not self._groups[program.group]:
            del self._groups[program.group]
        elif self.share_prefixes:
            self.saved -= program.shared

    @property
    def active(self) -> float:
        """Tokens in use, as ThunderAgent weighs them."""
        return self.reasoning + self.acting_weight * self.acting

    @property
    def room(self) -> float:
        """Tokens left: below 0, somebody has to go."""
        return self.capacity - (self.active - self.saved + BUFFER_TOKENS * len(self.programs))

    def decayed_room(self, now: float, half_life_s: float) -> float:
        """The same, with acting programs fading away: what counts for resuming."""
        idle: float = sum(
            program.tokens * 0.5 ** ((now - program.acting_since) / half_life_s)
            for program in self.programs.values()
            if not program.reasoning
        )
        return self.room + self.acting_weight * (self.acting - idle)

    def _count(self, program: Program, sign: int) -> None:
        if program.reasoning:
            self.reasoning += sign * program.tokens
        else:
            self.acting += sign * program.tokens
        if program.marked:
            self.marked += sign * (program.tokens + BUFFER_TOKENS)
