"""Support vector machines, as in arXiv 2602.24044."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packer.predictors.kinds import Arrays, Float32Array, Kind
from packer.predictors.targets import OUTPUTS

_GRID: dict[str, list[Any]] = {
    "C": [0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0],
    "gamma": [0.003, 0.01, 0.03, 0.1, 1.0, 10.0],
}
"""Penalty and width of the radial kernel, the only one that is compiled: values of arXiv 2602.24044, Appendix B, and
smaller widths (and tubes of regression), since targets are logarithms here."""


class Svm(Kind):
    """RBF kernels on squashed and scaled features."""

    name = "svm"
    family = "machine"
    max_rows = 2500  # the time to fit grows with the square of the rows
    grids = ({**_GRID, "epsilon": [0.01, 0.05, 0.1, 0.5, 1.0, 5.0]}, _GRID)
    defaults = ({"C": 10.0, "gamma": 0.02, "epsilon": 0.05}, {"C": 10.0, "gamma": 0.01})
    """Found by the search."""

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """A scikit-learn support vector machine."""
        from sklearn.svm import SVC, SVR

        return SVC(random_state=seed, **params) if classify else SVR(**params)

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Support vectors and their weights."""
        arrays: Arrays = {}
        constants = np.zeros((len(OUTPUTS), 2))
        for k, name in enumerate(OUTPUTS):
            if name in fitted:
                machine = fitted[name]
                arrays[f"vectors_{k}"] = machine.support_vectors_.astype(np.float32)
                arrays[f"weights_{k}"] = machine.dual_coef_[0].astype(np.float32)
                constants[k] = machine.gamma, machine.intercept_[0]
            else:
                arrays[f"vectors_{k}"] = np.zeros((0, x.shape[1]), dtype=np.float32)
                arrays[f"weights_{k}"] = np.zeros(0, dtype=np.float32)
        arrays["constants"] = constants
        return arrays
