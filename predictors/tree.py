"""Shallow trees that can be read as rules: one for each figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.predictors.ensemble import from_sklearn, packed
from packer.predictors.kinds import Arrays, Float32Array, Kind
from packer.predictors.targets import OUTPUTS, STARVED

MOST_RULES = 32
MOST_RULES_STARVATION = 16


class Tree(Kind):
    """One tree per figure: at most 32 leaves, 16 for starvation; `packer.predictors.refine` searches them."""

    name = "tree"
    grids = (
        {"max_leaf_nodes": [4, 6, 8, 12, 16, 24, 32], "min_samples_leaf": [5, 10, 20, 40]},
        {"max_leaf_nodes": [4, 6, 8, 12, 16], "min_samples_leaf": [5, 10, 20, 40]},
    )
    defaults = (
        {"max_leaf_nodes": MOST_RULES, "min_samples_leaf": 10},
        {"max_leaf_nodes": MOST_RULES_STARVATION, "min_samples_leaf": 10},
    )

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """A scikit-learn tree."""
        from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

        make = DecisionTreeClassifier if classify else DecisionTreeRegressor
        return make(random_state=seed, **params)

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Flattened trees; the value of a rule for starvation is the share of its rows that starved."""
        outputs = []
        for name in OUTPUTS:
            column = 1 if name == STARVED and hasattr(fitted.get(name), "classes_") else 0
            outputs.append([from_sklearn(fitted[name].tree_, 1.0, column)] if name in fitted else [])
        return packed(outputs, x.shape[1])
