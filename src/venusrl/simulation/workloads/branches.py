"""What recorded trajectories have in common, token by token, as an engine's prefix cache would find it.

Owns: from token sequences to ``Branch``es. Must not know: how they are recorded, what a cache does with them.

The sequences form a tree: two of them are one path up to the first token in which they differ. Every stretch of a path
that more than one of them takes is a branch. Branches end where paths part, and where a request begins or ends on any
of them, so that a request's context consists of whole branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, groupby, pairwise
from typing import NamedTuple

from venusrl.simulation.scenario import Branch


class Line(NamedTuple):
    """A trajectory's tokens, and how many of them there were as each request began and ended."""

    tokens: list[int]
    ends: list[int]


def branches(lines: Sequence[Line]) -> list[tuple[Branch, ...]]:
    """For each line what it has in common with others, from its first token on."""
    found: list[list[Branch]] = [[] for _ in lines]
    names = count()
    alike = sorted(range(len(lines)), key=lambda i: lines[i].tokens)
    left = [(alike, 0)]
    while left:
        alike, begin = left.pop()
        if len(alike) < 2:
            continue
        # In sorted order, what the first and the last have in common all have.
        end = _common(lines[alike[0]].tokens, lines[alike[-1]].tokens, begin)
        cuts = {end, *(cut for i in alike for cut in lines[i].ends if cut < end)}
        for start, stop in pairwise([begin, *sorted(cut for cut in cuts if cut > begin)]):
            branch = Branch(next(names), stop - start)
            for i in alike:
                found[i].append(branch)
        parts = groupby(alike, key=lambda i: lines[i].tokens[end : end + 1])
        left += [(list(part), end) for token, part in parts if token]
    return [tuple(line) for line in found]


def _common(a: list[int], b: list[int], begin: int) -> int:
    """Up to where both are alike, given that they are up to ``begin``."""
    end = min(len(a), len(b))
    while begin < end:
        middle = (begin + end + 1) // 2
        if a[begin:middle] == b[begin:middle]:
            begin = middle
        else:
            end = middle - 1
    return begin
