"""Nearest neighbours, as in arXiv 2602.24044."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packer.arrays import Float32Array
from packer.predictors.kinds import Arrays, ModelKind
from packer.predictors.targets import OUTPUTS, STARVED

CERTAIN = 4.0  # log odds of a point that starves; calibration follows


class Knn(ModelKind):
    """Means over the nearest points of the training set, weighted by 1 / distance."""

    name = "knn"
    family = "neighbours"
    max_rows = 4000  # each evaluation reads every row

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """A scikit-learn neighbours model."""
        from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

        make = KNeighborsClassifier if classify else KNeighborsRegressor
        return make(weights="distance", **params)

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """The points with their values; where a point has none, the prediction from its neighbours."""
        values = np.zeros((len(x), len(OUTPUTS)), dtype=np.float32)
        k = self.defaults[True]["n_neighbors"]
        for column, name in enumerate(OUTPUTS):
            if name not in fitted:
                continue
            predicted = fitted[name].predict(x)  # a point that was fitted on is its own nearest neighbour
            values[:, column] = CERTAIN * (2.0 * predicted - 1.0) if name == STARVED else predicted
            k = fitted[name].n_neighbors
        return {"points": x, "values": values, "k": np.array([k], dtype=np.int64)}
