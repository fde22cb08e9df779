"""Random forests, as in arXiv 2602.24044."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.arrays import Float32Array
from packer.predictors.ensemble import from_sklearn, packed
from packer.predictors.kinds import Arrays, ModelKind
from packer.predictors.targets import OUTPUTS, STARVED


class Forest(ModelKind):
    """Means over trees grown on bootstrap samples."""

    name = "forest"

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
