"""What an engine worker's work takes, as a few coefficients.

Owns: ``EngineCosts`` and its formulas; policies price decisions with it and the simulator's engines obey it. Must not
know: models, GPUs (``simulation`` derives coefficients from them).

The form: a decode step reads the weights once, works on every sequence and reads the KV of every sequence, so that
it takes base + per_sequence * batch + per_kv_token * (sum of contexts) seconds; prefill of a token does a fixed
number of operations and attends to the context before it.
"""

from __future__ import annotations

import msgspec


class EngineCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per unit of work. ``transfer_token_s``: to move one token's KV to another worker; None = it cannot."""

    step_base_s: float
    step_sequence_s: float
    step_kv_token_s: float
    prefill_token_s: float
    prefill_token_context_s: float
    transfer_token_s: float | None = None
    transfer_latency_s: float = 0.0

    def step_s(self, batch: int, kv_tokens: float) -> float:
        """One decode step: one token for each of ``batch`` sequences whose contexts sum to ``kv_tokens``."""
        return self.step_base_s + self.step_sequence_s * batch + self.step_kv_token_s * kv_tokens

    def prefill_s(self, tokens: float, context: float = 0.0) -> float:
        """Prefill of ``tokens`` that follow ``context`` cached ones, alone on the worker."""
        attended = tokens * (context + tokens / 2)
        return self.prefill_token_s * tokens + self.prefill_token_context_s * attended

    def transfer_s(self, tokens: float) -> float:
        """Moving ``tokens`` of KV; infinite where it cannot be done."""
        if self.transfer_token_s is None:
            return float("inf")
        return self.transfer_latency_s + self.transfer_token_s * tokens
