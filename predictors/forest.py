"""Random forests, as in arXiv 2602.24044."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.predictors.ensemble import from_sklearn, packed
from packer.predictors.kinds import Arrays, Float32Array, Kind
from packer.predictors.targets import OUTPUTS, STARVED

_GRID: dict[str, list[Any]] = {
    "n_estimators": [32, 128, 256],
    "max_depth": [None, 5, 10, 20],
    "min_samples_split": [2, 5, 10, 20],
    "min_samples_leaf": [1, 2, 5, 10, 32, 128],
    "max_features": [None, "sqrt", "log2"],
}
"""The values of arXiv 2602.24044, Appendix B; of the criteria only those that take no hours."""


class Forest(Kind):
    """Means over trees grown on bootstrap samples."""

    name = "forest"
    grids = (_GRID, {**_GRID, "criterion": ["gini", "entropy"]})
    defaults = (
        {"n_estimators": 32, "max_leaf_nodes": 128, "min_samples_leaf": 2, "max_features": 0.5},
        {"n_estimators": 48, "max_leaf_nodes": 128, "min_samples_leaf": 2, "max_features": 0.5},
    )
    """Small enough for a few microseconds per evaluation, and for the wheel."""

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """A scikit-learn forest."""
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

        make = RandomForestClassifier if classify else RandomForestRegressor
        return make(random_state=seed, n_jobs=1, **params)

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Flattened trees; each leaf counts 1 / trees."""
        outputs = []
        for name in OUTPUTS:
            trees = fitted[name].estimators_ if name in fitted else []
            column = 1 if name == STARVED else 0
            outputs.append([from_sklearn(t.tree_, 1.0 / len(trees), column) for t in trees])
        return packed(outputs, x.shape[1])
