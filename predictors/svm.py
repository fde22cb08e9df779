"""Support vector machines, as in arXiv 2602.24044."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packer.arrays import Float32Array
from packer.predictors.kinds import Arrays, ModelKind
from packer.predictors.targets import OUTPUTS


class Svm(ModelKind):
    """RBF kernels on squashed and scaled features."""

    name = "svm"
    family = "machine"
    max_rows = 2500  # the time to fit grows with the square of the rows

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
