"""The tensors that hold KV, and attention over them.

Owns: the working KV of running sequences (one dense row each, so that a decoding step attends without
gathering pages), the page pool behind them, and the attention function that transformers models call.

Must not know: which sequence is in which row or why.

Guarantees: exact causal attention for any mix of decoding tokens and prompt chunks in one pass. Memory is
committed by the system as rows and pages are first written, not when they are reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "venusrl_rows"


class KVShape(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int


class _Prefill(NamedTuple):
    """Tokens ``first:last`` of the pass are tokens ``start:end`` of ``row``."""

    first: int
    last: int
    row: int
    start: int
    end: int
    bias: torch.Tensor


class Pass:
    """What one forward pass computes: token i of the pass is at ``places[i]`` of its row.

    The first ``decodes`` tokens are single next tokens in ascending rows; then come prompt chunks, each contiguous.
    """

    def __init__(
        self, kv: Rows, rows: list[int], places: list[int], decodes: int, chunks: list[tuple[int, int]]
    ) -> None:
        """``chunks``: (first, last) of each prompt chunk, as indices of the pass's tokens."""
        self.kv = kv
        self.places = torch.tensor(places)
        self.decodes = decodes
        self.prefills = [self._prefill(rows[a], places[a], a, b) for a, b in chunks]
        self.rows = torch.tensor(rows[:decodes])
        self.positions = self.places[:decodes]
        if decodes:
            self.active = rows[decodes - 1] + 1
            self.longest = max(places[:decodes]) + 1
            # Rows between the decoding ones are computed along and ignored; their lengths only have to be finite.
            self.dense = self.active == decodes
            lengths = torch.full((self.active,), self.longest)
            lengths[self.rows] = self.positions + 1
            self.bias = self._bias(torch.arange(self.longest) >= lengths[:, None])[:, None, None, :]

    def _prefill(self, row: int, start: int, first: int, last: int) -> _Prefill:
        end = start + last - first
        later = torch.arange(end) > torch.arange(start, end)[:, None]
        return _Prefill(first, last, row, start, end, self._bias(later))

    def _bias(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self.kv.dtype).masked_fill_(hidden, float("-inf"))


class Rows:
    """``rows`` rows of ``row_tokens`` tokens, and ``pages`` pages of ``page_tokens`` tokens. A ``RowStore``.

    A layer's rows lie together, rows and heads one after the other: products over all of them then need no copy.
    """

    def __init__(
        self, shape: KVShape, *, rows: int, row_tokens: int, pages: int, page_tokens: int, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self._size = page_tokens
        layers, heads, width = shape
        row_tokens = -(-row_tokens // page_tokens) * page_tokens
        self._rows = _reserve((2, layers, rows, heads, row_tokens, width), dtype)
        self._pool = _reserve((pages, 2, layers, heads, page_tokens, width), dtype)
        # Views made once: slicing costs as much as a small product.
        self.keys, self.values = list(self._rows[0]), list(self._rows[1])

    def load(self, row: int, pages: Sequence[int]) -> None:
        if pages:
            pieces = self._pool[torch.tensor(list(pages))].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            self._rows[:, :, row, :, : len(pages) * self._size] = pieces

    def save(self, row: int, positions: Sequence[int], pages: Sequence[int]) -> None:
        for position, page in zip(positions, pages, strict=True):
            self._pool[page] = self._rows[:, :, row, :, position * self._size : (position + 1) * self._size]

    def move(self, source: int, target: int, tokens: int) -> None:
        self._rows[:, :, target, :, :tokens] = self._rows[:, :, source, :, :tokens]


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is committed on first write (torch.zeros writes them all)."""
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    rows_pass: Pass,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Write the pass's keys and values to their rows, and attend. Shapes are (1, heads, tokens, head_dim)."""
    for name in ("softcap", "s_aux", "position_bias"):
        if unused.get(name) is not None:
            raise ValueError(f"the embedded engine does not compute this model's attention ({name})")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = rows_pass.kv.keys[layer], rows_pass.kv.values[layer]
    heads, tokens, width = query.shape[1:]
    kv_heads = key.shape[1]
    # (tokens, kv heads, queries of that kv head, head_dim): no copy of keys per query head.
    grouped = (query[0].transpose(0, 1) * scaling).view(tokens, kv_heads, heads // kv_heads, width)
    output = torch.empty_like(grouped)
    if count := rows_pass.decodes:
        at = (rows_pass.rows, rows_pass.positions)
        keys[at[0], :, at[1]] = key[0, :, :count].transpose(0, 1)
        values[at[0], :, at[1]] = value[0, :, :count].transpose(0, 1)
        output[:count] = _decode(grouped[:count], keys, values, rows_pass)
    for chunk in rows_pass.prefills:
        part = slice(chunk.first, chunk.last)
        row_keys, row_values = keys[chunk.row, :, : chunk.end], values[chunk.row, :, : chunk.end]
        row_keys[:, chunk.start :] = key[0, :, part]
        row_values[:, chunk.start :] = value[0, :, part]
        output[part] = _prefill(grouped[part], row_keys, row_values, chunk.bias)
    return output.view(1, tokens, heads, width), None


def _decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows_pass: Pass) -> torch.Tensor:
    if not rows_pass.dense:
        query = query.new_zeros(rows_pass.active, *query.shape[1:]).index_copy_(0, rows_pass.rows, query)
    active, longest = rows_pass.active, rows_pass.longest
    scores = torch.matmul(query, keys[:active, :, :longest].transpose(2, 3))
    weights = torch.softmax(scores.add_(rows_pass.bias), -1, dtype=torch.float32).to(query.dtype)
    output = torch.matmul(weights, values[:active, :, :longest])
    return output if rows_pass.dense else output[rows_pass.rows]


def _prefill(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    size, kv_heads, groups, width = query.shape
    flat = query.permute(1, 2, 0, 3).reshape(kv_heads, groups * size, width)
    scores = torch.matmul(flat, keys.transpose(1, 2)).view(kv_heads, groups, size, -1).add_(bias)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    attended = torch.matmul(weights.view(kv_heads, groups * size, -1), values)
    return attended.view(kv_heads, groups, size, width).permute(2, 0, 1, 3)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, rows_attention)
