"""Regression trees as plain data.

Owns: ``Forest``, its evaluation and its form on disk. Must not know: who grew the trees.

Guarantees: evaluating needs no library and no pickle; a forest that was decoded is checked: it refers to known features
and every walk through it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

Node = tuple[int, float, int, int]
"""Feature, threshold, then the nodes for ``x <= threshold`` and for the rest. A feature of -1: a leaf, whose value is
the threshold."""


class Forest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum of some trees. A node's children come after it in its tree."""

    trees: tuple[tuple[Node, ...], ...]

    def check(self, features: int) -> None:
        """Raises ValueError unless every walk through every tree ends in a leaf."""
        for tree in self.trees:
            for at, (feature, _, left, right) in enumerate(tree):
                sound = feature == -1 or (0 <= feature < features and at < left < len(tree) and at < right < len(tree))
                if not sound:
                    raise ValueError(f"node {at} of a tree points to feature {feature}, nodes {left} and {right}")
            if not tree:
                raise ValueError("a tree without a node")

    def predict(self, row: Sequence[float]) -> float:
        total = 0.0
        for tree in self.trees:
            feature, value, left, right = tree[0]
            while feature >= 0:
                feature, value, left, right = tree[left if row[feature] <= value else right]
            total += value
        return total


class Regressor(Protocol):
    """Whoever grows forests. ``level``: the quantile to fit. Deterministic; may take a second; safe in a thread."""

    def fit(
        self, rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float], level: float
    ) -> Forest: ...
