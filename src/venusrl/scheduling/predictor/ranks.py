"""Rank correlations.

Owns: Spearman's rho and Kendall's tau-b, ties included. Must not know: what is ranked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Correlation of mean ranks; None for fewer than two values or where all are alike."""
    return _pearson(_ranks(a), _ranks(b)) if len(a) > 1 else None


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """tau-b in O(n log n) (Knight's method); None as for ``spearman``."""
    n = len(a)
    pairs = sorted(zip(a, b, strict=True))
    both = n * (n - 1) // 2
    tied_a, tied_b = _tied_pairs(a), _tied_pairs(b)
    if both in (tied_a, tied_b):
        return None
    tied_both = _tied_pairs(pairs)
    swaps = _inversions([y for _, y in pairs])
    concordant_less_discordant = both - tied_a - tied_b + tied_both - 2 * swaps
    return concordant_less_discordant / math.sqrt((both - tied_a) * (both - tied_b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2
        start = end + 1
    return ranks


def _pearson(a: Sequence[float], b: Sequence[float]) -> float | None:
    n = len(a)
    mean_a, mean_b = math.fsum(a) / n, math.fsum(b) / n
    together = math.fsum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    square_a = math.fsum((x - mean_a) ** 2 for x in a)
    square_b = math.fsum((y - mean_b) ** 2 for y in b)
    if square_a <= 0.0 or square_b <= 0.0:
        return None
    return max(-1.0, min(1.0, together / math.sqrt(square_a * square_b)))


def _tied_pairs(values: Sequence[object]) -> int:
    return sum(n * (n - 1) // 2 for n in Counter(values).values())


def _inversions(values: list[float]) -> int:
    """Pairs in descending order, by merge sort."""
    swaps, width, n = 0, 1, len(values)
    while width < n:
        merged: list[float] = []
        for start in range(0, n, 2 * width):
            left, right = values[start : start + width], values[start + width : start + 2 * width]
            i = 0
            for y in right:
                while i < len(left) and left[i] <= y:
                    merged.append(left[i])
                    i += 1
                swaps += len(left) - i
                merged.append(y)
            merged.extend(left[i:])
        values, width = merged, 2 * width
    return swaps
