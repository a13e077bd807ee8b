"""Gradient-boosted quantiles by LightGBM.

Owns: ``Boosting``: the library's settings, and the way from its model to a ``Forest``. Must not know: what is
predicted.

LightGBM is imported when the first ``Boosting`` is made, never with this module (it costs about a second). One thread
and fixed seeds: the same data give the same forest.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec

from venusrl.scheduling.predictor.forest import Forest, Node


class LibraryMissing(ImportError):
    """LightGBM is not installed; the message says how to get it."""


class Boosting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Small trees and few of them: there are hundreds of trajectories to learn from, not millions."""

    trees: int = 40
    leaves: int = 8
    rate: float = 0.1
    smallest_leaf: int = 40
    bins: int = 63

    def __post_init__(self) -> None:
        _library()

    def fit(
        self, rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float], level: float
    ) -> Forest:
        """See ``Regressor``."""
        numpy, lightgbm = importlib.import_module("numpy"), _library()
        settings = {
            "objective": "quantile",
            "alpha": level,
            "num_leaves": self.leaves,
            "learning_rate": self.rate,
            "min_data_in_leaf": self.smallest_leaf,
            "max_bin": self.bins,
            "num_threads": 1,
            "deterministic": True,
            "force_row_wise": True,
            "seed": 1,
            "verbose": -1,
        }
        data = lightgbm.Dataset(
            numpy.asarray(rows, dtype=numpy.float32),
            numpy.asarray(values, dtype=numpy.float32),
            weight=numpy.asarray(weights, dtype=numpy.float32),
            params=settings,
        )
        model = lightgbm.train(settings, data, num_boost_round=self.trees).dump_model()
        return Forest(tuple(_tree(tree["tree_structure"]) for tree in model["tree_info"]))


def _library() -> Any:
    try:
        return importlib.import_module("lightgbm")
    except ImportError as error:
        raise LibraryMissing(
            "the learned predictor needs LightGBM: pip install 'venusrl[predictor]' (or choose the sibling heuristic)"
        ) from error


def _tree(root: dict[str, Any]) -> tuple[Node, ...]:
    """The dumped tree, parents before children."""
    nodes: list[Node] = []

    def add(node: dict[str, Any]) -> int:
        at = len(nodes)
        if "split_feature" not in node:
            nodes.append((-1, float(node["leaf_value"]), 0, 0))
            return at
        if node["decision_type"] != "<=":
            raise ValueError(f"a split of type {node['decision_type']} was not asked for")
        nodes.append((-1, 0.0, 0, 0))
        left, right = add(node["left_child"]), add(node["right_child"])
        nodes[at] = (int(node["split_feature"]), float(node["threshold"]), left, right)
        return at

    add(root)
    return tuple(nodes)
